"""Publishing weights: what the learner pays for it, and when workers act on them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.harness import WRONG
from benchmarks.multi import collectors
from benchmarks.multi.envs import still, timed
from benchmarks.multi.figures import Figure, Tick
from benchmarks.multi.processes import Group, wait_until_asleep

SIZES = {"17KB": 17 * 2**10, "4MB": 4 * 2**20, "100MB": 100 * 2**20}
TENSORS = 8
"""Parameters that the bytes are spread over, as those of a network are."""


class Ballast(nn.Module):
    """Has as many bytes of weights as wanted; acts by the parity of the last one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        shape = size // (4 * TENSORS)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(TENSORS))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        parity = self.parts[-1][-1].remainder(2).long()
        return parity.expand(observation.shape[:-1])

    def train_step(self) -> None:
        """Change every weight, as an optimizer does."""
        with torch.no_grad():
            for part in self.parts:
                part.add_(1)


def ballast_policy(size: int) -> TensorDictModule:
    """Return a policy with ``size`` bytes of weights."""
    return TensorDictModule(Ballast(size), in_keys=["observation"], out_keys=["action"])


def publishing(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Time ``update_policy_weights_`` of two async workers and a copy of as many bytes."""
    figures: list[Figure] = []
    for name, size in SIZES.items():
        figures += _publishing(name, size, rounds, seconds)
        tick(f"weights {name}")
    return figures


def _publishing(name: str, size: int, rounds: int, seconds: float) -> list[Figure]:
    policy = ballast_policy(size)
    group = Group(lambda: collectors.ours("async", still(2, 16), policy, 32, num_threads=1))
    group.wake()
    try:
        measure = _Publishing(group, policy.module, size)
        measure.check()
        figures = []
        for state in ("at work", "at rest"):
            pairs = [measure.round(state == "at rest", seconds) for _ in range(rounds)]
            updates, copies = zip(*pairs, strict=True)
            over = [update - 1.5 * copy for update, copy in pairs]
            figures += [
                Figure(f"{name}, workers {state}: update", "us", list(updates)),
                Figure(f"{name}, workers {state}: memcpy", "us", list(copies)),
                Figure(f"{name}, workers {state}: update - 1.5 memcpy", "us", over, 50.0),
            ]
        return figures
    finally:
        group.close()


class _Publishing:
    """Takes turns between publishing and copying, under the same conditions."""

    def __init__(self, group: Group, module: Ballast, size: int) -> None:
        self._group, self._module = group, module
        system: Any = group.system
        self._update = system.collector.update_policy_weights_
        self._source, self._target = (np.ones(size, np.uint8) for _ in range(2))

    def round(self, at_rest: bool, seconds: float) -> tuple[float, float]:
        """Return the medians of both in microseconds, over ``seconds`` or five of each."""
        updates: list[float] = []
        copies: list[float] = []
        end = time.perf_counter() + seconds
        while len(updates) < 5 or time.perf_counter() < end:
            order = (self._time_update, updates), (self._time_copy, copies)
            for measure, times in order if len(updates) % 2 else order[::-1]:
                for _ in range(6):
                    self._group.collect_batch()
                if at_rest:
                    wait_until_asleep(self._group.pids)
                times.append(1e6 * measure())
        return statistics.median(updates), statistics.median(copies)

    def _time_update(self) -> float:
        self._module.train_step()
        start = time.perf_counter()
        self._update()
        return time.perf_counter() - start

    def _time_copy(self) -> float:
        np.add(self._source, 1, out=self._source)
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start

    def check(self) -> None:
        """See to it that published weights are acted on.

        Raises:
            RuntimeError: they are not.
        """
        for _ in range(4):
            self._module.train_step()
            self._update()
            wanted = int(self._module.parts[-1][-1].item()) % 2
            for _ in range(20):
                self._group.collect_batch()
            system: Any = self._group.system
            if not bool((system.batch["action"] == wanted).all()):
                raise RuntimeError(f"{WRONG} workers do not act by the published weights")


def freshness(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Follow versions of the policy through the frames of two async workers.

    A rollout that begins after a publication must have its version; of those under way only one
    per worker may be without it.
    """
    policy = TensorDictModule(OneWeight(), in_keys=["observation"], out_keys=["action"])
    system = collectors.ours(
        "async", timed(2, 0.001, False), policy, 16, num_threads=1, track_policy_version=True
    )
    try:
        log = _log(system, rounds, seconds, tick)
    finally:
        system.close()
    return list(_freshness(*log))


class OneWeight(nn.Module):
    """A policy with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight[0].long().expand(observation.shape[:-1])


_Rollout = tuple[int, float, float, float, int]
"""Worker, end of the rollout before, end of the first step, end of the last step, version."""


def _log(
    system: collectors.Batches, rounds: int, seconds: float, tick: Tick
) -> tuple[list[_Rollout], list[float]]:
    seen: list[_Rollout] = []
    published: list[float] = []

    def collect(count: int) -> None:
        for _ in range(count):
            system.collect_batch()
            batch = system.batch
            versions = batch["policy_version"]
            if int(versions.min()) != int(versions.max()):
                raise RuntimeError(f"{WRONG} a rollout has two versions: {versions.unique()}")
            after = batch["next", "observation"]
            stamps = (float(x) for x in (batch["observation"][0, 0], after[0, 0], after[-1, 0]))
            seen.append((int(after[0, 2]), *stamps, int(versions.min())))  # type: ignore[arg-type]

    collect(10)
    for _ in range(max(10, round(rounds * seconds * 5))):
        published.append(time.perf_counter())
        system.collector.update_policy_weights_()
        collect(10)
        tick("versions")
    collect(10)
    return seen, published


def _freshness(seen: list[_Rollout], published: list[float]) -> Iterator[Figure]:
    base = min(version for *_, version in seen)
    late, old, delays = [], [], []
    for number, when in enumerate(published, 1):
        for worker in (0, 1):
            rollouts = [item for item in seen if item[0] == worker]
            stale = [item for item in rollouts if item[3] > when and item[4] < base + number]
            late.append(float(sum(item[1] > when for item in stale)))
            old.append(float(len(stale)))
            first = next(item for item in rollouts if item[4] >= base + number)
            delays.append(1e3 * (first[2] - when))
    yield Figure("rollouts begun after publishing without it (worst)", "", [max(late)], 0.0)
    yield Figure("rollouts finished after publishing without it (worst)", "", [max(old)], 1.0)
    yield Figure("publishing to the first frame made with it (rollout: 17 ms)", "ms", delays)
