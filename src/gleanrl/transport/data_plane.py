"""The transfer of the tensors of rollouts and weights between the learner and its nodes.

Commands and replies travel on each node's connection. Data travel between two `Pair`s that a
`DataPlane` makes: one in the learner, which receives rollouts and sends weights, and one in the
node. Only the order of calls tells which tensor is which.

A rollout travels as the block that `packed` lays out, in as few pieces as allow the bulk of it to
be received where it belongs. Both sides work the pieces out from the window's reference. The mark
ends the last piece: where pieces arrive in order, a rollout is whole when its mark is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from gleanrl.core.messages import Block, WindowRef
from gleanrl.core.window import Array, Window
from gleanrl.memory.batch_arena import MARK, packed, window_over


class Transfer(Protocol):
    """One tensor on its way."""

    @property
    def over(self) -> bool:
        """Whether it is known to have ended."""

    def finish(self) -> None:
        """Wait for the end of the transfer; once over, do nothing.

        Raises:
            RuntimeError: the other side is gone, or stood still for too long; the pair cannot be
                used any more.
        """


class Pair(Protocol):
    """One side of the way for data, on which the first tensor sent is the first received."""

    def send(self, tensor: torch.Tensor) -> Transfer:
        """Begin to send ``tensor``, which must not change until the transfer is finished."""

    def receive(self, tensor: torch.Tensor) -> Transfer:
        """Begin to receive into ``tensor`` (uint8), which is whole once that is finished.

        Nothing is written to it after the transfer was destroyed.
        """


class Connection(Protocol):
    """One side of the connection between learner and node, on which a pair is agreed upon."""

    index: int
    """The node's."""
    own_address: str
    """This side's address on the network between the two."""

    def tell(self, key: str, value: bytes) -> None:
        """Send ``value`` to the other side."""

    def key(self, key: str) -> bytes:
        """Wait for the other side's value of ``key``."""


Connect = Callable[[Connection], Pair]


class DataPlane(Protocol):
    """A way for data, from the learner's side."""

    def connect(self, node: int) -> Connect:
        """Return a picklable function that makes the node's side in the node."""

    def pair(self, connection: Connection) -> Pair:
        """Make this side, while the node makes its own."""


_LARGE = 1 << 18
"""Bytes of a field from which on a transfer of its own is cheaper than a copy."""


def pieces_of(reference: WindowRef) -> list[tuple[int, int]]:
    """Return first and last byte (exclusive) of every piece of the packed block."""
    plan, nbytes = packed(reference)
    if in_one_piece(reference, plan):
        return [(0, nbytes)]
    cuts = {0, nbytes}
    for block, place in zip(reference.blocks, plan.blocks, strict=True):
        if _direct(reference, block):
            cuts |= {place.offset, place.offset + _extent(reference, block)}
    return list(pairwise(sorted(cuts)))


def in_one_piece(reference: WindowRef, plan: WindowRef) -> bool:
    """Tell whether the window lies in a slab of its own, which is laid out like ``plan``."""
    if not reference.alone:  # padding of this window may hold rows of others
        return False
    start = reference.blocks[0].offset
    return all(
        Block(b.field, b.offset - start, b.env_stride, b.time_stride) == p
        for b, p in zip(reference.blocks, plan.blocks, strict=True)
    )


def _extent(reference: WindowRef, block: Block) -> int:
    return reference.envs * reference.steps * block.field.nbytes


def _direct(reference: WindowRef, block: Block) -> bool:
    """Whether a field is large, and the window has it in one piece."""
    row = block.field.nbytes
    dense = block.time_stride == row and block.env_stride == reference.steps * row
    return dense and _extent(reference, block) >= _LARGE


def _mark_of(block: torch.Tensor) -> Array:
    mark: Array = block[-MARK:][:8].numpy().view(np.int64)
    return mark


class RolloutBlock:
    """A worker's memory for rollouts like one, laid out as they travel."""

    def __init__(self, reference: WindowRef) -> None:
        plan, nbytes = packed(reference)
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.window = window_over(self.bytes, plan)
        self.pieces = [self.bytes[start:end] for start, end in pieces_of(reference)]
        """In which it is sent."""
        self.mark = _mark_of(self.bytes)
        """int64 ``[1]``; ends the last piece and says which rollout it is."""


class Landing:
    """The memory that receives the pieces of a rollout, and the copies to be made afterwards."""

    def __init__(self, window: Window, reference: WindowRef) -> None:
        plan, nbytes = packed(reference)
        storage = window.tensor(reference.blocks[0].field.key).untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pieces: Sequence[torch.Tensor]
        """Per piece, uint8 memory to receive it into."""
        self.mark: Array
        """int64 ``[1]``: the mark of the rollout that has arrived last."""
        if in_one_piece(reference, plan):
            start = reference.blocks[0].offset
            whole = memory[start : start + nbytes]
            self.pieces, self.mark = [whole], _mark_of(whole)
            return
        aside = torch.zeros(nbytes, dtype=torch.uint8)  # in freed memory there may be a mark
        beside = window_over(aside, plan)
        direct: dict[int, torch.Tensor] = {}
        for block, place in zip(reference.blocks, plan.blocks, strict=True):
            key = block.field.key
            if _direct(reference, block):
                end = block.offset + _extent(reference, block)
                direct[place.offset] = memory[block.offset : end]
            else:
                self._copied.append((window.tensor(key), beside.tensor(key)))
        self.pieces = [direct.get(a, aside[a:b]) for a, b in pieces_of(reference)]
        self.mark = _mark_of(aside)

    def settle(self) -> None:
        """Copy the fields that were received outside of the window."""
        for target, source in self._copied:
            target.copy_(source)


class Arrival:
    """A rollout that is due by transfers.

    A wait for the end of a transfer ignores deadlines and interrupts, and takes long if the other
    side is gone in the middle of it. So no wait begins before the mark is there, which comes last.
    """

    def __init__(self, ticket: int, landing: Landing, pair: Pair) -> None:
        self._ticket, self._landing = ticket, landing
        self._transfers: list[Transfer] = []
        self._error: RuntimeError | None = None
        try:
            self._transfers += [pair.receive(piece) for piece in landing.pieces]
        except RuntimeError as err:
            self._error = err.with_traceback(None)  # which would keep the transfers

    @property
    def arrived(self) -> bool:
        """Whether `finish` would return at once."""
        if self._error is not None or self._landing.mark[0] == self._ticket:
            return True
        return all(transfer.over for transfer in self._transfers)

    def finish(self) -> None:
        """Wait until the rollout is in its window."""
        if self._error is not None:
            raise self._error
        for transfer in self._transfers:
            transfer.finish()
        if self._landing.mark[0] != self._ticket:
            raise RuntimeError("it did not come whole")
        self._landing.settle()
