"""IMPALA on CartPole
==================

Nodes collect while the learner learns, and V-trace corrects for old weights. ::

    python examples/impala.py [--nodes 2] [--frames 512000] [--seed 0]   # processes of this machine
    python examples/impala.py --nodes 16 --launcher submitit             # Slurm jobs
    python examples/impala.py --central                                  # SEED RL's architecture

A node acts with the weights that were newest when its rollout began; the learner has made updates
since. The batch holds the log-probabilities with which actions were taken, and V-trace weighs each
step by how much more likely its action is now. Espeholt et al. 2018, "IMPALA: Scalable Distributed
Deep-RL with Importance Weighted Actor-Learner Architectures".

With ``--central``, one copy of the policy acts for the environments of all workers, and new weights
act from its next call on: Espeholt et al. 2020, "SEED RL: Scalable and Efficient Deep-RL with
Accelerated Central Inference".
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

from gleanrl import BaseCollector, DistributedCollector, MultiAsyncCollector

ENVS, STEPS = 16, 32  # a batch is a rollout of one node, [16, 32]: 512 frames
GAMMA, ENTROPY, RATE = 0.99, 0.01, 1e-3
EVERY = 20  # batches from one report to the next


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


# V-trace. The ratio is the probability of an action now over the one with which it was taken; both
# of the paper's bounds on it, rho and c, are 1.
def vtrace(
    batch: TensorDict, ratio: Tensor, value: Tensor, next_value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return targets of the values, and advantages; all tensors are ``[envs, steps]``."""
    ends = batch["next"]
    reward = ends["reward"].squeeze(-1) * (1 - GAMMA)  # values stay below 1
    goes_on = ~ends["done"].squeeze(-1)
    next_value = next_value * ~ends["terminated"].squeeze(-1)
    weight = ratio.clamp(max=1.0)
    delta = weight * (reward + GAMMA * next_value - value)
    decay = GAMMA * goes_on * weight
    target, following = torch.empty_like(value), torch.zeros_like(value[:, 0])
    for step in reversed(range(STEPS)):
        following = delta[:, step] + decay[:, step] * following
        target[:, step] = value[:, step] + following
    # After a step comes the target of the next one; where the sequence ends, a mere value.
    next_target = next_value.clone()
    next_target[:, :-1] = torch.where(goes_on[:, :-1], target[:, 1:], next_value[:, :-1])
    return target, weight * (reward + GAMMA * next_target - value)


def loss_of(actor: nn.Module, critic: nn.Module, batch: TensorDict) -> Tensor:
    """Return the loss of a batch."""
    choice = torch.distributions.Categorical(logits=actor(batch["observation"]))
    log_prob = choice.log_prob(batch["action"])
    value = critic(batch["observation"]).squeeze(-1)
    with torch.no_grad():
        next_value = critic(batch["next", "observation"]).squeeze(-1)
        ratio = (log_prob - batch["action_log_prob"]).exp()
        target, advantage = vtrace(batch, ratio, value, next_value)
        advantage /= advantage.std().clamp(min=0.05)  # once all is well, noise stays small
    error = (value - target).pow(2).mean()
    return 0.5 * error - (log_prob * advantage).mean() - ENTROPY * choice.entropy().mean()


def collector_of(
    actor: nn.Module, frames: int, nodes: int, launcher: str, central: bool
) -> BaseCollector:
    """Return a collector whose batches are rollouts of one node, of whichever is ready."""
    envs, policy = ["CartPole-v1"] * nodes, as_policy(actor)
    options = {
        "num_envs": ENVS,  # of each node
        "frames_per_batch": ENVS * STEPS,
        "total_frames": frames,
        "track_policy_version": True,
    }
    if central:
        return MultiAsyncCollector(envs, policy, inference="central", **options)
    return DistributedCollector(envs, policy, sync=False, launcher=launcher, **options)


def train(
    frames: int = 512_000,
    seed: int = 0,
    nodes: int = 2,
    launcher: str = "mp",
    central: bool = False,
) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes, loss and age of weights."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks, and the other cores are the nodes'
    actor, critic = mlp(2), mlp(1)
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, RATE, fused=True)

    with collector_of(actor, frames, nodes, launcher, central) as collector:
        collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            loss = loss_of(actor, critic, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.param_groups[0]["lr"] = RATE * max(0.0, 1 - number * batch.numel() / frames)
            optimizer.step()
            collector.update_policy_weights_()  # for rollouts, or calls, that begin from now on
            if number % EVERY == 0:
                age = collector.policy_version - batch["policy_version"].float().mean()
                stats = collector.stats()
                yield {
                    "frames": stats["frames"],
                    "return": stats["return_mean"],
                    "loss": loss.item(),
                    "age": age.item(),
                }


def main() -> None:
    """Train and print; ``age`` is how many updates old a batch's weights are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=512_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--launcher", default="mp")
    parser.add_argument("--central", action="store_true")
    for row in train(**vars(parser.parse_args())):
        print(
            f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}  "
            f"age {row['age']:4.1f}"
        )


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/impala.png"
