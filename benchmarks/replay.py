"""Replay buffers: sampling against `torch.index_select`, against TorchRL, and memory per row.

The rows of "Pong" are real: ALE Pong, grey, 84x84, four frames stacked, a random policy.

python -m benchmarks.replay [--rounds 9] [--seconds 0.3] [--out results.json]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import mmap
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

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
Call = Callable[[], Any]


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


def pong(rows: int, envs: int = 4, steps: int = 64) -> list[TensorDict]:
    """Batches of ``envs`` environments and ``steps`` steps, as a collector stores them."""
    import ale_py
    import gymnasium as gym

    from gleanrl import Collector

    gym.register_envs(ale_py)

    def make() -> gym.Env:
        env = gym.make("ALE/Pong-v5", frameskip=1)
        env = gym.wrappers.AtariPreprocessing(env, screen_size=84, frame_skip=4)
        return gym.wrappers.FrameStackObservation(env, 4)

    batch = envs * steps
    with Collector([make] * envs, frames_per_batch=batch, total_frames=-1) as collector:
        collector.set_seed(0)
        found = (batch.reshape(-1).clone() for batch in collector)
        return list(itertools.islice(found, -(-rows // batch)))


def compact_or_not(rows: int) -> Iterator[tuple[str, Call]]:
    data = pong(rows)
    for name, compact in (("gleanrl", True), ("not compact", False)):
        rb = filled(rows, data, compact)
        yield name, lambda rb=rb: rb.sample(BATCH)


def storing_compact_or_not(rows: int) -> Iterator[tuple[str, Call]]:
    data = pong(rows)
    for name, compact in (("gleanrl", True), ("not compact", False)):
        rb, parts = filled(rows, data, compact), itertools.cycle(data)
        yield name, lambda rb=rb, parts=parts: rb.extend(next(parts))


def filled(rows: int, data: list[TensorDict], compact: bool) -> ReplayBuffer:
    rb = ReplayBuffer(storage=LazyTensorStorage(rows, compact=compact))
    for part in [*data, *data]:  # twice round: what is kept beside is used again
        rb.extend(part)
    return rb


def selecting(rb: ReplayBuffer) -> Call:
    """The floor: `torch.index_select` of every stored tensor, with indices drawn beforehand."""
    tensors = rb.storage.rows.tensors
    indices = itertools.cycle(torch.randint(len(rb), (4096, BATCH)).unbind(0))

    def call() -> Any:
        index = next(indices)
        return [torch.index_select(tensor, 0, index) for tensor in tensors]

    return call


def fill(rb: Any, make: Callable[[int], TensorDict], rows: int) -> Any:
    part = min(rows, 10_000)
    data = make(part)
    for _ in range(rows // part):
        rb.extend(data)
    return rb


def peer() -> Any:
    warnings.filterwarnings("ignore")
    import logging

    import torchrl.data

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    return torchrl.data


def plain(make: Callable[[int], TensorDict], rows: int) -> Iterator[tuple[str, Call]]:
    ours = fill(ReplayBuffer(storage=LazyTensorStorage(rows)), make, rows)
    yield "gleanrl", lambda: ours.sample(BATCH)
    yield "index_select", selecting(ours)
    shared = fill(ReplayBuffer(storage=LazyTensorStorage(rows), shared=True), make, rows)
    yield "gleanrl shared", lambda: shared.sample(BATCH)
    data = peer()
    theirs = fill(data.ReplayBuffer(storage=data.LazyTensorStorage(rows)), make, rows)
    yield "torchrl", lambda: theirs.sample(BATCH)


def prioritized(rows: int) -> Iterator[tuple[str, Call]]:
    def call(rb: Any) -> Call:
        def one() -> None:
            index = rb.sample(BATCH)["index"]
            rb.update_priority(index, torch.rand(BATCH))

        return one

    arguments = {"alpha": 0.7, "beta": 0.5}
    ours = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(rows), **arguments)
    yield "gleanrl", call(fill(ours, cartpole, rows))
    data = peer()
    theirs = data.TensorDictPrioritizedReplayBuffer(
        storage=data.LazyTensorStorage(rows), **arguments
    )
    yield "torchrl", call(fill(theirs, cartpole, rows))


def alone(rows: int) -> Iterator[tuple[str, Call]]:
    """The samplers alone, no rows gathered."""
    priority = torch.rand(BATCH)
    ours = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(rows), alpha=0.7, beta=0.5)
    fill(ours, lambda n: TensorDict({"a": torch.zeros(n)}, [n]), rows)

    def our_call() -> None:
        draw = ours.sampler.draw(ours.storage, BATCH, None)
        ours.sampler.update_priority(ours.storage, draw.index, priority)

    yield "gleanrl", our_call
    data = peer()
    theirs = data.TensorDictPrioritizedReplayBuffer(
        storage=data.LazyTensorStorage(rows), alpha=0.7, beta=0.5
    )
    fill(theirs, lambda n: TensorDict({"a": torch.zeros(n)}, [n]), rows)

    def their_call() -> None:
        index, _ = theirs.sampler.sample(theirs._storage, BATCH)
        theirs.sampler.update_priority(index, priority)

    yield "torchrl", their_call


def trajectories(rows: int) -> TensorDict:
    data = cartpole(rows)
    data["collector"] = {"traj_ids": torch.arange(rows) // 200}
    return data


def slices(rows: int, extending: bool) -> Iterator[tuple[str, Call]]:
    fresh = trajectories(64)

    def call(rb: Any) -> Call:
        def one() -> None:
            if extending:
                rb.extend(fresh)
            rb.sample(BATCH)

        return one

    ours = ReplayBuffer(storage=LazyTensorStorage(rows), sampler=SliceSampler(slice_len=32))
    yield "gleanrl", call(fill(ours, trajectories, rows))
    data = peer()
    from torchrl.data.replay_buffers.samplers import SliceSampler as Theirs

    sampler = Theirs(slice_len=32, traj_key=("collector", "traj_ids"), cache_values=not extending)
    theirs = data.ReplayBuffer(storage=data.LazyTensorStorage(rows), sampler=sampler)
    yield "torchrl", call(fill(theirs, trajectories, rows))


def extending(rows: int) -> Iterator[tuple[str, Call]]:
    batch = cartpole(256)
    ours = fill(ReplayBuffer(storage=LazyTensorStorage(rows)), cartpole, rows)
    yield "gleanrl", lambda: ours.extend(batch)
    shared = fill(ReplayBuffer(storage=LazyTensorStorage(rows), shared=True), cartpole, rows)
    yield "gleanrl shared", lambda: shared.extend(batch)
    data = peer()
    theirs = fill(data.ReplayBuffer(storage=data.LazyTensorStorage(rows)), cartpole, rows)
    yield "torchrl", lambda: theirs.extend(batch)


CASES: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {
    "sample(256), 1 M CartPole rows": lambda: plain(cartpole, ROWS),
    "sample(256), 20 k image rows": lambda: plain(images, IMAGES),
    "prioritized sample + update, 1 M rows": lambda: prioritized(ROWS),
    "the same, samplers alone": lambda: alone(ROWS),
    "slices of 32, 1 M rows, no writes": lambda: slices(ROWS, extending=False),
    "extend(64) + slices of 32, 1 M rows": lambda: slices(ROWS, extending=True),
    "sample(256), 4 k Pong rows, compact": lambda: compact_or_not(PONG),
    "extend(256), Pong rows, compact": lambda: storing_compact_or_not(PONG),
    "extend(256), CartPole rows": lambda: extending(ROWS),
}


def measure(
    case: Iterator[tuple[str, Call]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    calls: dict[str, Call] = {}
    try:
        for name, call in case:
            call()
            calls[name] = call
    except (ImportError, RuntimeError) as err:
        print(f"  (left out: {str(err).splitlines()[0]})")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        # Every other round runs backwards, so that a drift of the machine favours nobody.
        for name in list(calls)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(window(calls[name], seconds))
    return times


def window(call: Call, seconds: float) -> float:
    gc.collect()
    count, start = 0, time.perf_counter()
    end = start
    while end - start < seconds:
        call()
        count += 1
        end = time.perf_counter()
    return (end - start) / count


def report(times: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, values in times.items():
        print(f"  {name:16s} {statistics.median(values) * 1e6:9.1f} us")
        if name == "gleanrl":
            continue
        ratios = sorted(a / b for a, b in zip(times["gleanrl"], values, strict=True))
        if name.startswith("gleanrl"):
            base = times.get("index_select") or times["torchrl"]
            ratios = sorted(a / b for a, b in zip(values, base, strict=True))
        middle = statistics.median(ratios)
        result[name] = {"median": middle, "min": ratios[0], "max": ratios[-1]}
        what = f"{name} / floor or peer" if name.startswith("gleanrl") else f"gleanrl / {name}"
        print(f"    {what}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return result


def memory() -> dict[str, Any]:
    """Bytes per row beyond those of the data themselves."""
    result = {}
    for name, make in (("CartPole", cartpole), ("images", images)):
        rb = ReplayBuffer(storage=LazyTensorStorage(1000))
        rb.extend(make(10))
        row = rb.storage.rows.layout.nbytes
        result[name] = {"row": row, "stamp": 8}
        print(f"{name} rows: {row} bytes of data + 8 of bookkeeping: {(row + 8) / row:.4f}")
    return result


def resident() -> int:
    """Bytes of memory this process takes from the machine."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def halves() -> dict[str, Any]:
    """Bytes per transition, compact against storing both, counted and as the system sees them."""
    result: dict[str, Any] = {}
    for envs, steps in ((4, 64), (8, 16)):
        data = pong(PONG, envs, steps)
        sizes, kept = {}, []
        for compact in (False, True):
            before = resident()
            kept.append(filled(PONG, data, compact))
            sizes[compact] = kept[-1].storage.nbytes / PONG, (resident() - before) / PONG
        counted, taken = (a / b for a, b in zip(sizes[True], sizes[False], strict=True))
        name = f"{envs} environments, rollouts of {steps} steps"
        result[name] = {"bytes": sizes[True][0], "ratio": counted, "resident": taken}
        print(f"Pong, {name}: {sizes[True][0]:.0f} bytes per transition of {sizes[False][0]:.0f}")
        print(f"  {counted:.3f} of storing both ({taken:.3f} of resident memory)")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"memory": memory()}
    if arguments.only in "compact Pong":
        results["compact"] = halves()
    for name, case in CASES.items():
        if arguments.only in name:
            print(name)
            results[name] = report(measure(case(), arguments.rounds, arguments.seconds))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
