"""Collects for a while among kills, failing environments, updates and restored states.

``python -m tools.soak --kind sync --minutes 5 --seed 1``. Four worker processes, nodes or actors
collect from environments that sometimes raise or stand still for a moment. Every few seconds a
random worker is killed in the middle of a rollout, the weights change after every batch, and now
and then seeds, resets and states are set. The learner checks every frame: a valid one is a
transition of one environment, follows the one before it in its trajectory, and was made with one
version of the weights. The counts of `stats()` must account for every frame that the workers
reported, and memory must not grow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import rich
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import gleanrl

WORKERS, STEPS, LENGTH = 4, 32, 20
_KILL_S = 2.0
"""Mean time between two kills."""
_MOMENT_S = 0.03
"""About the time of a batch."""
_RARE = 1 / 3000
"""Chance that a step raises, and that it takes a while."""
_GROWTH = 32 << 20
"""Bytes by which the learner may grow after its first third."""
MASK, IDS = ("collector", "mask"), ("collector", "traj_ids")
_nodes = partial(gleanrl.DistributedCollector, launcher="mp", tcp_port=0)
_ray = partial(gleanrl.RayCollector, remote_configs={"num_cpus": 0}, start_timeout=280.0)
KINDS: dict[str, Callable[..., Any]] = {
    "sync": gleanrl.MultiSyncCollector,
    "async": gleanrl.MultiAsyncCollector,
    "nodes-sync": partial(_nodes, sync=True),
    "nodes-async": partial(_nodes, sync=False),
    "ray-sync": partial(_ray, sync=True),
    "ray-async": partial(_ray, sync=False),
    "central": partial(gleanrl.MultiSyncCollector, inference="central"),
    "central async": partial(
        gleanrl.MultiAsyncCollector, inference="central", policy_process=False
    ),
}


class Rough(gym.Env[Any, Any]):
    """Observes (its number, a number drawn at each build, its steps); raises or sleeps at times."""

    observation_space = gym.spaces.Box(0, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int) -> None:
        self.number, self.life, self.steps, self.inside = number, random.getrandbits(40), 0, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.inside = 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, raise, or stand still before it."""
        chance = random.random()
        if chance < _RARE:
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
        self._seen: set[int] = set()

    def take(self, batch: TensorDictBase) -> None:
        """Check ``batch``.

        Raises:
            AssertionError: a frame is wrong.
        """
        rows = batch.reshape(-1, batch.shape[-1])
        keys: list[Any] = [MASK, IDS, "observation", ("next", "observation"), ("next", "done")]
        keys += [("next", "reward"), "stamp", "policy_version"]
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
            assert traj not in self._seen, "a trajectory's number came again"
            self._seen.add(traj)
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


def kill(collector: Any, rng: random.Random) -> bool:
    """Kill a random worker at some moment of its next rollout; tell whether it still runs."""
    pid = int(collector.stats("per_worker")[f"worker_{rng.randrange(WORKERS)}/pid"])
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return False

    def act() -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)

    threading.Timer(rng.uniform(0.0, _MOMENT_S), act).start()
    return True


def run(kind: str, seconds: float, seed: int, kills: bool = True) -> dict[str, float]:
    """Collect for ``seconds``; return figures.

    Raises:
        AssertionError: a frame is wrong, frames are missing in the counts, or memory grows.
    """
    rng, ledger, module = random.Random(seed), Ledger(), Stamp()
    policy = TensorDictModule(module, ["observation"], ["action", "stamp"])
    collector = KINDS[kind](
        [partial(Rough, number) for number in range(WORKERS)],
        policy,
        frames_per_batch=STEPS * (1 if "async" in kind else WORKERS),
        total_frames=-1,
        track_policy_version=True,
        on_failure="relaunch",
        max_relaunches=(50, 10.0),
        on_env_error="restart",
        max_env_restarts=1_000_000,
        timeout=20.0,
    )
    figures: dict[str, float] = {}
    begin = time.monotonic()
    next_kill, third = begin + 1.0, 0
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, batch in enumerate(collector, 1):
            ledger.take(batch)
            with torch.no_grad():
                module.weight.fill_(number)
            collector.update_policy_weights_()
            disturb(collector, rng, ledger)
            now = time.monotonic()
            if kills and now >= next_kill:
                ledger.found["kills"] += kill(collector, rng)
                next_kill = now + rng.expovariate(1 / _KILL_S)
            third = third or (_rss() if now - begin > seconds / 3 else 0)
            if now - begin > seconds:
                break
        figures = _checked(collector.stats(), ledger)
        growth = _rss() - third
        assert growth < _GROWTH, f"the learner grew by {growth:,} bytes"
    return figures | {"seconds": time.monotonic() - begin, "growth": growth}


def _checked(stats: dict[str, float], ledger: Ledger) -> dict[str, float]:
    whys = ("reset", "loss", "stop", "ahead", "lag")
    parts = [stats["frames"], stats["frames_under_way"]]
    parts += [stats[f"frames_discarded_{why}"] for why in whys]
    assert stats["frames_stepped"] == sum(parts), "frames are missing in the counts"
    assert stats["frames"] == ledger.found["frames"], "other frames were delivered than counted"
    shown = ("workers_lost", "relaunches", "env_restarts", "frames_discarded")
    return {**ledger.found, **{name: stats[name] for name in shown}}


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    """Read the options, run, and print the figures beside those of an undisturbed run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), default="sync")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = 60 * options.minutes
    calm = run(options.kind, min(20.0, seconds), options.seed, kills=False)
    rough = run(options.kind, seconds, options.seed)
    for name, figures in (("without kills", calm), ("with kills", rough)):
        rate = figures["frames"] / figures["seconds"]
        shown = ", ".join(f"{key} {value:,.0f}" for key, value in figures.items())
        rich.print(f"[bold]{name}[/]: {rate:,.0f} frames/s; {shown}")


if __name__ == "__main__":
    main()
