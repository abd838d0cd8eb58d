"""Recurrent PPO on a CartPole that hides its velocities: the policy has to remember.

python examples/recurrent_ppo.py [--frames 400000] [--seed 0]
python examples/recurrent_ppo.py --memoryless                   # what the same network reaches without its state

Positions alone do not tell where the cart and the pole are going. The policy reads its state "hidden" and writes
("next", "hidden"); the collector carries it from step to step and zeroes it where an episode begins. Learning goes
over whole sequences, in which episodes end, with gradients through time.
"""

import argparse
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl import Collector

ENVS, STEPS = 16, 128
"""Environments, and steps of each in a batch: a sequence to learn from has that many steps."""
EPOCHS, SEQUENCES = 4, 4
"""Passes over a batch, and sequences in a minibatch."""
GAMMA, LAMBDA, CLIP, RATE = 0.99, 0.95, 0.2, 1e-3


class Positions(gymnasium.ObservationWrapper):
    """CartPole's position and angle without their velocities, 1 where an episode ends."""

    def __init__(self) -> None:
        """Wrap CartPole."""
        super().__init__(gymnasium.make("CartPole-v1"))
        self.observation_space = gymnasium.spaces.Box(-2.0, 2.0, (2,))

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the two entries that stay."""
        return observation[[0, 2]] / np.float32([2.4, 0.2095])


class Network(nn.Module):
    """A GRU with a head for the policy and one for the value."""

    def __init__(self, memoryless: bool = False, width: int = 64) -> None:
        """Make the layers; ``memoryless`` forgets the state at every step."""
        super().__init__()
        self.memoryless = memoryless
        self.encoder = nn.Sequential(nn.Linear(2, width), nn.Tanh())
        self.cell = nn.GRUCell(width, width)
        self.actor, self.critic = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, observation, hidden, is_init):
        """Act one step, as the collector calls it: ``[envs, ...]`` in, logits, value and state out."""
        hidden = self.remember(self.encoder(observation), hidden, is_init)
        return self.actor(hidden), self.critic(hidden), hidden

    def remember(self, encoded, hidden, is_init):
        """Return the state after one step: it starts from zero where an episode begins."""
        forget = torch.ones_like(is_init) if self.memoryless else is_init
        return self.cell(encoded, hidden * ~forget)

    def unroll(self, batch):
        """Return logits and values of ``[envs, steps]``, from the state before the first step."""
        hidden, states = batch["hidden"][:, 0], []
        encoded = self.encoder(batch["observation"]).unbind(1)
        for now, is_init in zip(encoded, batch["is_init"].unbind(1), strict=True):
            hidden = self.remember(now, hidden, is_init)
            states.append(hidden)
        hidden = torch.stack(states, 1)
        return self.actor(hidden), self.critic(hidden)


def estimate(network: Network, batch):
    """Return generalised advantages and targets of the value, ``[envs, steps, 1]``."""
    after = batch["next"]
    flat = after.flatten()  # what each step led to: its own state is stored, so all at once
    begins = torch.zeros_like(flat["done"])
    values = network(flat["observation"], flat["hidden"], begins)[1].view_as(after["reward"])
    reward = after["reward"] * (1 - GAMMA)  # so that values are about 1
    delta = reward + GAMMA * values * ~after["terminated"] - batch["state_value"]
    gain, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(STEPS)):
        running = delta[:, t] + GAMMA * LAMBDA * running * ~after["done"][:, t]
        gain[:, t] = running
    return gain, gain + batch["state_value"]


def train(frames: int, seed: int, memoryless: bool = False) -> Iterator[dict]:
    """Learn from so many frames; yield what was reached after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are not worth sharing out
    network = Network(memoryless)
    policy = ProbabilisticTensorDictSequential(
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
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    running, finished, seen = torch.zeros(ENVS), [], 0

    with Collector(
        Positions, policy, num_envs=ENVS, frames_per_batch=ENVS * STEPS, total_frames=frames
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            seen += batch.numel()
            for reward, done in zip(*(batch["next", key][..., 0].unbind(1) for key in ("reward", "done")), strict=True):
                running += reward
                finished += running[done].tolist()
                running[done] = 0
            with torch.no_grad():
                gain, target = estimate(network, batch)
            gain = (gain - gain.mean()) / gain.std()
            for index in torch.cat([torch.randperm(ENVS) for _ in range(EPOCHS)]).split(SEQUENCES):
                rows = batch[index]
                logits, values = network.unroll(rows)
                choice = torch.distributions.Categorical(logits=logits)
                ratio = (choice.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
                ratio, rise = ratio.unsqueeze(-1), gain[index]
                surrogate = torch.minimum(ratio * rise, ratio.clamp(1 - CLIP, 1 + CLIP) * rise)
                error = (values - target[index]).pow(2)
                loss = (0.5 * error - surrogate).mean() - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()
            recent = finished[-100:] or [0.0]
            yield {"frames": seen, "return": sum(recent) / len(recent), "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memoryless", action="store_true")
    given = parser.parse_args()
    for row in train(given.frames, given.seed, given.memoryless):
        print("{frames:8d} frames  return {return:6.1f}  loss {loss:8.3f}".format(**row))


if __name__ == "__main__":
    main()
