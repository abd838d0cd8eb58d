"""Training loops: any collection with the same networks and the same update, and SB3 as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.envs import EnvFactory
from benchmarks.harness import Around, System
from benchmarks.policies import mlp
from benchmarks.systems.ours import Batches
from benchmarks.systems.peers import SB3, CleanRL, DistributionOf

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Trained(Around):
    """Collects with one system and updates after each batch."""

    def __init__(self, inner: System, update: Callable[[Any], None]) -> None:
        super().__init__(inner)
        self._update = update

    def collect_batch(self) -> int:
        frames = super().collect_batch()
        self._update(self.inner)
        return frames


# -- PPO -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    """What an update needs, ``[P, T, ...]``; ``last`` ``[P, ...]`` is what is observed next."""

    observation: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    done: Tensor
    """Whether the step ended an episode, in either way, as CleanRL has it."""
    last: Tensor


class PPO:
    """The update that everybody gets: advantages, then some epochs of shuffled minibatches."""

    def __init__(
        self, actor: nn.Module, inputs: int, of: DistributionOf, epochs: int, minibatches: int
    ) -> None:
        self._actor, self._critic, self._of = actor, mlp(inputs, 1), of
        self._epochs, self._minibatches = epochs, minibatches
        parameters = [*actor.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    def __call__(self, rollout: Rollout) -> None:
        gain, target = self._advantages(rollout)
        columns = (rollout.observation, rollout.action, rollout.log_prob, gain, target)
        flat = [column.flatten(0, 1) for column in columns]
        frames = len(flat[0])
        for _ in range(self._epochs):
            for index in torch.randperm(frames).split(frames // self._minibatches):
                self._step(*(column[index] for column in flat))

    def _advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            value = self._critic(rollout.observation).squeeze(-1)
            after = torch.cat([value[:, 1:], self._critic(rollout.last)], 1)
        alive = 1.0 - rollout.done.float()
        delta = rollout.reward + GAMMA * after * alive - value
        decay, gain = GAMMA * LAMBDA * alive, torch.empty_like(delta)
        later = torch.zeros_like(delta[:, 0])
        for t in reversed(range(delta.shape[1])):
            gain[:, t] = later = delta[:, t] + decay[:, t] * later
        return gain, gain + value

    def _step(
        self, observation: Tensor, action: Tensor, log_prob: Tensor, gain: Tensor, target: Tensor
    ) -> None:
        choice = self._of(self._actor(observation))
        ratio = (choice.log_prob(action) - log_prob).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        won = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        error = (self._critic(observation).squeeze(-1) - target).pow(2).mean()
        loss = 0.5 * error - won - 0.01 * choice.entropy().mean()
        self._optimizer.zero_grad()
        loss.backward()
        parameters = self._optimizer.param_groups[0]["params"]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        self._optimizer.step()


def of_batches(source: Batches) -> Rollout:
    """Read a TensorDict batch, ours or TorchRL's."""
    batch = source.batch
    after = batch["next"]
    return Rollout(
        batch["observation"],
        batch["action"],
        batch["action_log_prob"],
        after["reward"].squeeze(-1),
        after["done"].squeeze(-1),
        after["observation"][:, -1],
    )


def of_cleanrl(source: CleanRL) -> Rollout:
    """Read the tensors of a CleanRL-style loop."""
    stored = {name: tensor.transpose(0, 1) for name, tensor in source.stored.items()}
    done = torch.cat([stored.pop("before")[:, 1:], source.next_done.unsqueeze(1)], 1)
    return Rollout(**stored, done=done, last=source.next_obs)


def of_sb3(source: SB3) -> Rollout:
    """Read SB3's rollout buffer."""
    model, buffer = source.model, source.model.rollout_buffer
    arrays = (buffer.observations, buffer.actions, buffer.log_probs, buffer.rewards)
    observation, action, log_prob, reward = (
        torch.as_tensor(array).transpose(0, 1) for array in arrays
    )
    ended = np.concatenate([buffer.episode_starts[1:], model._last_episode_starts[None]])
    done, last = torch.as_tensor(ended).transpose(0, 1), torch.as_tensor(model._last_obs)
    discrete = isinstance(model.action_space, gym.spaces.Discrete)
    action = action.squeeze(-1).long() if discrete else action
    return Rollout(observation, action, log_prob, reward, done, last)


class SB3Training(SB3):
    """SB3 as it is: its rollouts and its own update, of the same size."""

    def collect_batch(self) -> int:
        frames = super().collect_batch()
        self.model.train()
        return frames


# -- DQN -------------------------------------------------------------------------------------------

ROWS, SAMPLE, EPSILON = 4096, 32, 0.1
EVERY = 4
"""Frames per update."""


