"""SAC on Pendulum
===============

A worker fills a replay buffer in the background, this process learns from it. ::

    python examples/sac.py [--frames 12000] [--seed 0]

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications".
"""

import argparse
import copy
from collections.abc import Iterator

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import Collector, LazyTensorStorage, MultiAsyncCollector, RateLimiter, ReplayBuffer
from gleanrl.envs.utils import ExplorationType
from gleanrl.modules import TanhNormal

OBSERVATIONS, ACTIONS, BOUNDS = 3, 1, {"low": -2.0, "high": 2.0}  # of Pendulum's torques
ENVS, STEPS = 2, 8  # a rollout is [2, 8]: 16 frames, made with the newest weights
GAMMA, TAU, RATE, BATCH = 0.99, 0.01, 1e-3, 128
RANDOM_FRAMES = 1_000


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 64-64 network."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


class Actor(nn.Module):
    """Mean and width of the torque before it is squashed."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self.net = mlp(OBSERVATIONS, 2 * ACTIONS)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return location and scale ``[..., 1]`` for observations ``[..., 3]``."""
        loc, log_std = self.net(observation).chunk(2, -1)
        return loc, log_std.clamp(-5, 2).exp()


def as_policy(actor: Actor) -> ProbabilisticTensorDictSequential:
    """Return the policy that samples torques."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs=BOUNDS,
        ),
    )


class Learner:
    """Actor, two critics and the weight of the entropy, and how a batch improves them."""

    def __init__(self) -> None:
        """Make networks and optimizers."""
        self.actor = Actor()
        self.critics = nn.ModuleList(mlp(OBSERVATIONS + ACTIONS, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        groups = self.actor.parameters(), self.critics.parameters(), [self.log_alpha]
        self.optimizers = [torch.optim.Adam(group, RATE, fused=True) for group in groups]

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return differentiable torques ``[n, 1]`` and their log-probabilities ``[n, 1]``."""
        action, log_prob = TanhNormal(*self.actor(observation), **BOUNDS).rsample_and_log_prob()
        return action, log_prob.unsqueeze(-1)

    def update(self, batch) -> float:
        """Take one step of every optimizer on rows ``[n]`` and return the critics' loss."""
        observation, after = batch["observation"], batch["next"]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = self.sample(after["observation"])
            pair = torch.cat([after["observation"], action], -1)
            future = torch.minimum(*(q(pair) for q in self.targets)) - alpha * log_prob
            wanted = after["reward"] + GAMMA * future * ~after["terminated"]
        pair = torch.cat([observation, batch["action"]], -1)
        critic_loss = sum((q(pair) - wanted).pow(2).mean() for q in self.critics)
        self._step(1, critic_loss)

        action, log_prob = self.sample(observation)
        pair = torch.cat([observation, action], -1)
        value = torch.minimum(*(q(pair) for q in self.critics))
        self._step(0, (alpha * log_prob - value).mean())
        # The entropy is kept near minus the number of actions.
        self._step(2, -self.log_alpha * (log_prob.detach() - ACTIONS).mean())
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.targets.parameters()), list(self.critics.parameters()), TAU
            )
        return critic_loss.item()

    def _step(self, index: int, loss: Tensor) -> None:
        self.optimizers[index].zero_grad()
        loss.backward()
        self.optimizers[index].step()


def evaluate(actor: Actor) -> float:
    """Return the mean return of ten episodes without exploration."""
    with Collector(
        "Pendulum-v1",
        as_policy(actor),
        num_envs=10,
        frames_per_batch=2_000,  # an episode has 200 steps
        exploration_type=ExplorationType.DETERMINISTIC,
    ) as collector:
        collector.set_seed(1_000)
        return collector.next()["next", "reward"].sum().item() / 10


def train(frames: int = 12_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return without exploration and loss every 100 updates."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    learner = Learner()
    # The limiter keeps both sides in step: every frame is learnt from between 128 and 256 times.
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames),
        batch_size=BATCH,
        shared=True,
        limiter=RateLimiter(
            min_samples_per_insert=128,
            max_samples_per_insert=256,
            min_size_to_sample=min(RANDOM_FRAMES, frames // 4),  # until then `sample` waits
        ),
    )
    collector = MultiAsyncCollector(
        "Pendulum-v1",
        as_policy(learner.actor),
        num_workers=1,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
        init_random_frames=min(RANDOM_FRAMES, frames // 4),
        replay_buffer=buffer,
    )
    collector.set_seed(seed)
    collector.start()  # from here on the worker fills the buffer by itself
    updates = 0
    while buffer.write_count < frames and not collector.stats()["failed"]:
        loss = learner.update(buffer.sample())
        updates += 1
        if updates % 10 == 0:
            collector.update_policy_weights_()  # the next rollout is made with these weights
        if updates % 100 == 0:
            yield {"frames": buffer.write_count, "return": evaluate(learner.actor), "loss": loss}
    collector.async_shutdown()  # raises what went wrong in the worker, should anything


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:6d} frames  return {row['return']:7.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/sac.png"
