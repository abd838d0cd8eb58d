"""Training loops: any collection with the same networks and the same update, and SB3 as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.envs import EnvFactory
from benchmarks.harness import Fields, System
from benchmarks.policies import mlp
from benchmarks.systems.ours import Batches
from benchmarks.systems.peers import SB3, DistributionOf, sync_vector_env

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
_READ = "observation", "action", "action_log_prob", "next.reward", "next.done"


# -- PPO -------------------------------------------------------------------------------------------


class PPO:
    """The update of all loops: advantages, then some epochs of shuffled minibatches."""

    def __init__(
        self, actor: nn.Module, inputs: int, of: DistributionOf, epochs: int, minibatches: int
    ) -> None:
        self._actor, self._critic, self._of = actor, mlp(inputs, 1), of
        self._epochs, self._minibatches = epochs, minibatches
        parameters = [*actor.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    def __call__(self, fields: Fields) -> None:
        """Learn from a batch, ``[P, T, ...]``."""
        rollout = {name: torch.as_tensor(fields[name]) for name in _READ}
        after = fields["last"] if "last" in fields else fields["next.observation"][:, -1]
        gain, target = self._advantages(
            rollout["observation"], rollout["next.reward"], rollout["next.done"], after
        )
        columns = (*(rollout[name] for name in _READ[:3]), gain, target)
        flat = [column.flatten(0, 1) for column in columns]
        frames = len(flat[0])
        for _ in range(self._epochs):
            for index in torch.randperm(frames).split(frames // self._minibatches):
                self._step(*(column[index] for column in flat))

    def _advantages(
        self, observation: Tensor, reward: Tensor, done: Tensor, last: Any
    ) -> tuple[Tensor, Tensor]:
        """Return gains and targets; ``last``, ``[P, ...]``, is the next observation."""
        with torch.no_grad():
            value = self._critic(observation).squeeze(-1)
            after = torch.cat([value[:, 1:], self._critic(torch.as_tensor(last))], 1)
        alive = 1.0 - done.float()
        delta = reward + GAMMA * after * alive - value
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


def trained(system: System, update: Callable[[Fields], None]) -> System:
    """Return ``system`` with an update after each batch."""

    def learn(frames: int) -> int:
        update(system.fields())
        return frames

    return system.then(learn)


def sb3_training(sb3: SB3) -> SB3:
    """Return SB3 as it is: its rollouts and its own update, of the same size."""

    def learn(frames: int) -> int:
        sb3.model.train()
        return frames

    return sb3.then(learn)


# -- DQN -------------------------------------------------------------------------------------------

ROWS, SAMPLE, EPSILON = 4096, 32, 0.1
EVERY = 4
"""Frames per update."""


class Nature(nn.Module):
    """The convolutional network of the DQN paper, on bytes."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        with torch.random.fork_rng(()):
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
    """The update of all loops, once per four frames."""

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


def replayed(batches: Batches, buffer: Any, update: DQN) -> Batches:
    """Return a collector that fills a buffer of its own library, which is sampled from."""

    def sample() -> Sample:
        rows = buffer.sample()
        after = rows["next"]
        seen = rows["observation"], rows["action"]
        return *seen, after["reward"], after["observation"], after["terminated"]

    def learn(frames: int) -> int:
        buffer.extend(batches.batch.reshape(-1))
        update(sample)
        return frames

    return batches.then(learn)


def cleanrl_replay(
    factories: Sequence[EnvFactory], act: nn.Module, steps: int, update: DQN
) -> System:
    """Return the loop of CleanRL's ``dqn_atari.py``: ``SyncVectorEnv``, SB3's ``ReplayBuffer``."""
    from stable_baselines3.common.buffers import ReplayBuffer

    envs = sync_vector_env(factories)
    space: Any = envs.single_observation_space
    actions: Any = envs.single_action_space
    buffer = ReplayBuffer(
        ROWS, space, actions, "cpu", n_envs=envs.num_envs, handle_timeout_termination=False
    )
    obs = envs.reset()[0]

    def sample() -> Sample:
        rows = buffer.sample(SAMPLE)
        return rows.observations, rows.actions, rows.rewards, rows.next_observations, rows.dones

    def collect() -> int:
        nonlocal obs
        for _ in range(steps):
            with torch.no_grad():
                action = act(torch.as_tensor(obs)).numpy()
            seen, reward, terminated, truncated, info = envs.step(action)
            after = seen.copy()
            for env in np.flatnonzero(terminated | truncated):
                after[env] = info["final_obs"][env]
            buffer.add(obs, after, action, reward, terminated, [])
            obs = seen
        update(sample)
        return steps * envs.num_envs

    return System(collect, end=envs.close)


def sb3_replay(factories: Sequence[EnvFactory], steps: int) -> System:
    """Return SB3's DQN as it is, of the same size."""
    from stable_baselines3 import DQN as Model
    from stable_baselines3.common.vec_env import DummyVecEnv

    env: Any = DummyVecEnv(list(factories))
    model: Any = Model(
        "CnnPolicy",
        env,
        buffer_size=ROWS,
        batch_size=SAMPLE,
        learning_starts=0,
        train_freq=(steps, "step"),
        target_update_interval=10**9,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        device="cpu",
    )
    _, callback = model._setup_learn(total_timesteps=10**12)
    frames = steps * len(factories)

    def collect() -> int:
        model.collect_rollouts(
            env,
            train_freq=model.train_freq,
            callback=callback,
            learning_starts=0,
            replay_buffer=model.replay_buffer,
        )
        model.train(batch_size=SAMPLE, gradient_steps=frames // EVERY)
        return frames

    return System(collect, end=env.close)
