"""Rates, episodes and workers' time of one collector, added up from the reports of its workers."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TypeAlias

import numpy as np
import torch

from gleanrl.core.episode_returns import NO_EPISODES, Ended, EpisodeSums
from gleanrl.core.forks import guarded
from gleanrl.core.messages import Report
from gleanrl.core.window import Array
from gleanrl.transport.interrupts import Deferred
from gleanrl.watch.history import History
from gleanrl.watch.page import SHARES

_LAST = 100
"""Episodes, and batches, that means are taken of."""
_MARK_S = 0.5
_MARKS = 8
"""The current rate is that since the oldest of so many marks, which are so far apart."""
_MOST_BATCHES, _MOST_BYTES = 256, 1 << 20
"""Batches, and bytes of their rewards and ends, that may wait to be added up."""
_RECENT_S = 2.0
"""Seconds for which numbers are recent."""
_Seconds: TypeAlias = tuple[float, float, float, float, float]
"""In the order of `SHARES`; last, the part of resets in the first."""
_Share: TypeAlias = tuple[int, int, int, _Seconds, Ended]
"""A rollout's worker, frames, policy version, seconds and ended episodes."""
_Batch: TypeAlias = tuple[float, float, int, list[_Share]]
"""The times of its arrival and its request, the newest policy version, and its rollouts."""


class _Episodes:
    """How many episodes ended, and returns and lengths of the last ones."""

    def __init__(self) -> None:
        self._number = 0
        self._last = NO_EPISODES

    def add(self, episodes: Array) -> None:
        self._number += len(episodes)
        self._last = np.concatenate([self._last, episodes[-_LAST:]])[-_LAST:]

    def state(self) -> tuple[int, torch.Tensor]:
        return self._number, torch.tensor(self._last)

    def load(self, number: int, last: torch.Tensor) -> None:
        self._number, self._last = number, last.numpy().copy()

    @np.errstate(invalid="ignore")  # the mean of both infinities is NaN
    def stats(self) -> dict[str, float]:
        found: dict[str, float] = {"episodes": self._number}
        last = self._last if self._number else np.full((1, 2), math.nan)
        rows = last.mean(0), last.min(0), last.max(0)
        for what, (own, length) in zip(("mean", "min", "max"), rows, strict=True):
            found[f"return_{what}"], found[f"length_{what}"] = float(own), float(length)
        return found


class _Totals:
    """The sums of one worker, or of all, since collection began."""

    def __init__(self) -> None:
        self.frames = self.rollouts = self.policy_version = self.lag = 0
        self.episodes = _Episodes()
        self.lags: deque[int] = deque(maxlen=_LAST)
        """The ages of the weights of the last batches, in versions."""
        self.seconds: Sequence[float] = (0.0,) * (len(SHARES) + 1)
        self.sums = EpisodeSums()


