"""PPO on HalfCheetah
==================

Squashed Gaussian actions, observations normalised by running statistics. ::

    python examples/ppo_continuous.py [--frames 1000000] [--seed 0]

Needs ``pip install "gymnasium[mujoco]"``. The statistics are buffers of the policy, so they reach
the workers together with the weights.
Schulman et al. 2017, "Proximal Policy Optimization Algorithms"; details of the implementation after
Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization".
"""

import argparse
import math
import os
from collections.abc import Iterator

os.environ.setdefault("MUJOCO_GL", "disabled")  # nothing is drawn

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import MultiSyncCollector
from gleanrl.modules import TanhNormal

WORKERS, ENVS, STEPS = 2, 4, 250  # a batch is [2, 4, 250]: 2,000 frames
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
EPOCHS, MINIBATCH, RATE = 10, 125, 4e-4
OBSERVATIONS, ACTIONS = 17, 6


class Normalizer(nn.Module):
    """Brings its input to mean 0 and variance 1, by the statistics of all that it was shown."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        """Start with mean 0 and variance 1."""
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, rows: Tensor) -> None:
        """Take in rows ``[n, size]``."""
        total = self.count + len(rows)
        var, mean = torch.var_mean(rows, 0, correction=0)
        delta = mean - self.mean
        between = delta.square() * self.count * len(rows) / total
        self.var.copy_((self.var * self.count + var * len(rows) + between) / total)
        self.mean += delta * len(rows) / total
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, outliers cut at ten standard deviations."""
        return ((x - self.mean) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


def layer(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return a linear layer with orthogonal weights, and biases of zero."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(outputs: int, gain: float) -> nn.Sequential:
    """Return a 64-64 network on normalised observations."""
    hidden = [layer(OBSERVATIONS, 64), nn.Tanh(), layer(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, layer(64, outputs, gain))


# The policy. The actor writes where its Gaussian lies and how wide it is; tanh brings samples into
# the bounds of the action space, and the logarithm of their density accounts for that.
class Actor(nn.Module):
    """Mean and width of the actions before they are squashed."""

    def __init__(self) -> None:
        """Begin near zero, with a standard deviation of one."""
        super().__init__()
        self.normalizer = Normalizer(OBSERVATIONS)
        self.mean = mlp(ACTIONS, gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(ACTIONS))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return location and scale ``[..., 6]`` for observations ``[..., 17]``."""
        loc = self.mean(self.normalizer(observation))
        return loc, self.log_std.exp().expand_as(loc)


def as_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    """Return the policy that samples actions from the actor's squashed Gaussian."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            return_log_prob=True,
        ),
    )


# The advantages. Episodes of HalfCheetah are truncated after 1,000 steps and never terminate:
# ("next", "observation") is the true last one, and its value continues the episode.
def advantages(batch: TensorDict, reward: Tensor, value: Tensor, next_value: Tensor) -> Tensor:
    """Return generalised advantage estimates ``[environments, steps]``."""
    delta = reward + GAMMA * next_value * ~batch["next", "terminated"] - value
    decay = GAMMA * LAMBDA * ~batch["next", "done"]
    result, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        result[:, step] = following = delta[:, step] + decay[:, step] * following
    return result.squeeze(-1)


def discounted(batch: TensorDict, before: Tensor) -> Tensor:
    """Return the discounted sums of rewards so far ``[environments, steps]``, from those before."""
    reward, goes_on = batch["next", "reward"].squeeze(-1), ~batch["next", "done"].squeeze(-1)
    sums = torch.empty_like(reward)
    for step in range(reward.shape[1]):
        sums[:, step] = before = reward[:, step] + GAMMA * before
        before = before * goes_on[:, step]
    return sums


def loss_of(actor: nn.Module, critic: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Return the clipped PPO loss of a minibatch."""
    observation, action, log_prob, advantage, target = rows
    ratio = (TanhNormal(*actor(observation)).log_prob(action) - log_prob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    error = (critic(actor.normalizer(observation)).squeeze(-1) - target).pow(2).mean()
    return 0.25 * error - gain


def train(frames: int = 1_000_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return of the last 100 episodes and loss after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    actor, critic = Actor(), mlp(1, gain=1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, RATE, eps=1e-5, fused=True)
    rewards, sums = Normalizer(1), torch.zeros(WORKERS * ENVS)

    with MultiSyncCollector(
        "HalfCheetah-v5",
        as_policy(actor),
        num_workers=WORKERS,
        num_envs=ENVS,  # of each worker
        frames_per_batch=WORKERS * ENVS * STEPS,
        total_frames=frames,
        observation_dtype=torch.float32,  # MuJoCo's are float64
    ) as collector:
        collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            batch = batch.flatten(0, 1)  # [environments, steps]

            # Rewards are divided by the standard deviation of their discounted sums: whatever the
            # task, values are of the order of one.
            sums = discounted(batch, sums)
            rewards.update(sums.reshape(-1, 1))
            sums = sums[:, -1] * ~batch["next", "done"][:, -1, 0]
            reward = (batch["next", "reward"] / (rewards.var + 1e-8).sqrt()).clamp(-10, 10)
            with torch.no_grad():
                value, next_value = (
                    critic(actor.normalizer(x["observation"])) for x in (batch, batch["next"])
                )
                advantage = advantages(batch, reward, value, next_value)
                target = advantage + value.squeeze(-1)
            columns = batch["observation"], batch["action"], batch["action_log_prob"]
            columns = [x.flatten(0, 1) for x in (*columns, advantage, target)]

            optimizer.param_groups[0]["lr"] = RATE * (1 - (number - 1) * batch.numel() / frames)
            for _ in range(EPOCHS):
                for index in torch.randperm(batch.numel()).split(MINIBATCH):
                    loss = loss_of(actor, critic, tuple(x[index] for x in columns))
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, 0.5)
                    optimizer.step()

            # Only now: the log-probabilities above were made with the former statistics.
            actor.normalizer.update(columns[0])
            collector.update_policy_weights_()  # weights and statistics
            yield {
                "frames": number * batch.numel(),
                "return": collector.stats()["return_mean"],  # NaN until an episode ended
                "loss": loss.item(),
            }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:8d} frames  return {row['return']:7.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/ppo_continuous.png"
