"""Kills workers and learners at random moments, and prints what became of each as a table.

``python -m tools.kills --cases 300 --seed 1``. Each case runs in a forked learner of its own: a
collector of a random kind over CartPole, and a victim that sends itself ``SIGKILL`` at a random
moment between its start and half a second of collection. The tool adopts every orphan, so it knows
all processes that a case leaves behind.

A case is right if the learner raises `WorkerDied` that names the victim and the signal, closes
within a deadline, leaves no descriptor behind, and if neither a process nor a file in ``/dev/shm``
outlives it.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import rich
import rich.table
from benchmarks import policies
from benchmarks.processes import descendants

import gleanrl
from tools import trials

WORKERS = 2
LATE_S = 5.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
"""An error that needs longer than this, and a process that stays longer, is a finding.

Where processes wait for processors, each gets its share of the time.
"""
CASE_S = 60.0
"""A learner that needs longer than this hangs."""
_SUBREAPER = 36


@dataclass(frozen=True)
class Case:
    """One kill."""

    kind: str
    victim: str
    """``"worker"``, ``"policy"`` (its process) or ``"learner"``."""
    index: int
    """Of the victim among the workers."""
    after: float
    """Seconds from the start of the victim to its end."""


def die(note: Path) -> None:
    """Write down the time, then kill this process."""
    note.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def doom(after: float, note: Path) -> None:
    """Kill this process ``after`` seconds from now."""
    timer = threading.Timer(after, die, [note])
    timer.daemon = True
    timer.start()


def doomed(after: float, note: Path) -> gym.Env[Any, Any]:
    """Make an environment in a process that is killed ``after`` seconds from now."""
    doom(after, note)
    return gym.make("CartPole-v1")


def doomed_policy(after: float, note: Path) -> Any:
    """Make the policy in a process that is killed ``after`` seconds from now."""
    doom(after, note)
    return policies.POLICY


def factories(case: Case, note: Path) -> list[Callable[[], Any]]:
    """Make one factory per worker; that of the victim dooms its process."""
    made: list[Callable[[], Any]] = [partial(gym.make, "CartPole-v1") for _ in range(WORKERS)]
    if case.victim == "worker":
        made[case.index] = partial(doomed, case.after, note)
    return made


def collect(make: Callable[..., Any], case: Case, note: Path, **options: Any) -> None:
    """Collect and update weights until something raises; close the collector in any case.

    Args:
        make: The class of the collector.
        case: What to do.
        note: Where the victim writes down the time.
        options: Of the collector; with a ``replay_buffer`` it collects in the background.
    """
    act, buffer = policies.POLICY, options.get("replay_buffer")
    if case.victim == "policy":
        options["policy_factory"] = partial(doomed_policy, case.after, note)
    collector = make(factories(case, note), act, frames_per_batch=64, total_frames=-1, **options)
    try:
        if buffer is not None:
            collector.start()
        while True:
            collector.update_policy_weights_(act)
            if buffer is None:
                collector.next()
            elif len(buffer):
                buffer.sample()
            time.sleep(0.001)  # the time of a learner's step
    finally:
        collector.shutdown()


def fill(case: Case, note: Path) -> None:
    """Fill a buffer in the background until something raises."""
    buffer = gleanrl.ReplayBuffer(storage=gleanrl.LazyTensorStorage(10_000), batch_size=32)
    collect(gleanrl.MultiAsyncCollector, case, note, replay_buffer=buffer)


def step_parallel(case: Case, note: Path) -> None:
    """Step environments in processes until something raises."""
    env = gleanrl.ParallelEnv(WORKERS, factories(case, note))
    try:
        while True:
            env.rollout(32)
    finally:
        env.close()


KINDS: dict[str, Callable[[Case, Path], None]] = {
    "sync": partial(collect, gleanrl.MultiSyncCollector),
    "async": partial(collect, gleanrl.MultiAsyncCollector),
    "background": fill,
    "nodes": partial(collect, gleanrl.DistributedCollector, sync=True, launcher="mp"),
    "nodes async": partial(collect, gleanrl.DistributedCollector, sync=False, launcher="mp"),
    "ParallelEnv": step_parallel,
    "central": partial(collect, gleanrl.MultiSyncCollector, inference="central"),
    "central async": partial(collect, gleanrl.MultiAsyncCollector, inference="central"),
    "policy process": partial(
        collect, gleanrl.MultiSyncCollector, inference="central", policy_process=True
    ),
}
WITH_POLICY_PROCESS = "central async", "policy process"


def descriptors() -> int:
    """Count this process's open files."""
    return len(os.listdir("/proc/self/fd"))


