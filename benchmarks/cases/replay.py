"""Replay buffers: sampling against `torch.index_select`, against TorchRL, and memory per row.

The rows of "Pong" are real: ALE Pong, grey, 84x84, four frames stacked, a random policy.
"""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import envs
from benchmarks.harness import Build, Case, Figure, Measurement, Reference, Skip, System, Tick
from benchmarks.suites import Suite
from gleanrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)

BATCH = 256
ROWS = 1_000_000
IMAGES = 20_000
PONG = 4096
Make = Callable[[int], Any]


class Calls(System):
    """Calls a function; one counts as one."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def collect_batch(self) -> int:
        self._call()
        return 1


def calls(build: Callable[[], Callable[[], Any]]) -> Build:
    """Return a builder of the calls of what ``build`` returns."""
    return lambda: Calls(build())


# -- rows ------------------------------------------------------------------------------------------


def cartpole(rows: int) -> TensorDict:
    def flags() -> dict[str, torch.Tensor]:
        names = ("done", "terminated", "truncated")
        return {name: torch.zeros(rows, 1, dtype=torch.bool) for name in names}

    return TensorDict(
        {
            "observation": torch.randn(rows, 4),
            "action": torch.zeros(rows, dtype=torch.int64),
            **flags(),
            "next": {
                "observation": torch.randn(rows, 4),
                "reward": torch.ones(rows, 1),
                **flags(),
            },
        },
        [rows],
    )


def images(rows: int) -> TensorDict:
    data = cartpole(rows)
    for part in (data, data["next"]):
        part["observation"] = torch.zeros(rows, 84, 84, 4, dtype=torch.uint8)
    return data


def trajectories(rows: int) -> TensorDict:
    data = cartpole(rows)
    data["collector"] = {"traj_ids": torch.arange(rows) // 200}
    return data


def numbers(rows: int) -> TensorDict:
    return TensorDict({"a": torch.zeros(rows)}, [rows])


def pong(rows: int, count: int = 4, steps: int = 64) -> list[TensorDict]:
    """Batches of ``count`` environments and ``steps`` steps, as a collector stores them."""
    from gleanrl import Collector

    batch = count * steps
    with Collector([envs.pong] * count, frames_per_batch=batch, total_frames=-1) as collector:
        collector.set_seed(0)
        found = (batch.reshape(-1).clone() for batch in collector)
        return list(itertools.islice(found, -(-rows // batch)))


def filled(rows: int, data: list[TensorDict], compact: bool) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(rows, compact=compact))
    for part in [*data, *data]:  # twice round: overflow rows are used again
        rb.extend(part)
    return rb


def fill(rb: Any, make: Make, rows: int) -> Any:
    part = min(rows, 10_000)
    data = make(part)
    for _ in range(rows // part):
        rb.extend(data)
    return rb


def ours(make: Make, rows: int, **options: Any) -> ReplayBuffer:
    buffer: ReplayBuffer = fill(
        ReplayBuffer(storage=LazyTensorStorage(rows), **options), make, rows
    )
    return buffer


def theirs(make: Make, rows: int, **options: Any) -> Any:
    """Return TorchRL's."""
    import torchrl.data as data

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    return fill(data.ReplayBuffer(storage=data.LazyTensorStorage(rows), **options), make, rows)


# -- cases -----------------------------------------------------------------------------------------


def sampling(title: str, make: Make, rows: int) -> Case:
    def one(build: Callable[[], Any]) -> Build:
        def prepared() -> Callable[[], Any]:
            rb = build()
            return lambda: rb.sample(BATCH)

        return calls(prepared)

    def selecting() -> Callable[[], Any]:
        """The floor: `torch.index_select` of every stored tensor, with indices drawn beforehand."""
        tensors = ours(make, rows).storage.rows.tensors
        indices = itertools.cycle(torch.randint(rows, (4096, BATCH)).unbind(0))

        def call() -> Any:
            index = next(indices)
            return [torch.index_select(tensor, 0, index) for tensor in tensors]

        return call

    return Case(
        f"sample(256), {title}",
        "sampling",
        one(lambda: ours(make, rows)),
        [
            Reference("index_select", calls(selecting)),
            Reference("gleanrl shared", one(lambda: ours(make, rows, shared=True))),
            Reference("torchrl", one(lambda: theirs(make, rows))),
        ],
    )


def extending(rows: int) -> Case:
    def one(build: Callable[..., Any], **options: Any) -> Build:
        def prepared() -> Callable[[], Any]:
            rb, batch = build(cartpole, rows, **options), cartpole(256)
            return lambda: rb.extend(batch)

        return calls(prepared)

    return Case(
        "extend(256), CartPole rows",
        "storing",
        one(ours),
        [Reference("gleanrl shared", one(ours, shared=True)), Reference("torchrl", one(theirs))],
    )


