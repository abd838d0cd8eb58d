"""IMPALA on CartPole: nodes collect while the learner learns; V-trace corrects for weights that are behind.

python examples/impala.py [--nodes 2] [--frames 600000] [--seed 0]    # nodes are processes of this machine
python examples/impala.py --nodes 16 --launcher submitit              # Slurm jobs

A node acts with the weights that were newest when its rollout began. By the time the learner reads that rollout it has
moved on, so each batch holds the log-probability with which its actions were taken, and the learner weighs every step by
how much more likely the action is now. After Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance
Weighted Actor-Learner Architectures".
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

from gleanrl import DistributedCollector

ENVS, STEPS = 16, 32
"""Environments of a node, and steps of each in a batch."""
GAMMA, RATE, ENTROPY = 0.99, 2e-3, 0.01


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's observation."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def vtrace(batch, ratio: torch.Tensor, now: torch.Tensor, after: torch.Tensor):
    """Return V-trace targets of the value, and advantages, ``[envs, steps]``.

    Args:
        batch: ``[envs, steps]``.
        ratio: Probability of each action now, over that with which it was taken.
        now: Values of the observations.
        after: Values of what the steps led to.
    """
    reward = batch["next", "reward"].squeeze(-1) * (1 - GAMMA)  # so that values are about 1
    goes_on = ~batch["next", "done"].squeeze(-1)
    after = after * ~batch["next", "terminated"].squeeze(-1)
    weight = ratio.clamp(max=1.0)  # both of the paper's bounds, rho and c, are 1
    delta = weight * (reward + GAMMA * after - now)
    target, running = torch.zeros_like(now), torch.zeros_like(now[:, 0])
    for t in reversed(range(STEPS)):
        running = delta[:, t] + GAMMA * goes_on[:, t] * weight[:, t] * running
        target[:, t] = now[:, t] + running
    # What follows a step is the next step's target, and a mere value where the sequence ends.
    follows = torch.where(goes_on[:, :-1], target[:, 1:], after[:, :-1])
    follows = torch.cat([follows, after[:, -1:]], 1)
    return target, weight * (reward + GAMMA * follows - now)


def train(frames: int, seed: int, nodes: int = 2, launcher: str = "mp") -> Iterator[dict]:
    """Learn from so many frames; yield what was reached after every 20 batches."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small, and the other cores are the nodes'
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
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, lr=RATE)

    with DistributedCollector(
        ["CartPole-v1"] * nodes,
        policy,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=frames,
        sync=False,  # a batch is the rollout of whichever node is ready
        launcher=launcher,
        track_policy_version=True,
    ) as collector:
        collector.set_seed(seed)
        seen, episodes = 0, {}
        finished = []
        for number, batch in enumerate(collector, 1):
            seen += batch.numel()
            returns(batch, episodes, finished)
            choice = torch.distributions.Categorical(logits=actor(batch["observation"]))
            log_prob = choice.log_prob(batch["action"])
            value = critic(batch["observation"]).squeeze(-1)
            with torch.no_grad():
                after = critic(batch["next", "observation"]).squeeze(-1)
                ratio = (log_prob - batch["action_log_prob"]).exp()
                target, gain = vtrace(batch, ratio, value, after)
                gain = gain / (gain.std() + 1e-6)
            error = (target - value).pow(2).mean()
            loss = 0.5 * error - (log_prob * gain).mean() - ENTROPY * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            collector.update_policy_weights_()  # every rollout that begins from now on uses them
            if number % 20 == 0:
                age = collector.policy_version - batch["policy_version"].float().mean()
                recent = finished[-100:] or [0.0]
                yield {
                    "frames": seen,
                    "return": sum(recent) / len(recent),
                    "loss": loss.item(),
                    "age": age.item(),
                }

def returns(batch, episodes, finished):
        ids, rewards = batch["collector", "traj_ids"], batch["next", "reward"].squeeze(-1)
        over = batch["next", "done"].squeeze(-1)
        for episode, reward, done in zip(
            ids.flatten().tolist(), rewards.flatten().tolist(), over.flatten().tolist(), strict=True
        ):
            total = episodes.pop(episode, 0.0) + reward
            if done:
                finished.append(total)
            else:
                episodes[episode] = total


def main() -> None:
    """Train and print; ``age`` is how many updates old a batch's weights were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=600_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--launcher", default="mp")
    given = parser.parse_args()
    line = "{frames:8d} frames  return {return:6.1f}  loss {loss:8.3f}  age {age:4.1f}"
    for row in train(given.frames, given.seed, given.nodes, given.launcher):
        print(line.format(**row))


if __name__ == "__main__":
    main()
