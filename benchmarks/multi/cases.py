"""Throughput: ours over processes against everybody else, and against bare copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import envs, policies
from benchmarks.harness import Case, Fields, Reference, System
from benchmarks.multi import check, collectors, memcpy, peers
from benchmarks.multi.envs import still
from benchmarks.multi.processes import grouped, turn

STEPS = 64
"""Steps per environment and rollout."""
ENVS = 16
"""Environments per worker."""
WORKERS = 2
ROLLOUT = STEPS * ENVS
SIZES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "8MB": 2**23}


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(cartpole(kind) for kind in ("sync", "async")),
        process_peers(),
        *(many_workers(kind) for kind in ("sync", "async")),
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
    ]


class Seeds:
    """A factory for ``num_envs=``: each call makes an environment with the next seed."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self) -> Any:
        made = envs.Make(envs.cartpole, self._next)()
        self._next += 1
        return made


def _split(workers: int) -> list[list[envs.Make]]:
    factories = envs.seeded(envs.cartpole, workers * ENVS)
    return [factories[first : first + ENVS] for first in range(0, len(factories), ENVS)]


def _ours(kind: str, policy: Any, workers: int) -> System:
    return collectors.ours(
        kind,
        [Seeds(ENVS * worker) for worker in range(workers)],
        policy,
        ROLLOUT * (workers if kind == "sync" else 1),
        num_envs=ENVS,
        init_fn=collectors.quiet_worker,
        num_threads=1,
    )


def cartpole(kind: str) -> Case:
    """Two workers against none, and against TorchRL's two."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    # Batches hold equally many frames for everybody.
    frames = ROLLOUT * (WORKERS if kind == "sync" else 1)
    factories = envs.seeded(envs.cartpole, ENVS)
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of 2 workers, 64-64 MLP, {kind}",
        grouped(lambda: _ours(kind, policy, WORKERS)),
        [
            Reference(
                "in-process Collector x16",
                grouped(lambda: collectors.inline(factories, policy, frames)),
                1.8 if kind == "sync" else 1.85,
            ),
            Reference(
                f"TorchRL Multi{kind.capitalize()}Collector",
                grouped(lambda: collectors.torchrl(kind, _split(WORKERS), policy, frames)),
                20.0,
            ),
            Reference(
                f"TorchRL Multi{kind.capitalize()}Collector, argument checks",
                grouped(lambda: collectors.torchrl(kind, _split(WORKERS), policy, frames, True)),
                20.0,
            ),
        ],
        check=check.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


def process_peers() -> Case:
    """Against environments in processes with the policy in front of them."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)
    return Case(
        "process-peers",
        "CartPole-v1 x32, 64-64 MLP, environments in processes",
        grouped(lambda: _ours("sync", policy, WORKERS)),
        [
            Reference(name, grouped(build), 1.0)
            for name, build in (
                ("AsyncVectorEnv", lambda: peers.async_vector_env(factories, net, STEPS)),
                ("SB3 SubprocVecEnv", lambda: peers.sb3(factories, net, STEPS, False)),
                ("SB3 SubprocVecEnv, lean critic", lambda: peers.sb3(factories, net, STEPS, True)),
                ("PufferLib, 1 worker", lambda: peers.pufferlib(factories, net, STEPS, 1)),
                ("PufferLib, 2 workers", lambda: peers.pufferlib(factories, net, STEPS, 2)),
                (
                    "PufferLib, 2 workers in turns",
                    lambda: peers.pufferlib(factories, net, STEPS, 2, halves=True),
                ),
                ("tianshou subprocess", lambda: peers.tianshou(factories, net, STEPS, False)),
                ("tianshou shared memory", lambda: peers.tianshou(factories, net, STEPS, True)),
            )
        ],
        check=check.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


def many_workers(kind: str) -> Case:
    """More workers than cores must not be worse than as many."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"eight-workers-{kind}",
        f"CartPole-v1 x16 in each of 8 workers on two cores, 64-64 MLP, {kind}",
        grouped(lambda: _ours(kind, policy, 8)),
        [Reference("2 workers", grouped(lambda: _ours(kind, policy, WORKERS)), 0.85)],
        turn=turn,
    )


class Bytes:
    """Counts bytes of observations and successors instead of frames."""

    def __init__(self, batches: collectors.Batches, size: int) -> None:
        self.batches, self._size = batches, 2 * size

    def collect_batch(self) -> int:
        return self._size * self.batches.collect_batch()

    def fields(self) -> Fields:
        return self.batches.fields()

    def close(self) -> None:
        self.batches.close()


def rollout_steps(size: int) -> int:
    """Return how many steps of ``size`` bytes a rollout has: 64 MB of them at most."""
    return min(256, max(4, 2**24 // size))


def still_collector(kind: str, size: int, factories: Sequence[Any] | None = None) -> Bytes:
    """Return ours on two environments that do nothing."""
    steps = rollout_steps(size) * (WORKERS if kind == "sync" else 1)
    made = still(WORKERS, size) if factories is None else factories
    return Bytes(collectors.ours(kind, made, None, steps, num_threads=1), size)


def delivered(kind: str, name: str) -> Case:
    """Bytes per second, of observations and successors."""
    size = SIZES[name]
    steps = rollout_steps(size)
    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} observations, 2 workers, {kind}; bytes per second",
        grouped(lambda: still_collector(kind, size)),
        [
            Reference("memcpy", grouped(lambda: memcpy.Copies(size, steps)), 0.8),
            Reference("memcpy in 2 processes", grouped(lambda: memcpy.Processes(size, steps)), 0.8),
            Reference(
                "env.step and memcpy in 2 processes",
                grouped(lambda: memcpy.Processes(size, steps, stepping=True)),
            ),
        ],
        check=check.real_bytes,
        turn=turn,
    )
