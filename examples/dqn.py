"""DQN on CartPole: two workers fill a replay buffer while this process learns from it.

python examples/dqn.py [--frames 40000]
"""

import argparse
import copy
import time

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import Collector, LazyTensorStorage, MultiAsyncCollector, RateLimiter, ReplayBuffer

GAMMA = 0.99
RATE = 2.3e-3
SOLVED = 475.0
"""A mean return at which the task counts as solved; 500 is the most there is."""


class EpsilonGreedy(nn.Module):
    """The best action, or now and then any; epsilon is a buffer, so it travels with the weights."""

    def __init__(self) -> None:
        """Make the network; everything is explored at first."""
        super().__init__()
        self.q = nn.Sequential(
            nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
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
        "CartPole-v1",
        greedy,
        num_envs=10,
        frames_per_batch=500,
        trajs_per_batch=10,
        traj_quota="equal",  # one of each environment: the first ten would be the shortest
    ) as collector:
        return float(collector.next()["next", "reward"].sum() / 10)


def main() -> None:
    """Learn until the greedy policy balances the pole, or so many frames were collected."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=40_000)
    frames = parser.parse_args().frames
    torch.manual_seed(0)

    actor = EpsilonGreedy()
    target = copy.deepcopy(actor.q)
    optimizer = torch.optim.Adam(actor.q.parameters(), lr=RATE)
    # Without a limiter the workers, who are faster, would be done before anything was learnt.
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100_000),
        shared=True,
        batch_size=64,
        limiter=RateLimiter(min_samples_per_insert=32),
    )
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
    step, mean = 0, 0.0
    while mean < SOLVED and buffer.write_count < frames and not collector.stats()["failed"]:
        if len(buffer) < min(1_000, frames // 2):
            time.sleep(0.01)
            continue
        batch = buffer.sample()
        after = batch["next"]
        with torch.no_grad():
            best = actor.q(after["observation"]).argmax(-1, keepdim=True)
            future = target(after["observation"]).gather(-1, best)
            wanted = after["reward"] + GAMMA * future * ~after["terminated"]
        value = actor.q(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        loss = nn.functional.mse_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            progress = buffer.write_count / frames
            actor.epsilon.fill_(max(0.05, 1 - 5 * progress))
            optimizer.param_groups[0]["lr"] = RATE * max(0.05, 1 - progress)
            collector.update_policy_weights_()
            target.load_state_dict(actor.q.state_dict())
        if step % 1_000 == 0:
            mean = evaluate(actor)
            print(f"{buffer.write_count:7d} frames  {step:6d} steps  return {mean:6.1f}")
    collector.async_shutdown()  # raises what went wrong in a worker, should anything
    print(f"{buffer.write_count:7d} frames  {step:6d} steps  return {evaluate(actor):6.1f}")


if __name__ == "__main__":
    main()
