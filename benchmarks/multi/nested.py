"""Bytes per second of a collector inside a worker: its batches in shared memory, or pickled.

``python -m benchmarks.multi.nested [--rounds N] [--seconds S]`` runs three collectors in turn: one
with two workers; one with one worker that serves such a collector; and the same with a collector
class of the user's, whose batches travel as payloads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from gleanrl.collectors import MultiSyncCollector

WIDTH = 4096
"""Floats of an observation; a frame holds two."""
FRAMES = 32
"""Frames of a batch of one megabyte."""


class Wide(gym.Env[Any, Any]):
    """Costs nothing to step: what is measured is what happens to the data."""

    observation_space = gym.spaces.Box(-1, 1, (WIDTH,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.row = np.zeros(WIDTH, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return self.row, {}

    def step(self, action: Any) -> Any:
        return self.row, 0.0, False, False, {}


class Payloads(MultiSyncCollector):
    """Not known to hand out what it collected, so that its batches are pickled."""


def act(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def make(kind: str, frames: int) -> MultiSyncCollector:
    if kind == "flat":
        return MultiSyncCollector([Wide, Wide], act, frames_per_batch=frames)
    inner = MultiSyncCollector if kind == "window" else Payloads
    return MultiSyncCollector([[Wide, Wide]], act, frames_per_batch=frames, collector_class=inner)


def rate(collector: MultiSyncCollector, seconds: float) -> float:
    """Return megabytes per second."""
    size, done, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        batch = collector.next()
        assert batch is not None
        size = size or batch.bytes()
        done += size
        del batch
    return done / (time.perf_counter() - begin) / 1e6


def main() -> None:
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--rounds", type=int, default=5)
    read.add_argument("--seconds", type=float, default=2.0)
    asked = read.parse_args()
    for frames in (FRAMES, 16 * FRAMES):
        collectors = {kind: make(kind, frames) for kind in ("flat", "window", "payload")}
        found: dict[str, list[float]] = {kind: [] for kind in collectors}
        for number in range(asked.rounds + 1):
            for kind, collector in collectors.items():
                value = rate(collector, asked.seconds)
                if number:  # the first round warms up
                    found[kind].append(value)
        for collector in collectors.values():
            collector.shutdown()
        print(f"batches of {frames * 2 * WIDTH * 4 / 1e6:.0f} MB, MB/s, median (least to most)")
        for kind, values in found.items():
            middle = statistics.median(values)
            print(f"  {kind:8} {middle:8.0f}  ({min(values):.0f} to {max(values):.0f})")
        ratios = [a / b for a, b in zip(found["window"], found["payload"], strict=True)]
        middle = statistics.median(ratios)
        print(f"  window / payload {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
