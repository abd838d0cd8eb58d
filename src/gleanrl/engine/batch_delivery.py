"""The layout, the memory and the delivery of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import TIME, TRAJ_IDS
from gleanrl.core.layout import Layout, first_difference
from gleanrl.core.protocols import SharedMemory
from gleanrl.core.window import Array
from gleanrl.memory.batch_arena import Arena, Order, Slab, Views
from gleanrl.memory.shared import check_memory
from gleanrl.memory.tensordicts import batch_over, stacked, tensordict_over, time_named

_KEPT = 2
"""Batches that the consumer may hold as views; it gets copies of others meanwhile."""
_SYNC_SLOTS = _KEPT + 1
"""The others are being written: one batch."""
_ASYNC_SLOTS = _KEPT + 2
"""Per worker. The others are being written: two rollouts ahead of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How batches are handed out."""

    stacked: bool = False
    """Batches keep a leading worker dimension."""
    cat: int = -1
    """Otherwise: the dimension along which rollouts are put one after another."""
    device: torch.device | None = None
    """The device of delivered batches; ``None`` leaves tensors on their device."""
    trim: bool = False
    """Leave out steps that stopped rollouts never reached, unless rollouts are stacked."""
    single: bool = False
    """A batch is the rollout of one worker, the first to finish."""
    joined: int = 1
    """So many batches are put one after another in time before anything else is done."""
    rollout_envs: int | None = None
    """Environments of a rollout without a layout, if these are not all of a worker."""


class BatchPlan:
    """The memory of batches of rollouts of ``steps[w]`` steps of workers with ``layouts[w]``."""

    def __init__(
        self,
        shared: SharedMemory | None,
        layouts: Sequence[Layout | None],
        steps: Sequence[int],
        options: BatchOptions,
    ) -> None:
        self._shared, self._steps, self._layouts = shared, steps, layouts
        fixed = [layout for layout in layouts if layout is not None]
        there = {field.device for layout in fixed for field in layout.fields} - {None}
        if options.device is None and there:
            options = replace(options, device=there.pop())
        self._options = options
        self._fixed = fixed if len(fixed) == len(layouts) else None
        """The layouts, if every worker has one."""
        self.arenas: dict[int, Arena] = {}
        """By the number that windows have: the worker's if each has its own memory, else 0."""

    @property
    def uniform(self) -> bool:
        """Whether every batch will have the same fields and the same shape."""
        if self._fixed is None:
            return False
        if self._options.single:
            return len(set(zip(self._fixed, self._steps, strict=True))) == 1
        return self._options.stacked or not self._options.trim

    def common_slots(self) -> Slots:
        """Return the slots of batches that hold a rollout of every worker."""
        options = self._options
        if self._fixed is None:
            return Slots(self._steps, options)
        slab, dim = self._slab(self._fixed)
        return self._slab_slots(slab, dim, _SYNC_SLOTS, 0)

    def worker_slots(self, worker: int) -> Slots:
        """Return the slots of batches that are one rollout of ``worker``."""
        layout, steps = self._layouts[worker], self._steps[worker]
        if layout is None:
            return Slots([steps], BatchOptions(cat=0, device=self._options.device))
        return self._slab_slots(Slab([layout], [steps], Order.TIME), 0, _ASYNC_SLOTS, worker)

    def _slab_slots(self, slab: Slab, dim: int, count: int, number: int) -> Slots:
        if self._shared is not None:
            reserved = sum(arena.nbytes for arena in self.arenas.values())
            check_memory(
                reserved + slab.nbytes * count,
                f"{count} batches of {slab.nbytes:,} bytes",
                "lower frames_per_batch, the number of workers or of environments",
            )
        self.arenas[number] = arena = Arena(slab, count, self._shared, number)
        return SlabSlots(arena, count, self._options, dim)

    def fake_batch(self) -> TensorDictBase:
        """Return a batch of zeros with the layout of the real ones.

        Where a batch is one worker's rollout, it is that of the first.
        """
        if self._fixed is None:
            raise NotImplementedError(
                "the data of this environment have no fixed layout; collect a batch to see one"
            )
        count = 1 if self._options.single else len(self._fixed)
        slab, dim = self._slab(self._fixed[:count])
        slots = SlabSlots(Arena(slab, 2), 2, BatchOptions(device=self._options.device), dim)
        slot = slots.acquire()
        assert slot is not None
        return slots.hand_over(slot, [])

    def _slab(self, layouts: Sequence[Layout]) -> tuple[Slab, int]:
        """Return the memory of one batch, and the dimension along which parts are concatenated."""
        _check_fields(layouts)
        steps, cat = self._steps[: len(layouts)], self._options.cat
        shapes = [(*layout.batch_shape, t) for layout, t in zip(layouts, steps, strict=True)]
        if self._options.stacked:
            if len(set(shapes)) > 1:
                alike = len({shape[:-1] for shape in shapes}) == 1
                raise ConfigError(
                    f"rollouts of different shapes {shapes} cannot be stacked; "
                    + (
                        "pass cat_results=-1 to put them one after another in time"
                        if alike
                        else "give all workers as many environments, or collect asynchronously"
                    )
                )
            return Slab(layouts, steps, Order.STACKED), 0
        dims = len(shapes[0])
        dim = cat + dims if cat < 0 else cat
        if not 0 <= dim < dims:
            raise ConfigError(f"cat_results ({cat}) is outside the {dims} dimensions of a batch")
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if len({len(shape) for shape in shapes}) > 1 or len(others) > 1:
            raise ConfigError(
                f"rollouts of shapes {shapes} cannot be put one after another along dimension {dim}"
                " (cat_results): they differ in another one"
            )
        if dim == dims - 1:
            return Slab(layouts, steps, Order.TIME), dim
        return Slab(layouts, steps, Order.ENVS if dim == 0 else Order.APART), dim


