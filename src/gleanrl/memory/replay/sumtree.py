"""A tree of sums, searched and updated for many numbers at once."""

from __future__ import annotations

import torch

_FANOUT = 32
_SHIFT = 5
_TINY = 1e-300
_TOP = 2048
"""So many numbers are still searched at once."""
_MANY = 2048
"""From here on, looking for nodes that were named twice is cheaper than visiting them twice."""


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
        """Replace numbers; of a place that is named twice, one of its values.

        Args:
            index: Places, int64 ``[n]``.
            values: float64 ``[n]``; what is not above 1e-300 counts as zero.
        """
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
