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

import argparse
import ctypes
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import rich.progress
import rich.table
import torch
from tensordict.nn import TensorDictModule

import gleanrl

WORKERS = 2
LATE_S = 5.0
"""An error that needs longer than this, and a process that stays longer, is a finding."""
CASE_S = 60.0
"""A learner that needs longer than this hangs."""
_SUBREAPER = 36


@dataclass(frozen=True)
class Case:
    """One kill."""

    kind: str
    victim: str
    """``"worker"`` or ``"learner"``."""
    index: int
    """Of the victim among the workers."""
    after: float
    """Seconds from the start of the victim to its end."""


@dataclass
class Outcome:
    """The end of one case."""

    seconds: float = 0.0
    """From the kill to the error, or, if the learner was killed, to the end of all workers."""
    wrong: str = ""
    """Empty if all is right."""


def die(note: Path) -> None:
    """Write down the time, then kill this process."""
    note.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def doomed(after: float, note: Path) -> gym.Env[Any, Any]:
    """Make an environment in a process that ends ``after`` seconds from now."""
    timer = threading.Timer(after, die, [note])
    timer.daemon = True
    timer.start()
    return gym.make("CartPole-v1")


def factories(case: Case, note: Path) -> list[Callable[[], Any]]:
    """Make one factory per worker; that of the victim dooms its process."""
    made: list[Callable[[], Any]] = [partial(gym.make, "CartPole-v1") for _ in range(WORKERS)]
    if case.victim == "worker":
        made[case.index] = partial(doomed, case.after, note)
    return made


def policy() -> TensorDictModule:
    """Make a small deterministic policy."""

    class Act(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.layer(observation)
            return scores.argmax(-1)

    return TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])


def iterate(make: Callable[..., Any], case: Case, note: Path, **options: Any) -> None:
    """Collect and update weights until something raises; close the collector in any case."""
    act = policy()
    collector = make(factories(case, note), act, frames_per_batch=64, total_frames=-1, **options)
    try:
        for _ in collector:
            collector.update_policy_weights_(act)
    finally:
        collector.shutdown()


def fill(make: Callable[..., Any], case: Case, note: Path) -> None:
    """Fill a buffer in the background until something raises."""
    buffer = gleanrl.ReplayBuffer(storage=gleanrl.LazyTensorStorage(10_000), batch_size=32)
    act = policy()
    collector = make(
        factories(case, note), act, frames_per_batch=64, total_frames=-1, replay_buffer=buffer
    )
    collector.start()
    try:
        while True:
            collector.update_policy_weights_(act)
            if len(buffer):
                buffer.sample()
            time.sleep(0.001)  # the time of a learner's step
    finally:
        collector.shutdown()


def step_parallel(case: Case, note: Path) -> None:
    """Step environments in processes until something raises."""
    env = gleanrl.ParallelEnv(WORKERS, factories(case, note))
    try:
        while True:
            env.rollout(32)
    finally:
        env.close()


KINDS: dict[str, Callable[[Case, Path], None]] = {
    "sync": partial(iterate, gleanrl.MultiSyncCollector),
    "async": partial(iterate, gleanrl.MultiAsyncCollector),
    "background": partial(fill, gleanrl.MultiAsyncCollector),
    "nodes": partial(iterate, gleanrl.DistributedCollector, sync=True, launcher="mp"),
    "nodes async": partial(iterate, gleanrl.DistributedCollector, sync=False, launcher="mp"),
    "ParallelEnv": step_parallel,
}


def descriptors() -> int:
    """Count this process's open files."""
    return len(os.listdir("/proc/self/fd"))


