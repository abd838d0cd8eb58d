"""How messages are written as bytes: one frame each, its first byte says what it is.

What every rollout costs (`Collect` out, `Rolled` back) is packed into integers; everything else is
pickled, after a head that tells whose answer is due even if the pickle cannot be loaded. A window
is described in full the first time it is used, afterwards by its slot alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import cloudpickle

from gleanrl.core import messages as m

_COLLECT = struct.Struct("=cqiiq?")
_ROLLED = struct.Struct("=cqiqqqq")
_HEAD = struct.Struct("=cqi")
"""How every frame begins: its kind, the ticket, and in replies the worker (in commands, a slot)."""
_C, _R, _P = b"C", b"R", b"P"


class CommandWriter:
    """The learner's side of one worker's commands."""

    def __init__(self) -> None:
        """Start with no window described."""
        self._described: set[int] = set()

    def write(self, ticket: int, command: m.Command) -> bytes:
        """Return the frame of ``command``."""
        if isinstance(command, m.Collect):
            window = command.window
            if window.slot in self._described:
                return _COLLECT.pack(
                    _C, ticket, window.slot, window.worker, window.steps, command.random
                )
            self._described.add(window.slot)
        return _HEAD.pack(_P, ticket, 0) + bytes(cloudpickle.dumps(command))


class CommandReader:
    """The worker's side."""

    def __init__(self) -> None:
        """Start with no window described."""
        self._windows: dict[int, m.WindowRef] = {}

    def read(self, frame: bytes) -> m.Command:
        """Return the command in ``frame``.

        Raises:
            Exception: what the user's objects raise when they are unpickled.
        """
        if frame[:1] == _C:
            _, _, slot, _, _, random = _COLLECT.unpack(frame)
            return m.Collect(self._windows[slot], random)
        command: m.Command = cloudpickle.loads(memoryview(frame)[_HEAD.size :])
        if isinstance(command, m.Collect):
            self._windows[command.window.slot] = command.window
        return command


def write_reply(reply: m.Reply, pickle: Callable[[Any], bytes] = cloudpickle.dumps) -> bytes:
    """Return the frame of ``reply``."""
    if isinstance(reply, m.Rolled) and reply.report.payload is None:
        report = reply.report
        return _ROLLED.pack(
            _R,
            reply.ticket,
            reply.worker,
            report.steps,
            report.frames,
            report.policy_version,
            report.discarded,
        )
    return _HEAD.pack(_P, reply.ticket, reply.worker) + bytes(pickle(reply))


def read_reply(frame: bytes) -> m.Reply:
    """Return the reply in ``frame``.

    Raises:
        Exception: what the user's objects raise when they are unpickled.
    """
    if frame[:1] == _R:
        _, ticket, worker, steps, frames, version, discarded = _ROLLED.unpack(frame)
        return m.Rolled(worker, ticket, m.Report(steps, frames, version, discarded))
    reply: m.Reply = cloudpickle.loads(memoryview(frame)[_HEAD.size :])
    return reply


def head_of(frame: bytes) -> tuple[int, int]:
    """Return the ticket of a frame, and the worker that sent it (if it is a reply)."""
    _, ticket, worker = _HEAD.unpack_from(frame)
    return ticket, worker
