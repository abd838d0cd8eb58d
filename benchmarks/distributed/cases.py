"""Throughput of two nodes on the loopback interface."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks import envs, policies
from benchmarks.distributed import raw, raw_rpc
from benchmarks.harness import Case, Fields, Reference
from benchmarks.multi import check, collectors
from benchmarks.multi.cases import ENVS, STEPS, WORKERS, Bytes, Seeds
from benchmarks.multi.envs import still
from benchmarks.multi.processes import grouped, turn
from benchmarks.peers import TORCHRL_SHORTCUTS

SIZES = {"1MB": (2**15, 16), "64MB": (2**20, 32)}
"""Bytes of an observation and steps of a rollout; each observation is delivered twice."""


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
        *(collected(name) for name in SIZES),
        cartpole(),
        *(torchrl(kind) for kind in ("async", "sync")),
        *(delivered_by_rpc(kind, name) for kind in ("async", "sync") for name in SIZES),
    ]


def nodes(
    kind: str, factories: Any, policy: Any, frames: int, rpc: bool = False, **options: Any
) -> Any:
    """Return ours over local nodes."""
    from gleanrl.collectors import DistributedCollector, RPCCollector

    return collectors.Batches(
        (RPCCollector if rpc else DistributedCollector)(
            list(factories),
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            sync=kind == "sync",
            launcher="mp",
            **options,
        )
    )


def delivered(kind: str, name: str) -> Case:
    """Bytes per second that arrive."""
    size, steps = SIZES[name]
    frames = steps * (WORKERS if kind == "sync" else 1)
    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} per rollout, 2 nodes, {kind}; bytes per second",
        grouped(lambda: Bytes(nodes(kind, still(WORKERS, size), None, frames), size)),
        [Reference("bare send and recv", grouped(lambda: raw.Sends(2 * size * steps)), 0.8)],
        check=check.real_bytes,
        turn=turn,
    )


def collected(name: str) -> Case:
    """The same, held against processes that have to make what they send, too."""
    size, steps = SIZES[name]
    return Case(
        f"collected-{name}-async",
        f"no-op environment, {name} per rollout, 2 nodes, async; bytes per second",
        grouped(lambda: Bytes(nodes("async", still(WORKERS, size), None, steps), size)),
        [
            Reference(
                "in-process collectors and bare send", grouped(lambda: raw.Collected(size, steps))
            )
        ],
        turn=turn,
    )


def delivered_by_rpc(kind: str, name: str) -> Case:
    """Bytes per second that arrive by RPC."""
    size, steps = SIZES[name]
    frames = steps * (WORKERS if kind == "sync" else 1)

    def ours() -> Any:
        return Bytes(nodes(kind, still(WORKERS, size), None, frames, rpc=True, tcp_port=0), size)

    return Case(
        f"rpc-{name}-{kind}",
        f"no-op environment, {name} per rollout, 2 nodes, RPC, {kind}; bytes per second",
        grouped(ours),
        [Reference("bare rpc_async", grouped(lambda: raw_rpc.Pushes(2 * size * steps)))],
        check=check.real_bytes,
        turn=turn,
    )


def _cartpole_nodes(kind: str, policy: Any) -> Any:
    return nodes(
        kind,
        [Seeds(ENVS * worker) for worker in range(WORKERS)],
        policy,
        STEPS * ENVS * (WORKERS if kind == "sync" else 1),
        num_envs=ENVS,
        init_fn=collectors.quiet_worker,
    )


def cartpole() -> Case:
    """Two nodes against two collectors in two processes that nobody waits for."""
    policy = policies.categorical_policy(policies.mlp(4, 2))
    return Case(
        "cartpole-async",
        "CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, async",
        grouped(lambda: _cartpole_nodes("async", policy)),
        [Reference("2 in-process collectors in 2 processes", grouped(lambda: Apart(policy)), 0.9)],
        turn=turn,
    )


class Apart:
    """In-process collectors in processes of their own, which only say that a batch is done."""

    def __init__(self, policy: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for worker in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_apart, args=(theirs, worker, policy), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
            for _ in range(2):
                ours.send_bytes(b"go")

    def collect_batch(self) -> int:
        """Return the number of frames of whoever is ready first."""
        pipe: Any = wait(self._pipes)[0]
        pipe.recv_bytes()
        pipe.send_bytes(b"go")
        self._pipes.append(self._pipes.pop(self._pipes.index(pipe)))
        return STEPS * ENVS

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _apart(pipe: Connection, worker: int, policy: Any) -> None:
    collectors.quiet_worker()
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)[worker * ENVS : (worker + 1) * ENVS]
    batches = collectors.inline(factories, policy, STEPS * ENVS)
    try:
        while True:
            pipe.recv_bytes()
            batches.collect_batch()
            pipe.send_bytes(b"done")
    except (EOFError, OSError):
        return


def torchrl(kind: str) -> Case:
    """The same work with TorchRL's collector of the same name."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"torchrl-{kind}",
        f"CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, {kind}",
        grouped(lambda: _cartpole_nodes(kind, policy)),
        [
            Reference(
                "TorchRL DistributedCollector, mp, gloo",
                grouped(lambda: _torchrl(kind, policy)),
                10.0,
            )
        ],
        check=check.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


def _torchrl(kind: str, policy: Any) -> Any:
    from torchrl.collectors.distributed import DistributedCollector

    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)
    frames = STEPS * ENVS * (WORKERS if kind == "sync" else 1)
    return collectors.Batches(
        DistributedCollector(
            [
                collectors.quiet_serial(factories[worker * ENVS : (worker + 1) * ENVS])
                for worker in range(WORKERS)
            ],
            policy,
            frames_per_batch=frames,
            total_frames=1 << 40,
            sync=kind == "sync",
            launcher="mp",
            backend="gloo",
            collector_kwargs=dict(TORCHRL_SHORTCUTS),
        )
    )
