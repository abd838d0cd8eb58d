"""Collecting into a replay buffer in the background, against the same collection without one.

Two workers of 16 CartPole environments each and a 64-64 network. The reference iterates over a
`MultiAsyncCollector` and throws batches away; ours was started into a shared buffer of a million
rows, while the learner does nothing, samples 256 rows a hundred times a second, or samples as fast
as it can. Frames per second.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import policies
from benchmarks.harness import Case, Reference, System
from benchmarks.processes import grouped, turn
from benchmarks.suites import Suite
from benchmarks.systems import ours
from gleanrl import LazyTensorStorage, MultiAsyncCollector, ReplayBuffer

ENVS, STEPS, ROWS, SAMPLE = 16, 64, 1_000_000, 256
SLICE_S = 0.05
"""Seconds of background collection that count as one batch."""


class Act(nn.Module):
    """Samples from the logits of a network, and delivers no more than actions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = policies.mlp(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


def collector(**options: Any) -> MultiAsyncCollector:
    policy = TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])
    options |= {"num_workers": 2, "num_envs": ENVS, "frames_per_batch": ENVS * STEPS}
    return MultiAsyncCollector("CartPole-v1", policy, **options)


class Background(System):
    """A started collector, and a learner that samples."""

    def __init__(self, pace: float | None) -> None:
        """Sample every ``pace`` seconds: 0 for without a pause, ``None`` for never."""
        self._pace, self._due = pace, 0.0
        self.samples, self.seconds = 0, 0.0
        self._buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), shared=True)
        self._collector = collector(replay_buffer=self._buffer)
        self._collector.start()
        while self._buffer.write_count < 20_000:
            time.sleep(0.01)

    def collect_batch(self) -> int:
        before, start = self._buffer.write_count, time.perf_counter()
        end = start + SLICE_S
        if self._pace is None:
            time.sleep(SLICE_S)
        self._due = max(self._due, start)
        while self._pace is not None and (now := time.perf_counter()) < end:
            if self._pace and now < self._due:
                time.sleep(min(self._due, end) - now)
                continue
            self._due += self._pace
            self._buffer.sample(SAMPLE)
            self.samples += 1
        self.seconds += time.perf_counter() - start
        return int(self._buffer.write_count - before)

    def close(self) -> None:
        self._collector.shutdown()


def case(name: str, title: str, pace: float | None) -> Case:
    systems: list[Background] = []

    def build() -> System:
        systems.append(Background(pace))
        return systems[0]

    def samples() -> dict[str, float]:
        return {"samples_per_second": systems[0].samples / systems[0].seconds}

    return Case(
        f"buffer-{name}",
        f"CartPole-v1 x16 in each of 2 workers into a buffer, {title}",
        grouped(build),
        [Reference("batches", grouped(lambda: ours.Batches(collector())), 0.9)],
        extra=samples,
        turn=turn,
    )


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        case("idle", "no sampling", None),
        case("modest", "100 samples/s", 0.01),
        case("busy", "sampling in a loop", 0.0),
    ]


SUITE = Suite("benchmarks.background", all_cases, alone=True, rounds=9, seconds=2.0)
