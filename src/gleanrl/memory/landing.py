"""Rollouts that arrive as one block of bytes, and where they belong in the learner's memory."""

from __future__ import annotations

import torch

from gleanrl.core.messages import Block, WindowRef
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow


class Landing:
    """One window as the block in which its rollouts travel.

    If the window lies in one piece, which that of an asynchronous worker does, ``flat`` is the
    window's own memory; otherwise it is memory to be copied from.
    """

    def __init__(self, window: RolloutWindow, reference: WindowRef) -> None:
        """Prepare for rollouts into ``window``, which ``reference`` describes."""
        plan, nbytes = packed(reference)
        self._window = window
        self._parts: RolloutWindow | None = None
        own = _own_memory(window, reference, plan, nbytes)
        if own is None:
            own = torch.empty(nbytes, dtype=torch.uint8)
            self._parts = window_over(own, plan)
        self.flat = own
        """uint8 ``[nbytes]``: where the block is to be received."""

    def settle(self) -> None:
        """Put what was received where it belongs."""
        if self._parts is not None:
            for key in self._window.keys():
                self._window.tensor(key).copy_(self._parts.tensor(key))


def _own_memory(
    window: RolloutWindow, reference: WindowRef, plan: WindowRef, nbytes: int
) -> torch.Tensor | None:
    start = reference.blocks[0].offset
    if any(_moved(b, start) != p for b, p in zip(reference.blocks, plan.blocks, strict=True)):
        return None
    storage = window.tensor(reference.blocks[0].field.key).untyped_storage()
    flat: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage, start, (nbytes,), (1,))
    return flat


def _moved(block: Block, start: int) -> Block:
    return Block(block.field, block.offset - start, block.env_stride, block.time_stride)