class Nature(nn.Module):
    """The convolutional network of the DQN paper, on bytes."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                *(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
                *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions)),
            )

    def forward(self, observation: Tensor) -> Tensor:
        pixels = observation.reshape(-1, *observation.shape[-3:]) / 255.0
        values: Tensor = self.net(pixels)
        return values.reshape(*observation.shape[:-3], -1)


class Greedy(nn.Module):
    """Acts by the largest value, at random once in ten times."""

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values

    def forward(self, observation: Tensor) -> Tensor:
        values = self.values(observation)
        best = values.argmax(-1)
        other = torch.randint_like(best, values.shape[-1])
        return torch.where(torch.rand(best.shape) < EPSILON, other, best)


Sample = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Observation, action, reward, successor, whether it is terminal."""


class DQN:
    """The update that everybody gets, once per four frames."""

    def __init__(self, values: nn.Module, frames: int) -> None:
        self._values, self._target = values, copy.deepcopy(values)
        self._optimizer = torch.optim.Adam(values.parameters(), lr=1e-4)
        self._times = frames // EVERY

    def __call__(self, sample: Callable[[], Sample]) -> None:
        for _ in range(self._times):
            observation, action, reward, after, terminal = sample()
            with torch.no_grad():
                best = self._target(after).amax(-1)
                wanted = reward.flatten() + GAMMA * best * (1 - terminal.flatten().float())
            chosen = self._values(observation).gather(-1, action.view(-1, 1)).squeeze(-1)
            loss = nn.functional.smooth_l1_loss(chosen, wanted)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self._values.parameters(), 10.0)
            self._optimizer.step()


class Replayed(Around):
    """A collector that fills a replay buffer of its own library, which is sampled from."""

    def __init__(self, batches: Batches, buffer: Any, update: DQN) -> None:
        super().__init__(batches)
        self._buffer, self._update = buffer, update

    def collect_batch(self) -> int:
        frames = super().collect_batch()
        self._buffer.extend(self.inner.batch.reshape(-1))
        self._update(self._sample)
        return frames

    def _sample(self) -> Sample:
        rows = self._buffer.sample()
        after = rows["next"]
        return (
            rows["observation"],
            rows["action"],
            after["reward"],
            after["observation"],
            after["terminated"],
        )


class CleanRLReplay(System):
    """The loop of CleanRL's ``dqn_atari.py``: ``SyncVectorEnv`` and SB3's ``ReplayBuffer``."""

    def __init__(
        self, factories: Sequence[EnvFactory], act: nn.Module, steps: int, update: DQN
    ) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer

        same = gym.vector.AutoresetMode.SAME_STEP
        self._envs = gym.vector.SyncVectorEnv(list(factories), autoreset_mode=same)
        self._act, self._steps, self._update = act, steps, update
        space: Any = self._envs.single_observation_space
        actions: Any = self._envs.single_action_space
        count = self._envs.num_envs
        self._buffer = ReplayBuffer(
            ROWS, space, actions, "cpu", n_envs=count, handle_timeout_termination=False
        )
        self._obs = self._envs.reset()[0]

    def collect_batch(self) -> int:
        for _ in range(self._steps):
            with torch.no_grad():
                action = self._act(torch.as_tensor(self._obs)).numpy()
            seen, reward, terminated, truncated, info = self._envs.step(action)
            after = seen.copy()
            for env in np.flatnonzero(terminated | truncated):
                after[env] = info["final_obs"][env]
            self._buffer.add(self._obs, after, action, reward, terminated, [])
            self._obs = seen
        self._update(self._sample)
        return self._steps * self._envs.num_envs

    def _sample(self) -> Sample:
        rows = self._buffer.sample(SAMPLE)
        return rows.observations, rows.actions, rows.rewards, rows.next_observations, rows.dones

    def close(self) -> None:
        self._envs.close()


class SB3Replay(System):
    """SB3's DQN as it is, of the same size."""

    def __init__(self, factories: Sequence[EnvFactory], steps: int) -> None:
        from stable_baselines3 import DQN as Model
        from stable_baselines3.common.vec_env import DummyVecEnv

        self._model = model = Model(
            "CnnPolicy",
            DummyVecEnv(list(factories)),
            buffer_size=ROWS,
            batch_size=SAMPLE,
            learning_starts=0,
            train_freq=(steps, "step"),
            target_update_interval=10**9,
            exploration_initial_eps=EPSILON,
            exploration_final_eps=EPSILON,
            device="cpu",
        )
        _, self._callback = model._setup_learn(total_timesteps=10**12)
        self._frames = steps * len(factories)

    def collect_batch(self) -> int:
        model: Any = self._model
        model.collect_rollouts(
            model.env,
            train_freq=model.train_freq,
            callback=self._callback,
            learning_starts=0,
            replay_buffer=model.replay_buffer,
        )
        model.train(batch_size=SAMPLE, gradient_steps=self._frames // EVERY)
        return self._frames

    def close(self) -> None:
        assert self._model.env is not None
        self._model.env.close()
