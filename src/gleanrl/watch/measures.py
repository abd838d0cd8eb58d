"""Rates, episodes and workers' time of one collector, added up from what its workers report."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic

import numpy as np

from gleanrl.core.messages import NO_EPISODES, Report, Times
from gleanrl.core.protocols import Array

_LAST = 100
"""Episodes that means are taken of."""
_MARK_S = 0.5
_MARKS = 8
"""The current rate is that since the oldest of so many marks, which are so far apart."""
_TIMES = ("env", "policy", "transfer", "wait")


class _Episodes:
    """How many episodes ended, and returns and lengths of the last ones."""

    def __init__(self) -> None:
        self._number = 0
        self._last: Array = NO_EPISODES

    def add(self, episodes: Array) -> None:
        self._number += len(episodes)
        self._last = np.concatenate((self._last, episodes))[-_LAST:]

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = {"episodes": self._number}
        for name, values in zip(("return", "length"), self._last.T, strict=True):
            for what in ("mean", "min", "max"):
                found[f"{name}_{what}"] = (
                    float(getattr(np, what)(values)) if len(values) else math.nan
                )
        return found


class _Worker:
    """What one worker did, since collection began."""

    def __init__(self) -> None:
        self.frames = self.lag = 0
        self.times = Times()
        self.episodes = _Episodes()

    def add(self, report: Report, version: int) -> None:
        self.frames += report.frames
        self.lag = version - report.policy_version
        if len(report.episodes):
            self.episodes.add(report.episodes)
        times, new = self.times, report.times
        times.env += new.env
        times.policy += new.policy
        times.transfer += new.transfer
        times.wait += new.wait


class Measures:
    """What all workers of a collector did. Any thread may ask while another adds."""

    def __init__(self, workers: int) -> None:
        """Start with nothing from ``workers`` workers."""
        self._lock = threading.Lock()
        self._workers = [_Worker() for _ in range(workers)]
        self._episodes = _Episodes()
        self._lag = 0
        self._marks: deque[tuple[float, list[int]]] = deque(maxlen=_MARKS)
        """When, and the frames of each worker until then."""
        self._began = self._newest = self._mark_due = 0.0

    def begin(self) -> None:
        """Note that a batch is asked for: rates count from the first time."""
        if not self._began:
            self._began = self._newest = now = monotonic()
            self._mark(now)

    def _mark(self, now: float) -> None:
        self._marks.append((now, [worker.frames for worker in self._workers]))
        self._mark_due = now + _MARK_S

    def add(self, reports: Mapping[int, Report], version: int) -> None:
        """Take in the rollouts of a batch, and the learner's newest policy version."""
        with self._lock:
            lag = 0
            for index, report in reports.items():
                worker = self._workers[index]
                worker.add(report, version)
                lag = max(lag, worker.lag)
                if len(report.episodes):
                    self._episodes.add(report.episodes)
            self._lag = lag
            self._newest = now = monotonic()
            if now >= self._mark_due:
                self._mark(now)

    def stats(self) -> dict[str, float]:
        """Return rates, episodes, shares of the workers' time and the age of weights, of all."""
        with self._lock:
            everybody = range(len(self._workers))
            return {
                **self._rates(everybody),
                **self._episodes.stats(),
                **_shares([worker.times for worker in self._workers]),
                "lag": self._lag,
            }

    def worker_stats(self, index: int) -> dict[str, float]:
        """Return the same of one worker."""
        with self._lock:
            worker = self._workers[index]
            return {
                **self._rates([index]),
                **worker.episodes.stats(),
                **_shares([worker.times]),
                "lag": worker.lag,
            }

    def _rates(self, workers: Sequence[int]) -> dict[str, float]:
        """Return frames per second until the newest batch; 0 before the first."""
        if self._newest == self._began:
            return {"fps": 0.0, "fps_mean": 0.0}
        since, counts = self._marks[0]
        frames = sum(self._workers[index].frames for index in workers)
        before = sum(counts[index] for index in workers)
        return {
            "fps": (frames - before) / (self._newest - since),
            "fps_mean": frames / (self._newest - self._began),
        }


def _shares(times: Sequence[Times]) -> dict[str, float]:
    """Return what share of the seconds went where; NaN before there are any."""
    seconds = [sum(getattr(one, name) for one in times) for name in _TIMES]
    total = sum(seconds) or math.nan
    return {f"time_{name}": part / total for name, part in zip(_TIMES, seconds, strict=True)}
