"""Messages as bytes: one frame each, whose first byte tells its kind.

    C numbers         collect into a window that was described before (from the learner)
    R numbers         a rollout is done (from the worker); rewards and ends follow
    P head pickle     any other command or reply (both ways)

and, on the connection of a node only:

    H                 a sign of life (from the node)
    S byte            raise the stop flag, or take it back (from the learner)
    K pickle          half of agreeing on a process group: key and value (both ways)
    W                 weights are on their way (from the learner), were taken (from the node)
    L reason          the node ends, because it was told to or cannot continue (from the node)

The two messages of a rollout (C and R) are packed into integers. The head of a pickle tells which
answer is due even if the pickle cannot be loaded. A window is described in full the first time it
is used, afterwards by its slot alone.
"""

from __future__ import annotations

import pickle
import struct

import cloudpickle

from gleanrl.core import messages as m
from gleanrl.core.errors import WORKER_NAME, GleanError, error_text
from gleanrl.transport.authenticated_channel import ForgedFrameError
from gleanrl.transport.pickling import dumps
from gleanrl.transport.remote_errors import RemoteError, raised

_COLLECT = struct.Struct("=cqiiq?")
_ROLLED = struct.Struct("=cqiqqqqq9d")
"""Numbers of a report; which episodes ended follows."""
_HEAD = struct.Struct("=cqi")
"""The beginning of a frame: its kind, the ticket, and in replies the worker (else a slot)."""
_C, _R, _P = b"C", b"R", b"P"


class CommandWriter:
    """The learner's side of one worker's commands."""

    def __init__(self) -> None:
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
        return _HEAD.pack(_P, ticket, 0) + dumps(command)


class CommandReader:
    """The worker's side."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._windows: dict[int, m.WindowRef] = {}

    def read(self, frame: bytes) -> tuple[int, m.Command | m.Failed]:
        """Return ticket and command; in place of one that cannot be loaded, what to reply."""
        ticket, _ = head_of(frame)
        try:
            return ticket, self._command(frame)
        except Exception as err:  # of the user's objects
            return ticket, _failed(
                self._worker,
                ticket,
                err,
                "what was sent cannot be loaded in the worker's process",
                "send what can be unpickled there",
            )

    def _command(self, frame: bytes) -> m.Command:
        if frame[:1] == _C:
            _, _, slot, _, _, random = _COLLECT.unpack(frame)
            return m.Collect(self._windows[slot], random)
        command: m.Command = cloudpickle.loads(memoryview(frame)[_HEAD.size :])
        if not isinstance(command, m.Command):
            raise TypeError(f"a {type(command).__name__} is no command")
        if isinstance(command, m.Collect):
            self._windows[command.window.slot] = command.window
        return command


def head_of(frame: bytes) -> tuple[int, int]:
    """Return the ticket of a frame, and the worker that sent it (if it is a reply)."""
    _, ticket, worker = _HEAD.unpack_from(frame)
    return ticket, worker


BEAT, STOP, KEY, WEIGHTS, LEAVE = b"H", b"S", b"K", b"W", b"L"


def key_frame(key: str, value: bytes) -> bytes:
    """Return the frame that tells ``value``."""
    return KEY + pickle.dumps((key, value))


def read_key(frame: bytes) -> tuple[str, bytes]:
    """Return key and value."""
    told: tuple[str, bytes] = pickle.loads(frame[1:])
    return told


def _failed(worker: int, ticket: int, cause: Exception, problem: str, advice: str) -> m.Failed:
    """Return the reply in place of a message that cannot be written or read."""
    error = GleanError(f"{problem} ({type(cause).__name__}: {error_text(cause)}); {advice}")
    error.__cause__ = cause
    return m.Failed(worker, ticket, error)


def frame_of(reply: m.Reply) -> bytes:
    """Return ``reply`` as a frame; one that cannot be pickled becomes a failure that says so."""
    report = reply.report if isinstance(reply, m.Rolled) else None
    if report is not None and report.payload is None and not report.mishaps:
        head = _ROLLED.pack(
            _R,
            reply.ticket,
            reply.worker,
            report.steps,
            report.frames,
            report.policy_version,
            report.discarded,
            report.drift,
            *report.times,
            *report.seconds,
            report.weights_s,
        )
        return head + report.ended
    if isinstance(reply, m.Failed):
        remote = RemoteError.of(reply.error)
        reply = m.Failed(reply.worker, reply.ticket, remote)  # type: ignore[arg-type]
    try:
        return _HEAD.pack(_P, reply.ticket, reply.worker) + dumps(reply)
    except Exception as err:  # of the user's objects
        problem = "the answer cannot be sent to the learner's process"
        advice = "ask for an attribute that can be pickled"
        failed = _failed(reply.worker, reply.ticket, err, problem, advice)
        failed.error.__cause__ = None  # its traceback is of pickle's code
        return frame_of(failed)


def _pickled_reply(frame: bytes) -> m.Reply:
    reply: m.Reply = cloudpickle.loads(memoryview(frame)[_HEAD.size :])
    if not isinstance(reply, m.Reply) or (reply.ticket, reply.worker) != head_of(frame):
        raise TypeError(f"a {type(reply).__name__} is no such reply")
    return reply


def reply_in(frame: bytes, worker_name: str = WORKER_NAME) -> m.Reply:
    """Return the reply in ``frame``; one that cannot be loaded becomes the command's failure."""
    if frame[:1] == _R:
        found = _ROLLED.unpack_from(frame)
        ticket, worker, steps, frames, version, discarded, drift = found[1:8]
        report = m.Report(steps, frames, version, discarded, None, frame[_ROLLED.size :])
        report.times, report.seconds, report.weights_s = found[8:11], found[11:16], found[16]
        report.drift = drift
        return m.Rolled(worker, ticket, report)
    try:
        reply = _pickled_reply(frame)
    except Exception as err:  # of the user's objects
        ticket, worker = head_of(frame)
        problem = f"the answer of {worker_name.format(worker)} cannot be loaded here"
        advice = "ask for an attribute that can be unpickled in the learner's process"
        return _failed(worker, ticket, err, problem, advice)
    if isinstance(reply, m.Failed):
        worker = reply.worker
        error = raised(worker_name.format(worker), reply.error)  # type: ignore[arg-type]
        return m.Failed(worker, reply.ticket, error)
    return reply


def check_reply(frame: bytes, worker: int) -> None:
    """Refuse a ``frame`` that is no reply of ``worker``, as far as that shows unpickled."""
    least = _ROLLED.size if frame[:1] == _R else _HEAD.size
    if frame[:1] not in (_R, _P) or len(frame) < least or head_of(frame)[1] != worker:
        raise ForgedFrameError(f"a message of {len(frame)} bytes is no reply of worker {worker}")
