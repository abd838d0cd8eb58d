"""Weights in one piece of memory, to be sent, or shared with any number of readers.

A buffer, which is sent as it is to workers that share no memory with the learner:

    [version, serial, mark: int64][padding to 64 bytes][tensors, each aligned to 64 bytes]

In shared memory neither side waits. A counter of publications lies before three buffers.
Publication n goes into the buffer after that of publication n - 1. The buffer is marked with 2n - 1
before and with 2n afterwards; then the publication is counted. A reader copies the newest buffer
again if its mark has changed meanwhile. `fence` orders marks and data for the processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from gleanrl.core.errors import GleanError
from gleanrl.core.messages import Snapshot, WeightsRef
from gleanrl.core.protocols import SharedMemory
from gleanrl.core.raw_bytes import raw_bytes
from gleanrl.core.window import Array
from gleanrl.memory.shared import fence

_ALIGN = 64
"""Bytes; also those of a header, before the tensors of a buffer and before the three buffers."""
_VERSION, _SERIAL, _MARK = 0, 1, 2
_BUFFERS = 3
_MOST_TRIES = 10_000
_SMALL = 1 << 20
"""Up to how many bytes it is the calls that cost, not the copying: a tensor's takes 1/3 of torch's
time as plain bytes, and far less where nothing of torch's is in the caches."""


def planned(weights: Mapping[str, torch.Tensor]) -> WeightsRef:
    """Return the places of tensors like ``weights`` in a buffer."""
    entries, size = [], _ALIGN
    for name, tensor in weights.items():
        entries.append((name, tuple(tensor.shape), tensor.dtype, size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return WeightsRef(0, size, tuple(entries))


class FlatBuffer:
    """A buffer, and its tensors as views."""

    def __init__(self, ref: WeightsRef, memory: Array | None = None) -> None:
        """Lay the buffer over ``memory``, uint8 ``[ref.nbytes]``; its own if none."""
        self.array = np.zeros(ref.nbytes, np.uint8) if memory is None else memory
        self.bytes = torch.from_numpy(self.array)
        """The same as a tensor."""
        self.words = self.array[:_ALIGN].view(np.int64).data  # numpy scalars cost twice as much
        self._views = {
            name: self.bytes[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, shape, dtype, offset in ref.entries
        }
        self._parts = [raw_bytes(view) for view in self._views.values()]

    def fill(
        self,
        tensors: Sequence[torch.Tensor],
        version: int,
        serial: int,
        values: Sequence[memoryview] | None = None,
    ) -> None:
        """Copy ``tensors``, in the order of the plan; or their ``values``, if these are known."""
        self.words[_VERSION], self.words[_SERIAL] = version, serial
        if values is None:
            with torch.no_grad():
                torch._foreach_copy_(list(self._views.values()), list(tensors))
        else:
            for target, source in zip(self._parts, values, strict=True):
                target[:] = source

    def snapshot(self, model_id: str) -> Snapshot:
        """Return the contents as weights of ``model_id``, over the same memory."""
        return Snapshot(self.words[_VERSION], {model_id: self._views}, self.words[_SERIAL])


def _mapped(memory: SharedMemory, ref: WeightsRef) -> tuple[memoryview, list[FlatBuffer]]:
    whole = np.frombuffer(memory.map(), np.uint8)
    first = ref.offset + _ALIGN
    starts = range(first, first + _BUFFERS * ref.nbytes, ref.nbytes)
    buffers = [FlatBuffer(ref, whole[start : start + ref.nbytes]) for start in starts]
    return whole[ref.offset : first].view(np.int64).data, buffers


class SharedWeightPublisher:
    """The publisher's side."""

    def __init__(self, memory: SharedMemory, weights: Mapping[str, torch.Tensor]) -> None:
        """Reserve memory for tensors like ``weights``; nothing is published yet."""
        ref = planned(weights)
        self.ref = replace(ref, offset=memory.reserve(_ALIGN + _BUFFERS * ref.nbytes))
        self._count, self._buffers = _mapped(memory, self.ref)
        self._known: Sequence[torch.Tensor] = ()
        self._values: list[memoryview] | None = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of the plan, and make them the newest.

        A sequence that is given again, the same object, must have the same tensors over the same
        memory as before: only their values are read anew.
        """
        if tensors is not self._known:
            self._look_at(tensors)
        number = self._count[0] + 1
        buffer = self._buffers[number % _BUFFERS]
        buffer.words[_MARK] = 2 * number - 1
        fence()  # nothing is written into a buffer that is not marked
        buffer.fill(tensors, version, serial, self._values)
        fence()  # all of it is there before it is announced
        buffer.words[_MARK] = 2 * number
        fence()
        self._count[0] = number

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        plain = self.ref.nbytes <= _SMALL and all(
            _is_plain(tensor) and tensor.dtype == dtype
            for tensor, (_, _, dtype, _) in zip(tensors, self.ref.entries, strict=True)
        )
        self._known = tensors
        self._values = [raw_bytes(tensor) for tensor in tensors] if plain else None


class SharedWeightReceiver:
    """A reader's side."""

    def __init__(self, memory: SharedMemory) -> None:
        """Read weights published in ``memory``; nothing before `bind`."""
        self._memory = memory
        self._seen = 0
        self._count: Sequence[int] = (0,)

    def bind(self, model_id: str, ref: WeightsRef) -> None:
        """Read weights of ``model_id`` at ``ref`` from now on."""
        self._model_id, self._seen = model_id, 0
        self._count, self._buffers = _mapped(self._memory, ref)
        self._own = FlatBuffer(ref)

    def newest(self) -> Snapshot | None:
        """Return a snapshot that was not returned before, ``None`` if there is none.

        Its tensors are this reader's own and valid until the next call.
        """
        if self._count[0] == self._seen:
            return None
        for _ in range(_MOST_TRIES):
            number = self._count[0]
            buffer = self._buffers[number % _BUFFERS]
            fence()
            if buffer.words[_MARK] != 2 * number:
                continue
            fence()  # nothing is read before its mark was, nor the mark again before all is
            np.copyto(self._own.array, buffer.array)
            fence()
            if buffer.words[_MARK] == 2 * number:
                self._seen = number
                return self._own.snapshot(self._model_id)
        raise GleanError(
            f"weights were published faster than they could be read {_MOST_TRIES} times in a row"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's memory is its values in order, readable in this process."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not ordinary or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
