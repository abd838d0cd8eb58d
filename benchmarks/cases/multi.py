"""Over processes: ours against everybody else and against bare copies."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import checks, envs, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, frames, gleanrl, still, torchrl
from benchmarks.harness import Build, Case, Reference
from benchmarks.systems import bare, ours, peers

SIZES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "8MB": 2**23}


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(cartpole(kind) for kind in ("sync", "async")),
        process_peers(),
        *(many_workers(kind) for kind in ("sync", "async")),
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
        one_frame(),
    ]


def cartpole(kind: str) -> Case:
    """Two workers against none, and against TorchRL's two."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    factories = envs.seeded(envs.cartpole, ENVS)
    peer = f"TorchRL Multi{kind.capitalize()}Collector"
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of 2 workers, 64-64 MLP, {kind}",
        lambda: gleanrl("process", kind, policy),
        [
            Reference(
                "in-process Collector x16",
                lambda: ours.inline(factories, policy, frames(kind)),
                1.8 if kind == "sync" else 1.85,
            ),
            Reference(peer, lambda: torchrl("process", kind, policy), 20.0),
            Reference(
                f"{peer}, argument checks",
                lambda: torchrl("process", kind, policy, argument_checks=True),
                20.0,
            ),
        ],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        stopped=True,
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
        lambda: gleanrl("process", "sync", policy),
        [
            Reference("AsyncVectorEnv", peer(peers.async_vector_env), 1.0),
            Reference("SB3 SubprocVecEnv", peer(peers.sb3_processes, lean=False), 1.0),
            Reference("SB3 SubprocVecEnv, lean critic", peer(peers.sb3_processes, lean=True), 1.0),
        ],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        stopped=True,
    )


def many_workers(kind: str) -> Case:
    """More workers than cores must not be worse than as many."""
    policy = policies.categorical_policy(policies.mlp(4, 2))
    return Case(
        f"eight-workers-{kind}",
        f"CartPole-v1 x16 in each of 8 workers on two cores, 64-64 MLP, {kind}",
        lambda: gleanrl("process", kind, policy, 8),
        [Reference("2 workers", lambda: gleanrl("process", kind, policy), 0.85)],
        stopped=True,
    )


def delivered(kind: str, name: str) -> Case:
    """Bytes per second, of observations and successors; rollouts have 64 MB at most."""
    size = SIZES[name]
    steps = min(256, max(4, 2**24 // size))
    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} observations, 2 workers, {kind}; bytes per second",
        partial(still, "process", kind, size, steps),
        [Reference("memcpy", lambda: bare.Copies(size, steps), 0.8)],
        check=checks.real_bytes,
        stopped=True,
    )


def one_frame() -> Case:
    """The least that a batch takes: a message to a worker, and its answer."""

    def ours_of(count: int) -> Build:
        return lambda: ours.over("process", "async", envs.stamped(count, 16), None, 1)

    return Case(
        "one-frame",
        "batches of one frame, 2 workers, async",
        ours_of(2),
        [Reference("1 worker", ours_of(1)), Reference("message and answer", bare.ping_pong)],
        stopped=True,
    )
