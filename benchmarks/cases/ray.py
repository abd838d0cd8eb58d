"""Ray actors.

Two kinds of cases. ``object-*``: a source that does nothing, so that what remains is the transport;
against a bare actor that returns as many bytes (of one array that never changes, and read-only for
who gets them), and `ray.get`. ``cartpole-*``: frames per second, against TorchRL's RayCollector.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import checks, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, gleanrl, torchrl
from benchmarks.harness import Case, Reference, System, in_process
from benchmarks.suites import Suite
from benchmarks.systems import bare

SIZES = {"100KB": 100 * 2**10, "1MB": 2**20, "16MB": 2**24, "64MB": 2**26}
KINDS = ("sync", "async", "stack")
OVERHEAD = 1.2
"""What a batch may cost, in units of `ray.get` of as many bytes."""


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(objects(kind, name) for name in SIZES for kind in KINDS),
        *(cartpole(kind) for kind in ("sync", "async")),
    ]


class Idle:
    """A source of ``size`` bytes per step whose rollouts are whatever lies in memory."""

    def __init__(self, size: int, worker: int) -> None:
        self._size = size

    def layout(self) -> Any:
        from gleanrl.core.layout import Field, Layout

        return Layout((1,), (Field(("observation",), (self._size,), torch.uint8),))

    def collect(self, window: Any, steps: int, stop: Any, random: bool) -> Any:
        from gleanrl.core.messages import Report

        return Report(steps, steps, 0)

    def place(self, base: int, stride: int) -> None:
        """Nothing has a number here."""

    def close(self) -> None:
        """Nothing is open."""


class OurObjects(System):
    """Batches of one rollout of ``size`` bytes."""

    def __init__(self, size: int, kind: str) -> None:
        from gleanrl.core.options import FrameBudget
        from gleanrl.engine.batches import BatchOptions
        from gleanrl.engine.engine import Engine
        from gleanrl.transport.ray import RayBackend

        actors = 1 if kind == "sync" else WORKERS
        options = [{"num_cpus": 0}] * actors
        self._engine = Engine(
            lambda windows: RayBackend(windows, options=options),
            [functools.partial(Idle, size)] * actors,
        )
        self._budget = self._engine.plan(
            FrameBudget(frames_per_batch=1 if kind == "async" else actors, total_frames=None),
            [1] * actors,
            BatchOptions(stacked=kind == "stack", single=kind == "async"),
        )
        self._batch: Any = None

    def collect_batch(self) -> int:
        self._batch, _ = self._engine.collect(self._budget, None)
        return int(self._batch.numel())

    def close(self) -> None:
        self._batch = None
        self._engine.close(5.0)


def objects(kind: str, name: str) -> Case:
    """How much a batch costs beyond the transport of its bytes."""
    size = SIZES[name]
    if kind == "stack":
        return Case(
            f"object-{name}-stack",
            f"batches of {WORKERS} x {name}, one of each actor, stacked; arrays per second",
            lambda: OurObjects(size, kind),
            [Reference("ray.get and stack", lambda: bare.RayStack(size), 1 / OVERHEAD)],
        )
    what = "one actor, one at a time" if kind == "sync" else f"{WORKERS} actors, two ahead of each"
    return Case(
        f"object-{name}-{kind}",
        f"batches of {name}, {what}; batches per second",
        lambda: OurObjects(size, kind),
        [
            Reference("ray.get", lambda: bare.RayObjects(size, kind), 1 / OVERHEAD),
            Reference("ray.get and copy", lambda: bare.RayObjects(size, kind, copy=True)),
        ],
    )


def cartpole(kind: str) -> Case:
    """Frames per second of two actors with sixteen environments each."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of {WORKERS} actors, 64-64 MLP, {kind}; frames per second",
        lambda: gleanrl("ray", kind, policy),
        [Reference("TorchRL RayCollector", lambda: torchrl("ray", kind, policy), 5.0)],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS, in_process),
    )


@contextmanager
def started() -> Iterator[None]:
    """A Ray of our own."""
    import ray

    # Actors import what they run from here.
    here = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=8,
        object_store_memory=2 * 10**9,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


SUITE = Suite("benchmarks.ray", all_cases, around=started)
