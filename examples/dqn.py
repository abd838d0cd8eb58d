"""DQN on CartPole: two workers fill a replay buffer while this process learns from it.

python examples/dqn.py [--frames 150000]
"""

import argparse
import copy

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import Collector, LazyTensorStorage, MultiAsyncCollector, ReplayBuffer

GAMMA = 0.99


class EpsilonGreedy(nn.Module):
    """The best action, or now and then any; epsilon is a buffer, so it travels with the weights."""

    def __init__(self) -> None:
        """Make the network; everything is explored at first."""
        super().__init__()
        self.q = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return actions ``[...]`` for observations ``[..., 4]``."""
        best = self.q(observation).argmax(-1)
        explore = torch.rand(best.shape) < self.epsilon
        return torch.where(explore, torch.randint(2, best.shape), best)


def evaluate(actor: EpsilonGreedy) -> float:
    """Return the mean return of ten episodes without exploration."""
    greedy = TensorDictModule(lambda x: actor.q(x).argmax(-1), ["observation"], ["action"])
    with Collector(
        "CartPole-v1", greedy, num_envs=10, frames_per_batch=500, trajs_per_batch=10
    ) as collector:
        return float(collector.next()["next", "reward"].sum() / 10)


def main() -> None:
    """Learn until so many frames were collected; print how the greedy policy does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=150_000)
    frames = parser.parse_args().frames
    torch.manual_seed(0)

    actor = EpsilonGreedy()
    target = copy.deepcopy(actor.q)
    optimizer = torch.optim.Adam(actor.q.parameters(), lr=5e-4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), shared=True, batch_size=256)
    collector = MultiAsyncCollector(
        "CartPole-v1",
        TensorDictModule(actor, in_keys=["observation"], out_keys=["action"]),
        num_workers=2,
        num_envs=4,
        frames_per_batch=64,
        replay_buffer=buffer,
        init_random_frames=min(2_000, frames // 2),
    )
    collector.start()  # from here on the workers fill the buffer by themselves
    step = 0
    while buffer.write_count < frames:
        if len(buffer) < min(1_000, frames // 2):
            collector.stats()  # raises what went wrong in a worker, should anything
            continue
        batch = buffer.sample()
        after = batch["next"]
        with torch.no_grad():
            best = actor.q(after["observation"]).argmax(-1, keepdim=True)
            future = target(after["observation"]).gather(-1, best)
            wanted = after["reward"] + GAMMA * future * ~after["terminated"]
        value = actor.q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        loss = nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            actor.epsilon.fill_(max(0.05, 1 - buffer.write_count / (0.5 * frames)))
            collector.update_policy_weights_()
            for old, new in zip(target.parameters(), actor.q.parameters(), strict=True):
                old.data.lerp_(new.data, 0.05)
        if step % 500 == 0:
            print(f"{buffer.write_count:7d} frames  {step:6d} steps  return {evaluate(actor):6.1f}")
    collector.async_shutdown()
    print(f"{buffer.write_count:7d} frames  {step:6d} steps  return {evaluate(actor):6.1f}")


if __name__ == "__main__":
    main()
