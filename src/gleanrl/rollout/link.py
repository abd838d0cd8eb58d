"""What travels on the connection between a node and its learner besides commands and replies.

One byte says what a frame is. Commands and replies are those of `rollout.wire`; the others are

    H                 a sign of life (from the node)
    S byte            raise the stop byte, or take it back (from the learner)
    K length key val  half of agreeing on a process group (both ways)
    W board           weights are on their way (from the learner), were taken (from the node)
    L reason          the node ends, because it was told to or cannot go on (from the node)
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError, error_text
from gleanrl.rollout.channel import Channel
from gleanrl.rollout.inbox import Inbox
from gleanrl.rollout.sealed import ForgedFrameError
from gleanrl.rollout.serve import frame_of, unreadable
from gleanrl.rollout.wire import CommandReader, head_of

BEAT, STOP, KEY, WEIGHTS, LEAVE = b"H", b"S", b"K", b"W", b"L"
_LENGTH = struct.Struct("=i")
_BOARD = struct.Struct("=ci")
_LAST = 5.0
"""Seconds a node that was asked to end may take to do so once the learner is gone."""


def key_frame(key: str, value: bytes) -> bytes:
    """Return the frame that tells ``value``."""
    name = key.encode()
    return KEY + _LENGTH.pack(len(name)) + name + value


def read_key(frame: bytes) -> tuple[str, bytes]:
    """Return key and value."""
    (length,) = _LENGTH.unpack_from(frame, 1)
    start = 1 + _LENGTH.size
    return frame[start : start + length].decode(), frame[start + length :]


def weights_frame(board: int) -> bytes:
    """Return the frame that speaks of weights of ``board``."""
    return _BOARD.pack(WEIGHTS, board)


def read_weights(frame: bytes) -> int:
    """Return the number of the board."""
    return int(_BOARD.unpack(frame)[1])


class Link:
    """A node's end: a thread that reads, shows signs of life, and ends the node with the learner.

    Commands go to ``inbox``; whoever carries them out answers through `send`.
    """

    def __init__(self, channel: Channel, worker: int, patience: float) -> None:
        """Take over ``channel``.

        Args:
            channel: The connection.
            worker: This node's index.
            patience: Seconds after which the learner gives a silent node up.
        """
        self._channel, self._worker, self._patience = channel, worker, patience
        self._reader = CommandReader()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._keys: dict[str, bytes] = {}
        self._boards: deque[int] = deque()
        self._over = threading.Event()
        self._closing = False
        self.leaving = False
        """Whether this node was told to end: the learner is no longer spoken to."""
        self.inbox = Inbox()
        self.stop = bytearray(1)

    def start(self, frames: Sequence[bytes]) -> None:
        """Begin to read, after ``frames``, which have come already."""
        for frame in frames:
            self._take(frame)
        threading.Thread(target=self._run, name="gleanrl link", daemon=True).start()

    def finish(self) -> None:
        """From now on the learner may go away."""
        self._over.set()

    def send(self, frame: bytes) -> None:
        """Send ``frame``, waiting until the connection has taken it; any thread may."""
        with self._sending:
            self._channel.send(frame)

    def answer(self, reply: m.Reply) -> None:
        """Send a reply."""
        if self.leaving:
            return
        if isinstance(reply, m.Rolled) and reply.report.payload is not None:
            # It may be more than the connection holds, and the learner may be away for long.
            self._channel.be_patient()
        self.send(frame_of(reply))

    def leave(self, reason: str) -> None:
        """Tell the learner that this node ends; have it do so after the step it is in."""
        self.leaving = True
        self.stop[0] = 1
        self.inbox.put(0, m.Close())
        with contextlib.suppress(OSError):  # the learner is gone, too
            self.send(LEAVE + reason.encode())

    def key(self, key: str) -> bytes:
        """Wait for what the learner tells of ``key``.

        Raises:
            GleanError: it did not in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._keys, self._patience):
                raise GleanError(f"the learner did not answer for {self._patience} s")
            return self._keys[key]

    def pop_board(self) -> int | None:
        """Return the number of a board that weights are on their way for, ``None`` if none are."""
        return self._boards.popleft() if self._boards else None

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read()
        except (EOFError, OSError) as err:
            # A learner goes away as soon as it has the answer to its last command.
            expected = self.leaving or (self._closing and self._over.wait(_LAST))
            if not expected and not self._over.is_set():
                self._abort(
                    str(err) if isinstance(err, ForgedFrameError) else "the learner is gone"
                )
        except BaseException as err:  # even SystemExit: it would end this thread and nothing else
            cause = f"{type(err).__name__}: {error_text(err)}"
            problem = f"failed while it read from its connection ({cause})"
            self._tell_problem(problem)
            self._abort(problem, traceback.format_exc())

    def _tell_problem(self, problem: str) -> None:
        """Tell the learner why this node ends, if that can be done without waiting for it."""
        if self._sending.acquire(timeout=_LAST):
            with contextlib.suppress(Exception):
                self._channel.post(LEAVE + problem.encode())

    def _abort(self, why: str, details: str = "") -> None:
        """End this process, whatever the environment is doing: nobody waits for it any more."""
        with contextlib.suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"{details}node {self._worker}: {why}\n")
            sys.stderr.flush()
        os._exit(1)

    def _read(self) -> None:
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        pause = self._patience / 6
        due = time.monotonic()
        while True:
            left = due - time.monotonic()
            if left <= 0:
                self.send(BEAT)
                due, left = time.monotonic() + pause, pause
            readable.poll(1000 * left)
            for frame in self._channel.read():
                self._take(frame)

    def _take(self, frame: bytes) -> None:
        kind = frame[:1]
        if kind == STOP:
            self.stop[0] = frame[1]
        elif kind == WEIGHTS:
            self._boards.append(read_weights(frame))
        elif kind == KEY:
            key, value = read_key(frame)
            with self._changed:
                self._keys[key] = value
                self._changed.notify_all()
        else:
            self._command(frame)

    def _command(self, frame: bytes) -> None:
        ticket, _ = head_of(frame)
        try:
            command = self._reader.read(frame)
        except Exception as err:  # whatever the user's objects do when unpickled
            self.answer(m.Failed(self._worker, ticket, unreadable(err)))
            return
        self._closing = isinstance(command, m.Close)
        self.inbox.put(ticket, command)