def prioritized(rows: int, alone: bool) -> Case:
    """The samplers, with or without gathering rows."""
    make = numbers if alone else cartpole

    def mine() -> Callable[[], Any]:
        storage = LazyTensorStorage(rows)
        rb = fill(
            TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage), make, rows
        )
        if not alone:
            return lambda: rb.update_priority(rb.sample(BATCH)["index"], torch.rand(BATCH))
        priority = torch.rand(BATCH)

        def call() -> None:
            draw = rb.sampler.draw(rb.storage, BATCH, None)
            rb.sampler.update_priority(rb.storage, draw.index, priority)

        return call

    def peer() -> Callable[[], Any]:
        import torchrl.data as data

        storage = data.LazyTensorStorage(rows)
        try:
            rb = data.TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage)
        except RuntimeError as err:  # it was built without its trees
            raise Skip(f"torchrl: {err}") from err
        fill(rb, make, rows)
        if not alone:
            return lambda: rb.update_priority(rb.sample(BATCH)["index"], torch.rand(BATCH))
        priority = torch.rand(BATCH)

        def call() -> None:
            index, _ = rb.sampler.sample(rb._storage, BATCH)
            rb.sampler.update_priority(index, priority)

        return call

    title = "the same, samplers alone" if alone else "prioritized sample + update, 1 M rows"
    return Case(title, "priorities", calls(mine), [Reference("torchrl", calls(peer))])


def slices(rows: int, writing: bool) -> Case:
    fresh = trajectories(64)

    def one(build: Callable[..., Any], sampler: Callable[[], Any]) -> Build:
        def prepared() -> Callable[[], Any]:
            rb = build(trajectories, rows, sampler=sampler())

            def call() -> None:
                if writing:
                    rb.extend(fresh)
                rb.sample(BATCH)

            return call

        return calls(prepared)

    def peer() -> Any:
        from torchrl.data.replay_buffers.samplers import SliceSampler as Theirs

        key = ("collector", "traj_ids")
        return Theirs(slice_len=32, traj_key=key, cache_values=not writing)

    return Case(
        "extend(64) + slices of 32, 1 M rows" if writing else "slices of 32, 1 M rows, no writes",
        "slices",
        one(ours, lambda: SliceSampler(slice_len=32)),
        [Reference("torchrl", one(theirs, peer))],
    )


def compact(storing: bool) -> Case:
    """Every observation stored once, against twice."""

    def one(once: bool) -> Build:
        def prepared() -> Callable[[], Any]:
            data = pong(PONG)
            rb, parts = filled(PONG, data, once), itertools.cycle(data)
            return (lambda: rb.extend(next(parts))) if storing else (lambda: rb.sample(BATCH))

        return calls(prepared)

    title = "extend(256), Pong rows, compact" if storing else "sample(256), 4 k Pong rows, compact"
    return Case(title, "compact", one(True), [Reference("not compact", one(False))])


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        sampling("1 M CartPole rows", cartpole, ROWS),
        sampling("20 k image rows", images, IMAGES),
        prioritized(ROWS, alone=False),
        prioritized(ROWS, alone=True),
        slices(ROWS, writing=False),
        slices(ROWS, writing=True),
        compact(storing=False),
        compact(storing=True),
        extending(ROWS),
    ]


# -- memory ----------------------------------------------------------------------------------------


def bookkeeping(rounds: int, seconds: float, tick: Tick) -> Iterator[Figure]:
    """Bytes of a row with and without those beside the data."""
    for name, make in (("CartPole", cartpole), ("images", images)):
        rb = ReplayBuffer(storage=LazyTensorStorage(1000))
        rb.extend(make(10))
        row = rb.storage.rows.layout.nbytes
        yield Figure(f"{name}: data", "B", [row])
        yield Figure(f"{name}: data and bookkeeping / data", "x", [(row + 8) / row])


def resident() -> int:
    """Bytes of memory this process takes from the machine."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def once_or_twice(rounds: int, seconds: float, tick: Tick) -> Iterator[Figure]:
    """Bytes per transition, compact against storing both, counted and as the system sees them."""
    for count, steps in ((4, 64), (8, 16)):
        data = pong(PONG, count, steps)
        sizes, kept = {}, []
        for once in (False, True):
            before = resident()
            kept.append(filled(PONG, data, once))
            sizes[once] = kept[-1].storage.nbytes / PONG, (resident() - before) / PONG
        counted, taken = (a / b for a, b in zip(sizes[True], sizes[False], strict=True))
        name = f"Pong, {count} environments, rollouts of {steps} steps"
        yield Figure(f"{name}: compact", "B per transition", [sizes[True][0]])
        yield Figure(f"{name}: compact / both", "x", [counted])
        yield Figure(f"{name}: compact / both, resident", "x", [taken])


def all_measurements() -> list[Measurement]:
    """Return what is no rate against a rate."""
    return [
        Measurement("bookkeeping", "bytes of a row", bookkeeping),
        Measurement("compact Pong", "bytes of a transition", once_or_twice),
    ]


SUITE = Suite("benchmarks.replay", all_cases, all_measurements, alone=True, rounds=9, seconds=0.3)
