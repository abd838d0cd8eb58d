"""Single rows, and rows that are objects: taken apart and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from gleanrl.memory.replay.storages import ListStorage, Storage


def single(storage: Storage, data: Any) -> tuple[Any, int]:
    """Return one row as data of one row, and the dimension of rows in it."""
    if isinstance(storage, ListStorage):
        return [data], 0
    if isinstance(data, (TensorDictBase, torch.Tensor)):
        return data.unsqueeze(0), 0
    return {key: value.unsqueeze(0) for key, value in data.items()}, 0


def stack(items: Sequence[Any]) -> Any:
    """Stack items of a list into a batch; what cannot be stacked is returned as a list."""
    if items and all(isinstance(item, torch.Tensor) for item in items):
        return torch.stack(list(items))
    if items and all(isinstance(item, TensorDictBase) for item in items):
        return lazy_stack(list(items), 0).contiguous()
    return list(items)
