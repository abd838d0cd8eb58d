"""A check of states: a source that loads one must make the rollout that the saved source makes.

Both make it in a forked copy of the process that has the environments, whatever started that: so
nothing of the process changes, and its connections and threads are not touched.
"""

from __future__ import annotations

import abc
import contextlib
import os
import pickle
import select
import signal
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gleanrl.core import messages as m
from gleanrl.core.differences import unlike
from gleanrl.core.errors import ClosedError
from gleanrl.core.protocols import Source, SourceFactory
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window

CHECK_TIMEOUT_S = 60.0
"""Seconds that a check may take in one worker."""
_MOST_BYTES = 4000
"""Of a result: a pipe takes as many at once."""
_UNCHECKED = "a copy cannot be checked"
_ADVICE = (
    "keep all that steps change in attributes of plain data, or give the environment get_state() "
    "and set_state(state)"
)
_INSIDE = (
    "other processes have its environments: give the collector the ParallelEnv itself, with "
    "nothing around it"
)


class Verifiable(abc.ABC):
    """A source, or the environment of one, that has the check made elsewhere."""

    @abc.abstractmethod
    def verify(self, command: m.Verify) -> str | None:
        """Return the result of `difference` where the environments are. Internal to the package."""


def difference(
    source: Source, factory: SourceFactory, worker: int, command: m.Verify
) -> str | None:
    """Return how a source of ``factory`` that loads the state of ``source`` differs, if it does."""
    if isinstance(source, Verifiable):
        return source.verify(command)
    if command.group is None and isinstance(env := source.get("env"), Verifiable):
        return env.verify(command)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"{_UNCHECKED}: its process uses CUDA, so it cannot be copied by a fork"
    return _in_copy(lambda: _difference(source, partial(factory, worker), command))


def _difference(source: Source, make: Callable[[], Source], command: m.Verify) -> str | None:
    """Compare two sources; both are used up."""
    source = _part(source, command)
    state, policy = source.state(command.allow_pickle), source.call("policy_state")
    if "envs" not in state["episodes"]:
        return None  # the caller is told so in any case
    with preserved():
        expected = _rollout(source, command.steps)
        other = _part(make(), command)
    other.place(command.place.base, command.place.stride)
    if policy:
        other.load(m.Snapshot(state["policy_version"], {"policy": policy}))
    if (why := other.load_state(state, True, command.allow_pickle)) is not None:
        return f"a copy does not continue: {why}; {_ADVICE}"
    found = unlike(expected, _rollout(other, command.steps), "batch")
    return (
        found and f"a copy differs {command.steps} steps later: {found} (saved / loaded); {_ADVICE}"
    )


def _part(source: Source, command: m.Verify) -> Source:
    part: Source = source if command.group is None else source.call("part", command.group)
    return part


def _rollout(source: Source, steps: int) -> Any:
    layout = source.layout()
    fields = () if layout is None else layout.fields
    window = Window.allocate(fields, int(source.get("num_envs")), steps)
    report = source.collect(window, steps, bytearray(1), False)
    entries = {".".join(field.key): window.tensor(field.key) for field in fields}
    return entries if report.payload is None else report.payload


def _in_copy(call: Callable[[], str | None]) -> str | None:
    """Return the result of ``call`` in a forked copy of this process, which ends with it."""
    reading, writing = os.pipe()
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # stays so in the copy
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            pid = os.fork()
        if not pid:
            _answer(call, writing)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    os.close(writing)
    try:
        ready = select.select([reading], [], [], CHECK_TIMEOUT_S + 1.0)[0]
        data = os.read(reading, _MOST_BYTES) if ready else b""
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not data:
        return f"{_UNCHECKED}: it died, or took {CHECK_TIMEOUT_S:g} s"
    said: str | None = pickle.loads(data)
    return said


def _late(*_: object) -> None:
    """Interrupt a step, so that the error names it; a call that cannot be interrupted is killed."""
    raise TimeoutError(f"not over after {CHECK_TIMEOUT_S:g} s")


def _answer(call: Callable[[], str | None], writing: int) -> None:
    """Write the result of ``call`` and end this process, which is the copy; never returns."""
    try:
        signal.signal(signal.SIGALRM, _late)
        signal.setitimer(signal.ITIMER_REAL, CHECK_TIMEOUT_S)
        torch.set_num_threads(1)  # those of a pool are not in the copy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            said = call()
    except ClosedError:
        said = f"{_UNCHECKED}: {_INSIDE}"
    except BaseException as err:
        said = "; ".join([f"{type(err).__name__}: {err}", *getattr(err, "__notes__", ())])
        said = f"{_UNCHECKED}: {said}"
    finally:
        try:
            os.write(writing, pickle.dumps(said and said[: _MOST_BYTES // 5]))
        finally:
            os._exit(0)
