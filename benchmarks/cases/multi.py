"""Over processes: ours against everybody else and against bare copies, and `measurements`."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import checks, envs, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, frames, gleanrl, torchrl
from benchmarks.harness import Build, Case, Measurement, Reference
from benchmarks.processes import grouped, turn
from benchmarks.suites import Suite
from benchmarks.systems import bare, ours, peers

NESTED = 2**14
"""Bytes of an observation of the nested cases."""
SIZES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "8MB": 2**23}


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(cartpole(kind) for kind in ("sync", "async")),
        process_peers(),
        *(many_workers(kind) for kind in ("sync", "async")),
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
        *(nested(name, frames) for name, frames in (("1MB", 32), ("16MB", 512))),
    ]


def _ours(kind: str, policy: Any, workers: int = WORKERS) -> Build:
    return grouped(lambda: gleanrl("process", kind, policy, workers))


def cartpole(kind: str) -> Case:
    """Two workers against none, and against TorchRL's two."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    factories = envs.seeded(envs.cartpole, ENVS)
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of 2 workers, 64-64 MLP, {kind}",
        _ours(kind, policy),
        [
            Reference(
                "in-process Collector x16",
                grouped(lambda: ours.inline(factories, policy, frames(kind))),
                1.8 if kind == "sync" else 1.85,
            ),
            Reference(
                f"TorchRL Multi{kind.capitalize()}Collector",
                grouped(lambda: torchrl("process", kind, policy)),
                20.0,
            ),
            Reference(
                f"TorchRL Multi{kind.capitalize()}Collector, argument checks",
                grouped(lambda: torchrl("process", kind, policy, argument_checks=True)),
                20.0,
            ),
        ],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


def process_peers() -> Case:
    """Against environments in processes with the policy in front of them."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)

    def peer(make: Any, **options: Any) -> Build:
        return partial(make, factories, net, STEPS, **options)

    return Case(
        "process-peers",
        "CartPole-v1 x32, 64-64 MLP, environments in processes",
        _ours("sync", policy),
        [
            Reference(name, grouped(build), 1.0)
            for name, build in (
                ("AsyncVectorEnv", peer(peers.async_vector_env)),
                ("SB3 SubprocVecEnv", peer(peers.sb3_processes, lean=False)),
                ("SB3 SubprocVecEnv, lean critic", peer(peers.sb3_processes, lean=True)),
            )
        ],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


def many_workers(kind: str) -> Case:
    """More workers than cores must not be worse than as many."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"eight-workers-{kind}",
        f"CartPole-v1 x16 in each of 8 workers on two cores, 64-64 MLP, {kind}",
        _ours(kind, policy, 8),
        [Reference("2 workers", _ours(kind, policy), 0.85)],
        turn=turn,
    )


def rollout_steps(size: int) -> int:
    """Return how many steps of ``size`` bytes a rollout has: 64 MB of them at most."""
    return min(256, max(4, 2**24 // size))


def still_collector(kind: str, size: int) -> ours.Bytes:
    """Return ours on two environments that do nothing."""
    steps = rollout_steps(size) * (WORKERS if kind == "sync" else 1)
    return ours.Bytes(ours.over("process", kind, envs.still(WORKERS, size), None, steps), size)


def delivered(kind: str, name: str) -> Case:
    """Bytes per second, of observations and successors."""
    size = SIZES[name]
    steps = rollout_steps(size)

    def two(stepping: bool) -> Build:
        return grouped(lambda: bare.copies_in_two(size, steps, stepping))

    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} observations, 2 workers, {kind}; bytes per second",
        grouped(lambda: still_collector(kind, size)),
        [
            Reference("memcpy", grouped(lambda: bare.Copies(size, steps)), 0.8),
            Reference("memcpy in 2 processes", two(False), 0.8),
            Reference("env.step and memcpy in 2 processes", two(True)),
        ],
        check=checks.real_bytes,
        turn=turn,
    )


def nested(name: str, frames: int) -> Case:
    """A collector inside a worker: its batches in shared memory against pickled ones."""
    from gleanrl.collectors import MultiSyncCollector

    class Payloads(MultiSyncCollector):
        """Not known to hand out what it collected, so that its batches are pickled."""

    def build(made: Any, **options: Any) -> Build:
        return grouped(
            lambda: ours.Bytes(ours.over("process", "sync", made, None, frames, **options), NESTED)
        )

    made = envs.still(WORKERS, NESTED)
    return Case(
        f"nested-{name}",
        f"no-op environment, batches of {name}, a collector in one worker; bytes per second",
        build([made], collector_class=MultiSyncCollector),
        [
            Reference("2 workers", build(made)),
            Reference("payloads", build([made], collector_class=Payloads)),
        ],
        turn=turn,
    )


def _measured(name: str, title: str) -> Measurement:
    """Return a measurement of `benchmarks.measurements`, imported where it runs."""
    from benchmarks import measurements

    return Measurement(name, title, getattr(measurements, name.replace("-", "_")))


def all_measurements() -> list[Measurement]:
    """Return what is no rate against a rate, in the order in which it runs."""
    return [
        _measured("one-frame", "time per batch of one frame, async"),
        _measured("faults", "page faults and copies with large observations"),
        _measured("weights", "publishing weights against memcpy"),
        _measured("freshness", "publishing to the first frame"),
        _measured("stragglers", "exponential step times"),
        _measured("start", "start to first batch"),
        _measured("flat", "10,000 batches: memory and descriptors"),
    ]


SUITE = Suite("benchmarks.multi", all_cases, all_measurements, alone=True)
