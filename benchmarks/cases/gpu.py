"""Policies on a CUDA device in front of environments on the CPU, batches on the device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import envs
from benchmarks.harness import Case, Reference, Skip, System
from benchmarks.policies import NET, categorical_policy
from benchmarks.systems import ours, peers
from benchmarks.systems.training import Nature

STEPS = 64
"""Steps per environment and batch."""
WORKERS, EACH = 8, 4
"""Workers, and environments of each."""
THERE = {"policy_device": "cuda", "storing_device": "cuda"}


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        case("gpu-mlp-x16", "CartPole-v1 x16, 64-64 MLP", envs.seeded(envs.cartpole, 16), NET),
        case("gpu-cnn-x8", "ALE/Pong-v5 x8, Nature CNN", envs.seeded(envs.pong, 8), Nature(6)),
        central(envs.seeded(envs.pong, WORKERS * EACH), Nature(6)),
    ]


def case(name: str, title: str, factories: Sequence[envs.EnvFactory], net: nn.Module) -> Case:
    """Return a case: the ways to call a policy, in ours and in TorchRL, and the loop of CleanRL."""
    frames = len(factories) * STEPS

    def mine(**options: Any) -> System:
        return ours.inline(factories, _policy(net), frames, **THERE, **options)

    def theirs(**options: Any) -> System:
        where = {**THERE, "env_device": "cpu", "no_cuda_sync": False}
        return peers.torchrl(
            peers.torchrl_serial(factories), _policy(net), frames, **where, **options
        )

    def loop() -> System:
        return peers.cleanrl(factories, _there(net), STEPS, device="cuda")

    captured = {"cudagraph_policy": True}
    return Case(
        name,
        f"{title}, Categorical, policy and batches on the GPU",
        mine,
        [
            Reference("gleanrl, cudagraph_policy", lambda: mine(**captured)),
            Reference("TorchRL SerialEnv", theirs),
            Reference("TorchRL SerialEnv, cudagraph_policy", lambda: theirs(**captured)),
            Reference("CleanRL loop", loop),
        ],
    )


def central(factories: Sequence[envs.EnvFactory], net: nn.Module) -> Case:
    """Return a case over worker processes: one policy on the GPU for all, or one in each."""
    members = [list(factories[first : first + EACH]) for first in range(0, len(factories), EACH)]
    frames = len(factories) * STEPS

    def ours_of(kind: str, **options: Any) -> System:
        return ours.over("process", kind, members, _policy(net), frames, **THERE, **options)

    return Case(
        "gpu-cnn-x32-workers",
        f"ALE/Pong-v5 x{len(factories)} in {WORKERS} workers, Nature CNN, Categorical, on the GPU",
        lambda: ours_of("sync", inference="central", env_groups=2),
        [
            Reference("gleanrl, asynchronous", lambda: _asynchronous(members, net)),
            Reference("gleanrl, inference='workers'", lambda: ours_of("sync")),
            Reference(
                "gleanrl, one process",
                lambda: ours.inline(factories, _policy(net), frames, **THERE),
            ),
            Reference("TorchRL AsyncBatchedCollector", lambda: _torchrl_batched(factories, net)),
        ],
        stopped=True,
    )


def _asynchronous(members: Sequence[Any], net: nn.Module) -> System:
    from gleanrl import MultiAsyncCollector

    collector = MultiAsyncCollector(
        list(members),
        _policy(net),
        frames_per_batch=len(members) * EACH * STEPS,
        transition_chunk_size=STEPS,
        total_frames=-1,
        inference="central",
        env_groups=2,
        policy_device="cuda",
    )
    return ours.Batches(collector)


def _torchrl_batched(factories: Sequence[envs.EnvFactory], net: nn.Module) -> System:
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [partial(_wrapped, make) for make in factories],
        policy_factory=partial(_policy, net),
        frames_per_batch=len(factories) * STEPS,
        total_frames=-1,
        env_backend="multiprocessing",
        transport="auto",
        transition_chunk_size=64,
        max_batch_size=len(factories),
        device="cuda",
    )
    return ours.Batches(collector)


def _wrapped(make: envs.EnvFactory) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)


def _policy(net: nn.Module) -> Any:
    return categorical_policy(_there(net))


def _there(net: nn.Module) -> nn.Module:
    if not torch.cuda.is_available():
        raise Skip("there is no CUDA device")
    return copy.deepcopy(net).to("cuda")
