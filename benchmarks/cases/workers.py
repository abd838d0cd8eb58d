"""Over workers: processes, two nodes on the loopback interface, and two Ray actors.

Frames per second are those of CartPole, the same work for ours and for TorchRL's collector of the
same name. Bytes per second are those of an environment that does nothing: how much arrives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checks, envs
from benchmarks.harness import Build, Case, Reference
from benchmarks.policies import NET, POLICY
from benchmarks.systems import bare, ours, peers

STEPS = 64
"""Steps per environment and rollout."""
ENVS = 16
"""Environments per worker."""
WORKERS = 2
SIZES = {"1KB": 2**10, "64KB": 2**16, "1MB": 2**20, "8MB": 2**23}
"""Bytes of an observation, for processes."""
ROLLOUTS = {"1MB": (2**15, 16), "64MB": (2**20, 32)}
"""For nodes: bytes of an observation and steps of a rollout. Each observation is delivered twice.
"""


def multi() -> list[Case]:
    """Return the cases of processes: against other libraries and against bare copies."""
    return [
        *(two_processes(kind) for kind in ("sync", "async")),
        process_peers(),
        *(many_workers("eight", 8, kind, 0.85) for kind in ("sync", "async")),
        *(many_workers("64", 64, kind, 1.0) for kind in ("sync", "async")),
        *(copied(kind, name) for kind in ("async", "sync") for name in SIZES),
        *(one_frame(kind) for kind in ("async", "sync")),
    ]


def distributed() -> list[Case]:
    """Return the cases of nodes."""
    gloo = "TorchRL DistributedCollector, mp, gloo"
    return [
        *(sent(kind, name) for kind in ("async", "sync") for name in ROLLOUTS),
        *(made_and_sent(name) for name in ROLLOUTS),
        nobody_waits(),
        *(
            cartpole(
                f"torchrl-{kind}",
                f"CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, {kind}",
                *("nodes", kind),
                Reference(gloo, partial(torchrl, "nodes", kind), 10.0),
            )
            for kind in ("async", "sync")
        ),
    ]


def ray() -> list[Case]:
    """Return the cases of Ray actors."""
    return [
        cartpole(
            f"cartpole-{kind}",
            f"CartPole-v1 x16 in each of {WORKERS} actors, 64-64 MLP, {kind}; frames per second",
            *("ray", kind),
            Reference("TorchRL RayCollector", partial(torchrl, "ray", kind), 5.0),
        )
        for kind in ("sync", "async")
    ]


# -- CartPole --------------------------------------------------------------------------------------


def frames(kind: str, workers: int = WORKERS) -> int:
    """Return the frames of a batch."""
    return STEPS * ENVS * (workers if kind == "sync" else 1)


def gleanrl(where: str, kind: str, workers: int = WORKERS) -> ours.Batches:
    """Return ours; ``where`` is as `ours.over` has it."""
    options = {"num_envs": ENVS, "init_fn": ours.quiet_worker}
    factories = [envs.Seeds(ENVS * worker) for worker in range(workers)]
    start_ray(where)
    return ours.over(where, kind, factories, POLICY, frames(kind, workers), **options)


def torchrl(where: str, kind: str, argument_checks: bool = False) -> ours.Batches:
    """Return TorchRL's, with a ``SerialEnv`` in each worker.

    ``argument_checks`` leaves those of `torch.distributions` on in its workers, where they are by
    default.
    """
    from torchrl import collectors
    from torchrl.collectors import distributed

    start_ray(where)
    options: dict[str, Any] = {"frames_per_batch": frames(kind)}
    if where == "process":
        collector: Any = getattr(collectors, f"Multi{kind.capitalize()}Collector")
        options |= {"total_frames": -1, "num_threads": 1, **peers.TORCHRL_SHORTCUTS}
        options["init_fn"] = None if argument_checks else ours.quiet_worker
        options |= {"cat_results": "stack"} if kind == "sync" else {}
    else:
        options |= {"total_frames": 1 << 40, "sync": kind == "sync"}
        options["collector_kwargs"] = dict(peers.TORCHRL_SHORTCUTS)
        if where == "ray":
            collector = distributed.RayCollector
            options["remote_configs"] = {"num_cpus": 1, "num_gpus": 0}
        else:
            collector = distributed.DistributedCollector
            options |= {"launcher": "mp", "backend": "gloo"}
    quiet = where != "process"  # nodes have no init_fn
    makers = [partial(peers.torchrl_serial, _seeded(worker), quiet) for worker in range(WORKERS)]
    return ours.Batches(collector(makers, POLICY, **options))


def start_ray(where: str) -> None:
    """Start a Ray of our own, once, for systems that are on ``"ray"``."""
    if where != "ray":
        return
    import ray

    if not ray.is_initialized():
        # Actors import the benchmarks from here.
        here = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        ray.init(
            num_cpus=8,
            object_store_memory=2 * 10**9,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )


def _seeded(worker: int) -> Sequence[envs.Make]:
    return envs.seeded(envs.cartpole, WORKERS * ENVS)[worker * ENVS : (worker + 1) * ENVS]


def cartpole(name: str, title: str, where: str, kind: str, *references: Reference) -> Case:
    """Return ours, on workers of one kind, against others; first batches are compared."""
    check = partial(checks.worker_batches, net=NET)
    ours_on = partial(gleanrl, where, kind)
    return Case(name, title, ours_on, references, check, stopped=where != "ray")


def two_processes(kind: str) -> Case:
    """Two workers against none, and against TorchRL's two."""
    peer = f"TorchRL Multi{kind.capitalize()}Collector"
    theirs = partial(torchrl, "process", kind)
    return cartpole(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of 2 workers, 64-64 MLP, {kind}",
        *("process", kind),
        Reference(
            "in-process Collector x16",
            lambda: ours.inline(envs.seeded(envs.cartpole, ENVS), POLICY, frames(kind)),
            1.8 if kind == "sync" else 1.85,
        ),
        Reference(peer, theirs, 20.0),
        Reference(f"{peer}, argument checks", partial(theirs, argument_checks=True), 20.0),
    )


