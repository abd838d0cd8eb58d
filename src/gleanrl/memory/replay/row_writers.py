"""Writers: new data replace the oldest rows, or the rows that rank lowest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import NestedKey, as_key, format_key
from gleanrl.memory.replay.storages import LazyTensorStorage, Storage
from gleanrl.memory.tensordicts import indexable

_OVER_ROWS = ("MultiStepTransform", "Reward2GoTransform")


def over_rows(transform: Any) -> str | None:
    """Return the name of a part of TorchRL's ``transform`` that computes over successive rows."""
    parts = transform.modules() if isinstance(transform, nn.Module) else ()
    names = (type(part).__name__ for part in parts)
    return next((name for name in names if name in _OVER_ROWS), None)


class Writer:
    """Stores data and returns their places."""

    def extend(self, storage: Storage, data: Any, dim: int) -> torch.Tensor:
        """Store ``data`` in place of the oldest rows; return the slots that now hold it, int64.

        Args:
            storage: Where to.
            data: Rows along dimension ``dim``.
            dim: 0, or 1 for ``[env, time]`` data.
        """
        return storage.extend(data, dim)


class RoundRobinWriter(Writer):
    """New rows replace the oldest, and become visible when they are complete."""


TensorDictRoundRobinWriter = RoundRobinWriter
"""TorchRL's name for the writer of TensorDicts."""


class TensorDictMaxValueWriter(Writer):
    """Keeps the rows with the largest values of an entry. For storages of one process, 1-D.

    Args:
        rank_key: The entry; summed if it has several elements per row.
    """

    def __init__(self, rank_key: NestedKey) -> None:
        self.rank_key = as_key(rank_key)

    def extend(self, storage: Storage, data: Any, dim: int) -> torch.Tensor:
        """Store the rows that rank among the best; return a slot per row, -1 for other rows.

        Raises:
            ConfigError: the storage is shared, compact, a list, or 2-D, or rows lack the entry.
        """
        if not isinstance(storage, LazyTensorStorage) or storage.shared or storage.ndim != 1:
            raise ConfigError(
                "TensorDictMaxValueWriter writes to one-dimensional tensor storages of one process"
            )
        if storage.shares_rows:
            raise ConfigError(
                "TensorDictMaxValueWriter keeps single rows, and rows of a compact storage, or of "
                "one with stacks, have parts in common: use compact=False, and no stacks"
            )
        values, count = storage.prepare(data, dim)
        rows = storage.rows
        assert rows is not None
        if self.rank_key not in rows.keys:
            raise ConfigError(
                f"rank_key {format_key(self.rank_key)} is no entry of the data: {list(rows.keys)}"
            )
        rank = rows.keys.index(self.rank_key)
        with storage.ring.section():
            return self._store(storage, values, count, rank)

    def _store(
        self, storage: LazyTensorStorage, values: list[torch.Tensor], count: int, rank: int
    ) -> torch.Tensor:
        ring, rows = storage.ring, storage.rows
        assert rows is not None
        filled, slots = ring.live, ring.slots
        new = _ranks(values[rank])
        have = _ranks(rows.tensors[rank][:filled])
        # Stable, and the stored ones first: of equals, those that are there stay.
        best = np.argsort(-np.concatenate([have, new]), kind="stable")[:slots]
        taken = np.sort(best[best >= filled] - filled)
        out = np.setdiff1d(np.arange(filled), best)
        free = np.concatenate([np.arange(filled, slots), out])[: len(taken)]
        chosen, places = torch.from_numpy(taken), torch.from_numpy(free)
        for tensor, value in zip(rows.tensors, values, strict=True):
            picked = indexable(value.detach()).index_select(0, chosen).to(tensor.device)
            indexable(tensor).index_copy_(0, places.to(tensor.device), picked)
        ring.mark(free)
        ring.count += len(taken)
        where = torch.full((count,), -1)
        where[chosen] = places
        return where


def _ranks(values: torch.Tensor) -> Any:
    flat = values.reshape(len(values), -1) if values.numel() else values.reshape(len(values), 0)
    return flat.sum(1, dtype=torch.float64).cpu().numpy()
