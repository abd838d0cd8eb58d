"""PPO on InvertedPendulum with TorchRL's modules, GAE and ClipPPOLoss; the collector is from here.

python examples/ppo_torchrl_losses.py [--frames 200704] [--seed 0]

Everything but the collector is as TorchRL's PPO tutorial has it. Needs ``pip install torchrl 'gymnasium[mujoco]'``.
"""

import argparse
from collections.abc import Iterator

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from gleanrl import Collector

ENVS, STEPS = 8, 256
"""Environments, and steps of each in a batch."""
EPOCHS, MINIBATCH, RATE = 10, 256, 1e-3


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on the four observed numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def train(frames: int, seed: int) -> Iterator[dict]:
    """Learn from so many frames; yield what was reached after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # networks this small are not worth sharing out
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(mlp(2), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -3.0, "high": 3.0},
        return_log_prob=True,
    )
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    losses = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-4)
    optimizer = torch.optim.Adam(losses.parameters(), RATE)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(ENVS * STEPS),
        sampler=SamplerWithoutReplacement(),
        batch_size=MINIBATCH,
    )

    with Collector(
        "InvertedPendulum-v5",
        actor,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
        observation_dtype=torch.float32,  # MuJoCo's are float64
    ) as collector:
        collector.set_seed(seed)
        seen = 0
        for batch in collector:  # [envs, steps]
            seen += batch.numel()
            for _ in range(EPOCHS):
                advantage(batch)  # adds "advantage" and "value_target"
                buffer.empty()
                buffer.extend(batch.reshape(-1))
                for part in buffer:
                    found = losses(part)
                    loss = found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(losses.parameters(), 1.0)
                    optimizer.step()
            yield {"frames": seen, "return": batch["next","reward"].sum().item()/max(1,batch["next","done"].sum().item()), "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=200_704)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for row in train(given.frames, given.seed):
        print("{frames:8d} frames  return {return:6.1f}  loss {loss:8.3f}".format(**row))


if __name__ == "__main__":
    main()
