"""Replay buffers: sampling against `torch.index_select`, against TorchRL, and filled by workers."""

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

from benchmarks import policies
from benchmarks.harness import Case, Reference, Skip, System
from benchmarks.systems.ours import Batches
from gleanrl import MultiAsyncCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer

BATCH, ROWS, IMAGES = 256, 1_000_000, 20_000
ENVS, STEPS = 16, 64
SLICE_S = 0.05
"""Seconds of background collection that count as one batch."""
Make = Callable[[int], TensorDict]
Prepare = Callable[[], Callable[[], Any]]
"""Fills a buffer and returns the call that is timed."""


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        sampling("1 M CartPole rows", cartpole, ROWS),
        sampling("20 k image rows", images, IMAGES),
        prioritized(),
        background("idle", "no sampling", None),
        background("modest", "100 samples/s", 0.01),
        background("busy", "sampling in a loop", 0.0),
    ]


def calls(name: str, ours: Prepare, **others: Prepare) -> Case:
    """Return a case of calls; ``others`` are the references by name."""

    def timed(prepare: Prepare) -> System:
        call = prepare()
        return System(lambda: (call(), 1)[1])

    builds = {other.replace("_", " "): partial(timed, others[other]) for other in others}
    return Case(name, name, partial(timed, ours), [Reference(*each) for each in builds.items()])


# -- rows ------------------------------------------------------------------------------------------


def cartpole(rows: int) -> TensorDict:
    def part(**more: Any) -> dict[str, Any]:
        names = ("done", "terminated", "truncated")
        flags = {name: torch.zeros(rows, 1, dtype=torch.bool) for name in names}
        return {"observation": torch.randn(rows, 4), **flags, **more}

    ids, action = {"traj_ids": torch.arange(rows) // 200}, torch.zeros(rows, dtype=torch.int64)
    after = part(reward=torch.ones(rows, 1))
    return TensorDict(part(action=action, collector=ids, next=after), [rows])


def images(rows: int) -> TensorDict:
    data = cartpole(rows)
    for part in (data, data["next"]):
        part["observation"] = torch.zeros(rows, 84, 84, 4, dtype=torch.uint8)
    return data


def ours(make: Make, rows: int, **options: Any) -> ReplayBuffer:
    return filled(ReplayBuffer(storage=LazyTensorStorage(rows), **options), make, rows)


def theirs(make: Make, rows: int) -> Any:
    """Return TorchRL's."""
    import torchrl.data as data

    logging.getLogger("torchrl").setLevel(logging.ERROR)
    return filled(data.ReplayBuffer(storage=data.LazyTensorStorage(rows)), make, rows)


def filled(rb: Any, make: Make, rows: int) -> Any:
    part = min(rows, 10_000)
    data = make(part)
    for _ in range(rows // part):
        rb.extend(data)
    return rb


# -- cases -----------------------------------------------------------------------------------------


def sampling(title: str, make: Make, rows: int) -> Case:
    def selecting() -> Callable[[], Any]:
        """The floor: `torch.index_select` of every stored tensor, with indices drawn beforehand."""
        tensors = ours(make, rows).storage.rows.tensors
        indices = itertools.cycle(torch.randint(rows, (4096, BATCH)).unbind(0))

        def call() -> Any:
            index = next(indices)
            return [torch.index_select(tensor, 0, index) for tensor in tensors]

        return call

    return calls(
        f"sample(256), {title}",
        lambda: partial(ours(make, rows).sample, BATCH),
        index_select=selecting,
        gleanrl_shared=lambda: partial(ours(make, rows, shared=True).sample, BATCH),
        torchrl=lambda: partial(theirs(make, rows).sample, BATCH),
    )


def prioritized() -> Case:
    def updating(buffer: Any, storage: Any) -> Callable[[], Any]:
        rb = filled(buffer(alpha=0.7, beta=0.5, storage=storage(ROWS)), cartpole, ROWS)
        return lambda: rb.update_priority(rb.sample(BATCH)["index"], torch.rand(BATCH))

    def peer() -> Callable[[], Any]:
        import torchrl.data as data

        try:
            return updating(data.TensorDictPrioritizedReplayBuffer, data.LazyTensorStorage)
        except RuntimeError as err:  # it was built without its trees
            raise Skip(f"torchrl: {err}") from err

    return calls(
        "prioritized sample + update, 1 M rows",
        lambda: updating(TensorDictPrioritizedReplayBuffer, LazyTensorStorage),
        torchrl=peer,
    )


# -- filled in the background ----------------------------------------------------------------------


class Act(nn.Module):
    """Samples from the logits of a network, and delivers actions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = policies.mlp(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


def workers(**options: Any) -> MultiAsyncCollector:
    policy = TensorDictModule(Act(), in_keys=["observation"], out_keys=["action"])
    options |= {"num_workers": 2, "num_envs": ENVS, "frames_per_batch": ENVS * STEPS}
    return MultiAsyncCollector("CartPole-v1", policy, **options)


def sampled(pace: float | None) -> System:
    """Return a started collector, and a learner that samples.

    ``pace`` is in seconds between samples: 0 for without a pause, ``None`` for never.
    """
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), shared=True)
    collector = workers(replay_buffer=buffer)
    collector.start()
    while buffer.write_count < 20_000:
        time.sleep(0.01)
    due = 0.0

    def collect() -> int:
        nonlocal due
        before, start = buffer.write_count, time.perf_counter()
        end = start + SLICE_S
        if pace is None:
            time.sleep(SLICE_S)
        due = max(due, start)
        while pace is not None and (now := time.perf_counter()) < end:
            if pace and now < due:
                time.sleep(min(due, end) - now)
                continue
            due += pace
            buffer.sample(BATCH)
        return int(buffer.write_count - before)

    return System(collect, end=collector.shutdown)


def background(name: str, title: str, pace: float | None) -> Case:
    return Case(
        f"buffer-{name}",
        f"CartPole-v1 x16 in each of 2 workers into a buffer, {title}",
        lambda: sampled(pace),
        [Reference("batches", lambda: Batches(workers()), 0.9)],
        stopped=True,
    )
