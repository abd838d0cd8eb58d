"""Two nodes on the loopback interface."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import checks, envs, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, gleanrl, still, torchrl
from benchmarks.harness import Case, Reference
from benchmarks.systems import bare, ours

SIZES = {"1MB": (2**15, 16), "64MB": (2**20, 32)}
"""Bytes of an observation and steps of a rollout; each observation is delivered twice."""


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
        *(collected(name) for name in SIZES),
        cartpole(),
        *(theirs(kind) for kind in ("async", "sync")),
    ]


def delivered(kind: str, name: str) -> Case:
    """Bytes per second that arrive over torch.distributed."""
    size, steps = SIZES[name]
    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} per rollout, 2 nodes, {kind}; bytes per second",
        partial(still, "nodes", kind, size, steps),
        [Reference("bare send and recv", lambda: bare.sends(2 * size * steps), 0.8)],
        check=checks.real_bytes,
        stopped=True,
    )


def collected(name: str) -> Case:
    """The same, held against processes that have to make what they send, too."""
    size, steps = SIZES[name]
    return Case(
        f"collected-{name}-async",
        f"no-op environment, {name} per rollout, 2 nodes, async; bytes per second",
        partial(still, "nodes", "async", size, steps),
        [Reference("in-process collectors and bare send", lambda: bare.collected(size, steps))],
        stopped=True,
    )


def cartpole() -> Case:
    """Two nodes against two collectors in two processes that nobody waits for."""
    policy = policies.categorical_policy(policies.mlp(4, 2))
    builds = [partial(_apart, policy, worker) for worker in range(WORKERS)]
    apart = "2 in-process collectors in 2 processes"
    return Case(
        "cartpole-async",
        "CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, async",
        lambda: gleanrl("nodes", "async", policy),
        [Reference(apart, lambda: bare.Forked(builds, STEPS * ENVS), 0.9)],
        stopped=True,
    )


def _apart(policy: Any, worker: int) -> Any:
    ours.quiet_worker()
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)[worker * ENVS : (worker + 1) * ENVS]
    return ours.inline(factories, policy, STEPS * ENVS).collect_batch


def theirs(kind: str) -> Case:
    """The same work with TorchRL's collector of the same name."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    peer = "TorchRL DistributedCollector, mp, gloo"
    return Case(
        f"torchrl-{kind}",
        f"CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, {kind}",
        lambda: gleanrl("nodes", kind, policy),
        [Reference(peer, lambda: torchrl("nodes", kind, policy), 10.0)],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        stopped=True,
    )
