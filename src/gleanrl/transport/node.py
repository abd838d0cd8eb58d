"""What travels on the connection between a node and its learner besides commands and replies.

One byte says what a frame is. Commands and replies are those of `transport.frames`; the others are

    H                 a sign of life (from the node)
    S byte            raise the stop byte, or take it back (from the learner)
    K length key val  half of agreeing on a process group (both ways)
    W board           weights are on their way (from the learner), were taken (from the node)
    L reason          the node ends, because it was told to or cannot go on (from the node)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError, error_text
from gleanrl.core.protocols import Array
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.streams import enter_life
from gleanrl.transport.frames import (
    BEAT,
    KEY,
    LEAVE,
    STOP,
    WEIGHTS,
    CommandReader,
    frame_of,
    head_of,
    key_frame,
    read_key,
    read_weights,
    unreadable,
    weights_frame,
)
from gleanrl.transport.handshake import HandshakeError, Invitation, join, keep_alive
from gleanrl.transport.landing import mark_of, pieces_of
from gleanrl.transport.process_group import NODE_RANK, ConnectionStore, ProcessGroupPair, Transfer
from gleanrl.transport.stream import Channel, ForgedFrameError, SealedChannel
from gleanrl.transport.worker import Addressed, Inbox, Surroundings, Worker, settle, work
from gleanrl.weights.flat import FlatReader

_LAST = 5.0
"""Seconds a node that was asked to end may take to do so once the learner is gone."""


class NodeConnection:
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


_GRACE = 5.0
"""Seconds an environment gets to end its step and to close."""


class SignalShutdown:
    """While entered, signals make the node of a link leave. For the main thread.

    Python runs handlers in the main thread between two of its instructions, and a step of an
    environment may take long. So the handlers here do nothing: the number of the signal arrives
    through the wake-up descriptor, whatever the main thread is doing, and another thread reads it.
    """

    def __init__(
        self,
        link: NodeConnection,
        signals: Sequence[signal.Signals],
        label: str,
        note: Callable[[str], object],
    ) -> None:
        """Prepare.

        Args:
            link: The node's end of its connection.
            signals: That make it leave.
            label: Of what this process belongs to, for the learner: ``"Slurm job 12"``.
            note: Also told why it leaves.
        """
        self._link, self._signals, self._label, self._note = link, signals, label, note
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._got: int | None = None

    def __enter__(self) -> SignalShutdown:
        """Take over the signals."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            self._before[number] = signal.signal(number, lambda *_: None)
        # What an environment forks must neither survive a signal for want of a handler that does
        # something, nor speak through this process's descriptor, not even as it begins.
        hold, free, forget = map(weakref.WeakMethod, (self._hold, self._free, self._forget))
        os.register_at_fork(
            before=lambda: _call(hold),
            after_in_parent=lambda: _call(free),
            after_in_child=lambda: _call(forget),
        )
        self._thread = threading.Thread(target=self._wait, name="gleanrl leaving", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Give the signals back.

        Raises:
            SystemExit: the node was told to leave, and has.
        """
        signal.set_wakeup_fd(self._wakeup)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._signals = ()
        os.write(self._write, bytes(1))
        self._thread.join()
        os.close(self._write)
        os.close(self._read)
        if self._got is not None:
            # Whatever went wrong on the way out: the learner has gone, or is about to.
            raise SystemExit(128 + self._got) from error

    def _wait(self) -> None:
        while (got := os.read(self._read, 1)[0]) != 0:
            if got in self._signals:
                self._leave(signal.Signals(got))
                return

    def _leave(self, number: signal.Signals) -> None:
        end = threading.Timer(_GRACE, os._exit, [128 + number])
        end.daemon = True
        end.start()
        self._got = number
        reason = f"was told to end by {number.name} ({self._label}) and left"
        self._link.leave(reason)
        with contextlib.suppress(Exception):  # the connection has told it already
            self._note(reason)

    def _hold(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _free(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def _forget(self) -> None:
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        self._free()


def _call(method: Callable[[], Callable[[], None] | None]) -> None:
    found = method()
    if found is not None:
        found()


_FOR_EVER = 1e8
"""Seconds a rollout may wait for the learner to take it: as long as there is one, which the link
sees to."""
ROLLOUT_TAG, BOARD_TAG = 1, 2
"""Tags of transfers: rollouts; and from here on, weights of board 0, 1, ..."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a process that becomes a node is told: where to go, and what it inherits."""

    invitation: Invitation
    surroundings: Surroundings | None = None
    """Those of the process that started it, where it was forked earlier."""


class Boot(Protocol):
    """What the learner tells a node that it has let in: what to be."""

    @property
    def threads(self) -> int:
        """Return the number of torch threads of the node."""
        ...

    @property
    def path(self) -> tuple[str, ...]:
        """Return where the learner imports from."""
        ...

    def serve(self, connection: NodeConnection, node: int, address: str) -> None:
        """Serve the learner until it says `Close`.

        Args:
            connection: To the learner.
            node: This node's index.
            address: This node's address on the network between the two.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeBoot:
    """What a node whose data travel through a process group of two is told."""

    threads: int
    kind: str
    """Of process group."""
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""
    life: int = 0
    """How often this worker was lost before."""

    def serve(self, connection: NodeConnection, node: int, address: str) -> None:
        """Serve the learner until it says `Close`."""

        def tell(key: str, value: bytes) -> None:
            connection.send(key_frame(key, value))

        enter_life(self.life)
        pair = ProcessGroupPair(
            self.kind, ConnectionStore(tell, connection.key), NODE_RANK, address, _FOR_EVER
        )
        _Node(connection, pair, node, self.factory).run()


def main(fd: int) -> None:
    """Be the node that is described, pickled as `NodeSpec`, behind descriptor ``fd``."""
    with os.fdopen(fd, "rb") as told:
        going: NodeSpec = pickle.load(told)
    if going.surroundings is not None:
        going.surroundings.enter()
    run_node(going.invitation)


def run_node(
    invitation: Invitation,
    signals: Sequence[signal.Signals] = (),
    label: str = "",
    note: Callable[[str], object] = bool,
) -> None:
    """Serve the learner that ``invitation`` is from, until it says so or goes away.

    Args:
        invitation: Where to go.
        signals: That make the node end in order, after it has told the learner; only in the main
            thread. Others do what they did before.
        label: Of what this process belongs to, for the learner when a signal came.
        note: Told why the node leaves then, besides the learner.

    Raises:
        HandshakeError: who answers there is not the learner, or does not want this node.
        OSError: nobody answers.
        SystemExit: one of ``signals`` came.
    """
    sock, keys, patience = join(invitation, invitation.patience)
    keep_alive(sock, patience)
    address = str(sock.getsockname()[0])
    channel = SealedChannel(sock, sends=keys.node, receives=keys.learner)
    try:
        first, *others = channel.wait()
    except EOFError:
        raise HandshakeError(
            f"the learner at {invitation.host}:{invitation.port} has no place for node "
            f"{invitation.node}: it has joined already, or is one too many"
        ) from None
    # The learner has authenticated, and so is all that comes: its pickles are loaded.
    boot: Boot = pickle.loads(first)
    sys.path.extend(entry for entry in boot.path if entry not in sys.path)
    settle(boot.threads)
    link = NodeConnection(channel, invitation.node, patience)
    link.start(others)
    with SignalShutdown(link, signals, label, note) if signals else contextlib.nullcontext():
        boot.serve(link, invitation.node, address)
    link.finish()
    channel.close()


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """Memory of a rollout that is to be sent."""

    window: RolloutWindow
    pieces: Sequence[torch.Tensor]
    """In which it is sent."""
    mark: Array
    """Ends the last one; says which rollout it is."""


class _Node:
    """The worker of one node."""

    def __init__(
        self, link: NodeConnection, pair: ProcessGroupPair, index: int, factory: bytes
    ) -> None:
        self._link, self._pair, self._index, self._factory = link, pair, index, factory
        self._blocks: dict[int, _Outgoing] = {}
        """Per slot of the learner's."""
        self._sending: dict[int, list[Transfer]] = {}
        self._due: m.WindowRef | None = None
        """Of the rollout that is being carried out."""
        self._closing = False

    def run(self) -> None:
        work(self._index, self._build, self._following, self._answer)

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._factory)
        mailbox = NodeWeights(self._link, self._pair)
        return Worker(self._index, factory, self._open, self._link.stop, mailbox)

    def _following(self) -> Addressed:
        ticket, command = self._link.inbox.next()
        if isinstance(command, m.Collect) and command.window.blocks:
            self._due = command.window
        self._closing = isinstance(command, m.Close)
        return ticket, command

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        """Return memory of this node's own for a rollout; what was in it has to be gone first."""
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        self._finish(reference.slot)
        return self._block(reference).window

    def _block(self, reference: m.WindowRef) -> _Outgoing:
        found = self._blocks.get(reference.slot)
        if found is None:
            plan, nbytes = packed(reference)
            block = torch.zeros(nbytes, dtype=torch.uint8)
            pieces = [block[start:end] for start, end in pieces_of(reference)]
            found = _Outgoing(window_over(block, plan), pieces, mark_of(block))
            self._blocks[reference.slot] = found
        return found

    def _finish(self, slot: int) -> None:
        """Wait until the learner has taken what was in ``slot``."""
        for transfer in self._sending.pop(slot, ()):
            transfer.finish()

    def _answer(self, reply: m.Reply) -> None:
        if self._link.leaving:
            return
        if self._closing and not isinstance(reply, m.Begun):
            for slot in list(self._sending):  # what was announced is delivered
                self._finish(slot)
            self._link.finish()  # the learner goes away when it has this answer
        due, self._due = self._due, None
        if due is not None:
            # Also after a failure: the learner has been expecting the rollout since it asked.
            outgoing = self._block(due)
            self._finish(due.slot)
            outgoing.mark[0] = reply.ticket
            self._sending[due.slot] = [
                self._pair.send(piece, ROLLOUT_TAG) for piece in outgoing.pieces
            ]
            if not self._link.inbox:  # nothing else to do: announce it when it is on the way
                self._finish(due.slot)
        self._link.answer(reply)


class NodeWeights:
    """The weights that the learner publishes; a `Mailbox`."""

    def __init__(self, link: NodeConnection, pair: ProcessGroupPair) -> None:
        """Take weights from ``pair`` when ``link`` says that some are on their way."""
        self._link, self._pair = link, pair
        self._readers: dict[int, FlatReader] = {}
        self._coming: dict[int, Transfer] = {}

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Expect weights of ``model_id`` from now on."""
        number = board.offset
        self._readers[number] = FlatReader(model_id, board)
        self._expect(number)

    def _expect(self, number: int) -> None:
        """Have the next weights arrive whatever this node does meanwhile."""
        target = self._readers[number].next_buffer()
        self._coming[number] = self._pair.receive(target, BOARD_TAG + number)

    def newest(self) -> m.Snapshot | None:
        """Return the newest weights that are here or on their way, if there are new ones."""
        snapshot: m.Snapshot | None = None
        while (number := self._link.pop_board()) is not None:
            self._coming[number].finish()
            read = self._readers[number].read()
            models = {**(snapshot.models if snapshot else {}), **read.models}
            snapshot = replace(read, models=models)
            self._expect(number)
            self._link.send(weights_frame(number))
        return snapshot
