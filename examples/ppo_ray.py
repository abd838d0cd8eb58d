"""PPO on CartPole with Ray
========================

Actors collect, here or on a cluster, and this process learns. ::

    python examples/ppo_ray.py [--actors 2] [--frames 200704] [--seed 0]  # starts Ray here
    python examples/ppo_ray.py --actors 64 --address auto                 # the cluster of this host

Needs ``pip install 'gleanrl[ray]'``.
"""

import argparse
from collections.abc import Iterator

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import RayCollector

ENVS, STEPS = 8, 128  # a batch is [actors, 8, 128]
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, RATE = 6, 256, 1e-3


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def as_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    """Return the policy that samples actions from the actor's logits."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def advantages(critic: nn.Module, batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates and targets of the values ``[envs, steps, 1]``."""
    ends, value = batch["next"], critic(batch["observation"])
    delta = ends["reward"] + GAMMA * critic(ends["observation"]) * ~ends["terminated"] - value
    decay = GAMMA * LAMBDA * ~ends["done"]
    result, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(STEPS)):
        result[:, step] = following = delta[:, step] + decay[:, step] * following
    return result, result + value


def loss_of(
    actor: nn.Module, critic: nn.Module, rows: TensorDict, advantage: Tensor, target: Tensor
) -> Tensor:
    """Return the clipped PPO loss of a minibatch."""
    choice = torch.distributions.Categorical(logits=actor(rows["observation"]))
    ratio = (choice.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    error = (critic(rows["observation"]).squeeze(-1) - target).pow(2).mean()
    return 0.5 * error - gain - ENTROPY * choice.entropy().mean()


def train(frames: int = 200_704, seed: int = 0, actors: int = 2) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes and loss after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks, and the other cores are the actors'
    actor, critic = mlp(2), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], RATE, fused=True)

    with RayCollector(
        ["CartPole-v1"] * actors,
        as_policy(actor),
        num_envs=ENVS,  # of each actor
        frames_per_batch=actors * ENVS * STEPS,
        total_frames=frames,
        sync=True,  # a batch is one rollout of every actor, made with the same weights
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            batch = batch.flatten(0, 1)  # [environments, steps]
            with torch.no_grad():
                advantage, target = (x.flatten() for x in advantages(critic, batch))
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            rows = batch.reshape(-1)
            for _ in range(EPOCHS):
                for index in torch.randperm(len(rows)).split(MINIBATCH):
                    loss = loss_of(actor, critic, rows[index], advantage[index], target[index])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            collector.update_policy_weights_()  # one object in Ray's store, for all actors
            stats = collector.stats()
            yield {"frames": stats["frames"], "return": stats["return_mean"], "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200_704)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--address", help="a Ray cluster; without one, the collector starts Ray")
    given = parser.parse_args()
    if given.address:
        import ray

        ray.init(given.address)  # a collector uses the Ray that this process is connected to
    for row in train(given.frames, given.seed, given.actors):
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/ppo_ray.png"
