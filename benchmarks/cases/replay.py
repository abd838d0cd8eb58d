"""Replay buffers: sampling against `torch.index_select`, against TorchRL, and filled by workers.

The rows of "Pong" are real: ALE Pong, grey, 84x84, four frames stacked, a random policy.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import envs, policies
from benchmarks.harness import Build, Case, Reference, Skip, System
from benchmarks.systems.ours import Batches
from gleanrl import Collector, MultiAsyncCollector
from gleanrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)

BATCH, ROWS, IMAGES, PONG = 256, 1_000_000, 20_000, 4096
ENVS, STEPS = 16, 64
SLICE_S = 0.05
"""Seconds of background collection that count as one batch."""
Make = Callable[[int], TensorDict]


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        sampling("1 M CartPole rows", cartpole, ROWS),
        sampling("20 k image rows", images, IMAGES),
        prioritized(),
        slices(writing=False),
        slices(writing=True),
        compact(storing=False),
        compact(storing=True),
        extending(),
        background("idle", "no sampling", None),
        background("modest", "100 samples/s", 0.01),
        background("busy", "sampling in a loop", 0.0),
    ]


class Calls(System):
    """Calls a function; one counts as one."""

    def __init__(self, prepare: Callable[[], Callable[[], Any]]) -> None:
        self._call = prepare()

    def collect_batch(self) -> int:
        self._call()
        return 1


# -- rows ------------------------------------------------------------------------------------------


def cartpole(rows: int) -> TensorDict:
    def part(**more: torch.Tensor) -> dict[str, torch.Tensor]:
        names = ("done", "terminated", "truncated")
        flags = {name: torch.zeros(rows, 1, dtype=torch.bool) for name in names}
        return {"observation": torch.randn(rows, 4), **flags, **more}

    action, reward = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, 1)
    ids = {"traj_ids": torch.arange(rows) // 200}
    data = part(action=action) | {"collector": ids, "next": part(reward=reward)}
    return TensorDict(data, [rows])


def images(rows: int) -> TensorDict:
    data = cartpole(rows)
    for part in (data, data["next"]):
        part["observation"] = torch.zeros(rows, 84, 84, 4, dtype=torch.uint8)
    return data


def pong() -> list[TensorDict]:
    """Return batches as a collector stores them."""
    with Collector([envs.pong] * 4, frames_per_batch=BATCH, total_frames=PONG) as collector:
        collector.set_seed(0)
        return [batch.reshape(-1).clone() for batch in collector]


def ours(make: Make, rows: int, **options: Any) -> ReplayBuffer:
    return filled(ReplayBuffer(storage=LazyTensorStorage(rows), **options), make, rows)


def theirs(make: Make, rows: int, **options: Any) -> Any:
    """Return TorchRL's."""
    import torchrl.data as data

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    return filled(data.ReplayBuffer(storage=data.LazyTensorStorage(rows), **options), make, rows)


def filled(rb: Any, make: Make, rows: int) -> Any:
    part = min(rows, 10_000)
    data = make(part)
    for _ in range(rows // part):
        rb.extend(data)
    return rb


# -- cases -----------------------------------------------------------------------------------------


def sampling(title: str, make: Make, rows: int) -> Case:
    def one(build: Callable[..., Any], **options: Any) -> Build:
        return lambda: Calls(lambda: partial(build(make, rows, **options).sample, BATCH))

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
        one(ours),
        [
            Reference("index_select", lambda: Calls(selecting)),
            Reference("gleanrl shared", one(ours, shared=True)),
            Reference("torchrl", one(theirs)),
        ],
    )


def extending() -> Case:
    def one(build: Callable[..., Any], **options: Any) -> Build:
        return lambda: Calls(
            lambda: partial(build(cartpole, ROWS, **options).extend, cartpole(BATCH))
        )

    return Case(
        "extend(256), CartPole rows",
        "storing",
        one(ours),
        [Reference("gleanrl shared", one(ours, shared=True)), Reference("torchrl", one(theirs))],
    )


def prioritized() -> Case:
    def one(make: Callable[[], Any]) -> Build:
        def prepared() -> Callable[[], Any]:
            rb = filled(make(), cartpole, ROWS)
            return lambda: rb.update_priority(rb.sample(BATCH)["index"], torch.rand(BATCH))

        return lambda: Calls(prepared)

    def mine() -> Any:
        storage = LazyTensorStorage(ROWS)
        return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage)

    def peer() -> Any:
        import torchrl.data as data

        storage = data.LazyTensorStorage(ROWS)
        try:
            return data.TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage)
        except RuntimeError as err:  # it was built without its trees
            raise Skip(f"torchrl: {err}") from err

    title = "prioritized sample + update, 1 M rows"
    return Case(title, "priorities", one(mine), [Reference("torchrl", one(peer))])


def slices(writing: bool) -> Case:
    fresh = cartpole(64)

    def one(build: Callable[..., Any], sampler: Callable[[], Any]) -> Build:
        def prepared() -> Callable[[], Any]:
            rb = build(cartpole, ROWS, sampler=sampler())

            def call() -> None:
                if writing:
                    rb.extend(fresh)
                rb.sample(BATCH)

            return call

        return lambda: Calls(prepared)

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
            data = pong()
            rb, parts = ReplayBuffer(storage=LazyTensorStorage(PONG, compact=once)), [*data, *data]
            for part in parts:  # twice round: overflow rows are used again
                rb.extend(part)
            again = itertools.cycle(data)
            return (lambda: rb.extend(next(again))) if storing else (lambda: rb.sample(BATCH))

        return lambda: Calls(prepared)

    title = "extend(256), Pong rows, compact" if storing else "sample(256), 4 k Pong rows, compact"
    return Case(title, "compact", one(True), [Reference("not compact", one(False))])


# -- filled in the background ----------------------------------------------------------------------


class Act(nn.Module):
    """Samples from the logits of a network, and delivers no more than actions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = policies.mlp(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


def workers(**options: Any) -> MultiAsyncCollector:
    policy = TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])
    options |= {"num_workers": 2, "num_envs": ENVS, "frames_per_batch": ENVS * STEPS}
    return MultiAsyncCollector("CartPole-v1", policy, **options)


class Background(System):
    """A started collector, and a learner that samples."""

    def __init__(self, pace: float | None) -> None:
        """Sample every ``pace`` seconds: 0 for without a pause, ``None`` for never."""
        self._pace, self._due = pace, 0.0
        self._buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), shared=True)
        self._collector = workers(replay_buffer=self._buffer)
        self._collector.start()
        while self._buffer.write_count < 20_000:
            time.sleep(0.01)

    def collect_batch(self) -> int:
        before, start = self._buffer.write_count, time.perf_counter()
        end = start + SLICE_S
        if self._pace is None:
            time.sleep(SLICE_S)
        self._due = max(self._due, start)
        while self._pace is not None and (now := time.perf_counter()) < end:
            if self._pace and now < self._due:
                time.sleep(min(self._due, end) - now)
                continue
            self._due += self._pace
            self._buffer.sample(BATCH)
        return int(self._buffer.write_count - before)

    def close(self) -> None:
        self._collector.shutdown()


def background(name: str, title: str, pace: float | None) -> Case:
    return Case(
        f"buffer-{name}",
        f"CartPole-v1 x16 in each of 2 workers into a buffer, {title}",
        lambda: Background(pace),
        [Reference("batches", lambda: Batches(workers()), 0.9)],
        stopped=True,
    )
