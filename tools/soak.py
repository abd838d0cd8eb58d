"""Collects for a while among kills, failing environments, updates and restored states.

``python -m tools.soak --kind sync --minutes 5 --seed 1``. Four worker processes, nodes or actors
collect from environments that now and then stand still for a moment. The weights change after every
batch. Calm windows of ``--window`` seconds alternate with rough ones. In a rough window random
workers are killed in the middle of a rollout (``policy process`` kills the process of the policy as
well), environments raise, and seeds, resets and states are set.

The learner checks every frame: a valid one is a transition of one environment, follows the one
before it in its trajectory, and was made with one version of the weights. The counts of `stats()`
must account for every frame that the workers reported, and memory must not grow.

The rate of a rough window is compared with that of the calm window before it, as it is and less
restart time. Restart time is the time from each kill until the replacement has joined. A loss that
the whole batch waits for counts in full, another one as the share of the worker that is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import rich
import torch
from benchmarks.processes import workers
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import gleanrl

WORKERS, STEPS, LENGTH = 4, 32, 20
_MOMENT_S = 0.03
"""About the time of a batch."""
_BACK_S = 120.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
"""The longest time until a replacement has joined."""
_RARE = 1 / 3000
"""Chance that a step raises, and that it takes a while."""
_GROWTH = 8 << 20
"""Bytes by which the learner may grow after the first third of a soak of any length."""
MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")


@dataclass(frozen=True)
class Kind:
    """A kind of collector."""

    make: Callable[..., Any]
    sync: bool
    """Whether a batch waits for all workers."""
    kill_s: float = 2.0
    """Mean time between two kills."""
    policy: bool = False
    """Whether the policy has a process of its own, with the workers below it."""


def _central(kind: Callable[..., Any], policy: bool) -> Callable[..., Any]:
    return partial(kind, inference="central", policy_process=policy)


_nodes = partial(gleanrl.DistributedCollector, launcher="mp", tcp_port=0)
_ray = partial(
    gleanrl.RayCollector,
    remote_configs={"num_cpus": 0},
    ray_init_config={"log_to_driver": False},
    start_timeout=280.0,
)
_multi_sync, _multi_async = gleanrl.MultiSyncCollector, gleanrl.MultiAsyncCollector
KINDS = {
    "sync": Kind(_multi_sync, True),
    "async": Kind(_multi_async, False),
    "nodes-sync": Kind(partial(_nodes, sync=True), True, 5.0),
    "nodes-async": Kind(partial(_nodes, sync=False), False, 5.0),
    "ray-sync": Kind(partial(_ray, sync=True), True, 15.0),
    "ray-async": Kind(partial(_ray, sync=False), False, 15.0),
    "central": Kind(_central(_multi_sync, False), True),
    "central async": Kind(_central(_multi_async, False), False),
    "policy process": Kind(_central(_multi_sync, True), True, policy=True),
    "policy process async": Kind(_central(_multi_async, True), False, policy=True),
}


class Rough(gym.Env[Any, Any]):
    """Observes (its number, a number drawn at each build, its steps); raises or sleeps at times.

    It does not raise while the file ``calm`` is there.
    """

    observation_space = gym.spaces.Box(0, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, calm: str) -> None:
        self.number, self.life, self.steps, self.inside = number, random.getrandbits(40), 0, 0
        self.calm, self.raises = calm, True

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.inside, self.raises = 0, not os.path.exists(self.calm)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, raise, or stand still before it."""
        chance = random.random()
        if chance < _RARE and self.raises:
            raise ConnectionError("the simulator is gone")
        if chance < 2 * _RARE:
            time.sleep(0.02)
        self.steps += 1
        self.inside += 1
        return self._seen(), float(self.number), self.inside == LENGTH, False, {}

    def _seen(self) -> Any:
        return np.array([self.number, self.life, self.steps], np.float64)


class Stamp(nn.Module):
    """Acts at random, and stamps every frame with its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100, dtype=torch.float64))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions and stamps."""
        lead = observation.shape[:-1]
        stamp = torch.stack([self.weight[0], self.weight[-1]])
        return torch.zeros(lead, dtype=torch.int64), stamp.expand(*lead, 2)


