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
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key
from gleanrl.core.layout import Layout, numpy_dtype
from gleanrl.core.messages import Block, WindowRef
from gleanrl.core.protocols import Array
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.window import RolloutWindow

_ALIGN = 64
_View: TypeAlias = tuple[Key, tuple[int, ...], int, int, torch.dtype, "np.dtype[Any] | None"]


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
        shared: SharedMemory | None = None,
    ) -> None:
        """Reserve the memory.

        Args:
            layout: The fields of one step of one worker.
            steps: Steps per rollout, ``T``.
            slots: Batches that can exist at once.
            workers: Rollouts per batch, ``W``.
            shared: Memory that worker processes map; private memory by default.
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
        nbytes = _page_aligned(self.slab_nbytes) * slots
        if shared is None:
            self._memory = _private_memory(nbytes)
        else:
            shared.resize(nbytes)
            self._memory = shared.map()
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
        return self._views(base)

    def copy(self, slot: int) -> dict[Key, torch.Tensor]:
        """Copy ``slot`` into ordinary memory, ``[*lead, T, ...]``; the slot stays acquired."""
        start = slot * _page_aligned(self.slab_nbytes)
        base = np.frombuffer(self._memory, np.uint8, self.slab_nbytes, start).copy()
        return self._views(base)

    def _plan_views(self, lead: tuple[int, ...]) -> list[_View]:
        plan: list[_View] = []
        for field in self.layout.fields:
            shape = (*lead, self.steps, *field.shape)
            start = self._offsets[field.key]
            stop = start + math.prod(shape) * field.dtype.itemsize
            plan.append((field.key, shape, start, stop, field.dtype, numpy_dtype(field.dtype)))
        return plan

    def _views(self, base: Array) -> dict[Key, torch.Tensor]:
        # Every field gets a storage of its own: saving or copying one tensor takes only its bytes.
        # All of them keep ``base`` alive, and with it the lease.
        views = {}
        for key, shape, start, stop, dtype, known in self._views_of:
            if known is None:
                views[key] = torch.from_numpy(base[start:stop]).view(dtype).view(shape)
            else:
                views[key] = torch.from_numpy(base[start:stop].view(known).reshape(shape))
        return views


def _private_memory(nbytes: int) -> mmap.mmap:
    """Reserve anonymous memory; a process forked from this one sees its own copy of it.

    Raises:
        ConfigError: there is not that much.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, nbytes)
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as err:
        raise ConfigError(
            f"batches of this size need {nbytes:,} bytes of memory, which cannot be reserved "
            f"({err}); lower frames_per_batch"
        ) from err


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