class Measures:
    """The sums of a collector's workers. Any thread may read while another adds."""

    _rank = 2
    _lock: threading.RLock

    def __init__(self, workers: int) -> None:
        guarded(self)  # reentrant: a signal handler may ask in the thread that adds
        self._settling = False
        self._waiting: deque[_Batch] = deque()
        self._bytes = 0
        """Rewards and ends added since batches were added up."""
        self._workers = [_Totals() for _ in range(workers)]
        self._all = _Totals()
        self._marks: deque[tuple[float, list[int]]] = deque(maxlen=_MARKS)
        """When, and the frames of each worker until then."""
        self._began = self._newest = self._mark_due = self._settled = 0.0
        self._drift = 0
        """The most steps that an environment was ahead; see `Report.drift`."""
        self._history = History()

    def add(self, reports: Mapping[int, Report], version: int, requested: float) -> float:
        """Take in a batch; return the time. Arguments as in `Watching.gathered`.

        No reference to a report is kept.
        """
        now = monotonic()
        shares: list[_Share] = []
        for worker, r in reports.items():
            shares.append((worker, r.frames, r.policy_version, r.seconds, r.ended))
            self._bytes += len(r.ended)
            if r.drift > self._drift:
                self._drift = r.drift
        self._waiting.append((now, requested, version, shares))
        if len(self._waiting) > _MOST_BATCHES or self._bytes > _MOST_BYTES:
            self.settle()
        return now

    def settle(self) -> None:
        """Add up waiting batches; all at once they cost a fraction of single ones."""
        with Deferred(), self._lock:
            if self._settling:  # a signal handler asks: later batches must not be first
                return
            self._settling = True
            try:
                self._add_batches([self._waiting.popleft() for _ in range(len(self._waiting))])
            finally:
                self._settling = False

    def _after_fork(self, consistent: bool) -> None:
        self._settling = False

    def _add_batches(self, batches: Sequence[_Batch]) -> None:
        self._bytes = 0
        rollouts: list[list[tuple[_Seconds, Ended, int]]] = [[] for _ in self._workers]
        """Of each worker, with the frames of all until then."""
        for now, requested, version, shares in batches:
            if not self._began:
                self._mark(requested)
                self._began = self._newest = requested
            oldest, everything = version, self._all
            for index, frames, its_version, seconds, ended in shares:
                everything.frames += frames
                oldest = min(oldest, its_version)
                worker = self._workers[index]
                worker.frames += frames
                worker.rollouts += 1
                worker.policy_version, worker.lag = its_version, version - its_version
                worker.lags.append(worker.lag)
                rollouts[index].append((seconds, ended, everything.frames))
            self._newest, everything.lag = now, version - oldest
            everything.lags.append(everything.lag)
            self._history.batches.add((now, everything.frames, everything.lag))
            if now >= self._mark_due:
                self._mark(now)
        self._add_up(rollouts)
        self._settled = monotonic()

    def _add_up(self, rollouts: list[list[tuple[_Seconds, Ended, int]]]) -> None:
        rows: list[Array] = []
        for worker, own in zip(self._workers, rollouts, strict=True):
            if not own:
                continue
            seconds, ended, until = zip(*own, strict=True)
            worker.seconds = list(map(sum, zip(worker.seconds, *seconds, strict=True)))
            episodes, counts = worker.sums.add(ended)
            if len(episodes):
                worker.episodes.add(episodes)
                rows.append(np.column_stack((np.repeat(until, counts), episodes)))
        if rows:
            each = rows[0]
            if len(rows) > 1:
                each = np.concatenate(rows)
                each = each[each[:, 0].argsort(kind="stable")]
            self._all.episodes.add(each[:, 1:])
            self._history.episodes.extend(each)

    def _mark(self, now: float) -> None:
        self._marks.append((now, [worker.frames for worker in self._workers]))
        self._mark_due = now + _MARK_S

    def state_dict(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return how many episodes ended, the last ones and running ones: of all, then of each."""
        with self._lock:
            self.settle()
            return [(*t.episodes.state(), t.sums.state()) for t in (self._all, *self._workers)]

    def load_state_dict(self, state: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Continue the counts of `state_dict`; those that ``state`` has not start over."""
        with self._lock:
            self.settle()
            fresh = [(*_Episodes().state(), EpisodeSums().state())] * (1 + len(self._workers))
            state = [*state, *fresh[len(state) :]]
            each = zip((self._all, *self._workers), state, strict=True)
            for totals, (number, last, *running) in each:
                totals.episodes.load(number, last)
                totals.sums.load_state(*running or [EpisodeSums().state()])

    @property
    def frames(self) -> int:
        """The frames of all batches until now."""
        self.settle()
        return self._all.frames

    @property
    def history(self) -> History:
        """The figures of each batch until now."""
        self.settle()
        return self._history

    def stats(self, worker: int | None = None, *, newest: bool = True) -> dict[str, float]:
        """Return rates, episodes, shares of time and the age of weights, of one worker or all.

        Those of one worker also contain its frames, rollouts and policy version. If not all
        batches need to count (``newest``), numbers of the last two seconds will do: adding them up
        takes another thread three times as long as the one that collects, and has them cached.
        """
        with self._lock:
            if newest or not self._newest or monotonic() - self._settled > _RECENT_S:
                self.settle()
            indices = range(len(self._workers)) if worker is None else [worker]
            totals = self._all if worker is None else self._workers[worker]
            own: dict[str, float] = {"drift_max": self._drift}
            lags = totals.lags or (0,)
            if worker is not None:
                own = {"frames": totals.frames, "batches": totals.rollouts}
                own["policy_version"] = totals.policy_version
            return {
                **own,
                **self._rates(indices),
                **totals.episodes.stats(),
                **_shares([self._workers[index].seconds for index in indices]),
                "lag": totals.lag,
                "lag_mean": sum(lags) / len(lags),
                "lag_max": max(lags),
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


def _shares(workers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the shares of the seconds; NaN before there are any."""
    *seconds, resets = [sum(parts) for parts in zip(*workers, strict=True)]
    total = sum(seconds) or math.nan
    shares = {name: part / total for name, part in zip(SHARES, seconds, strict=True)}
    return {**shares, "time_reset": resets / total}
