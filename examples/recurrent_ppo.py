"""Recurrent PPO on a CartPole that hides its velocities
=====================================================

The policy has to remember. ::

    python examples/recurrent_ppo.py [--frames 200704] [--seed 0]
    python examples/recurrent_ppo.py --memoryless  # the same network, its state zeroed at each step

The policy reads its state "hidden" and writes ("next", "hidden"): the collector carries it from
step to step and zeroes it where an episode begins, which "is_init" says. The learner goes over
whole sequences, in which episodes end and begin, with gradients through time.
"""

import argparse
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import Collector

ENVS, STEPS = 16, 128  # a batch is [16, 128]: 16 sequences
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, SEQUENCES, RATE = 4, 4, 1e-3  # a minibatch is 4 sequences


# The environment. Where the cart and the pole are does not tell where they are going.
class Positions(gymnasium.ObservationWrapper):
    """CartPole's position and angle without their velocities, 1 where an episode ends."""

    def __init__(self) -> None:
        """Wrap CartPole."""
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-2.0, 2.0, (2,))

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the two numbers that stay."""
        return observation[[0, 2]] / np.float32([2.4, 0.2095])


# The network. The collector calls it step by step; the learner unrolls it over stored sequences.
class Network(nn.Module):
    """A GRU with a head for the policy and one for the value."""

    def __init__(self, memoryless: bool = False) -> None:
        """Make the layers; ``memoryless`` begins every step with a state of zeros."""
        super().__init__()
        self.memoryless = memoryless
        self.encoder = nn.Sequential(nn.Linear(2, 64), nn.Tanh())
        self.cell = nn.GRUCell(64, 64)
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, observation: Tensor, hidden: Tensor, is_init: Tensor) -> tuple[Tensor, ...]:
        """Return logits, value and the next state of one step; all are ``[n, ...]``."""
        hidden = self.advance(self.encoder(observation), hidden, is_init)
        return self.actor(hidden), self.critic(hidden), hidden

    def advance(self, encoded: Tensor, hidden: Tensor, is_init: Tensor) -> Tensor:
        """Return the state after a step, from zeros where an episode begins."""
        forget = torch.ones_like(is_init) if self.memoryless else is_init
        return self.cell(encoded, hidden * ~forget)

    def unroll(self, batch: TensorDict) -> tuple[Tensor, Tensor]:
        """Return logits and values ``[n, steps, ...]`` from the state before the first step on."""
        hidden, states = batch["hidden"][:, 0], []
        encoded = self.encoder(batch["observation"])
        for step in range(STEPS):
            hidden = self.advance(encoded[:, step], hidden, batch["is_init"][:, step])
            states.append(hidden)
        hidden = torch.stack(states, 1)
        return self.actor(hidden), self.critic(hidden)


def as_policy(network: Network) -> ProbabilisticTensorDictSequential:
    """Return the policy that samples actions from the network's logits."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(
            network,
            in_keys=["observation", "hidden", "is_init"],
            out_keys=["logits", "state_value", ("next", "hidden")],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


# The advantages. Every step's ("next", "observation") and ("next", "hidden") are in the batch, the
# true last ones of an episode too, so one call gives the values of all that steps led to.
def advantages(network: Network, batch: TensorDict) -> Tensor:
    """Return generalised advantage estimates ``[envs, steps, 1]``."""
    ends = batch["next"]
    flat = ends.flatten()
    begins = torch.zeros_like(flat["done"])  # not even after an end: the value is that of going on
    next_value = network(flat["observation"], flat["hidden"], begins)[1].view_as(ends["done"])
    reward = ends["reward"] * (1 - GAMMA)  # values stay below 1
    delta = reward + GAMMA * next_value * ~ends["terminated"] - batch["state_value"]
    decay = GAMMA * LAMBDA * ~ends["done"]
    result, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(STEPS)):
        result[:, step] = following = delta[:, step] + decay[:, step] * following
    return result


def loss_of(network: Network, batch: TensorDict, advantage: Tensor, target: Tensor) -> Tensor:
    """Return the clipped PPO loss of some sequences."""
    logits, value = network.unroll(batch)
    choice = torch.distributions.Categorical(logits=logits)
    ratio = (choice.log_prob(batch["action"]) - batch["action_log_prob"]).exp().unsqueeze(-1)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    return 0.5 * (value - target).pow(2).mean() - gain - ENTROPY * choice.entropy().mean()


def train(frames: int = 200_704, seed: int = 0, memoryless: bool = False) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes and loss after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    network = Network(memoryless)
    optimizer = torch.optim.Adam(network.parameters(), RATE, fused=True)

    with Collector(
        Positions,
        as_policy(network),
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            with torch.no_grad():
                advantage = advantages(network, batch)
                target = advantage + batch["state_value"]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            for _ in range(EPOCHS):
                for index in torch.randperm(ENVS).split(SEQUENCES):
                    loss = loss_of(network, batch[index], advantage[index], target[index])
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                    optimizer.step()  # the collector runs this very network: nothing to send
            stats = collector.stats()
            yield {"frames": stats["frames"], "return": stats["return_mean"], "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200_704)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memoryless", action="store_true")
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/recurrent_ppo.png"
