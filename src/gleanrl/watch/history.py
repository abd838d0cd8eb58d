"""The history of a collection from its beginning, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from time import monotonic
from typing import Any

import numpy as np

from gleanrl.watch.page import (
    SHARES,
    Array,
    Lines,
    Page,
    Plot,
    Series,
    Shares,
    Table,
    episode_plots,
    in_unit,
)
from gleanrl.watch.progress import clock_time

_MOST = 1000
_SPEEDS = 150
"""Points of the curve of the speed."""
Stats = Mapping[str, int | float | bool]


class Thinned:
    """Every k-th of the rows that were added: ``most`` at most, k grows with their number.

    >>> rows = Thinned(4)
    >>> rows.extend(np.stack([np.ones(7), np.arange(7)], 1))
    >>> for i in range(7, 10):
    ...     rows.add((1, i))
    >>> rows.every, rows.array().tolist()
    (4, [[1.0, 0.0], [1.0, 4.0], [1.0, 8.0]])
    """

    def __init__(self, most: int = _MOST) -> None:
        self.every = 1
        """k: how many rows each one represents."""
        self._rows: list[tuple[float, ...]] = []
        self._most, self._added = most, 0

    def add(self, row: tuple[float, ...]) -> None:
        """Add a row."""
        if self._added % self.every == 0:
            self._rows.append(row)
            self._thin()
        self._added += 1

    def extend(self, rows: Array) -> None:
        """Add the rows of ``rows``, ``[N, columns]``."""
        self._rows += rows[-self._added % self.every :: self.every].tolist()
        self._added += len(rows)
        self._thin()

    def _thin(self) -> None:
        while len(self._rows) > self._most:
            del self._rows[1::2]
            self.every *= 2

    def array(self) -> Array:
        """Return the rows, float64 ``[N, columns]``."""
        return np.array(self._rows, np.float64)


class History:
    """The figures of each batch."""

    def __init__(self) -> None:
        self.batches = Thinned()
        """When each came, the frames until then, and its policy lag."""
        self.episodes = Thinned()
        """The frames until the batch that each ended in, its return and its length."""
        self.batches.add((monotonic(), 0, 0))

    def page(self, title: str, facts: Lines, stats: Stats, losses: Iterable[Any] = ()) -> Page:
        """Return the page of a collection with these ``stats("both")``.

        ``losses`` say when (seconds since the epoch) which worker was lost, and why.
        """
        seconds, frames, lag = self.batches.array().T
        seconds = seconds - seconds[0]
        unit, elapsed = in_unit(seconds)
        episodes = self.episodes.array().reshape(-1, 3)
        ends, returns, lengths = episodes.T
        parts: list[Plot | Shares | Table] = []
        parts += episode_plots(ends, returns, lengths, self.episodes.every)
        if len(seconds) > 1:
            grid = np.linspace(0.0, max(seconds[-1], 1e-9), min(_SPEEDS, 2 + len(seconds) // 4))
            rates = np.diff(np.interp(grid, seconds, frames)) / np.diff(grid)
            over = in_unit(grid)[1][1:]
            parts.append(Plot("Speed", unit, "frames per second", [Series("", over, rates)], True))
            behind = Series("", elapsed[1:], lag[1:], "dots")
            parts.append(Plot("Policy lag of batches", unit, "versions old", [behind], True))
        if shares := _shares(stats):
            parts.append(Shares("Workers' time", shares))
        rows = [
            (f"{datetime.fromtimestamp(when):%d %b %H:%M:%S}", worker, why.splitlines()[0])
            for when, worker, why in losses
        ]
        if rows:
            parts.append(Table("Losses", ("when", "worker", "why"), rows))
        states = (word for word in ("failed", "completed", "closed") if stats.get(word))
        figures = _figures(stats, seconds[-1])
        return Page(title, next(states, "collecting"), figures, facts, parts)


def _shares(stats: Stats) -> list[tuple[str, list[float]]]:
    rows = []
    prefixes = [(f"worker {i}", f"worker_{i}/") for i in range(int(stats.get("workers", 0)))]
    for name, prefix in (*prefixes, ("all", "")):
        parts = [float(stats.get(prefix + key, np.nan)) for key in SHARES]
        if np.isfinite(parts).all():
            rows.append((name, parts))
    return rows[-1:] if len(rows) == 2 else rows


def _figures(stats: Stats, seconds: float) -> Lines:
    took = clock_time(seconds) if seconds >= 60 else f"{seconds:.1f} s"
    figures = [("frames", f"{stats['frames']:,}"), ("time", took)]
    figures.append(("frames/s", f"{stats.get('fps_mean', 0):,.0f}"))
    figures.append(("episodes", f"{stats.get('episodes', 0):,}"))
    if stats.get("episodes"):
        figures.append(("return, last 100", f"{stats['return_mean']:,.1f}"))
        figures.append(("length, last 100", f"{stats['length_mean']:,.1f}"))
    if stats.get("workers"):
        figures.append(("workers", f"{stats['workers_alive']:,} of {stats['workers']:,}"))
    return figures
