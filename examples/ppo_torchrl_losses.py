"""PPO on InvertedPendulum
=======================

Actor, GAE and ClipPPOLoss are TorchRL's, the collector is from here. ::

    python examples/ppo_torchrl_losses.py [--frames 102400] [--seed 0]

Batches have TorchRL's keys, so what reads its collectors' batches reads these: advantages, losses,
replay buffers. Needs ``pip install torchrl 'gymnasium[mujoco]'``.
"""

import argparse
from collections.abc import Iterator

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from gleanrl import Collector

ENVS, STEPS = 8, 256  # a batch is [8, 256]: 2,048 frames
EPOCHS, MINIBATCH, RATE = 10, 256, 1e-3


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on the pendulum's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def make_actor() -> ProbabilisticActor:
    """Return TorchRL's policy for actions between -3 and 3."""
    return ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(mlp(2), NormalParamExtractor()), ["observation"], ["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -3.0, "high": 3.0},
        return_log_prob=True,
    )


def train(frames: int = 102_400, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes and loss after each batch."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    actor = make_actor()
    critic = ValueOperator(mlp(1), in_keys=["observation"])
    estimate = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss_of = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-3)
    optimizer = torch.optim.Adam(loss_of.parameters(), RATE, fused=True)

    with Collector(
        "InvertedPendulum-v5",
        actor,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
        observation_dtype=torch.float32,  # MuJoCo's are float64
    ) as collector:
        collector.set_seed(seed)
        for batch in collector:
            for _ in range(EPOCHS):
                estimate(batch)  # writes "advantage" and "value_target"
                rows = batch.reshape(-1)
                for index in torch.randperm(len(rows)).split(MINIBATCH):
                    losses = loss_of(rows[index])
                    loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(loss_of.parameters(), 1.0)
                    optimizer.step()
            stats = collector.stats()
            yield {"frames": stats["frames"], "return": stats["return_mean"], "loss": loss.item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=102_400)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/ppo_torchrl_losses.png"