def learn(case: Case, note: Path) -> str:
    """Run a case in this process; return whether it is right, and seconds from kill to error."""
    if case.victim == "learner":
        doom(case.after, note)
    before = descriptors()
    try:
        KINDS[case.kind](case, note)
    except gleanrl.WorkerDied as err:
        seconds, text = time.monotonic() - float(note.read_text()), str(err)
    named = any(f"{kind} {case.index} " in text for kind in ("worker", "node"))
    named = text.startswith("policy process ") if case.victim == "policy" else named
    assert named and "signal 9" in text, f"named wrongly: {text}"
    assert seconds <= LATE_S, f"named after {seconds:.1f} s"
    gc.collect()  # tracebacks hold the collector
    assert descriptors() <= before + 4, "descriptors stay open"  # the zygote's stay
    return f"right\n{seconds}"


def alone() -> bool:
    """Collect the exit statuses of adopted orphans; tell whether no descendant is left."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return not descendants(os.getpid())


def until(condition: Callable[[], Any], seconds: float) -> None:
    """Wait for ``condition``, at most ``seconds``."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)


def outcome(case: Case) -> str:
    """Run a case in a forked learner; return whether it is right, and the seconds of its end.

    The seconds are those from the kill to the error, or to the end of all workers of a learner that
    was killed.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "note")
        shared = set(os.listdir("/dev/shm"))
        said = trials.answer(partial(learn, case, note), CASE_S)
        until(alone, LATE_S)
        if case.victim == "learner":
            killed = said.startswith(f"{trials.WRONG}ended with code -9") and note.exists()
            assert killed, f"was not killed: {said}"
            said = f"right\n{time.monotonic() - float(note.read_text())}"
    stay = [(pid, Path(f"/proc/{pid}/cmdline").read_text()) for pid in descendants(os.getpid())]
    for pid, _ in stay:
        os.kill(pid, signal.SIGKILL)
    if not said.startswith(trials.WRONG):
        assert not stay, f"processes stay: {stay}"
        rest = set(os.listdir("/dev/shm")) - shared
        assert not rest, f"stays in /dev/shm: {sorted(rest)}"
    return said


def draw(number: int) -> tuple[str, trials.Call]:
    """Return kind and call of the case of a number."""
    rng = random.Random(number)
    kind, victim = rng.choice(list(KINDS)), rng.choice(["worker", "worker", "learner"])
    if victim == "worker" and kind in WITH_POLICY_PROCESS:
        victim = rng.choice(["worker", "policy"])
    case = Case(kind, victim, rng.randrange(WORKERS), rng.uniform(0, 1.0))
    return f"{kind}, {victim}", partial(outcome, case)


def show(found: list[trials.Found]) -> rich.table.Table:
    """Make the table: a row per kind and victim."""
    table = rich.table.Table("kind, killed", "cases", "right", "median s", "slowest s")
    for kind in sorted({one.kind for one in found}):
        cases = [one for one in found if one.kind == kind]
        seconds = [float(one.said.splitlines()[1]) for one in cases if not one.wrong] or [math.nan]
        times = f"{median(seconds):.3f}", f"{max(seconds):.3f}"
        table.add_row(kind, str(len(cases)), str(sum(not one.wrong for one in cases)), *times)
    return table


def main() -> int:
    """Run the cases; return 1 if one was wrong."""
    found = trials.main("kills", __doc__, draw, CASE_S + 2 * LATE_S, cases=100, alone=True)
    rich.print(show(found))
    return int(any(one.wrong for one in found))


if __name__ == "__main__":
    sys.exit(main())
