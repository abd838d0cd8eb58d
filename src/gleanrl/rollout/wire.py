"""How messages are written as bytes: one frame each, its first byte says what it is.

What every rollout costs (`Collect` out, `Rolled` back) is packed into integers; everything else is
pickled. A window is described in full the first time it is used, afterwards by its slot alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import cloudpickle

from gleanrl.core import messages as m

_COLLECT = struct.Struct("=cqiiq?")
_ROLLED = struct.Struct("=cqiqqqq")
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
        return _P + bytes(cloudpickle.dumps((ticket, command)))


class CommandReader:
    """The worker's side."""

    def __init__(self) -> None:
        """Start with no window described."""
        self._windows: dict[int, m.WindowRef] = {}

    def read(self, frame: bytes) -> tuple[int, m.Command]:
        """Return the ticket and the command in ``frame``."""
        if frame[:1] == _C:
            _, ticket, slot, _, _, random = _COLLECT.unpack(frame)
            return ticket, m.Collect(self._windows[slot], random)
        ticket, command = cloudpickle.loads(frame[1:])
        if isinstance(command, m.Collect):
            self._windows[command.window.slot] = command.window
        return ticket, command


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
    return _P + bytes(pickle(reply))


def read_reply(frame: bytes) -> m.Reply:
    """Return the reply in ``frame``."""
    if frame[:1] == _R:
        _, ticket, worker, steps, frames, version, discarded = _ROLLED.unpack(frame)
        return m.Rolled(worker, ticket, m.Report(steps, frames, version, discarded))
    reply: m.Reply = cloudpickle.loads(frame[1:])
    return reply
