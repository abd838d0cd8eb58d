"""Frames per second of whole training: collection and updates, in one process with one thread.

Every loop has the same environments, network and update, and differs in how it collects (and, for
DQN, in its library's replay buffer). *SB3* is Stable-Baselines3 as it is, with its own update of as
many epochs and minibatches; *SB3's rollouts* have the update of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical

from benchmarks import envs, policies
from benchmarks.harness import Case, Reference, System
from benchmarks.systems import training
from benchmarks.systems.ours import Batches, inline
from benchmarks.systems.peers import SB3, cleanrl, torchrl, torchrl_serial
from benchmarks.systems.training import PPO

ENVS, STEPS = 16, 128
DQN_ENVS, DQN_STEPS = 8, 8
SB3_SIZE = {"learning_rate": 2.5e-4, "gae_lambda": training.LAMBDA, "ent_coef": 0.01}


def half_cheetah_single() -> gym.Env[Any, Any]:
    """Return HalfCheetah in single precision; for SB3, which clips actions itself."""
    return gym.wrappers.DtypeObservation(envs.half_cheetah(), np.float32)


def half_cheetah() -> gym.Env[Any, Any]:
    """Return the same as scripts wrap it: with clipped actions."""
    return gym.wrappers.ClipAction(half_cheetah_single())


def ppo(
    name: str,
    title: str,
    build: envs.EnvFactory,
    sb3_build: envs.EnvFactory,
    inputs: int,
    actor: Callable[[], Any],
    policy: Callable[[Any], Any],
    of: Callable[[Any], Any],
    sb3_outputs: int,
    epochs: int,
    minibatches: int,
) -> Case:
    """Return the case of PPO on one environment.

    Args:
        name: Of the case.
        title: Of the case.
        build: Makes an environment.
        sb3_build: The same for SB3.
        inputs: Features of an observation.
        actor: Makes the network that acts.
        policy: Makes it a TensorDict policy.
        of: Makes what it returns a distribution.
        sb3_outputs: Of SB3's network, whose scale is a parameter.
        epochs: Of an update.
        minibatches: Of an epoch.
    """
    factories = envs.seeded(build, ENVS)

    def ppo_on(make: Callable[[Any], System]) -> System:
        net = actor()
        return training.trained(make(net), PPO(net, inputs, of, epochs, minibatches))

    def theirs() -> SB3:
        net = policies.mlp(inputs, sb3_outputs)
        batch = ENVS * STEPS // minibatches
        made = envs.seeded(sb3_build, ENVS)
        return SB3(made, net, STEPS, n_epochs=epochs, batch_size=batch, **SB3_SIZE)

    def peer() -> System:
        return ppo_on(lambda net: torchrl(torchrl_serial(factories), policy(net), frames))

    frames = ENVS * STEPS
    return Case(
        name,
        f"{title}, {epochs} epochs of {minibatches} minibatches",
        lambda: ppo_on(lambda net: inline(factories, policy(net), frames)),
        [
            Reference("CleanRL loop", lambda: ppo_on(lambda n: cleanrl(factories, n, STEPS, of))),
            Reference("SB3", lambda: training.sb3_training(theirs())),
            Reference("SB3's rollouts", lambda: ppo_on(lambda _: theirs())),
            Reference("TorchRL Collector", peer),
        ],
    )


def _independent(outputs: tuple[Any, Any]) -> policies.IndependentNormal:
    return policies.IndependentNormal(*outputs)


def pong() -> Case:
    """Return the case of DQN: an update per four frames, whose network costs most of the time."""
    count, steps = DQN_ENVS, DQN_STEPS
    factories, frames = envs.seeded(envs.pong, count), count * steps

    def policy(net: training.Nature) -> TensorDictModule:
        return TensorDictModule(training.Greedy(net), ["observation"], ["action"])

    def over(library: Any, collect: Callable[[Any], Batches]) -> System:
        net = training.Nature(6)
        storage = library.LazyTensorStorage(training.ROWS)
        buffer = library.ReplayBuffer(storage=storage, batch_size=training.SAMPLE)
        return training.replayed(collect(policy(net)), buffer, training.DQN(net, frames))

    def ours() -> System:
        import gleanrl

        return over(gleanrl, lambda act: inline(factories, act, frames))

    def theirs() -> System:
        from torchrl import data

        return over(data, lambda act: torchrl(torchrl_serial(factories), act, frames))

    def single_file() -> System:
        net = training.Nature(6)
        act, update = training.Greedy(net), training.DQN(net, frames)
        return training.cleanrl_replay(factories, act, steps, update)

    return Case(
        "train-pong-dqn",
        "ALE/Pong-v5 x8, DQN, a minibatch of 32 per 4 frames",
        ours,
        [
            Reference("CleanRL loop", single_file),
            Reference("SB3", lambda: training.sb3_replay(factories, steps)),
            Reference("TorchRL Collector", theirs),
        ],
    )


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        ppo(
            "train-cartpole-ppo",
            "CartPole-v1 x16, PPO",
            envs.cartpole,
            envs.cartpole,
            4,
            partial(policies.mlp, 4, 2),
            policies.categorical_policy,
            lambda logits: Categorical(logits=logits),
            sb3_outputs=2,
            epochs=4,
            minibatches=4,
        ),
        ppo(
            "train-halfcheetah-ppo",
            "HalfCheetah-v5 x16, PPO",
            half_cheetah,
            half_cheetah_single,
            17,
            lambda: policies.normal_module(policies.mlp(17, 12)),
            lambda net: policies.normal_policy(net, policies.distribution("normal")),
            _independent,
            sb3_outputs=6,
            epochs=10,
            minibatches=32,
        ),
        pong(),
    ]
