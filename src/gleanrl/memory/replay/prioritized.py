"""Sampling in proportion to priorities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.ledger import Ledger
from gleanrl.memory.replay.samplers import (
    Draw,
    Sampler,
    empty_error,
    saved_tensor,
    stamps_of,
    whole,
)
from gleanrl.memory.replay.storages import Storage
from gleanrl.memory.replay.sumtree import SumTree

_TRIES = 4


class PrioritizedSampler(Sampler):
    """Prioritized experience replay: rows in proportion to ``(priority + eps) ** alpha``.

    New rows get the largest priority seen so far. Samples carry ``"index"`` and the importance
    weights ``(p_min / p) ** beta``, at most 1, under ``"priority_weight"`` and ``"_weight"`` (the
    name it has in older code), float32.

    Priorities belong to the process that samples. In a shared buffer, rows that others wrote get
    the default priority when this process samples next, whoever overwrote what was there before.

    Args:
        max_capacity: Frames the storage can hold, its ``max_size``.
        alpha: How much priorities count; 0 is uniform.
        beta: How much weights correct for it; 1 is fully. May be changed at any time.
        eps: Added to every priority.
    """

    def __init__(self, max_capacity: int, alpha: float, beta: float, eps: float = 1e-8) -> None:
        if alpha < 0 or beta < 0 or eps < 0:
            raise ConfigError(f"alpha, beta and eps are not negative: {alpha}, {beta}, {eps}")
        self.max_capacity = max_capacity
        self.alpha = alpha
        self.beta = beta
        self.eps = eps
        self._tree = SumTree(max_capacity)
        self._max = 1.0
        self._ledger: Ledger | None = None
        self._version = (0, -1)
        self._known = np.zeros(max_capacity, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ledger": None}  # looked at anew by whoever loads it

    @property
    def default_priority(self) -> float:
        """What new rows are given: the largest priority seen so far, 1 at first."""
        return self._max

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose by priority."""
        self._follow(storage)

        def propose(number: int) -> torch.Tensor:
            found = self._tree.draw(number, generator)
            if found is None:
                raise empty_error(storage)
            return found

        for _ in range(_TRIES):
            if not storage.shared and storage.ledger.live == storage.ledger.top:
                draw: Draw | None = Draw(propose(count), None)
            else:
                draw = whole(storage, propose, count)
            if draw is not None:
                self._weigh(draw)
                return draw
            self._drop(storage)
        raise empty_error(storage)

    def _weigh(self, draw: Draw) -> None:
        chosen = self._tree.leaves.index_select(0, draw.index)
        weight = chosen.div_(self._tree.smallest()).float().pow_(-self.beta)
        draw.info = {"priority_weight": weight, "_weight": weight}

    def _drop(self, storage: Storage) -> None:
        """Give no priority to what holds nothing whole (rows of writers that died, mostly)."""
        places = torch.arange(storage.ledger.top * storage.envs)
        gone = places[stamps_of(storage, places) <= 0]
        self._tree.set(gone, torch.zeros(len(gone), dtype=torch.float64))

    def update_priority(
        self, storage: Storage, index: torch.Tensor, priority: torch.Tensor
    ) -> None:
        """Set the priorities of flat places.

        Raises:
            ConfigError: a priority is negative or not a number.
        """
        self._follow(storage)
        if len(priority):
            least, largest = torch.aminmax(priority)
            if not 0 <= float(least) <= float(largest) < math.inf:  # NaN fails this too
                raise ConfigError(f"priorities are finite and not negative: {priority}")
            self._max = max(self._max, float(largest))
        self._tree.set(index, self._raised(priority))

    def _raised(self, priority: torch.Tensor) -> torch.Tensor:
        return priority.to(torch.float64).add(self.eps).pow_(self.alpha)

    def _follow(self, storage: Storage) -> None:
        """Give rows that were committed since the last time their first priority.

        The mark is taken first: what changes meanwhile is looked at again.
        """
        ledger, version = storage.ledger, storage.ledger.version
        if ledger is self._ledger and version == self._version:
            return
        if storage.max_size > self.max_capacity:
            raise ConfigError(
                f"max_capacity ({self.max_capacity}) is less than the storage's max_size "
                f"({storage.max_size})"
            )
        recent = ledger.changes(self._version) if ledger is self._ledger else None
        if recent is None:
            self._rescan(storage)
        else:
            for first, count in recent:
                for start, stop, _ in storage.ledger.pieces(first, count):
                    self._fresh(storage, np.arange(start, stop))
        self._ledger, self._version = ledger, version

    def _rescan(self, storage: Storage) -> None:
        stamps = storage.ledger.stamps
        changed = np.flatnonzero(stamps != self._known[: len(stamps)])
        self._fresh(storage, changed)

    def _fresh(self, storage: Storage, slots: Any) -> None:
        stamps, envs = storage.ledger.stamps[slots], storage.envs
        self._known[slots] = stamps
        default = (self._max + self.eps) ** self.alpha
        values = torch.from_numpy(np.where(stamps > 0, default, 0.0))
        places = torch.from_numpy(slots)
        if envs > 1:
            places = (places.unsqueeze(1) * envs + torch.arange(envs)).flatten()
            values = values.repeat_interleave(envs)
        inside = places < self.max_capacity
        self._tree.set(places[inside], values[inside])

    def state_dict(self) -> dict[str, Any]:
        """Return all priorities (raised to alpha) and the largest that was given."""
        return {"priorities": self._tree.leaves.clone(), "max_priority": self._max}

    def check_state_dict(self, state: dict[str, Any], frames: int) -> None:
        """Refuse what are no priorities, or those of another capacity."""
        saved, most = saved_tensor(state, "priorities", torch.float64), state.get("max_priority")
        if len(saved) != self.max_capacity:
            raise ConfigError(f"{len(saved)} priorities for a capacity of {self.max_capacity}")
        largest = float(saved.max()) if len(saved) else 0.0
        if not isinstance(most, float) or not (saved >= 0).all() or max(most, largest) == math.inf:
            raise ConfigError(f"priorities are finite and not negative: {saved}, at most {most!r}")

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        """Put priorities back."""
        self._follow(storage)
        self._tree.fill(state["priorities"])
        self._max = state["max_priority"]
