"""Where rollouts land, and how they are handed over: as views of an arena, or as payloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError
from gleanrl.core.keys import TIME
from gleanrl.core.protocols import Array, Backend
from gleanrl.memory.arena import Arena, Views
from gleanrl.memory.slab import Order
from gleanrl.memory.trees import tensordict_over, time_named


class Slots(Protocol):
    """The memory of batches of one shape."""

    copies: int
    """Batches copied because the user held every slot."""
    nbytes: int
    """Bytes reserved."""

    def acquire(self) -> int:
        """Take a free slot for writing."""
        ...

    def windows(self, slot: int) -> Sequence[m.WindowRef]:
        """Return where each worker writes its part of ``slot``."""
        ...

    def prepare(self, slot: int) -> None:
        """Do what can be done for `hand_over` before the rollouts are there."""
        ...

    def release(self, slot: int) -> None:
        """Give back a slot that was not handed over."""
        ...

    def hand_over(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase | None:
        """Return the batch that was written into ``slot``; its memory is the caller's.

        ``None`` where workers keep what they collect.
        """
        ...


class SlabSlots:
    """Slots of an arena.

    The memory rule: a batch is handed out as a view of its slot, unless that would leave no slot to
    write the next one into. Then it is copied into ordinary memory and its slot used again: nobody
    waits for the user to let go, and what the user holds never changes. A rollout that the backend
    has left elsewhere is handed out there. Where a rollout did not fit the layout and travelled as
    a payload, the whole batch is put together from payloads and copies.
    """

    def __init__(
        self,
        arena: Arena,
        slots: int,
        device: torch.device | None,
        *,
        open_payload: Callable[[m.Payload], TensorDictBase] | None = None,
        same_memory: bool = False,
        trim: bool = False,
        cat_dim: int = 0,
    ) -> None:
        """Hand out slots of ``arena``.

        Args:
            arena: Has ``slots`` slots.
            slots: How many.
            device: Where batches are delivered; ``None`` leaves tensors where they are.
            open_payload: Returns the rollout of a worker whose data did not fit the layout.
            same_memory: Hand the same `TensorDict` out every time.
            trim: Leave out steps that a stopped rollout never reached, where there is a place to
                leave them out from (not where rollouts are stacked).
            cat_dim: Along which dimension rollouts that lie apart are put together.
        """
        self._arena = arena
        self._device = device
        self._open = open_payload
        self._same_memory = same_memory
        self._trim = trim and arena.slab.order is not Order.STACKED
        self._cat_dim = cat_dim
        self._kept: TensorDictBase | None = None
        self._elsewhere = False
        """Whether the last batch did not lie in its slot."""
        self._prepared: tuple[int, Array, list[TensorDict]] | None = None
        self.copies = 0
        self.nbytes = arena.nbytes
        self._shapes = arena.slab.batch_shapes
        self._names = time_last(len(self._shapes[0]))
        self._groups = arena.slab.layouts[0].groups
        workers = range(len(arena.slab.layouts))
        self._windows = [[arena.reference(slot, w) for w in workers] for slot in range(slots)]

    def acquire(self) -> int:
        """Take a free slot for writing."""
        if self._same_memory:
            return 0
        slot = self._arena.acquire()
        if slot is None:
            raise GleanError("no slot is free: a batch was handed out that should have been copied")
        return slot

    def windows(self, slot: int) -> Sequence[m.WindowRef]:
        """Return where each worker writes its part of ``slot``."""
        return self._windows[slot]

    def prepare(self, slot: int) -> None:
        """Make the tensors of a batch while workers write it: they stand still afterwards."""
        if self._elsewhere:  # most likely the next one will be, too
            return
        base, groups = self._arena.view(slot)
        self._prepared = slot, base, self._parts(groups)

    def release(self, slot: int) -> None:
        """Give back a slot that was not handed over."""
        if not self._same_memory:
            self._arena.release(slot)

    def hand_over(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase:
        """Return the batch in ``slot``: a view, or a copy if no other slot is free."""
        if any(report.payload is not None for report in reports):
            return self._opened(slot, reports)
        if self._same_memory:
            if self._kept is None:
                self._kept = self._batch(self._leased(slot), reports)
            return self._kept
        block = reports[0].block if reports else None
        if block is not None:
            self._prepared, self._elsewhere = None, True
            batch = self._batch(self._parts(self._arena.views_over(block)), reports)
            self._arena.release(slot)
            return batch
        if self._arena.has_free():
            return self._batch(self._leased(slot), reports)
        self.copies += 1
        self._prepared = None
        batch = self._batch(self._parts(self._arena.copy(slot)), reports)
        self._arena.release(slot)
        return batch

    def _opened(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase:
        """Put a batch together of which some rollouts are payloads."""
        assert self._open is not None
        parts = [
            self._copied(self._windows[slot][worker])
            if report.payload is None
            else _home(self._open(report.payload))
            for worker, report in enumerate(reports)
        ]
        self._prepared = None
        self.release(slot)
        if self._trim:
            parts = trimmed(parts, reports, self._cat_dim)
        batch = put_together(parts, self._arena.slab.order is Order.STACKED, self._cat_dim)
        return batch if self._device is None else batch.to(self._device)

    def _copied(self, reference: m.WindowRef) -> TensorDict:
        """Copy the rollout of one worker out of its window."""
        layout, window = self._arena.slab.layouts[reference.worker], self._arena.window(reference)
        shape = (*layout.batch_shape, window.steps)
        views = {
            field.key: window.tensor(field.key).clone().view((*shape, *field.shape))
            for field in layout.fields
        }
        return tensordict_over(views, shape, time_last(len(shape)), layout.groups)

    def _leased(self, slot: int) -> list[TensorDict]:
        if self._prepared is None or self._prepared[0] != slot:
            self._elsewhere = False
            self.prepare(slot)
        assert self._prepared is not None
        _, base, parts = self._prepared
        self._prepared = None  # only who gets them may keep them alive
        self._arena.lease(slot, base)
        return parts

    def _parts(self, groups: Sequence[Views]) -> list[TensorDict]:
        return [
            tensordict_over(views, shape, self._names, self._groups)
            for views, shape in zip(groups, self._shapes, strict=True)
        ]

    def _batch(self, parts: list[TensorDict], reports: Sequence[m.Report]) -> TensorDictBase:
        steps = self._arena.slab.steps
        short = self._trim and any(r.steps < t for r, t in zip(reports, steps, strict=True))
        if short:
            parts = self._trimmed(parts, reports)
        batch = parts[0]
        if len(parts) > 1:
            batch = joined(parts, self._cat_dim)
        return batch if self._device is None else batch.to(self._device)

    def _trimmed(self, parts: list[TensorDict], reports: Sequence[m.Report]) -> list[TensorDict]:
        slab = self._arena.slab
        if slab.order is Order.TIME:
            whole, start, kept = parts[0], 0, []
            for report, steps in zip(reports, slab.steps, strict=True):
                kept.append(whole[..., start : start + report.steps])
                start += steps
            return [joined(kept, whole.ndim - 1)]
        return trimmed(parts, reports, self._cat_dim)


def time_last(ndim: int) -> list[str | None]:
    """Return the names of the dimensions of a batch."""
    return [None] * (ndim - 1) + [TIME]


def _home(payload: TensorDictBase) -> TensorDictBase:
    """Return a rollout as those are that come out of windows: on the CPU, without a device."""
    return payload.cpu().clear_device_()


_Part = TypeVar("_Part", bound=TensorDictBase)


def trimmed(parts: Sequence[_Part], reports: Sequence[m.Report], dim: int) -> list[_Part]:
    """Leave out what stopped rollouts, to be put together along ``dim``, never reached."""
    if dim in (-1, parts[0].ndim - 1):
        return [part[..., : r.steps] for part, r in zip(parts, reports, strict=True)]
    most = max(report.steps for report in reports)  # one part may hold several rollouts
    return [part[..., :most] for part in parts]


def put_together(parts: Sequence[TensorDictBase], stacked: bool, dim: int) -> TensorDictBase:
    """Return rollouts as one batch; lazily stacked where their entries or shapes differ."""
    if stacked:
        return lazy_stack(list(parts), 0)
    if len(parts) == 1:
        return parts[0]
    time = parts[0].ndim - 1
    try:
        batch: TensorDictBase = torch.cat(list(parts), dim)
    except (KeyError, RuntimeError):  # entries or shapes differ
        batch = _put_lazily(parts, dim % (time + 1), time)
    return time_named(batch, time)


def _put_lazily(parts: Sequence[TensorDictBase], dim: int, time: int) -> TensorDictBase:
    rows = [row for part in parts for row in part.unbind(dim)]
    if dim != time:
        rows = [time_named(row, time - 1) for row in rows]
    return LazyStackedTensorDict.lazy_stack(rows, dim)


def joined(parts: Sequence[TensorDict], dim: int) -> TensorDict:
    """Copy ``parts`` one after another along ``dim``; the dimensions keep their names."""
    whole: Any = torch.cat(list(parts), dim)
    whole.names = parts[0].names
    out: TensorDict = whole
    return out


class PayloadSlots:
    """Rollouts that travel with the reply: data without a fixed layout."""

    def __init__(
        self,
        backend: Backend,
        steps: Sequence[int],
        cat_dim: int | None,
        stacked: bool,
        trim: bool = False,
    ) -> None:
        """Ask workers for ``steps[w]`` steps each; see `SlabSlots`."""
        self._backend = backend
        self._windows = [
            m.WindowRef(worker, worker, 0, count, ()) for worker, count in enumerate(steps)
        ]
        self._cat_dim, self._stacked = cat_dim or 0, stacked
        self._trim = trim and not stacked
        self.copies, self.nbytes = 0, 0

    def acquire(self) -> int:
        """Return a number; nothing is reserved."""
        return 0

    def windows(self, slot: int) -> Sequence[m.WindowRef]:
        """Return how many steps each worker takes."""
        return self._windows

    def prepare(self, slot: int) -> None:
        """Nothing is known before payloads have come."""

    def release(self, slot: int) -> None:
        """Nothing to give back."""

    def hand_over(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase | None:
        """Open the payloads and put them together; ``None`` if there are none."""
        parts = [self._backend.open(r.payload) for r in reports if r.payload is not None]
        if parts and self._trim:
            parts = trimmed(parts, reports, self._cat_dim)
        return put_together(parts, self._stacked, self._cat_dim) if parts else None
