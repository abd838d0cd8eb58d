"""TorchRL's environments with their transforms: our collector, TorchRL's, and none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks import checks, envs, policies
from benchmarks.harness import OURS, Case, Reference, System
from benchmarks.policies import POLICY
from benchmarks.systems import hand, ours, peers

STEPS = 64
"""Steps per environment and batch."""
ALONE = 256
"""The same for a single environment."""
MEMBERS = 16

Chain = Callable[[], Sequence[Any]]
"""Makes transforms."""


def all_cases() -> list[Case]:
    """Return every case."""
    return [
        half_cheetah("norm", "ObservationNorm", _scaled, 8.0, 0.75),
        half_cheetah("vecnorm", "VecNormV2, ClipTransform", _running, 6.0, None),
        cartpole("inside", 20.0),
        cartpole("around", 20.0),
        parallel(),
        pong(),
        atari(),
    ]


def _counted() -> list[Any]:
    from torchrl.envs import InitTracker, RewardSum, StepCounter

    return [StepCounter(), RewardSum(), InitTracker()]


def _scaled() -> list[Any]:
    from torchrl.envs import DoubleToFloat, ObservationNorm, RewardSum, StepCounter

    norm = ObservationNorm(loc=0.1, scale=2.0, in_keys=["observation"])
    return [DoubleToFloat(), StepCounter(), RewardSum(), norm]


def _running() -> list[Any]:
    """Return the transforms of TorchRL's script ``ppo_mujoco``."""
    from torchrl.envs import ClipTransform, DoubleToFloat, RewardSum, StepCounter, VecNormV2

    norm = VecNormV2(in_keys=["observation"], decay=0.99999, eps=1e-2)
    clip = ClipTransform(in_keys=["observation"], low=-10, high=10)
    return [norm, clip, RewardSum(), StepCounter(), DoubleToFloat(in_keys=["observation"])]


def _equal(systems: Mapping[str, System]) -> list[str]:
    """Compare our first batches with TorchRL's; the other references have other observations."""
    same = (OURS, "TorchRL Collector")
    return checks.first_batches({name: systems[name] for name in same if name in systems})


def transformed(env: Any, chain: Chain) -> Any:
    """Return ``env`` with the transforms of ``chain`` around it."""
    from torchrl.envs import Compose, TransformedEnv

    return TransformedEnv(env, Compose(*chain()))


def half_cheetah(
    name: str, title: str, chain: Chain, target: float, bare_target: float | None
) -> Case:
    """One MuJoCo environment, as TorchRL's scripts have it."""
    from torchrl.envs import GymWrapper

    (factory,) = envs.seeded(envs.half_cheetah, 1)
    module = policies.normal_module(policies.mlp(17, 12))
    policy = policies.normal_policy(module, policies.distribution("tanh"))

    def make() -> Any:
        return transformed(GymWrapper(factory()), chain)

    def bare() -> System:
        return ours.inline(factory, policy, ALONE, observation_dtype=torch.float32)

    return Case(
        f"torchrl-halfcheetah-{name}",
        f"TorchRL GymWrapper of HalfCheetah-v5 x1, {title} and three more, 64-64 MLP, TanhNormal",
        lambda: ours.inline(make(), policy, ALONE),
        [
            Reference("TorchRL Collector", lambda: peers.torchrl(make(), policy, ALONE), target),
            Reference("GleanRL, Gymnasium environment", bare, bare_target),
        ],
        check=_equal,
    )


def cartpole(where: str, target: float) -> Case:
    """Cheap environments: what surrounds them decides."""
    factories = envs.seeded(envs.cartpole, MEMBERS)
    frames = MEMBERS * STEPS

    def member(factory: Any) -> Any:
        return transformed(peers.torchrl_gym(factory), _counted)

    def make() -> Any:
        from torchrl.envs import SerialEnv

        if where == "around":
            return transformed(peers.torchrl_serial(factories), _counted)
        makers = [partial(member, factory) for factory in factories]
        return SerialEnv(len(makers), makers, use_buffers=True)

    return Case(
        f"torchrl-cartpole-{where}",
        f"TorchRL SerialEnv of CartPole-v1 x16, StepCounter, RewardSum, InitTracker {where}, "
        "64-64 MLP",
        lambda: ours.inline(make(), POLICY, frames),
        [
            Reference("TorchRL Collector", lambda: peers.torchrl(make(), POLICY, frames), target),
            Reference(
                "GleanRL, Gymnasium environments",
                lambda: ours.inline(factories, POLICY, frames),
                0.7,
            ),
        ],
        check=_equal,
    )


