"""Other people's collectors, each in its own best documented configuration for this machine."""

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
from benchmarks.systems.hand import CategoricalActor, PoolLoop
from benchmarks.systems.ours import Batches, quiet_worker

TORCHRL_SHORTCUTS: Mapping[str, Any] = {
    "trust_policy": True,
    "no_cuda_sync": True,
    "use_buffers": True,
    "auto_register_policy_transforms": False,
}
"""What TorchRL's documentation offers to every one of its collectors to be faster."""


def torchrl(env: Any, policy: Any, frames: int) -> Batches:
    """Return TorchRL's ``Collector`` on the CPU, with every shortcut its documentation offers."""
    from torchrl.collectors import Collector

    return Batches(
        Collector(
            env,
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            return_same_td=True,
            **TORCHRL_SHORTCUTS,
        )
    )


def torchrl_gym(factory: EnvFactory) -> Any:
    """Return one environment wrapped by TorchRL; discrete actions are indices as for everyone."""
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


def torchrl_transformed(env: Any) -> Any:
    """Return ``env`` with the two transforms most TorchRL scripts have."""
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

    return TransformedEnv(env, Compose(StepCounter(), RewardSum()))


DistributionOf = Callable[[Any], Any]
"""Makes what a network returns the distribution of actions."""


def _categorical(logits: torch.Tensor) -> Categorical:
    return Categorical(logits=logits)


class CleanRL(System):
    """A rollout phase as single-file PPO scripts write it, over Gymnasium's ``SyncVectorEnv``.

    Stores what such scripts store: no ``next`` observations, no trajectory ids, one flag. The
    critic is left out, so that everybody runs the same network.
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        net: nn.Module,
        steps: int,
        distribution: DistributionOf = _categorical,
    ) -> None:
        same = gym.vector.AutoresetMode.SAME_STEP
        self._envs = gym.vector.SyncVectorEnv(list(factories), autoreset_mode=same)
        self._net, self._steps, self._distribution = net, steps, distribution
        count = self._envs.num_envs
        shape = self._envs.single_observation_space.shape
        action_shape = self._envs.single_action_space.shape
        assert shape is not None
        assert action_shape is not None
        self._obs = torch.zeros((steps, count, *shape))
        self._actions = torch.zeros((steps, count, *action_shape))
        self._logprobs = torch.zeros((steps, count))
        self._rewards = torch.zeros((steps, count))
        self._dones = torch.zeros((steps, count))
        self.next_obs = torch.Tensor(self._envs.reset()[0])
        self.next_done = torch.zeros(count)

    def collect_batch(self) -> int:
        next_obs, next_done = self.next_obs, self.next_done
        for step in range(self._steps):
            self._obs[step] = next_obs
            self._dones[step] = next_done
            with torch.no_grad():
                probs = self._distribution(self._net(next_obs))
                action = probs.sample()
                logprob = probs.log_prob(action)
            self._actions[step] = action
            self._logprobs[step] = logprob
            obs, reward, terminations, truncations, _ = self._envs.step(action.numpy())
            self._rewards[step] = torch.tensor(reward).view(-1)
            next_done = torch.Tensor(np.logical_or(terminations, truncations))
            next_obs = torch.Tensor(obs)
        self.next_obs, self.next_done = next_obs, next_done
        return self._steps * self._envs.num_envs

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """What was stored, ``[T, P, ...]``; ``before``: whether the step before was an end."""
        return {
            "observation": self._obs,
            "action": self._actions,
            "log_prob": self._logprobs,
            "reward": self._rewards,
            "before": self._dones,
        }

    def fields(self) -> Fields:
        named = {
            "observation": self._obs,
            "action": self._actions,
            "action_log_prob": self._logprobs,
            "next.reward": self._rewards,
        }
        return {name: value.numpy().swapaxes(0, 1).copy() for name, value in named.items()}

    def close(self) -> None:
        self._envs.close()


class SB3(System):
    """``PPO.collect_rollouts`` on ``DummyVecEnv`` with the same policy network.

    It cannot go without a critic: by default that is a second network of the same size; ``lean``
    makes it one linear layer on the observation. Its advantages are part of the time too.
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
        self.model = PPO("MlpPolicy", env, **options)
        policy: Any = self.model.policy
        policy.mlp_extractor.policy_net.load_state_dict(net[:-1].state_dict())
        policy.action_net.load_state_dict(net[-1].state_dict())
        _, self._callback = self.model._setup_learn(total_timesteps=10**12)
        self._steps, self._frames = steps, steps * len(factories)

    def collect_batch(self) -> int:
        model = self.model
        assert model.env is not None
        model.collect_rollouts(model.env, self._callback, model.rollout_buffer, self._steps)
        return self._frames

    def fields(self) -> Fields:
        buffer = self.model.rollout_buffer
        named = {
            "observation": buffer.observations,
            "action": buffer.actions[..., 0],
            "action_log_prob": buffer.log_probs,
            "next.reward": buffer.rewards,
        }
        return {name: value.swapaxes(0, 1).copy() for name, value in named.items()}

    def close(self) -> None:
        assert self.model.env is not None
        self.model.env.close()


# -- environments in processes, the policy in front of them ----------------------------------------


def async_vector_env(factories: Sequence[EnvFactory], net: nn.Module, steps: int) -> PoolLoop:
    """Return the bare loop over Gymnasium's ``AsyncVectorEnv``: a process per environment."""
    pool = gym.vector.AsyncVectorEnv(list(factories), shared_memory=True, copy=False)
    actor = CategoricalActor(net, steps, len(factories), 2, np.int64)
    return PoolLoop(pool, steps, actor)


def sb3_processes(
    factories: Sequence[EnvFactory], net: nn.Sequential, steps: int, lean: bool
) -> SB3:
    """Return ``PPO.collect_rollouts`` over ``SubprocVecEnv``: a process per environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # Forked: the default starts as many interpreters, and does the same from then on.
    return SB3(factories, net, steps, lean, lambda makers: SubprocVecEnv(makers, "fork"))
