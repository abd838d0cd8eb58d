"""DQN on MinAtar's Breakout
=========================

Two workers fill a replay buffer, this process learns from it (``pip install minatar``). ::

    python examples/dqn.py [--frames 200000] [--seed 0]

An observation is ``[10, 10, 4]`` bits, and is stored once. One of the four channels shows where the
ball came from, so no frames are stacked; for Atari, return
``FrameStackObservation(AtariPreprocessing(gym.make(...)), 4)`` from ``make_env``.
Mnih et al. 2015, "Human-level control through deep reinforcement learning", with the double
estimates of van Hasselt et al. 2016; Young and Tian 2019, "MinAtar".
"""

import argparse
import copy
from collections.abc import Iterator

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gleanrl import LazyTensorStorage, MultiAsyncCollector, RateLimiter, ReplayBuffer

WORKERS, ENVS, STEPS = 2, 10, 20  # a rollout of a worker is [10, 20]: 200 frames
GAMMA, BATCH, RATE = 0.99, 64, 3e-4
SAMPLES_PER_FRAME = 16  # an update for every four frames
TARGET_EVERY = 500


def make_env():
    """Return the environment; called in the workers, so this process need not import it."""
    from minatar.gym import BaseEnv

    return BaseEnv("breakout", use_minimal_action_set=True)


class EpsilonGreedy(nn.Module):
    """The best action, or now and then any; epsilon is a buffer, so it travels with the weights."""

    epsilon: Tensor

    def __init__(self) -> None:
        """Make the network; everything is explored at first."""
        super().__init__()
        self.q = nn.Sequential(
            nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(),
            nn.Linear(128, 3),
        )  # fmt: skip
        self.register_buffer("epsilon", torch.tensor(1.0))

    def values(self, observation: Tensor) -> Tensor:
        """Return the values of the three actions ``[n, 3]`` for bits ``[n, 10, 10, 4]``."""
        return self.q(observation.float().permute(0, 3, 1, 2))

    def forward(self, observation: Tensor) -> Tensor:
        """Return actions ``[n]``."""
        best = self.values(observation).argmax(-1)
        explore = torch.rand(best.shape) < self.epsilon
        return torch.where(explore, torch.randint(3, best.shape), best)


def loss_of(actor: EpsilonGreedy, target: EpsilonGreedy, batch) -> Tensor:
    """Return the temporal-difference loss: the actor chooses, the target rates."""
    after = batch["next"]
    with torch.no_grad():
        best = actor.values(after["observation"]).argmax(-1, keepdim=True)
        future = target.values(after["observation"]).gather(-1, best)
        wanted = after["reward"] + GAMMA * future * ~after["terminated"]
    value = actor.values(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    return nn.functional.smooth_l1_loss(value, wanted)


def train(frames: int = 200_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return of the last 100 episodes and loss every 200 updates."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the other cores are the workers'
    actor = EpsilonGreedy()
    target = copy.deepcopy(actor)
    optimizer = torch.optim.Adam(actor.parameters(), RATE, fused=True)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100_000, compact=True),  # each observation once
        batch_size=BATCH,
        shared=True,  # the workers write into it themselves
        # Without a limiter the workers, who are faster, would be done before anything was learnt.
        limiter=RateLimiter(
            min_samples_per_insert=SAMPLES_PER_FRAME,
            min_size_to_sample=min(5_000, frames // 4),  # until then `sample` waits
        ),
    )
    collector = MultiAsyncCollector(
        make_env,
        TensorDictModule(actor, in_keys=["observation"], out_keys=["action"]),
        num_workers=WORKERS,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
        replay_buffer=buffer,
    )
    collector.set_seed(seed)
    collector.start()  # from here on the workers fill the buffer by themselves
    updates = 0
    while buffer.write_count < frames and not collector.stats()["failed"]:
        loss = loss_of(actor, target, buffer.sample())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        if updates % 10 == 0:
            actor.epsilon.fill_(max(0.05, 1 - 5 * buffer.write_count / frames))
            collector.update_policy_weights_()  # rollouts that begin from now on use these weights
        if updates % TARGET_EVERY == 0:
            target.load_state_dict(actor.state_dict())
        if updates % 200 == 0:
            stats = collector.stats()
            yield {"frames": stats["frames"], "return": stats["return_mean"], "loss": loss.item()}
    collector.async_shutdown()  # raises what went wrong in a worker, should anything


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:7d} frames  return {row['return']:6.2f}  loss {row['loss']:8.5f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/dqn.png"