def process_peers() -> Case:
    """Against a process per environment, with the policy in the learner's process."""
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)
    sb3 = partial(peers.sb3_processes, factories, NET, STEPS)
    vector = partial(peers.async_vector_env, factories, NET, STEPS)
    return cartpole(
        "process-peers",
        "CartPole-v1 x32, 64-64 MLP, environments in processes",
        *("process", "sync"),
        Reference("AsyncVectorEnv", vector, 1.0),
        Reference("SB3 SubprocVecEnv", partial(sb3, lean=False), 1.0),
        Reference("SB3 SubprocVecEnv, lean critic", partial(sb3, lean=True), 1.0),
    )


def many_workers(name: str, count: int, kind: str, target: float) -> Case:
    """More workers than cores must not be worse than as many."""
    return Case(
        f"{name}-workers-{kind}",
        f"CartPole-v1 x16 in each of {count} workers on two cores, 64-64 MLP, {kind}",
        partial(gleanrl, "process", kind, count),
        [Reference("2 workers", partial(gleanrl, "process", kind), target)],
        stopped=True,
    )


def nobody_waits() -> Case:
    """Two nodes against two collectors in two processes without a learner."""
    builds = [partial(_apart, worker) for worker in range(WORKERS)]
    apart = "2 in-process collectors in 2 processes"
    return Case(
        "cartpole-async",
        "CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, async",
        partial(gleanrl, "nodes", "async"),
        [Reference(apart, lambda: bare.answers(builds, STEPS * ENVS), 0.9)],
        stopped=True,
    )


def _apart(worker: int) -> Any:
    ours.quiet_worker()
    return ours.inline(_seeded(worker), POLICY, STEPS * ENVS).collect_batch


# -- bytes -----------------------------------------------------------------------------------------


def still(where: str, kind: str, size: int, steps: int) -> ours.Batches:
    """Return ours over workers with one `envs.still_bytes` of ``size`` each; it counts bytes."""
    frames = steps * (WORKERS if kind == "sync" else 1)
    batches = ours.over(where, kind, [envs.still_bytes(size)] * WORKERS, None, frames)
    return batches.then(lambda frames: 2 * size * frames)


def delivered(name: str, work: str, build: Build, reference: Reference) -> Case:
    """Return the case of bytes per second, of observations and successors."""
    title = f"no-op environment, {work}; bytes per second"
    return Case(name, title, build, [reference], stopped=True)


def copied(kind: str, name: str) -> Case:
    """From processes; rollouts have 64 MB at most."""
    size = SIZES[name]
    steps = min(256, max(4, 2**24 // size))
    return delivered(
        f"bytes-{name}-{kind}",
        f"{name} observations, 2 workers, {kind}",
        partial(still, "process", kind, size, steps),
        Reference("memcpy", lambda: bare.copies(size, steps), 0.8),
    )


def sent(kind: str, name: str) -> Case:
    """Over torch.distributed."""
    size, steps = ROLLOUTS[name]
    return delivered(
        f"bytes-{name}-{kind}",
        f"{name} per rollout, 2 nodes, {kind}",
        partial(still, "nodes", kind, size, steps),
        Reference("bare send and recv", lambda: bare.sends(2 * size * steps), 0.8),
    )


def made_and_sent(name: str) -> Case:
    """The same against processes that also make the data that they send."""
    size, steps = ROLLOUTS[name]
    return delivered(
        f"collected-{name}-async",
        f"{name} per rollout, 2 nodes, async",
        partial(still, "nodes", "async", size, steps),
        Reference("in-process collectors and bare send", lambda: bare.collected(size, steps)),
    )


def one_frame(kind: str) -> Case:
    """The least that a batch takes: a message to each of its workers, and their answers."""

    def ours_of(count: int) -> Build:
        frames = count if kind == "sync" else 1
        return lambda: ours.over("process", kind, [envs.still_bytes(16)] * count, None, frames)

    return Case(
        "one-frame" if kind == "async" else "one-frame-sync",
        f"batches of one frame per worker, 2 workers, {kind}; frames per second",
        ours_of(2),
        [Reference("1 worker", ours_of(1)), Reference("message and answer", bare.ping_pong)],
        stopped=True,
    )
