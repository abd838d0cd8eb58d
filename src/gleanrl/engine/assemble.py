"""From windows or payloads to the batch a user gets; builds `TensorDict` batches, alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from gleanrl.core.keys import TIME, Key, is_private
from gleanrl.core.layout import Layout
from gleanrl.memory.arena import nest


class Assembler:
    """Views a slab as the delivered batch. What depends on the layout is decided once."""

    def __init__(
        self, layout: Layout, workers: int, stacked: bool, device: torch.device | None
    ) -> None:
        """Decide the batch shape.

        Args:
            layout: One step of one worker.
            workers: Rollouts per batch.
            stacked: Keep a leading worker dimension.
            device: Storing device; ``None`` leaves tensors where they are.
        """
        self.lead = ((workers,) if stacked else ()) + layout.batch_shape
        """Shape of a batch without its time dimension."""
        self._names = [None] * len(self.lead) + [TIME]
        self._device = device

    def batch(self, views: Mapping[Key, torch.Tensor]) -> TensorDict:
        """Return the batch over ``views`` ``[*lead, T, ...]``; copies only to another device."""
        steps = next(iter(views.values())).shape[len(self.lead)]
        batch = TensorDict(nest(views), batch_size=(*self.lead, steps), names=self._names)
        return batch if self._device is None else batch.to(self._device)


def combine(payloads: Sequence[TensorDictBase], stacked: bool) -> TensorDictBase:
    """Put rollouts that travelled as payloads together."""
    if len(payloads) == 1 and not stacked:
        return payloads[0]
    return lazy_stack(list(payloads), 0)


def drop_private(batch: TensorDictBase) -> TensorDictBase:
    """Remove every entry, at any depth, one part of whose key starts with an underscore."""
    private = [key for key in batch.keys(True) if is_private(_tuple(key))]
    return batch.exclude(*private) if private else batch


def _tuple(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)
