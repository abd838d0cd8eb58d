"""Where rows follow one another: stretches of consecutive steps of one trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.memory.fence import fence
from gleanrl.memory.replay.ledger import STEP, Ledger
from gleanrl.memory.replay.storages import Storage

Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Same: TypeAlias = Callable[[Storage, Places, Places], Bools]
"""Tells of rows and of those before them whether one trajectory goes on, ``[n, envs]``."""
_PIECEMEAL = 64
"""From so many changed stretches on, looking at all rows is cheaper."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of consecutive steps, each of one environment."""

    slot: torch.Tensor
    env: torch.Tensor
    length: torch.Tensor
    stamps: torch.Tensor
    """Stamps of all slots when these were found."""

    def select(self, which: torch.Tensor) -> Runs:
        """Return some of the runs."""
        return replace(self, slot=self.slot[which], env=self.env[which], length=self.length[which])

    def remaining(self, stamps: torch.Tensor) -> Runs:
        """Return what is behind the last overwritten row of each run, by the ``stamps`` of now."""
        run, step, _ = steps_of(self.length)
        slots = (self.slot[run] + step) % len(self.stamps)
        gone = stamps[slots] != self.stamps[slots]
        lost = torch.zeros_like(self.length)
        lost.scatter_reduce_(0, run[gone], step[gone] + 1, "amax")
        slot = (self.slot + lost) % max(len(self.stamps), 1)
        return replace(self, slot=slot, length=self.length - lost)


def steps_of(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of every step of stretches of these lengths its stretch and number, and their ends."""
    ends = length.cumsum(0)
    run = torch.arange(len(length)).repeat_interleave(length)
    step = torch.arange(len(run)) - (ends - length)[run]
    return run, step, ends


class RunFinder:
    """Finds the runs of a storage; rows that did not change are not looked at again."""

    def __init__(self, same: Same) -> None:
        """Ask ``same`` where trajectories end."""
        self._same = same
        self._ledger: Ledger | None = None
        self._version = (0, -1)
        self._runs: Runs | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ledger": None}  # looked at anew by whoever loads it

    def runs(self, storage: Storage) -> Runs:
        """Return the runs of all rows that are whole."""
        ledger = storage.ledger
        # Taken first: what changes while we look is looked at again the next time.
        version = ledger.version
        if self._runs is not None and self._ledger is ledger and version == self._version:
            return self._runs
        recent = ledger.changes(self._version) if self._ledger is ledger else None
        if recent is None or len(recent) > _PIECEMEAL:
            self._stamps = np.zeros(ledger.slots, np.int64)
            self._breaks = np.ones((storage.envs, ledger.slots), bool)
            if ledger.slots:
                self._look(storage, np.arange(ledger.slots))
        else:
            for first, count in recent:
                # The row behind the last one may not follow it any more.
                self._look(storage, np.arange(first, first + count + 1) % ledger.slots)
        self._ledger, self._version = ledger, version
        self._runs = self._cut(ledger.top, storage.envs)
        return self._runs

    def _look(self, storage: Storage, rows: Places) -> None:
        stamps = storage.ledger.stamps
        before = rows - 1
        before[before < 0] += len(self._stamps)
        new, old = stamps[rows], stamps[before]
        fence()  # rows are looked at between two looks at their stamps
        same = self._same(storage, rows, before)
        fence()
        new[new != stamps[rows]] = 0
        self._stamps[rows] = new
        same &= ((new > 0) & (new - old == STEP) & (old == stamps[before]))[:, None]
        self._breaks[:, rows] = ~same.T

    def _cut(self, top: int, envs: int) -> Runs:
        breaks = self._breaks[:, :top]
        around = ~self._breaks[:, :1]
        # Environment by environment: runs never go from one to the next.
        self._breaks[:, :1] = True
        starts = np.flatnonzero(breaks)
        self._breaks[:, :1] = ~around
        lengths = np.diff(starts, append=envs * top)
        slots, owners = starts % max(top, 1), starts // max(top, 1)
        keep = self._stamps[slots] > 0
        for env in np.flatnonzero(around).tolist():
            # The ring's first row continues its last: one run, which starts at the end.
            first, last = np.searchsorted(starts, [env * top, (env + 1) * top - 1], "right") - 1
            lengths[last] += lengths[first]
            keep[first] = False
        return Runs(
            torch.from_numpy(slots[keep]),
            torch.from_numpy(owners[keep]),
            torch.from_numpy(lengths[keep]),
            torch.from_numpy(self._stamps),
        )
