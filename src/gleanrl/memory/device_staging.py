"""Page-locked memory between rows on the CPU and a policy on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

Entries: TypeAlias = Mapping[Any, tuple[tuple[int, ...], torch.dtype]]
"""By name: the shape of one environment's value, and its dtype."""
Tensors: TypeAlias = dict[Any, torch.Tensor]
_Places: TypeAlias = list[tuple[Any, torch.dtype, int, tuple[int, ...]]]
_ALIGN = 64


def can_stage(device: torch.device) -> bool:
    """Tell whether copies to and from ``device`` are faster from page-locked memory."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


class _Call(NamedTuple):
    """The memory of calls for one batch size."""

    places: _Places
    """Of the shown entries, in new memory on the device."""
    rows: Tensors
    sent: torch.Tensor
    """The bytes of ``rows``."""
    written: Tensors
    """The outputs, on the device."""
    there: torch.Tensor
    """The bytes of ``written``."""
    fetched: Tensors
    """The outputs, on the CPU."""
    here: torch.Tensor
    """The bytes of ``fetched``."""


class Staging:
    """Takes all entries of a policy's call to its device in one copy, and all outputs back in one.

    Each call is `rows`, `send` and `fetch`. The only wait is that of `fetch` for its own copy, by
    an event; sent entries have arrived by then. Page-locked memory is used again by the next call.
    Memory on the device that the policy was shown is not, because the policy may keep it.
    """

    def __init__(self, device: torch.device, shown: Entries, written: Entries) -> None:
        self._device, self._entries = device, (shown, written)
        self._event = torch.Event(device)
        self._calls: dict[tuple[int, ...], _Call] = {}
        """By batch size."""
        self._call: _Call
        self._sent = self._there = self._here = torch.empty(0, dtype=torch.uint8)

    def rows(self, batch: tuple[int, ...]) -> Tensors:
        """Return the memory for the entries of a call for ``batch``, to be written."""
        if batch not in self._calls:
            self._calls[batch] = self._lay(batch)
        self._call = self._calls[batch]
        return self._call.rows

    def send(self) -> Tensors:
        """Return the entries of `rows` in new memory on the device, before they have arrived."""
        return _over(self._call.sent.to(self._device, non_blocking=True), self._call.places)

    def fetch(self, values: Mapping[Any, torch.Tensor]) -> Tensors:
        """Return the outputs ``values`` of the call on the CPU; the next call overwrites them."""
        call = self._call
        for name, place in call.written.items():
            place.copy_(values[name])
        call.here.copy_(call.there, non_blocking=True)
        self._event.record(torch.accelerator.current_stream(self._device))
        self._event.synchronize()
        return call.fetched

    def _lay(self, batch: tuple[int, ...]) -> _Call:
        (shown, size), (written, back) = (_places(each, batch) for each in self._entries)
        if size > len(self._sent) or back > len(self._here):
            self._calls.clear()
            self._sent = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._here = torch.empty(back, dtype=torch.uint8, pin_memory=True)
            self._there = torch.empty(back, dtype=torch.uint8, device=self._device)
        sent, there, here = self._sent[:size], self._there[:back], self._here[:back]
        fetched = _over(here, written)
        return _Call(shown, _over(sent, shown), sent, _over(there, written), there, fetched, here)


def _places(entries: Entries, batch: tuple[int, ...]) -> tuple[_Places, int]:
    """Return where each entry begins, in values of its dtype, and the bytes of all."""
    places: _Places = []
    size = 0
    for name, (shape, dtype) in entries.items():
        whole = (*batch, *shape)
        places.append((name, dtype, size // dtype.itemsize, whole))
        size += -(-math.prod(whole) * dtype.itemsize // _ALIGN) * _ALIGN
    return places, size


def _over(memory: torch.Tensor, places: _Places) -> Tensors:
    """Return a tensor over ``memory`` for each place; each counts its own writes, unlike views."""
    storage, device = memory.untyped_storage(), memory.device
    return {
        name: torch.empty(0, dtype=dtype, device=device).set_(storage, start, shape)  # type: ignore[call-overload]
        for name, dtype, start, shape in places
    }
