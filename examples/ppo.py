"""PPO on CartPole
===============

Two workers collect, this process learns. A mean return of 475 within 160,000 frames. ::

    python examples/ppo.py [--frames 200000] [--seed 0]

Schulman et al. 2017, "Proximal Policy Optimization Algorithms".
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

from gleanrl import MultiSyncCollector

WORKERS, ENVS, STEPS = 2, 20, 100  # a batch is [2, 20, 100]: 4,000 frames
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, RATE = 4, 500, 2e-3


# The networks. The actor becomes a policy: a TensorDict module that reads "observation" and writes
# "logits", "action" and "action_log_prob". The workers run copies of it.
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


# The advantages. ("next", "observation") is the true final observation where an episode ends, so a
# truncated episode is continued by its value and a terminated one is not.
def advantages(batch: TensorDict, value: Tensor, next_value: Tensor) -> Tensor:
    """Return generalised advantage estimates ``[environments, steps]``."""
    ends = batch["next"]
    delta = ends["reward"] + GAMMA * next_value * ~ends["terminated"] - value
    decay = GAMMA * LAMBDA * ~ends["done"]
    result, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        result[:, step] = following = delta[:, step] + decay[:, step] * following
    return result.squeeze(-1)


# The loss. Probabilities of the actions when they were taken came with the batch.
def loss_of(actor: nn.Module, critic: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    """Return the clipped PPO loss of a minibatch."""
    observation, action, log_prob, advantage, target = rows
    choice = torch.distributions.Categorical(logits=actor(observation), validate_args=False)
    ratio = (choice.log_prob(action) - log_prob).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    error = (critic(observation).squeeze(-1) - target).pow(2).mean()
    return 0.5 * error - gain - ENTROPY * choice.entropy().mean()


def train(frames: int = 200_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return of the last 100 episodes and loss after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    actor, critic = mlp(2), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], RATE, fused=True)

    with MultiSyncCollector(
        "CartPole-v1",
        as_policy(actor),
        num_workers=WORKERS,
        num_envs=ENVS,  # of each worker
        frames_per_batch=WORKERS * ENVS * STEPS,
        total_frames=frames,
    ) as collector:
        collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            batch = batch.flatten(0, 1)  # [environments, steps]
            with torch.no_grad():
                value = critic(batch["observation"])
                advantage = advantages(batch, value, critic(batch["next", "observation"]))
                target = advantage + value.squeeze(-1)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            columns = batch["observation"], batch["action"], batch["action_log_prob"]
            columns = [x.flatten(0, 1) for x in (*columns, advantage, target)]
            for _ in range(EPOCHS):
                for index in torch.randperm(batch.numel()).split(MINIBATCH):
                    loss = loss_of(actor, critic, tuple(x[index] for x in columns))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            collector.update_policy_weights_()  # the next batch is made with these weights
            yield {
                "frames": number * batch.numel(),
                "return": collector.stats()["return_mean"],
                "loss": loss.item(),
            }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/ppo.png"
