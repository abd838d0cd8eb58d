"""The workloads in one process, their references and the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import checks, envs, policies
from benchmarks.cases import torchrl_envs
from benchmarks.harness import Build, Case, Reference, System
from benchmarks.policies import NET, POLICY
from benchmarks.systems import hand, ours, peers

STEPS = 64
"""Steps per environment and batch."""
ALONE = 256
"""The same for a single environment."""
CHECKED = "as gym.make gives it"
"""Marks references that step through the wrappers which only check how they are called."""
ENVPOOL = ("envpool", "EnvPool CartPole", envs.cartpole_envpool, 64, np.int32)
"""EnvPool on one thread."""
NATIVE = ("native", "Gymnasium vector CartPole", envs.cartpole_vector, 256, np.int64)


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        cartpole_random(),
        cartpole_mlp_16(),
        cartpole_mlp_1(),
        half_cheetah("normal"),
        half_cheetah("tanh"),
        half_cheetah("own", target=None),
        pong(),
        *(pool(*ENVPOOL, mlp) for mlp in (False, True)),
        *(pool(*NATIVE, mlp) for mlp in (False, True)),
        async_pool("envpool-async-random", "EnvPool CartPole", envs.cartpole_async_envpool, 2),
        async_pool("envpool-async-pong", "EnvPool Pong", envs.pong_envpool, 6),
        async_pool("ale-async-pong", "ALE vector Pong", envs.pong_ale_pool, 6),
        *torchrl_envs.all_cases(),
    ]


def case(name: str, title: str, build: Build, *references: Reference, random: bool = False) -> Case:
    """Return a case whose first batches are compared, with ``random`` actions only in part."""
    check = partial(checks.first_batches, random=random)
    return Case(name, title, build, references, check=check)


def loop(
    factories: Sequence[envs.EnvFactory],
    actor: Callable[[int, int, int], hand.Actor],
    actions: int,
    steps: int = STEPS,
) -> Build:
    """Return the hand-written loop; ``actor`` is made for steps, environments and actions."""
    return lambda: hand.hand_loop(factories, steps, actor(steps, len(factories), actions))


def cartpole_random() -> Case:
    """Overhead without a policy."""
    factories = envs.seeded(envs.cartpole, 16)
    checked = envs.seeded(envs.cartpole_checked, 16)
    return case(
        "cartpole-random",
        "CartPole-v1 x16, random policy",
        lambda: ours.inline(factories, None, 16 * STEPS),
        Reference("raw env.step", lambda: hand.raw_steps(factories, STEPS), 0.9),
        Reference(f"raw env.step, {CHECKED}", lambda: hand.raw_steps(checked, STEPS)),
        Reference("hand loop", loop(factories, hand.RandomActor, 2)),
        random=True,
    )


def cartpole_mlp_16() -> Case:
    """The case most people have."""
    some, checked = envs.seeded(envs.cartpole, 16), envs.seeded(envs.cartpole_checked, 16)
    actor = partial(hand.CategoricalActor, NET)

    def serial(factories: Any) -> Build:
        return lambda: peers.torchrl(peers.torchrl_serial(factories), POLICY, 16 * STEPS)

    return case(
        "cartpole-mlp-x16",
        "CartPole-v1 x16, 64-64 MLP, Categorical",
        lambda: ours.inline(some, POLICY, 16 * STEPS),
        Reference("hand loop", loop(some, actor, 2), 0.9),
        Reference("hand loop, addmm(out=)", loop(some, partial(hand.AddmmActor, NET), 2)),
        Reference(f"hand loop, {CHECKED}", loop(checked, actor, 2)),
        Reference("TorchRL SerialEnv", serial(some), 15.0),
        Reference(f"TorchRL SerialEnv, {CHECKED}", serial(checked)),
        Reference("CleanRL loop", lambda: peers.cleanrl(some, NET, STEPS), 1.3),
        Reference(f"CleanRL loop, {CHECKED}", lambda: peers.cleanrl(checked, NET, STEPS)),
        Reference("SB3 PPO", lambda: peers.SB3(some, NET, STEPS), 3.0),
        Reference(f"SB3 PPO, {CHECKED}", lambda: peers.SB3(checked, NET, STEPS)),
        Reference("SB3 PPO, lean critic", lambda: peers.SB3(some, NET, STEPS, lean=True)),
    )


def cartpole_mlp_1() -> Case:
    """One environment: the policy call dominates."""
    factories = envs.seeded(envs.cartpole, 1)

    def theirs() -> System:
        return peers.torchrl(peers.torchrl_gym(factories[0]), POLICY, ALONE)

    return case(
        "cartpole-mlp-x1",
        "CartPole-v1 x1, 64-64 MLP, Categorical",
        lambda: ours.inline(factories[0], POLICY, ALONE),
        Reference("hand loop", loop(factories, partial(hand.CategoricalActor, NET), 2, ALONE), 0.9),
        Reference(
            "hand loop, addmm(out=)", loop(factories, partial(hand.AddmmActor, NET), 2, ALONE)
        ),
        Reference("TorchRL GymEnv", theirs, 6.0),
    )


def half_cheetah(kind: str, target: float | None = 0.9) -> Case:
    """Continuous actions, float64 observations, an environment that costs something."""
    factories = envs.seeded(envs.half_cheetah, 16)
    module = policies.normal_module(policies.mlp(17, 12))

    def build() -> System:
        policy = policies.normal_policy(module, policies.distribution(kind))
        return ours.inline(factories, policy, 16 * STEPS, observation_dtype=torch.float32)

    actor = partial(hand.NormalActor, module, squash=kind == "tanh")
    names = {"normal": "IndependentNormal", "tanh": "TanhNormal", "own": "the user's own Normal"}
    return case(
        f"halfcheetah-{kind}",
        f"HalfCheetah-v5 x16, 64-64 MLP, {names[kind]}",
        build,
        Reference("hand loop", loop(factories, actor, 6), target),
    )


def pong() -> Case:
    """Large observations: the number of copies decides."""
    factories = envs.seeded(envs.pong, 8)
    return case(
        "pong",
        "ALE/Pong-v5 x8, 84x84 grey, 4 frames, random policy",
        lambda: ours.inline(factories, None, 8 * STEPS),
        Reference("hand loop", loop(factories, hand.RandomActor, 6), 0.95),
        random=True,
    )


def pool(
    name: str, title: str, make: Callable[[int], Any], count: int, dtype: Any, mlp: bool
) -> Case:
    """A vector environment that resets on the next step."""
    policy = POLICY if mlp else None
    actor = partial(hand.CategoricalActor, NET) if mlp else hand.RandomActor

    def bare() -> System:
        return hand.pool_loop(make(count), STEPS, actor(STEPS, count, 2, arrays=dtype))

    return case(
        f"{name}-{'mlp' if mlp else 'random'}",
        f"{title} x{count}, {'64-64 MLP' if mlp else 'random policy'}",
        lambda: ours.inline(make(count), policy, count * STEPS),
        Reference("bare loop", bare, 0.9),
        random=not mlp,
    )


def async_pool(name: str, title: str, make: Callable[[int, int], Any], actions: int) -> Case:
    """A pool of 64 that answers for 32 at a time, random policy."""
    steps = STEPS if actions == 2 else 16

    def bare(stores: bool) -> System:
        actor = hand.RandomActor(steps, 32, actions, arrays=np.int32)
        return hand.async_pool_loop(make(64, 32), steps, actor, stores)

    return Case(
        name,
        f"{title} x64, 32 at a time, random policy",
        lambda: ours.inline(make(64, 32), None, 32 * steps),
        (
            Reference("bare send and recv", lambda: bare(False), 0.9),
            Reference("bare loop that stores rows", lambda: bare(True)),
        ),
    )
