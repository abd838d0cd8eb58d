"""Slabs of memory: workers write windows of them, users hold leases on them.

An arena is cut into slots of one slab each. A slab holds every field of one batch, env-major and
in the order of the delivered batch, so that handing it over makes views and copies nothing:

    slab = [field 0: W x P x T x ...][field 1: ...] ...     (64-byte aligned)

Who may touch a slot is the arena's business: `acquire` takes a free one for writing, `lease` hands
it to the user as fresh tensors, and it is free again when the last of those tensors (or any slice
or numpy view of one) is gone.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from gleanrl.core.keys import Key
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Block, WindowRef
from gleanrl.memory.window import RolloutWindow

_ALIGN = 64
_View: TypeAlias = tuple[Key, tuple[int, ...], tuple[int, ...], int]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Arena:
    """``slots`` slabs, each the memory of one batch of ``workers`` rollouts.

    Untouched slots cost address space only; free slots are used last-in first-out, so a consumer
    that lets go of its batches keeps the collector in the same warm pages.
    """

    def __init__(
        self,
        layout: Layout,
        steps: int,
        slots: int,
        workers: int = 1,
        lead: tuple[int, ...] | None = None,
    ) -> None:
        """Reserve the memory.

        Args:
            layout: The fields of one step of one worker.
            steps: Steps per rollout, ``T``.
            slots: Batches that can exist at once.
            workers: Rollouts per batch, ``W``.
            lead: Shape in which ``W x P`` environments are handed out; ``(W, P)`` by default.
        """
        self.layout = layout
        self.steps = steps
        self.workers = workers
        self._offsets: dict[Key, int] = {}
        size = 0
        for field in layout.fields:
            self._offsets[field.key] = size
            size += _aligned(field.nbytes * layout.num_envs * steps * workers)
        self.slab_nbytes = max(size, _ALIGN)
        self._views_of = self._plan_views((workers, layout.num_envs) if lead is None else lead)
        self._memory = mmap.mmap(-1, _page_aligned(self.slab_nbytes) * slots)
        self._free = list(range(slots))[::-1]
        # Finalizers run in any thread, also inside the garbage collector: all they may do is
        # append.
        self._returned: deque[int] = deque()
        self._windows: dict[tuple[int, int], RolloutWindow] = {}

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return len(self._memory)

    def acquire(self) -> int | None:
        """Take a free slot for writing, or return ``None`` if every slot is held."""
        self._reclaim()
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Give back a slot that was acquired and not leased."""
        self._free.append(slot)

    def has_free(self) -> bool:
        """Tell whether `acquire` would succeed."""
        self._reclaim()
        return bool(self._free)

    def _reclaim(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def reference(self, slot: int, worker: int) -> WindowRef:
        """Describe the part of ``slot`` that ``worker`` writes."""
        envs, steps = self.layout.num_envs, self.steps
        blocks = []
        for field in self.layout.fields:
            row = field.nbytes
            start = slot * _page_aligned(self.slab_nbytes) + self._offsets[field.key]
            blocks.append(Block(field, start + worker * envs * steps * row, steps * row, row))
        return WindowRef(slot, worker, envs, steps, tuple(blocks))

    def window(self, reference: WindowRef) -> RolloutWindow:
        """Map the window ``reference`` describes; the same object every time."""
        place = (reference.slot, reference.worker)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = map_window(self._memory, reference)
        return window

    def lease(self, slot: int) -> dict[Key, torch.Tensor]:
        """Hand ``slot`` out as fresh tensors ``[*lead, T, ...]``; it returns when all are gone."""
        start = slot * _page_aligned(self.slab_nbytes)
        base = np.frombuffer(self._memory, np.uint8, self.slab_nbytes, start)
        weakref.finalize(base, self._returned.append, slot).atexit = False
        return self._views(torch.from_numpy(base))

    def copy(self, slot: int) -> dict[Key, torch.Tensor]:
        """Copy ``slot`` into ordinary memory, ``[*lead, T, ...]``; the slot stays acquired."""
        start = slot * _page_aligned(self.slab_nbytes)
        base = np.frombuffer(self._memory, np.uint8, self.slab_nbytes, start).copy()
        return self._views(torch.from_numpy(base))

    def _plan_views(self, lead: tuple[int, ...]) -> list[tuple[torch.dtype, list[_View]]]:
        """Group the fields by dtype, with shapes, strides and offsets in elements."""
        plan: dict[torch.dtype, list[_View]] = {}
        for field in self.layout.fields:
            shape = (*lead, self.steps, *field.shape)
            offset = self._offsets[field.key] // field.dtype.itemsize
            view = (field.key, shape, _contiguous_strides(shape), offset)
            plan.setdefault(field.dtype, []).append(view)
        return list(plan.items())

    def _views(self, base: torch.Tensor) -> dict[Key, torch.Tensor]:
        views = {}
        for dtype, group in self._views_of:
            typed = base.view(dtype)
            for key, shape, strides, offset in group:
                views[key] = typed.as_strided(shape, strides, offset)
        return views


def map_window(memory: mmap.mmap, reference: WindowRef) -> RolloutWindow:
    """Map the window described by ``reference`` in ``memory``."""
    tensors: dict[Key, torch.Tensor] = {}
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for block in reference.blocks:
        field, item = block.field, block.field.dtype.itemsize
        typed = whole.view(field.dtype)
        shape = (reference.envs, reference.steps, *field.shape)
        inner = _contiguous_strides(field.shape)
        strides = (block.env_stride // item, block.time_stride // item, *inner)
        tensors[field.key] = typed.as_strided(shape, strides, block.offset // item)
    return RolloutWindow(tensors, reference.envs, reference.steps)


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def nest(flat: Mapping[Key, torch.Tensor]) -> dict[str, object]:
    """Turn ``{("next", "reward"): x}`` into ``{"next": {"reward": x}}``."""
    tree: dict[str, object] = {}
    for key, value in flat.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})  # type: ignore[assignment]  # inner nodes are dicts
        node[key[-1]] = value
    return tree
