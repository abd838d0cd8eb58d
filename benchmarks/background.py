"""Collecting into a replay buffer in the background, against the same collection without one.

python -m benchmarks.background [--rounds 9] [--seconds 2] [--out results.json]

Two workers of 16 CartPole environments each and a 64-64 network. ``batches`` iterates over a
`MultiAsyncCollector` and throws batches away; the others were started into a shared buffer of a
million rows, while the learner does nothing, samples 256 rows a hundred times a second, or samples
as fast as it can. Frames per second, in alternating windows, workers of the others stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import LazyTensorStorage, MultiAsyncCollector, ReplayBuffer
from gleanrl.transport.process import ProcessBackend

ENVS, STEPS, ROWS, SAMPLE = 16, 64, 1_000_000, 256
WARM = 0.3


class Act(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
        self.net = nn.Sequential(*parts)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


class System:
    """One collector, whose workers sleep while it is not its turn."""

    def __init__(self, pace: float | None, buffered: bool) -> None:
        """Sample every ``pace`` seconds: 0 for without a pause, ``None`` for never."""
        self.pace = pace
        storage = LazyTensorStorage(ROWS)
        self.rb = ReplayBuffer(storage=storage, shared=True) if buffered else None
        self.collector = MultiAsyncCollector(
            "CartPole-v1",
            TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"]),
            num_workers=2,
            num_envs=ENVS,
            frames_per_batch=ENVS * STEPS,
            replay_buffer=self.rb,
        )
        backend = self.collector._engine.backend
        assert isinstance(backend, ProcessBackend)
        self.pids = backend.pids
        self.samples = 0
        if self.rb is not None:
            self.collector.start()
            while self.rb.write_count < 20_000:
                time.sleep(0.01)
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def window(self, seconds: float) -> float:
        self.signal(signal.SIGCONT)
        self.run(WARM)
        self.samples = 0
        before, start = self.count(), time.perf_counter()
        self.run(seconds)
        rate = (self.count() - before) / (time.perf_counter() - start)
        self.signal(signal.SIGSTOP)
        return rate

    def count(self) -> int:
        return self.collector.stats()["frames"] if self.rb is None else self.rb.write_count

    def run(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        if self.rb is None:
            while time.perf_counter() < end:
                next(iter(self.collector))
            return
        if self.pace is None:
            time.sleep(seconds)
            return
        due = time.perf_counter()
        while (now := time.perf_counter()) < end:
            if self.pace and now < due:
                time.sleep(min(due, end) - now)
                continue
            due += self.pace
            self.rb.sample(SAMPLE)
            self.samples += 1

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.collector.shutdown()


def measure(rounds: int, seconds: float) -> dict[str, Any]:
    systems = {
        "batches": System(None, buffered=False),
        "buffer, no sampling": System(None, buffered=True),
        "buffer, 100 samples/s": System(0.01, buffered=True),
        "buffer, sampling in a loop": System(0.0, buffered=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    samples: dict[str, list[float]] = {name: [] for name in systems}
    try:
        for number in range(rounds):
            for name in list(systems)[:: 1 if number % 2 == 0 else -1]:
                gc.collect()
                rates[name].append(systems[name].window(seconds))
                samples[name].append(systems[name].samples / seconds)
    finally:
        for system in systems.values():
            system.close()
    found: dict[str, Any] = {}
    for name, values in rates.items():
        ratios = sorted(a / b for a, b in zip(values, rates["batches"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        found[name] = {
            "frames_per_second": statistics.median(values),
            "samples_per_second": statistics.median(samples[name]),
            "ratio": middle,
            "quartiles": [low, high],
            "extremes": [ratios[0], ratios[-1]],
        }
        print(
            f"{name:28s} {found[name]['frames_per_second']:9,.0f} frames/s  "
            f"{found[name]['samples_per_second']:7,.0f} samples/s  "
            f"ratio {middle:.2f} ({low:.2f} to {high:.2f}, extremes {ratios[0]:.2f}, "
            f"{ratios[-1]:.2f})"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(given.rounds, given.seconds)
    found["load"] = os.getloadavg()
    print(f"load averages {found['load']}")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