def _check_fields(layouts: Sequence[Layout]) -> None:
    for worker, layout in enumerate(layouts):
        difference = first_difference(layout.fields, layouts[0].fields)
        if difference is not None:
            raise ConfigError(
                f"workers {worker} and 0 cannot share a batch: {difference}; collect "
                "asynchronously, or make the environments alike"
            )


class Slots:
    """Batches whose rollouts travel with the replies: nothing is reserved for them."""

    def __init__(self, steps: Sequence[int], options: BatchOptions) -> None:
        """Ask workers for ``steps[w]`` steps each."""
        self.windows = [
            [m.WindowRef(worker, worker, 0, count, ()) for worker, count in enumerate(steps)]
        ]
        """By slot, the windows of the workers."""
        self._cat_dim, self._stacked, self._device = options.cat, options.stacked, options.device
        self._trim = options.trim and not options.stacked
        self.copies, self.nbytes = 0, 0
        """Batches copied because the user held every slot; bytes reserved."""

    def acquire(self) -> int | None:
        """Take a free slot for writing; ``None`` if there is none."""
        return 0

    def prepare(self, slot: int) -> None:
        """Prepare `hand_over` before the rollouts arrive."""

    def release(self, slot: int) -> None:
        """Give back a slot that was not handed over."""

    def blank(self, slot: int, worker: int) -> None:
        """Write zeros, and trajectory id -1, for a rollout of ``worker`` that was never made."""

    def hand_over(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase | None:
        """Return the batch that was written into ``slot``; its memory is the caller's.

        ``None`` if workers keep their rollouts.
        """
        there = [report for report in reports if report.payload is not None]
        return self._put_together([r.payload for r in there], there) if there else None

    def copied(self, slot: int, report: m.Report) -> TensorDictBase | None:
        """Return a copy of the batch in a slot of one worker, which is still to be handed over."""
        if report.payload is None:
            return None
        payload: TensorDictBase = report.payload.clone()
        return self._put_together([payload], [report])

    def _put_together(
        self, parts: Sequence[TensorDictBase], reports: Sequence[m.Report]
    ) -> TensorDictBase:
        """Return rollouts as one batch; lazily stacked if their entries or shapes differ."""
        if self._trim:
            parts = _trimmed(parts, reports, self._cat_dim)
        if self._stacked:
            batch = time_named(stacked(parts, 0), parts[0].ndim)
        else:
            batch = _joined(parts, self._cat_dim)
        return batch if self._device is None else batch.to(self._device)


class SlabSlots(Slots):
    """Slots of an arena.

    The memory rule: a batch is handed out as a view of its slot, unless the user holds two already.
    Then it is copied into ordinary memory and its slot used again: there is always one to write the
    next rollout into, and a batch never changes while the user holds it.
    Where a rollout did not fit the layout and travelled as a payload, the whole batch is put
    together from payloads and copies.
    """

    def __init__(self, arena: Arena, slots: int, options: BatchOptions, cat_dim: int = 0) -> None:
        self._arena, self._device = arena, options.device
        self._stacked = arena.slab.order is Order.STACKED
        self._trim = options.trim and not self._stacked
        self._cat_dim = cat_dim
        self._prepared: tuple[int, Array, list[TensorDict]] | None = None
        self.copies, self.nbytes = 0, arena.nbytes
        self._shapes = arena.slab.batch_shapes
        self._names = [*[None] * (len(self._shapes[0]) - 1), TIME]
        self._groups = arena.slab.layouts[0].groups
        workers = range(len(arena.slab.layouts))
        self.windows = [[arena.reference(slot, w) for w in workers] for slot in range(slots)]

    def acquire(self) -> int | None:
        return self._arena.acquire()

    def prepare(self, slot: int) -> None:
        """Make the tensors of a batch while workers write it: they stand still afterwards."""
        base, groups = self._arena.view(slot)
        self._prepared = slot, base, self._parts(groups)

    def release(self, slot: int) -> None:
        self._arena.release(slot)

    def blank(self, slot: int, worker: int) -> None:
        window = self._arena.window(self.windows[slot][worker])
        window.zero_from(0)
        if TRAJ_IDS in window.keys():
            window.tensor(TRAJ_IDS).fill_(-1)

    def hand_over(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase:
        """Return the batch in ``slot``: a view, or a copy if the user holds several views."""
        if any(report.payload is not None for report in reports):
            opened = self._apart(slot, reports)
            self._prepared = None
            self._arena.release(slot)
            return opened
        if self._arena.leased < _KEPT:
            return self._batch(self._leased(slot), reports)
        self._prepared = None
        self.copies += 1
        batch = self._batch(self._parts(self._arena.copy(slot)), reports)
        self._arena.release(slot)
        return batch

    def copied(self, slot: int, report: m.Report) -> TensorDictBase | None:
        if report.payload is not None:
            report = replace(report, payload=report.payload.clone())
        return self._apart(slot, [report])

    def _apart(self, slot: int, reports: Sequence[m.Report]) -> TensorDictBase:
        """Put a batch together of payloads, and of copies of the slot's contents."""
        own = zip(self.windows[slot], self._arena.slab.layouts, reports, strict=True)
        parts: list[TensorDictBase] = [
            batch_over(self._arena.window(reference), layout).clone()
            if report.payload is None
            # as rollouts are that come out of windows: on the CPU, without a device
            else report.payload.cpu().clear_device_()
            for reference, layout, report in own
        ]
        return self._put_together(parts, reports)

    def _leased(self, slot: int) -> list[TensorDict]:
        if self._prepared is None or self._prepared[0] != slot:
            self.prepare(slot)
        assert self._prepared is not None
        _, base, parts = self._prepared
        self._prepared = None  # nothing but the user may keep them alive
        self._arena.lease(slot, base)
        return parts

    def _parts(self, groups: Sequence[Views]) -> list[TensorDict]:
        return [
            tensordict_over(views, shape, self._names, self._groups)
            for views, shape in zip(groups, self._shapes, strict=True)
        ]

    def _batch(self, parts: Sequence[TensorDict], reports: Sequence[m.Report]) -> TensorDictBase:
        slab, dim = self._arena.slab, self._cat_dim
        if self._trim and any(r.steps < t for r, t in zip(reports, slab.steps, strict=True)):
            if slab.order is Order.TIME:
                parts, dim = parts[0].split(list(slab.steps), -1), parts[0].ndim - 1
            parts = _trimmed(parts, reports, dim)
        batch = parts[0] if len(parts) == 1 else _joined(parts, dim)
        return batch if self._device is None else batch.to(self._device)


_Part = TypeVar("_Part", bound=TensorDictBase)


def _trimmed(parts: Sequence[_Part], reports: Sequence[m.Report], dim: int) -> list[_Part]:
    """Leave out steps that stopped rollouts, which are joined along ``dim``, did not reach."""
    if dim in (-1, parts[0].ndim - 1):
        return [part[..., : r.steps] for part, r in zip(parts, reports, strict=True)]
    most = max(report.steps for report in reports)  # one part may hold several rollouts
    return [part[..., :most] for part in parts]


def _joined(parts: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """Copy ``parts`` one after another along ``dim``; stack them lazily if they differ."""
    if len(parts) == 1:
        return parts[0]
    time = parts[0].ndim - 1
    try:
        batch: TensorDictBase = torch.cat(list(parts), dim)
    except (KeyError, RuntimeError):  # entries or shapes differ
        rows = [row for part in parts for row in part.unbind(dim)]
        if dim % (time + 1) != time:
            rows = [time_named(row, time - 1) for row in rows]
        batch = LazyStackedTensorDict.lazy_stack(rows, dim % (time + 1))
    return time_named(batch, time)