def parallel() -> Case:
    """Environments in processes, the policy in the learner; each library's ``ParallelEnv``."""
    count = 8
    factories = envs.seeded(envs.cartpole, count)
    frames = count * STEPS

    def member(factory: Any) -> Any:
        return transformed(peers.torchrl_gym(factory), _counted)

    makers = [partial(member, factory) for factory in factories]

    def over_workers() -> System:
        from gleanrl.envs import ParallelEnv

        return ours.inline(ParallelEnv(count, makers), POLICY, frames)

    def torchrl() -> System:
        from torchrl.envs import ParallelEnv

        return peers.torchrl(ParallelEnv(count, makers), POLICY, frames)

    return Case(
        "torchrl-parallel",
        f"ParallelEnv({count}) of TorchRL's CartPole-v1, StepCounter, RewardSum, InitTracker "
        "inside, 64-64 MLP",
        over_workers,
        [Reference("TorchRL Collector", torchrl, 5.0)],
        check=_equal,
    )


def pong() -> Case:
    """Images that TorchRL's transforms prepare."""
    from torchrl.envs import CatFrames, GrayScale, GymWrapper, StepCounter, ToTensorImage

    (factory,) = envs.seeded(envs.pong_in_colour, 1)

    def chain() -> list[Any]:
        return [ToTensorImage(), GrayScale(), CatFrames(4, -3), StepCounter()]

    def make() -> Any:
        return transformed(GymWrapper(factory(), categorical_action_encoding=True), chain)

    return Case(
        "torchrl-pong",
        "TorchRL GymWrapper of ALE/Pong-v5 x1, ToTensorImage, GrayScale, CatFrames(4), "
        "StepCounter, random policy",
        lambda: ours.inline(make(), None, ALONE),
        [
            Reference("TorchRL Collector", lambda: peers.torchrl(make(), None, ALONE), 3.5),
            Reference("hand loop", lambda: hand.grey_stacks(factory, ALONE), 0.6),
        ],
    )


def atari() -> Case:
    """Eight environments and the policy, as TorchRL's script ``dqn_atari`` makes them."""
    from torchrl.envs import SerialEnv

    count, steps = 8, 16
    factories = envs.seeded(envs.pong_in_colour, count)
    net = policies.atari_net()
    policy = policies.values_of_pixels(net)

    def member(factory: Any) -> Any:
        from torchrl.envs import GymWrapper

        env = GymWrapper(
            factory(), from_pixels=True, pixels_only=False, categorical_action_encoding=True
        )
        return transformed(env, _dqn_atari)

    def make() -> Any:
        makers = [partial(member, factory) for factory in factories]
        return SerialEnv(len(makers), makers, use_buffers=True)

    frames = count * steps
    return Case(
        "torchrl-atari",
        "TorchRL SerialEnv of ALE/Pong-v5 x8, transforms and network of TorchRL's dqn_atari",
        lambda: ours.inline(make(), policy, frames),
        [
            Reference("TorchRL Collector", lambda: peers.torchrl(make(), policy, frames), 2.5),
            Reference("hand loop", lambda: hand.prepared_atari(factories, net, steps)),
        ],
    )


def _dqn_atari() -> list[Any]:
    from torchrl import envs as rl

    return [
        rl.NoopResetEnv(noops=30, random=True),
        rl.EndOfLifeTransform(),
        rl.SignTransform(in_keys=["reward"]),
        rl.ToTensorImage(),
        rl.GrayScale(),
        rl.Resize(84, 84),
        rl.CatFrames(N=4, dim=-3),
        rl.RewardSum(),
        rl.StepCounter(max_steps=4500),
        rl.DoubleToFloat(),
        rl.VecNorm(in_keys=["pixels"]),
    ]
