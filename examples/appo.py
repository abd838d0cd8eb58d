"""Asynchronous PPO on CartPole: nodes collect while the learner learns. Reaches 400+ in a minute.

python examples/appo.py [--nodes 2] [--frames 300000]             # processes of this machine
python examples/appo.py --nodes 16 --launcher submitit             # Slurm jobs

V-trace makes up for weights that are a few updates old: Espeholt et al. 2018, "IMPALA: Scalable
Distributed Deep-RL with Importance Weighted Actor-Learner Architectures".
"""

import argparse

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl.collectors import DistributedCollector

ENVS, STEPS = 8, 64
"""Environments of a node, and steps of each in a batch."""
GAMMA, EPOCHS = 0.99, 4


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's observation."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def ratio_of(actor: nn.Module, batch) -> torch.Tensor:
    """Return the probability of each action now over that it was taken with."""
    choice = torch.distributions.Categorical(logits=actor(batch["observation"]))
    return (choice.log_prob(batch["action"]) - batch["action_log_prob"]).exp()


def vtrace(batch, ratio: torch.Tensor, now: torch.Tensor, after: torch.Tensor):
    """Return V-trace targets and advantages, ``[envs, steps]``.

    Args:
        batch: ``[envs, steps]``.
        ratio: New probability of each action over that it was taken with.
        now: Values of the observations.
        after: Values of the next ones.
    """
    reward = batch["next", "reward"].squeeze(-1)
    goes_on = ~batch["next", "done"].squeeze(-1)
    after = after * ~batch["next", "terminated"].squeeze(-1)
    weight = ratio.clamp(max=1.0)
    delta = weight * (reward + GAMMA * after - now)
    targets, running = torch.zeros_like(now), torch.zeros_like(now[:, 0])
    for t in reversed(range(now.shape[1])):
        running = delta[:, t] + GAMMA * goes_on[:, t] * weight[:, t] * running
        targets[:, t] = now[:, t] + running
    follows = torch.where(goes_on[:, :-1], targets[:, 1:], after[:, :-1])
    follows = torch.cat([follows, after[:, -1:]], 1)
    return targets, weight * (reward + GAMMA * follows - now)


class Returns:
    """The returns of finished episodes, pieced together from batches in any order of nodes."""

    def __init__(self) -> None:
        """Start with none."""
        self._running: dict[int, float] = {}
        self._finished = [0.0]

    def add(self, batch) -> None:
        """Take in the rewards of a batch."""
        ids, rewards = batch["collector", "traj_ids"], batch["next", "reward"].squeeze(-1)
        over = batch["next", "done"].squeeze(-1)
        for episode, reward, done in zip(
            ids.flatten().tolist(), rewards.flatten().tolist(), over.flatten().tolist(), strict=True
        ):
            total = self._running.pop(episode, 0.0) + reward
            if done:
                self._finished.append(total)
            else:
                self._running[episode] = total

    def mean(self) -> float:
        """Return the mean of the last thirty."""
        recent = self._finished[-30:]
        return sum(recent) / len(recent)


def main() -> None:
    """Train and print the mean return of finished episodes and how old the weights were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=300_000)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--launcher", default="mp")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the nets are small, and the processors are the nodes'

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
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    returns = Returns()

    with DistributedCollector(
        ["CartPole-v1"] * given.nodes,
        policy,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=given.frames // (ENVS * STEPS) * ENVS * STEPS,
        sync=False,
        launcher=given.launcher,
        track_policy_version=True,
    ) as collector:
        collector.set_seed(0)
        for number, batch in enumerate(collector, 1):
            returns.add(batch)
            with torch.no_grad():
                now = critic(batch["observation"]).squeeze(-1)
                after = critic(batch["next", "observation"]).squeeze(-1)
                target, gain = vtrace(batch, ratio_of(actor, batch), now, after)
                gain = (gain - gain.mean()) / (gain.std() + 1e-3)
            for _ in range(EPOCHS):
                ratio = ratio_of(actor, batch)
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                error = (target - critic(batch["observation"]).squeeze(-1)).pow(2).mean()
                optimizer.zero_grad()
                (0.5 * error - surrogate).backward()
                nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 10.0)
                optimizer.step()
            collector.update_policy_weights_()
            if number % 20 == 0:
                age = collector.policy_version - batch["policy_version"].float().mean()
                print(f"{number * batch.numel():7d} frames  return {returns.mean():6.1f}  "
                      f"weights {age:.1f} updates old")  # fmt: skip


if __name__ == "__main__":
    main()