class Ledger:
    """Checks every frame of the batches in their order."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._last: dict[int, tuple[int, list[float]]] = {}
        """Per environment: its newest trajectory and its last observation."""
        self._newest = [-1] * WORKERS
        """The newest trajectory of each remainder by the number of environments."""

    def take(self, batch: TensorDictBase) -> None:
        """Check ``batch``.

        Raises:
            AssertionError: a frame is wrong.
        """
        rows = batch.reshape(-1, batch.shape[-1])
        keys: list[Any] = [MASK, IDS, "observation", ("next", "observation"), ("next", "done")]
        keys += [("next", "reward"), "stamp", "policy_version"]
        self.found["batches"] += 1
        for row in zip(*(rows[key].tolist() for key in keys), strict=True):
            for frame in zip(*row, strict=True):
                self._frame(*frame)

    def _frame(self, valid: bool, traj: int, root: Any, after: Any, done: Any, *rest: Any) -> None:
        reward, stamp, version = rest
        if not valid:
            assert traj == -1, "a frame that is none has a trajectory"
            self.found["masked"] += 1
            return
        self.found["frames"] += 1
        number = int(root[0])
        assert root[:2] == after[:2], "a frame joins two environments"
        assert root[2] + 1 == after[2], "a step is missing inside a frame"
        assert reward == [root[0]], "the reward is another environment's"
        assert stamp[0] == stamp[1] == version, "weights of two versions"
        known, last = self._last.get(number, (None, None))
        if traj == known:
            assert last == root, "a trajectory lost or repeated a step"
        else:
            # Numbers of one remainder grow, so a number needs no memory to be new.
            assert traj > self._newest[traj % WORKERS], "a trajectory's number came again"
            self._newest[traj % WORKERS] = traj
        self._last[number] = (-1 if done[0] else traj), after


def disturb(collector: Any, rng: random.Random, ledger: Ledger) -> None:
    """Do something to the collector between two batches."""
    choice = rng.random()
    if choice < 0.01:
        collector.reset()
    elif choice < 0.02:
        collector.set_seed(rng.randrange(1 << 20))
    elif choice < 0.03:
        collector.state_dict()
    ledger.found["commands"] += choice < 0.03


@dataclass
class Outage:
    """A kill, and the time until the replacement has joined."""

    share: float
    """Of the workers that it takes away."""
    begin: float
    end: float = math.inf


class Kills:
    """Kills random processes of a collector, and notes how long they are missing."""

    def __init__(self, collector: Any, kind: Kind, rng: random.Random) -> None:
        """Kill processes of ``collector``."""
        self._collector, self._kind, self._rng = collector, kind, rng
        self._outages: list[Outage] = []
        self._busy: set[str] = set()
        """Workers that are being killed or replaced."""
        self.late = False
        """Whether a replacement did not join in time."""

    def strike(self) -> bool:
        """Kill a process at some moment of the next batch; tell whether one was there to kill."""
        stats = self._collector.stats("both")
        number = 0 if self._kind.policy else self._rng.randrange(WORKERS)
        worker = "policy_process" if self._kind.policy else f"worker_{number}"
        pid, share = int(stats[f"{worker}/pid"]), 1.0 if self._kind.sync else 1 / WORKERS
        if worker in self._busy or not stats[f"{worker}/alive"]:
            return False
        back: Callable[[dict[str, Any]], bool] = partial(_is_back, worker, pid)
        if self._kind.policy and self._rng.random() < 0.2:
            share = 1.0  # of the process of the policy
        elif self._kind.policy:
            below = sorted(workers() - {pid})
            if len(below) != WORKERS:  # the process of the policy has just been replaced
                return False
            pid, back = self._rng.choice(below), partial(_more_relaunches, stats["relaunches"])
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        self._busy.add(worker)
        delay = self._rng.uniform(0.0, _MOMENT_S)
        threading.Timer(delay, self._kill, (worker, process, share, back)).start()
        return True

    def _kill(self, worker: str, process: int, share: float, back: Callable[..., bool]) -> None:
        outage = Outage(share, time.monotonic())
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        self._outages.append(outage)
        while not (self._collector.closed or back(self._collector.stats("both")) or self.late):
            time.sleep(0.01)
            self.late |= time.monotonic() > outage.begin + _BACK_S
        outage.end = time.monotonic()
        self._busy.discard(worker)

    @property
    def busy(self) -> bool:
        """Whether a process is being killed or replaced."""
        return bool(self._busy)

    def missing_s(self, begin: float, end: float) -> float:
        """Return the time between two moments, times the shares of the workers that were missing.

        It forgets what was before.
        """
        self._outages = [one for one in self._outages if one.end > begin]
        spans = [(max(one.begin, begin), min(one.end, end), one.share) for one in self._outages]
        edges = sorted({begin, end, *(edge for span in spans for edge in span[:2])})
        return sum(
            (b - a) * min(1.0, sum(share for c, d, share in spans if c <= a and b <= d))
            for a, b in itertools.pairwise(edges)
        )


def _is_back(worker: str, pid: int, stats: dict[str, Any]) -> bool:
    return bool(stats[f"{worker}/alive"]) and stats[f"{worker}/pid"] != pid


def _more_relaunches(before: float, stats: dict[str, Any]) -> bool:
    return bool(stats["relaunches"] > before)


class Windows:
    """Calm windows that alternate with rough ones, and their rates."""

    def __init__(self, calm: Path, seconds: float) -> None:
        """Begin with a calm one, for which the file ``calm`` is made; if endless, with a rough one.

        Args:
            calm: The file.
            seconds: The length of each window.
        """
        self._calm, self._seconds = calm, seconds
        self.rough = math.isinf(seconds)
        self._began, self._frames = time.monotonic(), 0
        self.rates: list[tuple[float, float]] = []
        """Per window: frames per second, and per second less restart time."""
        if not self.rough:
            calm.touch()

    def turn(self, frames: int, kills: Kills) -> None:
        """Begin the next window if this one is over and all workers are there."""
        now = time.monotonic()
        if now < self._began + self._seconds or kills.busy:
            return
        new, took = frames - self._frames, now - self._began
        missing = kills.missing_s(self._began, now)
        self.rates.append((new / took, new / max(took - missing, 1e-9)))
        self.rough = not self.rough
        self._calm.unlink(missing_ok=True) if self.rough else self._calm.touch()
        self._began, self._frames = time.monotonic(), frames

    def ratios(self) -> list[tuple[float, float]]:
        """Return, per pair of windows, the rough one's rates as a share of the calm one's."""
        pairs = zip(self.rates[::2], self.rates[1::2], strict=False)
        return [(rough[0] / calm[0], rough[1] / calm[0]) for calm, rough in pairs]


def run(kind: str, seconds: float, seed: int, window: float = math.inf) -> dict[str, float]:
    """Collect for ``seconds``, in windows of ``window`` seconds; return figures.

    Raises:
        AssertionError: a frame is wrong, frames are missing in the counts, a replacement does not
            join, or memory grows.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(KINDS[kind], seconds, seed, Path(folder, "calm"), window)


