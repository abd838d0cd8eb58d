"""What passes between the learner and Ray actors: rollouts and weights."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.core.messages import BoardRef, WindowRef
from gleanrl.core.protocols import Array
from gleanrl.memory.landing import in_one_piece
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.weights.flat import FlatBuffer, check_fit

_LENT_FROM = 1 << 18
"""Bytes of a rollout from which on copying costs more than making its tensors when it is there."""
_SHARE = 4
"""One part in so many of Ray's store may be in the hands of the user."""


class Loan:
    """A block in Ray's store, as memory that may be written.

    Ray marks what it returns read-only because others might have it, too. A rollout is nobody
    else's: only the reply refers to it, and that is forgotten when it was taken in.
    """

    def __init__(self, block: Array) -> None:
        """Keep ``block`` where it is for as long as this or an array made of it exists."""
        self._block = block
        self.nbytes = block.nbytes
        """Of the store."""
        _LOANS.add(self)
        plain = block.__array_interface__
        self.start: int = plain["data"][0]
        """Its address."""
        self.__array_interface__ = {**plain, "data": (self.start, False)}

    def keep(self) -> None:
        """Keep the block until this process ends, whatever becomes of this."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._block))


_LOANS: weakref.WeakSet[Loan] = weakref.WeakSet()
"""All of this process: they share one store."""


def _after_fork() -> None:
    # A child that let go of a block would tell the store so through its parent's connection, and
    # the store would give away what the parent still holds. Even the child's end must not do it.
    for loan in _LOANS:
        loan.keep()


os.register_at_fork(after_in_child=_after_fork)


class Lender:
    """Says which rollouts are handed out where they lie in Ray's store."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        """Lend a part of the ``capacity`` bytes, a function that is called when it matters.

        What other collectors of this process have lent counts, too.
        """
        self._capacity = capacity
        self._limit = 0
        self._writable: list[range] = []
        self._whole: dict[tuple[int, int, int], bool] = {}

    def lend(self, reference: WindowRef, block: Array) -> Array | None:
        """Return ``block``, writable; ``None`` if it has to be copied into its window."""
        if block.nbytes < _LENT_FROM or not self._is_whole(reference):
            return None
        if not self._limit:
            self._limit = self._capacity() // _SHARE
        if sum(loan.nbytes for loan in list(_LOANS)) + block.nbytes > self._limit:
            return None
        loan = Loan(block)
        if loan.start % 64 or not self._may_be_written(loan):
            return None
        return np.asarray(loan)

    def _is_whole(self, reference: WindowRef) -> bool:
        """Tell whether a window lies in a slab of its own; worked out once."""
        key = (reference.arena, reference.slot, reference.worker)
        whole = self._whole.get(key)
        if whole is None:
            whole = self._whole[key] = in_one_piece(reference, packed(reference)[0])
        return whole

    def _may_be_written(self, loan: Loan) -> bool:
        """Ask the kernel: a Ray that maps its store read-only would end who writes into it."""
        first, last = loan.start, loan.start + loan.nbytes - 1
        for known in self._writable:
            if first in known and last in known:
                return True
        self._writable = writable_memory()
        return any(first in known and last in known for known in self._writable)


def writable_memory() -> list[range]:
    """Return the addresses that this process may write."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:  # where there is no such file everything is copied
        return []
    for line in lines:
        place, mode, _ = line.split(maxsplit=2)
        if mode.startswith("rw"):
            first, end = place.split("-")
            found.append(range(int(first, 16), int(end, 16)))
    return found


class Landing:
    """Where in the learner's memory the bytes of one window's rollouts belong."""

    def __init__(self, window: RolloutWindow, reference: WindowRef) -> None:
        """Prepare for rollouts into ``window``, which ``reference`` describes."""
        plan, _ = packed(reference)
        self._parts: list[tuple[Array, slice]] = []
        for block in plan.blocks:
            target = window.tensor(block.field.key)
            if target.numel():
                rows = target.flatten(1).view(torch.uint8).numpy()
                self._parts.append((rows, slice(block.offset, block.offset + rows.size)))

    def fill(self, block: Array) -> None:
        """Copy a rollout, which came as uint8 ``[nbytes]``."""
        for rows, part in self._parts:
            np.copyto(rows, block[part].reshape(rows.shape))


class RayBoard:
    """The weights of one model, published to all actors."""

    def __init__(
        self,
        ref: BoardRef,
        put: Callable[[Array], Any],
        tell: Callable[[int, Any], None],
    ) -> None:
        """Publish what ``put`` has stored by means of ``tell``, under the number in ``ref``."""
        self.ref = ref
        self._put = put
        self._tell = tell
        self._buffer = FlatBuffer(ref)
        self._newest: Any = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, into one object and tell all actors of it.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        self._buffer.fill(tensors, version, serial)
        self._newest = self._put(self._buffer.bytes.numpy())
        self._tell(self.ref.offset, self._newest)
