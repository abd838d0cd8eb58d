"""The workloads, what ours is held against in each, and by how much it has to win."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks import agreement, envs, policies
from benchmarks.actors import AddmmActor, CategoricalActor, NormalActor, RandomActor
from benchmarks.hand import HandLoop, RawSteps
from benchmarks.hand_pool import PoolLoop
from benchmarks.harness import Case, Reference, System
from benchmarks.ours import Ours
from benchmarks.peers import SB3, CleanRL, TorchRL, torchrl_gym, torchrl_serial, torchrl_transformed

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
        lambda: Ours(factories, None, 16 * STEPS),
        [
            Reference("raw env.step", lambda: RawSteps(factories, STEPS), 0.9),
            Reference(f"raw env.step, {CHECKED}", lambda: RawSteps(checked, STEPS)),
            Reference(
                "hand loop", lambda: HandLoop(factories, STEPS, RandomActor(STEPS, 16, 2)), None
            ),
        ],
        check=agreement.first_batches,
    )


def cartpole_mlp_16() -> Case:
    """The case most people have."""
    factories = envs.seeded(envs.cartpole, 16)
    checked = envs.seeded(envs.cartpole_checked, 16)
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        "cartpole-mlp-x16",
        "CartPole-v1 x16, 64-64 MLP, Categorical",
        lambda: Ours(factories, policy, 16 * STEPS),
        [
            Reference(
                "hand loop",
                lambda: HandLoop(factories, STEPS, CategoricalActor(net, STEPS, 16, 2)),
                0.9,
            ),
            Reference(
                "hand loop, addmm(out=)",
                lambda: HandLoop(factories, STEPS, AddmmActor(net, STEPS, 16, 2)),
            ),
            Reference(
                f"hand loop, {CHECKED}",
                lambda: HandLoop(checked, STEPS, CategoricalActor(net, STEPS, 16, 2)),
            ),
            Reference(
                "TorchRL SerialEnv",
                lambda: TorchRL(torchrl_serial(factories), policy, 16 * STEPS),
                15.0,
            ),
            Reference(
                f"TorchRL SerialEnv, {CHECKED}",
                lambda: TorchRL(torchrl_serial(checked), policy, 16 * STEPS),
            ),
            Reference("CleanRL loop", lambda: CleanRL(factories, net, STEPS), 1.3),
            Reference(f"CleanRL loop, {CHECKED}", lambda: CleanRL(checked, net, STEPS)),
            Reference("SB3 PPO", lambda: SB3(factories, net, STEPS), 3.0),
            Reference(f"SB3 PPO, {CHECKED}", lambda: SB3(checked, net, STEPS)),
            Reference("SB3 PPO, lean critic", lambda: SB3(factories, net, STEPS, lean=True)),
        ],
        check=agreement.first_batches,
    )


def cartpole_mlp_1() -> Case:
    """One environment: the policy call dominates."""
    factories = envs.seeded(envs.cartpole, 1)
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        "cartpole-mlp-x1",
        "CartPole-v1 x1, 64-64 MLP, Categorical",
        lambda: Ours(factories[0], policy, ALONE),
        [
            Reference(
                "hand loop",
                lambda: HandLoop(factories, ALONE, CategoricalActor(net, ALONE, 1, 2)),
                0.9,
            ),
            Reference(
                "hand loop, addmm(out=)",
                lambda: HandLoop(factories, ALONE, AddmmActor(net, ALONE, 1, 2)),
            ),
            Reference(
                "TorchRL GymEnv", lambda: TorchRL(torchrl_gym(factories[0]), policy, ALONE), 6.0
            ),
        ],
        check=agreement.first_batches,
    )


def half_cheetah(kind: str, target: float | None = 0.9) -> Case:
    """Continuous actions, float64 observations, an environment that costs something."""
    factories = envs.seeded(envs.half_cheetah, 16)
    module = policies.normal_module(policies.mlp(17, 12))

    def ours() -> System:
        policy = policies.normal_policy(module, policies.distribution(kind))
        return Ours(factories, policy, 16 * STEPS, observation_dtype=torch.float32)

    def hand() -> System:
        actor = NormalActor(module, STEPS, 16, 6, squash=kind == "tanh")
        return HandLoop(factories, STEPS, actor)

    names = {"normal": "IndependentNormal", "tanh": "TanhNormal", "own": "the user's own Normal"}
    return Case(
        f"halfcheetah-{kind}",
        f"HalfCheetah-v5 x16, 64-64 MLP, {names[kind]}",
        ours,
        [Reference("hand loop", hand, target)],
        check=agreement.first_batches,
    )


def pong() -> Case:
    """Large observations: what counts is how often they are copied."""
    factories = envs.seeded(envs.pong, 8)
    return Case(
        "pong",
        "ALE/Pong-v5 x8, 84x84 grey, 4 frames, random policy",
        lambda: Ours(factories, None, 8 * STEPS),
        [
            Reference(
                "hand loop", lambda: HandLoop(factories, STEPS, RandomActor(STEPS, 8, 6)), 0.95
            )
        ],
        check=agreement.first_batches,
        extra=_pong_writes,
    )


def _pong_writes() -> dict[str, Any]:
    from benchmarks.counts import count_traffic, still_frames

    real = count_traffic([envs.pong] * 2, steps=32)
    still = count_traffic([still_frames] * 8, steps=16)
    observations = {name: times for name, times in real.written.items() if "observation" in name}
    return {
        "frame_bytes": 4 * 84 * 84,
        "writes_per_stored_observation": observations,
        "bytes_copied_per_frame": sum(observations.values()) * 4 * 84 * 84,
        "transient_bytes_of_16_steps_x8": still.transient,
    }


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
        lambda: Ours(make(count), policy, count * STEPS),
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
        check=agreement.first_batches,
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
        lambda: Ours(make(), policy, ALONE),
        [Reference("TorchRL Collector", lambda: TorchRL(make(), policy, ALONE), 1.5)],
        check=agreement.first_batches,
    )