def _run(kind: Kind, seconds: float, seed: int, calm: Path, window: float) -> dict[str, float]:
    rng, ledger, module = random.Random(seed), Ledger(), Stamp()
    policy = TensorDictModule(module, ["observation"], ["action", "stamp"])
    collector = kind.make(
        [partial(Rough, number, str(calm)) for number in range(WORKERS)],
        policy,
        frames_per_batch=STEPS * (WORKERS if kind.sync else 1),
        total_frames=-1,
        track_policy_version=True,
        on_failure="relaunch",
        max_relaunches=(50, 10.0),
        on_env_error="restart",
        max_env_restarts=1_000_000,
        timeout=20.0,
    )
    kills, windows = Kills(collector, kind, rng), Windows(calm, window)
    begin = time.monotonic()
    next_kill, third = begin + 1.0, 0
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, batch in enumerate(collector, 1):
            ledger.take(batch)
            with torch.no_grad():
                module.weight.fill_(number)
            collector.update_policy_weights_()
            windows.turn(ledger.found["frames"], kills)
            now = time.monotonic()
            if windows.rough:
                disturb(collector, rng, ledger)
                if now >= next_kill:
                    ledger.found["kills"] += kills.strike()
                    next_kill = now + rng.expovariate(1 / kind.kill_s)
            third = third or (_memory() if now - begin > seconds / 3 else 0)
            assert not kills.late, "a replacement does not join"
            if now - begin > seconds:
                break
        figures = _checked(collector.stats(), ledger)
        growth = _memory() - third
        assert growth < _GROWTH, f"the learner grew by {growth:,} bytes: {figures}"
    _show(windows)
    return figures | {"seconds": time.monotonic() - begin, "growth": growth}


def _show(windows: Windows) -> None:
    """Print the rates of the windows."""
    if not (ratios := windows.ratios()):
        return
    calm, rough = windows.rates[::2], windows.rates[1::2]
    rates = [statistics.median(rate for rate, _ in some) for some in (calm, rough)]
    gross, net = (statistics.median(some) for some in zip(*ratios, strict=True))
    rich.print(
        f"{len(ratios)} pairs of windows: calm {rates[0]:,.0f}, rough {rates[1]:,.0f} frames/s; "
        f"medians of the ratios: {gross:.2f}, less restart time {net:.2f} "
        f"({', '.join(f'{one:.2f}' for _, one in ratios)})"
    )


def _checked(stats: dict[str, float], ledger: Ledger) -> dict[str, float]:
    whys = ("reset", "loss", "stop", "ahead", "lag")
    parts = [stats["frames"], stats["frames_under_way"]]
    parts += [stats[f"frames_discarded_{why}"] for why in whys]
    assert stats["frames_stepped"] == sum(parts), "frames are missing in the counts"
    assert stats["frames"] == ledger.found["frames"], "other frames were delivered than counted"
    shown = ("workers_lost", "relaunches", "env_restarts", "frames_discarded")
    return {**ledger.found, **{name: stats[name] for name in shown}}


def _memory() -> int:
    """Return the bytes in use, without pages of files, which the kernel drops and loads again."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status)))


def main() -> None:
    """Read the options, run, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="sync")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--window", type=float, default=30.0, help="seconds of each window")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = run(options.kind, 60 * options.minutes, options.seed, options.window)
    shown = ", ".join(f"{key} {value:,.0f}" for key, value in figures.items())
    rich.print(f"[bold]{options.kind}[/]: {shown}")


if __name__ == "__main__":
    main()
