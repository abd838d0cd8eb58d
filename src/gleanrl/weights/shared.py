"""Weights in one piece of memory, to be sent, or shared with any number of readers.

A flat buffer, which is sent to workers that share no memory with the learner:

    [version, serial: int64][padding to 64 bytes][tensors, each aligned to 64 bytes]

In shared memory nobody waits for anybody. There are three buffers. Each publication goes into the
next one and ends with a counter; a reader copies the newest buffer and looks afterwards whether it
was being written meanwhile. With three buffers that takes three publications during one copy, so a
retry is rare.

    word 0: publications so far     words 1-3: per buffer, 2n once publication n is in it
    words 4-6: version in each      words 7-9: serial in each

The words are 64-bit and aligned. Where the processor reorders stores or loads, `fence` keeps the
words apart from what they announce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from gleanrl.core.errors import GleanError, WeightsError
from gleanrl.core.messages import Snapshot, WeightsRef
from gleanrl.core.protocols import SharedMemory
from gleanrl.core.window import Array
from gleanrl.memory.shared import fence

_ALIGN = 64
_BUFFERS = 3
_HEADER = 128
_STATE, _VERSION, _SERIAL = 1, 4, 7
_MOST_TRIES = 10_000
_SMALL = 1 << 20
"""Up to how many bytes it is the calls that cost, not the copying: a tensor's takes 1/3 of torch's
time as plain bytes, and far less where nothing of torch's is in the caches."""


def planned(weights: Mapping[str, torch.Tensor], start: int = 0) -> WeightsRef:
    """Return where tensors like ``weights`` lie in a buffer, from byte ``start`` on."""
    entries, size = [], start
    for name, tensor in weights.items():
        entries.append((name, tuple(tensor.shape), tensor.dtype, size))
        size += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return WeightsRef(0, max(size, _ALIGN), tuple(entries))


def views_of(buffer: torch.Tensor, ref: WeightsRef) -> dict[str, torch.Tensor]:
    """Return the tensors in ``buffer``, which is uint8, by name."""
    return {
        name: buffer[offset : offset + torch.Size(shape).numel() * dtype.itemsize]
        .view(dtype)
        .view(shape)
        for name, shape, dtype, offset in ref.entries
    }


def check_fit(ref: WeightsRef, tensors: Sequence[torch.Tensor]) -> None:
    """Check shapes against the plan.

    Raises:
        WeightsError: one that is not the plan's.
    """
    if len(tensors) != len(ref.entries):
        raise WeightsError(f"{len(tensors)} tensors for {len(ref.entries)} entries")
    for tensor, (name, shape, _, _) in zip(tensors, ref.entries, strict=True):
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{name!r} has shape {tuple(tensor.shape)}, the workers' is {shape}")


_FLAT_HEADER = 64
"""Bytes of a buffer before its tensors."""


def plan_flat(weights: Mapping[str, torch.Tensor]) -> WeightsRef:
    """Return where tensors like ``weights`` lie in a buffer, which begins at 0."""
    return planned(weights, _FLAT_HEADER)


