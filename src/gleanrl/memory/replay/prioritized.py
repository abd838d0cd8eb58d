"""Sampling in proportion to priorities, and the tree of sums that finds rows by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.ring import RingIndex
from gleanrl.memory.replay.samplers import Draw, Sampler, draw_complete, empty_error, saved_tensor
from gleanrl.memory.replay.storages import Storage

_TRIES = 4
_FANOUT = 32
_SHIFT = 5
_TINY = 1e-300
_TOP = 2048
"""So many numbers are still searched at once."""
_MANY = 2048
"""From here on, looking for nodes that were named twice is cheaper than visiting them twice."""


class PrioritizedSampler(Sampler):
    """Prioritized experience replay: rows in proportion to ``(priority + eps) ** alpha``.

    New rows get the largest priority seen so far. Samples carry ``"index"`` and the importance
    weights ``(p_min / p) ** beta``, at most 1, under ``"priority_weight"`` and ``"_weight"`` (the
    name it has in older code), float32.

    Priorities belong to the process that samples. In a shared buffer, rows that others wrote get
    the default priority when this process samples next.

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
        self._ring: RingIndex | None = None
        self._version = (0, -1)
        self._known = np.zeros(max_capacity, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None}  # a copy looks at all rows anew

    @property
    def default_priority(self) -> float:
        """What new rows are given: the largest priority seen so far, 1 at first."""
        return self._max

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose by priority."""
        self._follow(storage)

        def propose(number: int) -> torch.Tensor:
            places = self._tree.draw(number, generator)
            if places is None:
                raise empty_error(storage)
            return places

        for _ in range(_TRIES):
            if not storage.shared and storage.ring.live == storage.ring.top:
                draw: Draw | None = Draw(propose(count), None)
            else:
                draw = draw_complete(storage, propose, count)
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
        """Give no priority to incomplete rows (of writers that died, mostly)."""
        places = torch.arange(storage.ring.top * storage.envs)
        gone = places[storage.sequence_of(places) <= 0]
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
        ring, version = storage.ring, storage.ring.version
        if ring is self._ring and version == self._version:
            return
        if storage.max_size > self.max_capacity:
            raise ConfigError(
                f"max_capacity ({self.max_capacity}) is less than the storage's max_size "
                f"({storage.max_size})"
            )
        recent = ring.changes(self._version) if ring is self._ring else None
        if recent is None:
            numbers = ring.sequence
            self._fresh(storage, np.flatnonzero(numbers != self._known[: len(numbers)]))
        else:
            for first, count in recent:
                for start, stop, _ in ring.pieces(first, count):
                    self._fresh(storage, np.arange(start, stop))
        self._ring, self._version = ring, version

    def _fresh(self, storage: Storage, slots: Any) -> None:
        numbers, envs = storage.ring.sequence[slots], storage.envs
        self._known[slots] = numbers
        default = (self._max + self.eps) ** self.alpha
        values = torch.from_numpy(np.where(numbers > 0, default, 0.0))
        if envs > 1:
            values = values.repeat_interleave(envs)
        places = storage.frames_of(torch.from_numpy(slots))
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


class SumTree:
    """Non-negative numbers that can be drawn in proportion to their size.

    A node has 32 children that stand side by side, so that one level costs one gathering of rows
    for all draws together. Sums are recomputed from the children, never adjusted: they do not
    drift. Double precision throughout.
    """

    def __init__(self, size: int) -> None:
        """Hold ``size`` numbers, all zero."""
        self.size = size
        self._rows: list[torch.Tensor] = []
        nodes = size
        while nodes > _TOP:
            nodes = -(-nodes // _FANOUT)
            self._rows.append(torch.zeros(nodes, _FANOUT, dtype=torch.float64))
        self._top = torch.zeros(nodes, dtype=torch.float64)
        self._flat = [rows.view(-1) for rows in self._rows]
        leaves = self._flat[0] if self._flat else self._top
        self.leaves = leaves[:size]
        """The numbers; read only."""
        blocks = self._rows[0].shape[0] if self._rows else len(self._top)
        self._least = torch.full((blocks,), torch.inf, dtype=torch.float64)

    def smallest(self) -> float:
        """Return the smallest number above zero, infinity if there is none."""
        return float(self._least.min())

    def set(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Replace numbers; if a place is named twice, by either. Up to 1e-300 counts as zero."""
        # So small that a share of it may not be smaller than itself.
        values = torch.threshold(values, _TINY, 0.0)
        for level, (flat, rows) in enumerate(zip(self._flat, self._rows, strict=True)):
            flat.index_copy_(0, index, values)
            index = index >> _SHIFT
            if len(index) > _MANY:
                index = torch.unique(index)
            below = rows.index_select(0, index)
            if level == 0:
                least = torch.where(below > 0, below, torch.inf).amin(1)
                self._least.index_copy_(0, index, least)
            values = below.sum(1)
        self._top.index_copy_(0, index, values)
        if not self._rows:
            self._least.copy_(torch.where(self._top > 0, self._top, torch.inf))

    def fill(self, values: torch.Tensor) -> None:
        """Replace all numbers."""
        self.set(torch.arange(self.size), values)

    def draw(self, count: int, generator: torch.Generator | None = None) -> torch.Tensor | None:
        """Draw ``count`` places, each in proportion to its number; ``None`` if all are zero."""
        sums = self._top.cumsum(0)
        total = float(sums[-1])
        if total <= 0:
            return None
        # A fresh uniform number per level: what is left of one after subtracting loses precision.
        uniform = torch.rand((len(self._rows) + 1, count), dtype=torch.float64, generator=generator)
        # Strictly below one even after rounding, or a draw could land behind the last number.
        first, *shares = uniform.mul_(1 - 2**-52).unbind(0)
        index = torch.searchsorted(sums, first.mul_(total), right=True)
        for rows, share in zip(reversed(self._rows), shares, strict=True):
            sums = rows.index_select(0, index).cumsum(1)
            target = share.mul_(sums.select(1, _FANOUT - 1)).unsqueeze(1)
            index = torch.add((sums <= target).sum(1), index, alpha=_FANOUT)
        return index