def learn(case: Case, note: Path) -> Outcome:
    """Run ``case`` in this process; return the outcome if a worker was the victim."""
    if case.victim == "learner":
        timer = threading.Timer(case.after, die, [note])
        timer.daemon = True
        timer.start()
    outcome = Outcome()
    before = descriptors()
    try:
        KINDS[case.kind](case, note)
        outcome.wrong = "ended without an error"
    except gleanrl.WorkerDied as err:
        outcome.seconds = time.monotonic() - float(note.read_text())
        text = str(err)
        named = f"worker {case.index}" in text or f"node {case.index}" in text
        if not (named and "signal 9" in text):
            outcome.wrong = f"named wrongly: {text}"
    except Exception as err:
        outcome.wrong = f"{type(err).__name__}: {err}"
    if outcome.seconds > LATE_S:
        outcome.wrong = f"named after {outcome.seconds:.1f} s"
    gc.collect()  # tracebacks hold the collector
    if not outcome.wrong and descriptors() > before + 4:  # the zygote's stay
        outcome.wrong = f"{descriptors() - before} descriptors stay open"
    return outcome


def children(pid: int) -> Iterator[int]:
    """Yield the descendants of ``pid``, zombies left out."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with suppress(OSError):
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        yield child
                yield from children(child)


def alone() -> bool:
    """Collect the exit statuses of adopted orphans; tell whether no descendant is left."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return not any(children(os.getpid()))


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Wait for ``condition``, at most ``seconds``; tell whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def in_a_learner(case: Case, folder: Path) -> Outcome:
    """Run ``case`` in a forked process; look at what it leaves behind."""
    note, report = folder / "note", folder / "report"
    for path in (note, report):
        path.unlink(missing_ok=True)
    shared = set(os.listdir("/dev/shm"))
    learner = os.fork()
    if learner == 0:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            report.write_text(json.dumps(asdict(learn(case, note))))
        finally:
            os._exit(0)
    outcome = Outcome()
    if not until(lambda: os.waitpid(learner, os.WNOHANG)[0], CASE_S):
        os.kill(learner, signal.SIGABRT)
        os.waitpid(learner, 0)
        outcome.wrong = "hangs: " + (folder / "log").read_text()[-500:]
    elif case.victim == "worker":
        outcome = Outcome(**json.loads(report.read_text())) if report.exists() else Outcome()
        if not report.exists():
            outcome.wrong = "the learner crashed: " + (folder / "log").read_text()[-500:]
    gone = until(alone, LATE_S)
    if case.victim == "learner" and note.exists():
        outcome.seconds = time.monotonic() - float(note.read_text())
    if not gone:
        stay = list(children(os.getpid()))
        names = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in stay]
        outcome.wrong = outcome.wrong or f"processes stay: {names}"
        for pid in stay:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if rest := set(os.listdir("/dev/shm")) - shared:
        outcome.wrong = outcome.wrong or f"stays in /dev/shm: {sorted(rest)}"
    return outcome


def draw(rng: random.Random) -> Case:
    """Draw a case."""
    kind, victim = rng.choice(list(KINDS)), rng.choice(["worker", "worker", "learner"])
    return Case(kind, victim, rng.randrange(WORKERS), rng.uniform(0, 1.0))


def show(outcomes: dict[tuple[str, str], list[Outcome]]) -> rich.table.Table:
    """Make the table: a row per kind and victim."""
    table = rich.table.Table("kind", "killed", "cases", "right", "median s", "slowest s")
    for (kind, victim), found in sorted(outcomes.items()):
        seconds = [one.seconds for one in found]
        right = sum(not one.wrong for one in found)
        times = f"{median(seconds):.3f}", f"{max(seconds):.3f}"
        table.add_row(kind, victim, str(len(found)), str(right), *times)
    return table


def main() -> int:
    """Run the cases; return 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.kills", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    rng = random.Random(options.seed)
    outcomes: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for number in rich.progress.track(range(options.cases), "killing"):
            case = draw(rng)
            outcome = in_a_learner(case, Path(folder))
            outcomes[case.kind, case.victim].append(outcome)
            if outcome.wrong:
                rich.print(f"case {number}: {case}: [red]{outcome.wrong}")
    rich.print(show(outcomes))
    return int(any(one.wrong for found in outcomes.values() for one in found))


if __name__ == "__main__":
    sys.exit(main())
