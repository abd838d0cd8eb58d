"""Slabs of memory: workers write windows of them, users hold leases on them."""

from __future__ import annotations

import enum
import math
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout, numpy_dtype
from gleanrl.core.messages import Block, WindowRef
from gleanrl.core.protocols import SharedMemory
from gleanrl.core.window import Array, Window
from gleanrl.memory.shared import use_huge_pages

Views: TypeAlias = dict[Key, torch.Tensor]

_ALIGN = 64
MARK = 64
"""Bytes behind the last field."""


def batch_rows(window: Window, key: Key, batch: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """Return one view per step of ``window`` in the shape ``batch`` of its environments."""
    if len(batch) == 1:
        return window.tensor_rows(key)
    tensor = window.tensor(key)
    if not batch:
        return tensor[0].unbind(0)
    return tensor.view((*batch, *tensor.shape[1:])).unbind(len(batch))


class Order(enum.Enum):
    """The arrangement of several workers' rollouts in one batch."""

    STACKED = "stacked"
    """``[W, *batch, T]``; all workers have the same shape."""
    ENVS = "envs"
    """Concatenated along the first environment dimension; all of the same length."""
    TIME = "time"
    """Concatenated in time, ``[*batch, sum of T]``; all with the same environments."""
    APART = "apart"
    """Each rollout separate, for a batch by copying."""


class View(NamedTuple):
    """One delivered field: ``slab[start:stop]`` as ``shape``."""

    key: Key
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype
    known: np.dtype[Any] | None
    """The same dtype of numpy, if it has that."""


class Slab:
    """The plan of one batch's memory. Numbers only; owns nothing.

    A slab holds every field of one batch, environment-major and in the order of the delivered
    batch, so that handing it over makes views and copies nothing::

        slab = [field 0][field 1] ... [mark]     (64-byte aligned)

    The mark is no data: a transport that copies a rollout here may note there that it is complete.
    Fields on a device lie beside the slab, in memory of their own.
    """

    def __init__(
        self, layouts: Sequence[Layout], steps: Sequence[int], order: Order = Order.STACKED
    ) -> None:
        """Lay out the rollouts of ``steps[w]`` steps of workers with ``layouts[w]``.

        All workers have the same fields; the caller checks the further conditions of `Order`.
        """
        self.layouts = tuple(layouts)
        self.steps = tuple(steps)
        self.order = order
        self._blocks: list[list[Block]] = [[] for _ in layouts]
        size = 0
        groups = len(layouts) if order is Order.APART else 1
        self.views: list[list[View]] = [[] for _ in range(groups)]
        """Per group that is delivered as one: its fields."""
        self.batch_shapes: list[tuple[int, ...]] = []
        """Per group: its shape, time last, without the fields' own dimensions."""
        for group in range(groups):
            total = sum(self.steps) if order is Order.TIME else self.steps[group]
            self.batch_shapes.append((*self._lead(group), total))
        self.on_device = [field for field in layouts[0].fields if field.device is not None]
        """Fields beside the slab; where there are any, there is one worker."""
        for field in layouts[0].fields:
            for group in range(groups) if field.device is None else ():
                size = self._lay(group, field, size)
        self.nbytes = -(-(size + MARK) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _lay(self, group: int, field: Field, start: int) -> int:
        """Place one field of the workers in ``group``; return where the next may begin."""
        row, order = field.nbytes, self.order
        members = [group] if order is Order.APART else range(len(self.layouts))
        total_steps = sum(self.steps) if order is Order.TIME else 0
        place = start
        for worker in members:
            steps, envs = self.steps[worker], self.layouts[worker].num_envs
            env_stride = (total_steps or steps) * row
            self._blocks[worker].append(Block(field, place, env_stride, row))
            place += steps * row * (1 if order is Order.TIME else envs)
        shape = (*self.batch_shapes[group], *field.shape)
        stop = start + math.prod(shape) * field.dtype.itemsize
        known = numpy_dtype(field.dtype)
        self.views[group].append(View(field.key, shape, start, stop, field.dtype, known))
        return -(-stop // _ALIGN) * _ALIGN

    def _lead(self, group: int) -> tuple[int, ...]:
        """Shape of a delivered group, without time and the fields' own dimensions."""
        batch = self.layouts[group].batch_shape
        if self.order is Order.STACKED:
            return (len(self.layouts), *batch)
        if self.order is Order.ENVS:
            return (sum(layout.batch_shape[0] for layout in self.layouts), *batch[1:])
        return batch

    def reference(self, slot: int, worker: int, base: int, arena: int) -> WindowRef:
        """Describe the part of ``worker`` in the slab of ``slot`` that begins at byte ``base``."""
        blocks = tuple(
            Block(block.field, base + block.offset, block.env_stride, block.time_stride)
            for block in self._blocks[worker]
        )
        envs, steps = self.layouts[worker].num_envs, self.steps[worker]
        return WindowRef(slot, worker, envs, steps, blocks, arena, len(self.layouts) == 1)


def packed(reference: WindowRef) -> tuple[WindowRef, int]:
    """Return the same window in memory of its own, beginning at byte 0, and its size.

    A slab of one worker is laid out like that; its mark is the last `MARK` bytes.
    """
    blocks, place = [], 0
    for block in reference.blocks:
        row = block.field.nbytes
        blocks.append(Block(block.field, place, reference.steps * row, row))
        place += -(-reference.envs * reference.steps * row // _ALIGN) * _ALIGN
    return replace(reference, blocks=tuple(blocks)), place + MARK


class _Lease(weakref.ref[Array]):
    """Tells when the array of a batch no longer exists.

    It is no `weakref.finalize`: Python looks through all of these at exit, and fails if a thread
    that still collects makes or drops one meanwhile.
    """

    __slots__ = ("slot",)
    slot: int


class Arena:
    """``slots`` slabs, each the memory of one batch.

    Untouched slots cost address space only; free slots are used last-in first-out, so a consumer
    that lets go of its batches keeps the collector in the same warm pages.

    Memory on a device is allocated anew for each batch, as torch uses freed memory of devices again
    without asking the driver. So it needs no lease.
    """

    def __init__(
        self, slab: Slab, slots: int, shared: SharedMemory | None = None, number: int = 0
    ) -> None:
        """Reserve the memory of ``slots`` batches that can exist at once.

        It is private, or ``shared``, which is mapped at first use so that several arenas can lie in
        it. Windows name the arena by its ``number``.
        """
        self._number = number
        self.slab = slab
        self.nbytes = slab.nbytes * slots
        """Bytes reserved."""
        self._shared = shared
        self._base = 0 if shared is None else shared.reserve(self.nbytes)
        self._memory = _private_memory(self.nbytes) if shared is None else None
        self._free = list(range(slots))[::-1]
        # Leases call back in any thread, also inside the garbage collector: all that may do is
        # append.
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()
        self._windows: dict[tuple[int, int], Window] = {}
        self._on_device: dict[int, Views] = {}
        """By slot that is being written: fields on a device, ``[P, T, ...]``."""

    def _map(self) -> mmap.mmap:
        if self._memory is None:
            assert self._shared is not None
            self._memory = self._shared.map()
        return self._memory

    def acquire(self) -> int | None:
        """Take a free slot for writing, or return ``None`` if every slot is held."""
        self._reclaim()
        if not self._free:
            return None
        slot = self._free.pop()
        if self.slab.on_device:
            envs, (steps,) = self.slab.layouts[0].num_envs, self.slab.steps
            window = Window.allocate(self.slab.on_device, envs, steps)
            self._on_device[slot] = {key: window.tensor(key) for key in window.keys()}
        return slot

    def release(self, slot: int) -> None:
        """Return a slot that was acquired and not leased."""
        self._drop_on_device(slot)
        self._free.append(slot)

    def _drop_on_device(self, slot: int) -> None:
        """Let go of memory on devices, which only the user's batch keeps from now on."""
        self._on_device.pop(slot, None)
        self._windows.pop((slot, 0), None)

    @property
    def leased(self) -> int:
        """The number of slots that are leased."""
        self._reclaim()
        return len(self._leases)

    def _reclaim(self) -> None:
        while self._returned:
            slot = self._returned.popleft().slot
            del self._leases[slot]
            self._free.append(slot)

    def reference(self, slot: int, worker: int) -> WindowRef:
        """Describe the part of ``slot`` that ``worker`` writes."""
        return self.slab.reference(slot, worker, self._start(slot), self._number)

    def _start(self, slot: int) -> int:
        return self._base + slot * self.slab.nbytes

    def window(self, reference: WindowRef) -> Window:
        """Map the window ``reference`` describes; the same object every time."""
        place = (reference.slot, reference.worker)
        window = self._windows.get(place)
        if window is None:
            window = map_window(self._map(), reference, self._on_device.get(reference.slot))
            self._windows[place] = window
        return window

    def view(self, slot: int) -> tuple[Array, list[Views]]:
        """Return fresh tensors over ``slot``, and the array that all of them keep alive.

        They may be made while the slot is still written; `lease` hands them out.

        Returns:
            The array, and one set of fields per group of the slab: one, unless workers are kept
            apart.
        """
        base = np.frombuffer(self._map(), np.uint8, self.slab.nbytes, self._start(slot))
        return base, self._views_over(base, slot)

    def lease(self, slot: int, base: Array) -> None:
        """Lease the tensors of `view`; ``slot`` is free when none of them exists any more."""
        self._leases[slot] = lease = _Lease(base, self._returned.append)
        lease.slot = slot
        if self.slab.on_device:
            self._drop_on_device(slot)

    def copy(self, slot: int) -> list[Views]:
        """Copy ``slot`` into ordinary memory; the slot stays acquired."""
        base = np.frombuffer(self._map(), np.uint8, self.slab.nbytes, self._start(slot)).copy()
        return self._views_over(base, slot)

    def _views_over(self, base: Array, slot: int) -> list[Views]:
        """Return tensors over ``base``, a slab in uint8, and those of ``slot`` on a device."""
        # Every field gets a storage of its own: saving or copying one tensor takes only its bytes.
        # All of them keep ``base`` alive, and with it the lease.
        groups = []
        for fields in self.slab.views:
            views = {}
            for key, shape, start, stop, dtype, known in fields:
                if known is None:
                    views[key] = torch.from_numpy(base[start:stop]).view(dtype).view(shape)
                else:
                    views[key] = torch.from_numpy(base[start:stop].view(known).reshape(shape))
            for field in self.slab.on_device:
                shape = (*self.slab.batch_shapes[0], *field.shape)
                views[field.key] = self._on_device[slot][field.key].view(shape)
            groups.append(views)
        return groups


def _private_memory(nbytes: int) -> mmap.mmap:
    """Reserve anonymous memory; a process forked from this one sees its own copy of it."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise ConfigError(
            f"batches of this size need {nbytes:,} bytes of memory, which cannot be reserved "
            f"({err}); lower frames_per_batch"
        ) from err
    use_huge_pages(memory)
    return memory


@torch.inference_mode(False)
def map_window(memory: mmap.mmap, reference: WindowRef, more: Views | None = None) -> Window:
    """Map the window described by ``reference`` in ``memory``, with ``more`` fields in others."""
    return window_over(torch.frombuffer(memory, dtype=torch.uint8), reference, more)


def window_over(memory: torch.Tensor, reference: WindowRef, more: Views | None = None) -> Window:
    """Return the window ``reference`` describes in ``memory``, which is uint8 and contiguous."""
    tensors: dict[Key, torch.Tensor] = dict(more or {})
    for block in reference.blocks:
        field, item = block.field, block.field.dtype.itemsize
        typed = memory.view(field.dtype)
        shape = (reference.envs, reference.steps, *field.shape)
        inner = (math.prod(field.shape[axis + 1 :]) for axis in range(len(field.shape)))
        strides = (block.env_stride // item, block.time_stride // item, *inner)
        tensors[field.key] = typed.as_strided(shape, strides, block.offset // item)
    return Window(tensors, reference.envs, reference.steps)
