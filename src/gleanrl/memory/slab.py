"""Where every worker's rollout lies in the memory of one batch, and what shape that has.

A slab holds every field of one batch, environment-major and in the order of the delivered batch,
so that handing it over makes views and copies nothing:

    slab = [field 0][field 1] ... [mark]     (64-byte aligned)

The mark is no data: a transport that copies a rollout here may note there that it is complete.
"""

from __future__ import annotations

import enum
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.messages import Block, WindowRef

_ALIGN = 64
MARK = 64
"""Bytes behind the last field."""


class Order(enum.Enum):
    """How the rollouts of several workers make up one batch."""

    STACKED = "stacked"
    """``[W, *batch, T]``; all workers alike."""
    ENVS = "envs"
    """One after another along the first environment dimension; all of the same length."""
    TIME = "time"
    """One after another in time, ``[*batch, sum of T]``; all with the same environments."""
    APART = "apart"
    """Each for itself, to be put together by a copy."""


@dataclass(frozen=True, slots=True)
class View:
    """One field as it is handed out: ``slab[start:stop]`` as ``shape``."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


class Slab:
    """The plan of one batch's memory. Numbers only; owns nothing."""

    def __init__(
        self, layouts: Sequence[Layout], steps: Sequence[int], order: Order = Order.STACKED
    ) -> None:
        """Lay out the rollouts of ``steps[w]`` steps of workers with ``layouts[w]``.

        All workers have the same fields; what `Order` asks for besides is the caller's to check.
        """
        self.layouts = tuple(layouts)
        self.steps = tuple(steps)
        self.order = order
        self._blocks: list[list[Block]] = [[] for _ in layouts]
        size = 0
        groups = len(layouts) if order is Order.APART else 1
        self.views: list[list[View]] = [[] for _ in range(groups)]
        """Per group that is handed out as one: its fields."""
        self.batch_shapes: list[tuple[int, ...]] = []
        """Per group: its shape, time last, without the fields' own dimensions."""
        for group in range(groups):
            total = sum(self.steps) if order is Order.TIME else self.steps[group]
            self.batch_shapes.append((*self._lead(group), total))
        for field in layouts[0].fields:
            for group in range(groups):
                size = self._lay(group, field, size)
        self.nbytes = _page_aligned(size + MARK)

    def _lay(self, group: int, field: Field, start: int) -> int:
        """Place one field of the workers in ``group``; return where the next may begin."""
        row, order = field.nbytes, self.order
        members = [group] if order is Order.APART else range(len(self.layouts))
        total_steps = sum(self.steps) if order is Order.TIME else 0
        place = start
        for worker in members:
            layout, steps = self.layouts[worker], self.steps[worker]
            if order is Order.TIME:
                self._blocks[worker].append(Block(field, place, total_steps * row, row))
                place += steps * row
            else:
                self._blocks[worker].append(Block(field, place, steps * row, row))
                place += layout.num_envs * steps * row
        shape = (*self.batch_shapes[group], *field.shape)
        stop = start + math.prod(shape) * field.dtype.itemsize
        self.views[group].append(View(field.key, shape, field.dtype, start, stop))
        return -(-stop // _ALIGN) * _ALIGN

    def _lead(self, group: int) -> tuple[int, ...]:
        """Shape of what is handed out as one, without time and the fields' own dimensions."""
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
    """Return the same window in memory of its own, beginning at byte 0, and how large that is.

    A slab of one worker is laid out like that; its mark is the last `MARK` bytes.
    """
    blocks, place = [], 0
    for block in reference.blocks:
        row = block.field.nbytes
        blocks.append(Block(block.field, place, reference.steps * row, row))
        place += -(-reference.envs * reference.steps * row // _ALIGN) * _ALIGN
    return replace(reference, blocks=tuple(blocks)), place + MARK


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
