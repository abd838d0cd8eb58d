"""PPO on CartPole with Ray: actors collect, on this machine or on a cluster; this process learns.

python examples/ppo_ray.py [--actors 2] [--frames 200704] [--seed 0]      # starts a Ray of its own
python examples/ppo_ray.py --actors 64 --address auto                     # on the cluster that this host is part of

Needs ``pip install 'gleanrl[ray]'``.
"""

import argparse
from collections.abc import Iterator

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl import RayCollector

ENVS, STEPS = 8, 128
"""Environments of an actor, and steps of each in a batch."""
GAMMA, LAMBDA, CLIP, RATE = 0.99, 0.95, 0.2, 1e-3
EPOCHS, MINIBATCH = 6, 256


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's observation."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def estimate(critic: nn.Module, batch):
    """Return generalised advantages and targets of the value, ``[envs, steps, 1]``."""
    after = batch["next"]
    value = critic(batch["observation"])
    delta = after["reward"] + GAMMA * critic(after["observation"]) * ~after["terminated"] - value
    gain, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(STEPS)):
        running = delta[:, t] + GAMMA * LAMBDA * running * ~after["done"][:, t]
        gain[:, t] = running
    return gain, gain + value


def train(
    frames: int, seed: int, actors: int = 2, address: str | None = None
) -> Iterator[dict]:
    """Learn from so many frames; yield what was reached after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small, and the other cores are the actors'
    actor, critic = mlp(2), mlp(1)
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=RATE)
    local = {"num_cpus": actors, "include_dashboard": False}

    with RayCollector(
        ["CartPole-v1"] * actors,
        policy,
        num_envs=ENVS,
        frames_per_batch=actors * ENVS * STEPS,
        total_frames=frames,
        sync=True,  # a batch is one rollout of every actor, with the same weights
        ray_init_config={"address": address} if address else local,
    ) as collector:
        collector.set_seed(seed)
        seen = 0
        for batch in collector:
            seen += batch.numel()
            rows = batch.flatten(0, 1)  # [actors, envs, steps] -> [envs, steps]
            with torch.no_grad():
                gain, target = (x.flatten() for x in estimate(critic, rows))
            rows, gain = rows.reshape(-1), (gain - gain.mean()) / gain.std()
            for index in torch.cat([torch.randperm(len(rows)) for _ in range(EPOCHS)]).split(MINIBATCH):
                part = rows[index]
                choice = torch.distributions.Categorical(logits=actor(part["observation"]))
                ratio = (choice.log_prob(part["action"]) - part["action_log_prob"]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                surrogate = torch.minimum(ratio * gain[index], clipped * gain[index]).mean()
                error = (critic(part["observation"]).flatten() - target[index]).pow(2).mean()
                loss = 0.5 * error - surrogate - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            collector.update_policy_weights_()  # one object in Ray's store for all actors
            yield {"frames": seen, "return": 0.0, "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=200_704)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--address", help="of a Ray cluster")
    given = parser.parse_args()
    for row in train(given.frames, given.seed, given.actors, given.address):
        print("{frames:8d} frames  return {return:6.1f}  loss {loss:8.3f}".format(**row))


if __name__ == "__main__":
    main()