class FlatBuffer:
    """One buffer in ordinary memory, and its tensors as views."""

    def __init__(self, ref: WeightsRef) -> None:
        self.bytes = torch.zeros(ref.nbytes, dtype=torch.uint8)
        """uint8 ``[ref.nbytes]``."""
        self._words = self.bytes[:16].view(torch.int64)
        self._views = views_of(self.bytes, ref)

    def fill(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of the plan."""
        self._words[0], self._words[1] = version, serial
        with torch.no_grad():
            torch._foreach_copy_(list(self._views.values()), list(tensors))

    def snapshot(self, model_id: str) -> Snapshot:
        """Return what is in it as weights of ``model_id``, over the same memory."""
        version, serial = int(self._words[0]), int(self._words[1])
        return Snapshot(version, {model_id: self._views}, serial)


def reserve_shared(memory: SharedMemory, weights: Mapping[str, torch.Tensor]) -> WeightsRef:
    """Reserve what a `SharedWeightPublisher` of tensors like ``weights`` needs."""
    ref = planned(weights)
    return replace(ref, offset=memory.reserve(_HEADER + _BUFFERS * ref.nbytes))


class SharedWeightPublisher:
    """The publisher's side."""

    def __init__(self, memory: SharedMemory, ref: WeightsRef) -> None:
        """Map what `reserve_shared` has reserved; nothing is published yet."""
        whole = np.frombuffer(memory.map(), np.uint8)
        self.ref = ref
        self._words = _words(whole, ref).data  # numpy scalars cost twice as much
        buffers = [torch.from_numpy(_buffer(whole, ref, number)) for number in range(_BUFFERS)]
        self._views = [list(views_of(buffer, ref).values()) for buffer in buffers]
        self._bytes = [[_bytes_of(view) for view in views] for views in self._views]
        self._known: Sequence[torch.Tensor] = ()
        self._sources: list[memoryview] | None = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of the plan, and make them the newest.

        A sequence that is given again, the same object, must have the same tensors over the same
        memory as before: only their values are read anew.

        Raises:
            WeightsError: a shape that is not the plan's; nothing is published.
        """
        if tensors is not self._known:
            self._look_at(tensors)
        words = self._words
        number = words[0] + 1
        buffer = number % _BUFFERS
        words[_STATE + buffer] = 2 * number - 1
        fence()  # nothing is written into a buffer that is not marked
        words[_VERSION + buffer], words[_SERIAL + buffer] = version, serial
        if self._sources is None:
            with torch.no_grad():
                torch._foreach_copy_(self._views[buffer], list(tensors))
        else:
            for target, source in zip(self._bytes[buffer], self._sources, strict=True):
                target[:] = source
        fence()  # all of it is there before it is announced
        words[_STATE + buffer] = 2 * number
        fence()
        words[0] = number

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        check_fit(self.ref, tensors)
        plain = self.ref.nbytes <= _SMALL and all(
            _is_plain(tensor) and tensor.dtype == dtype
            for tensor, (_, _, dtype, _) in zip(tensors, self.ref.entries, strict=True)
        )
        self._known = tensors
        self._sources = [_bytes_of(tensor) for tensor in tensors] if plain else None


class SharedWeightReceiver:
    """A reader's side."""

    def __init__(self, memory: SharedMemory) -> None:
        """Read what is published in ``memory``; nothing before `bind`."""
        self._memory = memory
        self._seen = 0
        self._words: Array | None = None

    def bind(self, model_id: str, ref: WeightsRef) -> None:
        """Take what is published at ``ref`` for weights of ``model_id`` from now on."""
        whole = np.frombuffer(self._memory.map(), np.uint8)
        self._model_id, self._seen = model_id, 0
        self._words = _words(whole, ref)
        self._buffers = [_buffer(whole, ref, number) for number in range(_BUFFERS)]
        self._own = np.zeros(ref.nbytes, np.uint8)
        self._tensors = views_of(torch.from_numpy(self._own), ref)

    def newest(self) -> Snapshot | None:
        """Return a snapshot that was not returned before, ``None`` if there is none.

        Its tensors are this reader's own and valid until the next call.
        """
        words = self._words
        if words is None or words[0] == self._seen:
            return None
        version, serial = self._read(words)
        return Snapshot(version, {self._model_id: self._tensors}, serial)

    def _read(self, words: Array) -> tuple[int, int]:
        """Copy the newest publication; return its version and serial."""
        for _ in range(_MOST_TRIES):
            number = int(words[0])
            buffer = number % _BUFFERS
            fence()
            if words[_STATE + buffer] != 2 * number:
                continue
            fence()  # nothing is read before its mark was, nor the mark again before all is
            np.copyto(self._own, self._buffers[buffer])
            version, serial = int(words[_VERSION + buffer]), int(words[_SERIAL + buffer])
            fence()
            if words[_STATE + buffer] == 2 * number:
                self._seen = number
                return version, serial
        raise GleanError(
            f"weights were published faster than they could be read {_MOST_TRIES} times in a row"
        )


def _words(whole: Array, ref: WeightsRef) -> Array:
    return whole[ref.offset : ref.offset + _HEADER].view(np.int64)


def _buffer(whole: Array, ref: WeightsRef, number: int) -> Array:
    start = ref.offset + _HEADER + number * ref.nbytes
    return whole[start : start + ref.nbytes]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the tensor's memory is its values, one after another, and can be read here."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not ordinary or tensor.device.type != "cpu" or tensor.requires_grad:
        return False
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
