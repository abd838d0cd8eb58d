"""The weights of one model as one flat tensor, which is how they cross a network.

buffer = [version, serial: int64][padding to 64 bytes][tensors, each aligned to 64 bytes]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gleanrl.core.errors import WeightsError
from gleanrl.core.messages import BoardRef, Snapshot

_ALIGN = 64
_HEADER = 64


def plan_flat(number: int, weights: Mapping[str, torch.Tensor]) -> BoardRef:
    """Return where tensors like ``weights`` lie in the buffers of board ``number``.

    In memory of its own a buffer begins at 0: the reference's ``offset`` holds the number instead.
    """
    entries, size = [], _HEADER
    for name, tensor in weights.items():
        entries.append((name, tuple(tensor.shape), tensor.dtype, size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return BoardRef(number, size, tuple(entries))


class FlatBuffer:
    """One buffer, and its tensors as views."""

    def __init__(self, ref: BoardRef, data: torch.Tensor | None = None) -> None:
        """Make it, all zero, in ordinary memory; or over ``data``, uint8 ``[ref.nbytes]``."""
        self.bytes = torch.zeros(ref.nbytes, dtype=torch.uint8) if data is None else data
        """uint8 ``[ref.nbytes]``."""
        self._words = self.bytes[:16].view(torch.int64)
        self.views = {
            name: self.bytes[offset : offset + _size(shape, dtype)].view(dtype).view(shape)
            for name, shape, dtype, offset in ref.entries
        }

    def fill(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of the plan."""
        self._words[0], self._words[1] = version, serial
        with torch.no_grad():
            torch._foreach_copy_(list(self.views.values()), list(tensors))

    @property
    def stamp(self) -> tuple[int, int]:
        """Version and serial."""
        return int(self._words[0]), int(self._words[1])


def check_fit(ref: BoardRef, tensors: Sequence[torch.Tensor]) -> None:
    """Check shapes against the plan.

    Raises:
        WeightsError: one that is not the plan's.
    """
    if len(tensors) != len(ref.entries):
        raise WeightsError(f"{len(tensors)} tensors for {len(ref.entries)} entries")
    for tensor, (name, shape, _, _) in zip(tensors, ref.entries, strict=True):
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{name!r} has shape {tuple(tensor.shape)}, the nodes' is {shape}")


class FlatReader:
    """Two buffers in turn: one is read while the next weights arrive in the other."""

    def __init__(self, model_id: str, ref: BoardRef) -> None:
        """Read the weights of ``model_id``."""
        self._model_id = model_id
        self._buffers = [FlatBuffer(ref), FlatBuffer(ref)]
        self._next = 0

    def next_buffer(self) -> torch.Tensor:
        """Return where the next weights are to arrive."""
        return self._buffers[self._next].bytes

    def read(self) -> Snapshot:
        """Return what has arrived; its tensors are valid until the next call."""
        buffer = self._buffers[self._next]
        self._next = 1 - self._next
        version, serial = buffer.stamp
        return Snapshot(version, {self._model_id: buffer.views}, serial)


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
