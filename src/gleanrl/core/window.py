"""The memory of one rollout, for loops that write and read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.keys import Key
from gleanrl.core.layout import Field

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Window:
    """``[P, T, ...]`` tensors by key; row views are made once and kept.

    Rows are what the hot loops write through: making a view costs as much as a small copy, and a
    window is used again for every rollout that lands in the same slot.
    """

    def __init__(self, tensors: Mapping[Key, torch.Tensor], envs: int, steps: int) -> None:
        """Wrap ``tensors``, each ``[envs, steps, ...]``. The memory stays the caller's."""
        self.envs = envs
        self.steps = steps
        self._tensors = dict(tensors)
        self._rows: dict[Key, list[Array]] = {}
        self._tensor_rows: dict[Key, tuple[torch.Tensor, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave views out: a copy of numpy's would have memory of its own."""
        return {**vars(self), "_rows": {}, "_tensor_rows": {}}

    @classmethod
    @torch.inference_mode(False)  # it is written outside of it as well
    def allocate(cls, fields: Iterable[Field], envs: int, steps: int) -> Window:
        """Make a window over fresh zeroed private memory, of the host or where a field says."""
        tensors = {
            field.key: torch.zeros(
                (envs, steps, *field.shape), dtype=field.dtype, device=field.device
            )
            for field in fields
        }
        return cls(tensors, envs, steps)

    def keys(self) -> Sequence[Key]:
        return tuple(self._tensors)

    def tensor(self, key: Key) -> torch.Tensor:
        """Return the field as ``[P, T, ...]``."""
        return self._tensors[key]

    def array(self, key: Key) -> Array:
        """Return the field as a numpy array over the same memory, ``[P, T, ...]``."""
        return self._tensors[key].numpy()

    def on_host(self, key: Key) -> bool:
        """Tell whether the field is in memory of the host, which `array` and `rows` need."""
        return self._tensors[key].device.type == "cpu"

    def rows(self, key: Key) -> list[Array]:
        """Return ``T`` numpy views ``[P, ...]``, one per step."""
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = list(np.moveaxis(self.array(key), 1, 0))
        return rows

    def tensor_rows(self, key: Key) -> Sequence[torch.Tensor]:
        """Return ``T`` tensor views ``[P, ...]``, one per step."""
        rows = self._tensor_rows.get(key)
        if rows is None:
            rows = self._tensor_rows[key] = self._tensors[key].unbind(1)
        return rows

    def zero_from(self, step: int, envs: int | slice = slice(None)) -> None:
        """Zero every field of ``envs`` from ``step`` on, where nothing was collected."""
        for tensor in self._tensors.values():
            tensor[envs, step:] = 0
