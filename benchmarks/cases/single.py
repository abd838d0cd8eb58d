"""The workloads, what ours is held against in each, and by how much it has to win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import checks, envs, policies
from benchmarks.harness import Build, Case, Reference, System
from benchmarks.systems.hand import (
    AddmmActor,
    CategoricalActor,
    HandLoop,
    NormalActor,
    PoolLoop,
    RandomActor,
    RawSteps,
)
from benchmarks.systems.ours import inline
from benchmarks.systems.peers import (
    SB3,
    CleanRL,
    torchrl,
    torchrl_gym,
    torchrl_serial,
    torchrl_transformed,
)

STEPS = 64
"""Steps per environment and batch."""
ALONE = 256
"""The same for a single environment."""
CHECKED = "as gym.make gives it"
"""Marks references that step through the wrappers which only check how they are called."""


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
        envpool(mlp=False),
        envpool(mlp=True),
        native(mlp=False),
        native(mlp=True),
        torchrl_env(transforms=False),
        torchrl_env(transforms=True),
    ]


def cartpole_random() -> Case:
    """Overhead without a policy."""
    factories = envs.seeded(envs.cartpole, 16)
    checked = envs.seeded(envs.cartpole_checked, 16)
    return Case(
        "cartpole-random",
        "CartPole-v1 x16, random policy",
        lambda: inline(factories, None, 16 * STEPS),
        [
            Reference("raw env.step", lambda: RawSteps(factories, STEPS), 0.9),
            Reference(f"raw env.step, {CHECKED}", lambda: RawSteps(checked, STEPS)),
            Reference(
                "hand loop", lambda: HandLoop(factories, STEPS, RandomActor(STEPS, 16, 2)), None
            ),
        ],
        check=checks.first_batches,
    )


def cartpole_mlp_16() -> Case:
    """The case most people have."""
    some, checked = envs.seeded(envs.cartpole, 16), envs.seeded(envs.cartpole_checked, 16)
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)

    def hand(factories: Any, actor: Any = CategoricalActor) -> Build:
        return lambda: HandLoop(factories, STEPS, actor(net, STEPS, 16, 2))

    def serial(factories: Any) -> Build:
        return lambda: torchrl(torchrl_serial(factories), policy, 16 * STEPS)

    return Case(
        "cartpole-mlp-x16",
        "CartPole-v1 x16, 64-64 MLP, Categorical",
        lambda: inline(some, policy, 16 * STEPS),
        [
            Reference("hand loop", hand(some), 0.9),
            Reference("hand loop, addmm(out=)", hand(some, AddmmActor)),
            Reference(f"hand loop, {CHECKED}", hand(checked)),
            Reference("TorchRL SerialEnv", serial(some), 15.0),
            Reference(f"TorchRL SerialEnv, {CHECKED}", serial(checked)),
            Reference("CleanRL loop", lambda: CleanRL(some, net, STEPS), 1.3),
            Reference(f"CleanRL loop, {CHECKED}", lambda: CleanRL(checked, net, STEPS)),
            Reference("SB3 PPO", lambda: SB3(some, net, STEPS), 3.0),
            Reference(f"SB3 PPO, {CHECKED}", lambda: SB3(checked, net, STEPS)),
            Reference("SB3 PPO, lean critic", lambda: SB3(some, net, STEPS, lean=True)),
        ],
        check=checks.first_batches,
    )


def cartpole_mlp_1() -> Case:
    """One environment: the policy call dominates."""
    factories = envs.seeded(envs.cartpole, 1)
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)

    def hand(actor: Any) -> Build:
        return lambda: HandLoop(factories, ALONE, actor(net, ALONE, 1, 2))

    return Case(
        "cartpole-mlp-x1",
        "CartPole-v1 x1, 64-64 MLP, Categorical",
        lambda: inline(factories[0], policy, ALONE),
        [
            Reference("hand loop", hand(CategoricalActor), 0.9),
            Reference("hand loop, addmm(out=)", hand(AddmmActor)),
            Reference(
                "TorchRL GymEnv", lambda: torchrl(torchrl_gym(factories[0]), policy, ALONE), 6.0
            ),
        ],
        check=checks.first_batches,
    )


def half_cheetah(kind: str, target: float | None = 0.9) -> Case:
    """Continuous actions, float64 observations, an environment that costs something."""
    factories = envs.seeded(envs.half_cheetah, 16)
    module = policies.normal_module(policies.mlp(17, 12))

    def ours() -> System:
        policy = policies.normal_policy(module, policies.distribution(kind))
        return inline(factories, policy, 16 * STEPS, observation_dtype=torch.float32)

    def hand() -> System:
        actor = NormalActor(module, STEPS, 16, 6, squash=kind == "tanh")
        return HandLoop(factories, STEPS, actor)

    names = {"normal": "IndependentNormal", "tanh": "TanhNormal", "own": "the user's own Normal"}
    return Case(
        f"halfcheetah-{kind}",
        f"HalfCheetah-v5 x16, 64-64 MLP, {names[kind]}",
        ours,
        [Reference("hand loop", hand, target)],
        check=checks.first_batches,
    )


def pong() -> Case:
    """Large observations: what counts is how often they are copied."""
    factories = envs.seeded(envs.pong, 8)
    return Case(
        "pong",
        "ALE/Pong-v5 x8, 84x84 grey, 4 frames, random policy",
        lambda: inline(factories, None, 8 * STEPS),
        [
            Reference(
                "hand loop", lambda: HandLoop(factories, STEPS, RandomActor(STEPS, 8, 6)), 0.95
            )
        ],
        check=checks.first_batches,
    )


def envpool(mlp: bool) -> Case:
    """EnvPool's threads (one of them), reset on the next step."""
    return _pool_case("envpool", "EnvPool CartPole", envs.cartpole_envpool, 64, mlp, np.int32)


def native(mlp: bool) -> Case:
    """Gymnasium's own vectorised CartPole, reset on the next step."""
    return _pool_case(
        "native", "Gymnasium vector CartPole", envs.cartpole_vector, 256, mlp, np.int64
    )


def _pool_case(
    name: str, title: str, make: Callable[[int], Any], count: int, mlp: bool, dtype: Any
) -> Case:
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net) if mlp else None
    return Case(
        f"{name}-{'mlp' if mlp else 'random'}",
        f"{title} x{count}, {'64-64 MLP' if mlp else 'random policy'}",
        lambda: inline(make(count), policy, count * STEPS),
        [
            Reference(
                "bare loop",
                lambda: PoolLoop(
                    make(count),
                    STEPS,
                    CategoricalActor(net, STEPS, count, 2, dtype)
                    if mlp
                    else RandomActor(STEPS, count, 2, dtype),
                ),
                0.9,
            )
        ],
        check=checks.first_batches,
    )


def torchrl_env(transforms: bool) -> Case:
    """An environment written for TorchRL, in ours and in theirs.

    With transforms it is no Gymnasium environment in disguise: every step goes through TensorDicts.
    """
    factory = envs.seeded(envs.cartpole, 1)[0]
    policy = policies.categorical_policy(policies.mlp(4, 2))

    def make() -> Any:
        env = torchrl_gym(factory)
        return torchrl_transformed(env) if transforms else env

    return Case(
        "torchrl-env-transforms" if transforms else "torchrl-env",
        f"TorchRL GymEnv x1{' + StepCounter, RewardSum' if transforms else ''}, 64-64 MLP",
        lambda: inline(make(), policy, ALONE),
        [Reference("TorchRL Collector", lambda: torchrl(make(), policy, ALONE), 1.5)],
        check=checks.first_batches,
    )
