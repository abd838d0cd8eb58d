"""Collectors of other libraries, each in its best documented configuration for this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from benchmarks.envs import EnvFactory
from benchmarks.harness import Fields, System
from benchmarks.policies import HIDDEN
from benchmarks.systems.hand import CategoricalActor, pool_loop
from benchmarks.systems.ours import Batches, quiet_worker

TORCHRL_SHORTCUTS: Mapping[str, Any] = {
    "trust_policy": True,
    "no_cuda_sync": True,
    "use_buffers": True,
    "auto_register_policy_transforms": False,
}
"""Arguments that TorchRL's documentation recommends for the speed of any collector."""


def torchrl(env: Any, policy: Any, frames: int, **options: Any) -> Batches:
    """Return TorchRL's ``Collector``, with every shortcut its documentation offers."""
    from torchrl.collectors import Collector

    return Batches(
        Collector(
            env,
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            return_same_td=True,
            **{**TORCHRL_SHORTCUTS, **options},
        )
    )


def torchrl_gym(factory: EnvFactory) -> Any:
    """Return one environment wrapped by TorchRL; discrete actions are indices."""
    from torchrl.envs import GymWrapper

    return GymWrapper(factory(), categorical_action_encoding=True)


def torchrl_serial(factories: Sequence[EnvFactory], quiet: bool = False) -> Any:
    """Return the environments in TorchRL's ``SerialEnv``.

    ``quiet`` is for workers that have no ``init_fn``: they become quiet workers here.
    """
    from torchrl.envs import SerialEnv

    if quiet:
        quiet_worker()
    makers = [partial(torchrl_gym, factory) for factory in factories]
    return SerialEnv(len(makers), makers, use_buffers=True)


DistributionOf = Callable[[Any], Any]
"""Makes a network's output the distribution of actions."""


def _categorical(logits: torch.Tensor) -> Categorical:
    return Categorical(logits=logits)


def cleanrl(
    factories: Sequence[EnvFactory],
    net: nn.Module,
    steps: int,
    distribution: DistributionOf = _categorical,
    device: str = "cpu",
) -> System:
    """Return a rollout phase as single-file PPO scripts write it, over ``SyncVectorEnv``.

    Like such scripts it stores no ``next`` observations, no trajectory ids and one flag. The
    critic is left out, so all systems run the same network, which is on ``device``.
    """
    envs = sync_vector_env(factories)
    count = envs.num_envs
    space: Any = envs.single_observation_space
    action_space: Any = envs.single_action_space
    zeros = partial(torch.zeros, device=device)
    obs, actions = zeros((steps, count, *space.shape)), zeros((steps, count, *action_space.shape))
    logprobs, rewards, dones = zeros((3, steps, count)).unbind()
    next_obs, next_done = torch.Tensor(envs.reset()[0]).to(device), zeros(count)

    def collect() -> int:
        nonlocal next_obs, next_done
        for step in range(steps):
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                probs = distribution(net(next_obs))
                action = probs.sample()
                logprob = probs.log_prob(action)
            actions[step] = action
            logprobs[step] = logprob
            seen, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).to(device).view(-1)
            next_done = torch.Tensor(np.logical_or(terminations, truncations)).to(device)
            next_obs = torch.Tensor(seen).to(device)
        return steps * count

    def fields() -> Fields:
        ended = torch.cat([dones[1:], next_done.unsqueeze(0)])
        return _stored(obs, actions, logprobs, rewards, ended, next_obs)

    return System(collect, fields, envs.close)


def sync_vector_env(factories: Sequence[EnvFactory]) -> gym.vector.SyncVectorEnv:
    """Return the environments of CleanRL's scripts."""
    same = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv(list(factories), autoreset_mode=same)


def _stored(*stored: Any) -> Fields:
    """Return the arrays of loops without successors, ``[T, P, ...]``, and the next observations."""
    arrays = [np.asarray(torch.as_tensor(each).cpu()) for each in stored]
    last = arrays.pop()
    return {
        **{name: part.swapaxes(0, 1) for name, part in zip(_NAMES, arrays, strict=True)},
        "last": last,
    }


_NAMES = "observation", "action", "action_log_prob", "next.reward", "next.done"


class SB3(System):
    """``PPO.collect_rollouts`` on ``DummyVecEnv`` with the same policy network.

    It needs a critic: by default that is a second network of the same size; ``lean``
    makes it one linear layer on the observation. The time includes its advantages.
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        net: nn.Sequential,
        steps: int,
        lean: bool = False,
        vectorise: Callable[[list[EnvFactory]], Any] | None = None,
        **options: Any,
    ) -> None:
        """Build it with further ``options`` of `PPO`.

        ``vectorise`` makes the vectorised environment, else it is ``DummyVecEnv``.
        """
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import DummyVecEnv

        env = (vectorise or DummyVecEnv)(list(factories))
        layers = {"pi": [HIDDEN, HIDDEN], "vf": [] if lean else [HIDDEN, HIDDEN]}
        options |= {"n_steps": steps, "policy_kwargs": {"net_arch": layers}, "device": "cpu"}
        self.model: Any = PPO("MlpPolicy", env, **options)
        policy = self.model.policy
        policy.mlp_extractor.policy_net.load_state_dict(net[:-1].state_dict())
        policy.action_net.load_state_dict(net[-1].state_dict())
        _, callback = self.model._setup_learn(total_timesteps=10**12)

        def collect() -> int:
            self.model.collect_rollouts(env, callback, self.model.rollout_buffer, steps)
            return steps * len(factories)

        super().__init__(collect, self._fields, env.close)

    def _fields(self) -> Fields:
        model, stored = self.model, self.model.rollout_buffer
        discrete = isinstance(model.action_space, gym.spaces.Discrete)
        actions = stored.actions[..., 0] if discrete else stored.actions
        ended = np.concatenate([stored.episode_starts[1:], model._last_episode_starts[None]])
        return _stored(
            stored.observations, actions, stored.log_probs, stored.rewards, ended, model._last_obs
        )


# -- environments in processes, the policy in front of them ----------------------------------------


def async_vector_env(factories: Sequence[EnvFactory], net: nn.Module, steps: int) -> System:
    """Return the bare loop over Gymnasium's ``AsyncVectorEnv``: a process per environment."""
    pool = gym.vector.AsyncVectorEnv(list(factories), shared_memory=True, copy=False)
    actor = CategoricalActor(net, steps, len(factories), 2, np.int64)
    return pool_loop(pool, steps, actor)


def sb3_processes(
    factories: Sequence[EnvFactory], net: nn.Sequential, steps: int, lean: bool
) -> SB3:
    """Return ``PPO.collect_rollouts`` over ``SubprocVecEnv``: a process per environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # Forked: the default starts as many interpreters, and does the same from then on.
    return SB3(factories, net, steps, lean, lambda makers: SubprocVecEnv(makers, "fork"))
