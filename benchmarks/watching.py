"""The cost of watching: measuring, adding up and showing.

A collector in one process, with ``progress=True``, collects with a clock around all functions that
measure, count and show; the CPU time of the thread that shows progress is added. A timeline is
measured the same way. As a check, the collector takes turns of a few batches with and without these
functions: on a quiet machine the difference is about the same, on a busy one it is noise. A worker
process measures its own parts, without turns. The sums that the learner makes while the worker
collects are shown, but not counted, because the learner waits then.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import torch

from benchmarks import envs, policies
from benchmarks.harness import summary
from benchmarks.processes import in_fresh_process
from benchmarks.systems.ours import Batches, inline, over

CASES = {
    "1024 frames of 16 CartPole": ("cartpole", 16, 1024),
    "256 frames of 16 CartPole": ("cartpole", 16, 256),
    "2 frames of 2 CartPole": ("cartpole", 2, 2),
    "1024 frames of 16 HalfCheetah": ("half_cheetah", 16, 1024),
    "1024 frames of 16 CartPole in a worker": ("cartpole", 16, 1024),
}
"""Environment, number of them, and frames of a batch."""
LIMIT = 0.5
"""Percent that watching may cost with batches of 1024 frames."""
NUMBERS = "microseconds", "percent", "timeline", "turns"
TURN_S = 0.05
"""Seconds of a turn, about."""
TIMELINE_LIMIT = 3.0
"""Percent that a timeline may cost, likewise."""
ADDED, ADDED_MEANWHILE = "batches and episodes added up", "added up while the worker collects"
Parts = list[tuple[Any, str, str, Callable[..., Any]]]


def parts() -> Parts:
    """Return the functions that watch, the part of each, and its replacement in a bare turn."""
    from gleanrl.core.returns import NONE_ENDED
    from gleanrl.rollout.step_clock import StepClock
    from gleanrl.rollout.tracker import Tracker
    from gleanrl.transport.worker_loop import Worker
    from gleanrl.watch.watching import Watching

    return [
        (StepClock, "begin", "workers' time", lambda _, act, step: (act, step)),
        (Worker, "_complete", "workers' time", lambda *_: None),
        (Tracker, "_ends_of", "rewards kept or sent", lambda *_: NONE_ENDED),
        (Watching, "gathered", ADDED, lambda *_: None),
    ]


@contextmanager
def bare() -> Iterator[None]:
    """Have collectors measure nothing, add nothing up and show nothing."""
    with ExitStack() as stack:
        for owner, name, _, instead in parts():
            stack.enter_context(patch.object(owner, name, instead))
        yield


@contextmanager
def timed(parts: Parts) -> Iterator[Counter[str]]:
    """Add up the seconds of each part in the calling thread, less those of the clock itself."""
    spent: Counter[str] = Counter()
    clock, owner_thread = time.perf_counter, threading.get_ident()
    own = min(-clock() + clock() for _ in range(1000))

    def counted(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any) -> Any:
            if threading.get_ident() != owner_thread:
                return method(*args)
            begin = clock()
            try:
                return method(*args)
            finally:
                end = clock()
                spent[part] += end - begin - own

        return call

    with ExitStack() as stack:
        for owner, name, part, _ in parts:
            method = counted(getattr(owner, name), part)
            stack.enter_context(patch.object(owner, name, method))
        yield spent


def stepwise(steps: int) -> float:
    """Return the seconds per rollout of timing its steps; one rollout of 16 is timed."""
    from gleanrl.rollout.step_clock import StepClock

    def nothing(_: int) -> None:
        pass

    def least(call: Callable[[int], None]) -> float:
        found = []
        for _ in range(20):
            begin = time.perf_counter()
            for t in range(1000):
                call(t)
            found.append((time.perf_counter() - begin) / 1000)
        return min(found)

    envs: Any = SimpleNamespace(reset_s=0.0)
    act, _ = StepClock(envs).begin(nothing, nothing)
    return 2 * steps * (least(act) - least(nothing)) / 16


def sending(envs: int, steps: int) -> float:
    """Return the seconds per rollout that rewards and ends take on their way to the learner.

    Reports go through a pipe with them and without, each time with cold caches. One frame in twenty
    ends an episode.
    """
    from gleanrl.core import messages
    from gleanrl.core.returns import NONE_ENDED, head_of
    from gleanrl.transport import wire

    rewards, ends = np.ones((envs, steps), np.float32), np.ones((2, envs * steps // 20), np.int64)
    both = head_of(rewards) + rewards.tobytes() + ends.tobytes()
    others = np.zeros(1 << 18)
    source, sink = os.pipe()

    def once(ended: bytes) -> float:
        report = messages.Report(steps, envs * steps, 0, ended=bytes(bytearray(ended)))
        others.__iadd__(1.0)
        begin = time.perf_counter()
        os.write(sink, wire.frame_of(messages.Rolled(0, 1, report)))
        wire.reply_in(os.read(source, 1 << 16))
        return time.perf_counter() - begin

    found = [once(both) - once(NONE_ENDED) for _ in range(2000)]
    os.close(source)
    os.close(sink)
    return statistics.median(found)


def traced(system: Batches, batches: int, seconds: float) -> float:
    """Return the share of the time that a timeline takes."""
    from gleanrl.watch.timeline import Timeline

    part: Parts = [(Timeline, "gathered", "timeline", lambda *_: None)]
    with tempfile.TemporaryDirectory() as folder, timed(part) as spent:
        began = time.perf_counter()
        with system.collector.timeline(Path(folder) / "trace.json"):
            while time.perf_counter() - began < seconds:
                for _ in range(batches):
                    system.collect_batch()
            return spent["timeline"] / (time.perf_counter() - began)


class TimedUntilClosed(gym.Wrapper[Any, Any, Any, Any]):
    """Builds an environment; from then on, its process measures its parts of watching.

    Seconds by part are in ``path`` when the environment has been closed.
    """

    def __init__(self, build: Callable[[], gym.Env[Any, Any]], path: Path) -> None:
        super().__init__(build())
        self._path, self._until_closed = path, ExitStack()
        self._spent = self._until_closed.enter_context(timed(parts()))

    def close(self) -> None:
        self._until_closed.close()
        self._path.write_text(json.dumps(self._spent))
        super().close()


def run(case: str, seconds: float) -> dict[str, Any]:
    """Return the cost of watching: percent by part, and by taking turns."""
    torch.set_num_threads(1)
    name, count, frames = CASES[case]
    if name == "cartpole":
        make, policy = envs.cartpole, policies.categorical_policy(policies.mlp(4, 2))
    else:
        make, actor = envs.half_cheetah, policies.normal_module(policies.mlp(17, 12))
        policy = policies.normal_policy(actor, policies.distribution("own"))
    # CartPole's observations are of that dtype already.
    options = {"observation_dtype": torch.float32, "progress": True}
    factories: list[Callable[[], Any]] = [*envs.seeded(make, count)]
    if not case.endswith("in a worker"):
        return measured(inline(factories, policy, frames, **options), frames // count, seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spent.json"
        factories[0] = partial(TimedUntilClosed, factories[0], path)
        system = over("process", "sync", [factories], policy, frames, **options)
        found = measured(system, frames // count, seconds, turns=False)
        rollouts = system.collector.stats()["frames"] / frames
        spent = Counter(json.loads(path.read_text()))
        spent["rewards kept or sent"] += sending(count, frames // count) * rollouts
        for part, seconds in spent.items():
            percent = 100 * 1e6 * seconds / rollouts / found["microseconds"]
            found["parts"][part] = found["parts"].get(part, 0.0) + percent
            found["percent"] += percent
        return found


def measured(system: Batches, steps: int, seconds: float, turns: bool = True) -> dict[str, Any]:
    """Return the cost of watching in this process, where a rollout has ``steps`` steps."""
    (progress,) = [t for t in threading.enumerate() if t.name == "gleanrl-progress"]
    assert progress.ident is not None
    thread = time.pthread_getcpuclockid(progress.ident)

    def collect(batches: int) -> float:
        begin = time.perf_counter()
        for _ in range(batches):
            system.collect_batch()
        return time.perf_counter() - begin

    try:
        gather = system.collector._engine.gather
        beside: Parts = [(gather, "meanwhile", ADDED if turns else ADDED_MEANWHILE, bool)]
        collect(20)
        batches = max(2, round(20 * TURN_S / collect(20)))
        began, shown = time.monotonic(), time.clock_gettime(thread)
        taken, number = 0.0, 0
        with timed([*parts(), *beside]) as spent:
            while (passed := time.monotonic() - began) < seconds / 2:
                taken += collect(batches)
                number += batches
        spent["progress line"] = (time.clock_gettime(thread) - shown) * taken / passed
        spent["workers' time"] += stepwise(steps) * number
        timeline = traced(system, batches, seconds / 8)
        ratios = []
        while turns and (not ratios or time.monotonic() - began < seconds):
            took = {}
            for watched in (True, False) if len(ratios) % 2 else (False, True):
                with nullcontext() if watched else bare():
                    collect(1)  # fills the caches after the other turn
                    took[watched] = collect(batches)
            ratios.append(took[True] / took[False])
    finally:
        system.close()
    return {
        "microseconds": 1e6 * taken / number,
        "parts": {part: 100 * seconds / taken for part, seconds in spent.items()},
        "percent": 100 * (spent.total() - spent[ADDED_MEANWHILE]) / taken,
        "timeline": 100 * timeline,
        "turns": 100 * (statistics.median(ratios) - 1) if ratios else None,
    }


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    """Measure all cases in turns, each time in a fresh process."""
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, runs in found.items():
            runs.append(in_fresh_process(__name__, "run", case, seconds))
            print(case, json.dumps(runs[-1]), flush=True)
    cases = {}
    for case, runs in found.items():
        columns = {name: [run[name] for run in runs] for name in NUMBERS}
        kept = {name: summary(values) for name, values in columns.items() if None not in values}
        cases[case] = {**kept, "rounds": runs}
    return {"limit": LIMIT, "timeline_limit": TIMELINE_LIMIT, "cases": cases}
