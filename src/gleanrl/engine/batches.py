"""What batches look like: how the rollouts of workers are put together, and the memory for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import format_key
from gleanrl.core.layout import Layout
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import SyncGather
from gleanrl.engine.gather_first import AsyncGather
from gleanrl.engine.slots import PayloadSlots, SlabSlots, Slots
from gleanrl.memory.arena import Arena
from gleanrl.memory.available import check_memory
from gleanrl.memory.slab import Order, Slab

_SYNC_SLOTS = 3
"""One batch being written, one being handed over, one the consumer has not let go of yet."""
_ASYNC_SLOTS = 4
"""Per worker: two rollouts ahead of it, one being handed over, one not let go of yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How batches are handed out."""

    stacked: bool = False
    """Batches keep a leading worker dimension."""
    cat: int = -1
    """Otherwise: the dimension along which rollouts are put one after another."""
    device: torch.device | None = None
    """Where batches are delivered; ``None`` leaves tensors where they are."""
    same_memory: bool = False
    """Write every batch into the same slot and return the same `TensorDict`."""
    trim: bool = False
    """Leave out what stopped rollouts never reached."""
    single: bool = False
    """A batch is one worker's rollout, whoever is first."""


def gather_all(
    engine: Engine,
    steps: Sequence[int],
    options: BatchOptions,
    *,
    enough: int | None = None,
    stopped: Callable[[], bool] = bool,
) -> None:
    """Have ``engine`` make batches of one rollout of every worker, ``steps[w]`` steps each.

    Raises:
        ConfigError: rollouts that cannot be put together so, or more memory than there is.
    """
    slots: Slots
    arenas: list[Arena] = []
    layouts = _fixed(engine.layouts)
    if layouts is None:
        slots = PayloadSlots(engine.backend, steps, options.cat, options.stacked, options.trim)
    else:
        slab, dim = plan_slab(layouts, steps, options)
        count = 1 if options.same_memory else _SYNC_SLOTS
        slots = _slots(engine, slab, count, options, dim, arenas)
    gather = SyncGather(
        engine.dispatcher,
        slots,
        engine.sizes(steps),
        stop=engine.backend.stop_byte,
        enough=enough,
        stopped=stopped,
    )
    engine.use(gather, arenas)


def gather_first(engine: Engine, steps: Sequence[int], options: BatchOptions) -> AsyncGather:
    """Have ``engine`` make batches of one rollout each, of whichever worker is first.

    Raises:
        ConfigError: more memory than there is.
    """
    arenas: list[Arena] = []
    numbers: dict[int, int] = {}

    def make_slots(worker: int) -> Slots:
        layout, count = engine.layouts[worker], steps[worker]
        if layout is None:
            return PayloadSlots(engine.backend, [count], 0, stacked=False)
        slab = Slab([layout], [count], Order.TIME)
        number = numbers.setdefault(worker, len(arenas))
        return _slots(engine, slab, _ASYNC_SLOTS, options, 0, arenas, number)

    gather = AsyncGather(engine.dispatcher, make_slots, engine.sizes(steps))
    engine.use(gather, arenas)
    return gather


def _slots(
    engine: Engine,
    slab: Slab,
    count: int,
    options: BatchOptions,
    dim: int,
    arenas: list[Arena],
    number: int = 0,
) -> Slots:
    """Return slots of an arena, which takes its place among ``arenas``."""
    shared = engine.backend.memory
    if shared is not None:
        reserved = sum(arena.nbytes for arena in arenas)
        check_memory(
            reserved + slab.nbytes * count,
            f"{count} batches of {slab.nbytes:,} bytes",
            "lower frames_per_batch, the number of workers or of environments",
        )
    arena = Arena(slab, count, shared, number)
    arenas[number : number + 1] = [arena]
    return SlabSlots(
        arena,
        count,
        options.device,
        open_payload=engine.backend.open,
        same_memory=options.same_memory,
        trim=options.trim,
        cat_dim=dim,
    )


def fake_batch(engine: Engine, steps: Sequence[int], options: BatchOptions) -> TensorDictBase:
    """Return a batch of zeros with the layout of the real ones.

    Where workers take turns, it is that of the first.

    Raises:
        NotImplementedError: steps have no fixed layout.
    """
    layouts = _fixed(engine.layouts)
    if layouts is None:
        raise NotImplementedError(
            "the data of this environment have no fixed layout; collect a batch to see one"
        )
    if options.single:
        layouts, steps = layouts[:1], steps[:1]
    slab, dim = plan_slab(layouts, steps, options)
    slots = SlabSlots(Arena(slab, 2), 2, options.device, cat_dim=dim)
    return slots.hand_over(slots.acquire(), [])


def uniform(engine: Engine, steps: Sequence[int], options: BatchOptions) -> bool:
    """Tell whether every batch will have the same fields and the same shape."""
    if _fixed(engine.layouts) is None:
        return False
    if options.single:
        return len(set(zip(engine.layouts, steps, strict=True))) == 1
    return options.stacked or not options.trim  # what is stacked has no place to leave out from


def _fixed(layouts: Sequence[Layout | None]) -> list[Layout] | None:
    """Return the layouts if every worker has one."""
    fixed = [layout for layout in layouts if layout is not None]
    return fixed if len(fixed) == len(layouts) else None


def plan_slab(
    layouts: Sequence[Layout], steps: Sequence[int], options: BatchOptions
) -> tuple[Slab, int]:
    """Return the memory of one batch, and the dimension along which parts are concatenated.

    Raises:
        ConfigError: rollouts that cannot be put together as asked.
    """
    _check_fields(layouts)
    shapes = [layout.batch_shape for layout in layouts]
    wholes = [(*shape, count) for shape, count in zip(shapes, steps, strict=True)]
    if options.stacked:
        if len(set(wholes)) > 1:
            raise ConfigError(
                f"rollouts of different shapes {wholes} cannot be stacked; pass cat_results=-1 to "
                "put them one after another in time"
            )
        return Slab(layouts, steps, Order.STACKED), 0
    dims = len(wholes[0])
    dim = options.cat + dims if options.cat < 0 else options.cat
    if not 0 <= dim < dims:
        raise ConfigError(
            f"cat_results ({options.cat}) is outside the {dims} dimensions of a batch"
        )
    others = {(*whole[:dim], *whole[dim + 1 :]) for whole in wholes}
    if len({len(whole) for whole in wholes}) > 1 or len(others) > 1:
        raise ConfigError(
            f"rollouts of shapes {wholes} cannot be put one after another along dimension {dim} "
            "(cat_results): they differ in another one"
        )
    if dim == dims - 1:
        return Slab(layouts, steps, Order.TIME), dim
    order = Order.ENVS if dim == 0 else Order.APART
    return Slab(layouts, steps, order), dim


def _check_fields(layouts: Sequence[Layout]) -> None:
    first = {field.key: field for field in layouts[0].fields}
    for worker, layout in enumerate(layouts):
        own = {field.key: field for field in layout.fields}
        for key in [*first, *own]:
            if first.get(key) != own.get(key):
                raise ConfigError(
                    f"workers cannot share a batch: {format_key(key)} is {own.get(key)} in worker "
                    f"{worker}, {first.get(key)} in worker 0; collect asynchronously, or make the "
                    "environments alike"
                )
