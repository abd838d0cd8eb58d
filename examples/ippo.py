"""Independent PPO on simple_spread
================================

Three agents share one network and learn to cover three places. ::

    pip install gleanrl[pettingzoo] mpe2
    python examples/ippo.py [--frames 120000] [--seed 0]

de Witt et al. 2020, "Is Independent Learning All You Need in the StarCraft Multi-Agent Challenge?"
"""

import argparse
from collections.abc import Iterator

import torch
from mpe2 import simple_spread_v3
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import MultiSyncCollector

WORKERS, ENVS, STEPS = 2, 16, 50  # a batch is [2, 16, 50]: 1,600 frames of three agents each
GAMMA, LAMBDA, CLIP, ENTROPY = 0.95, 0.9, 0.2, 0.01
EPOCHS, MINIBATCH, RATE = 8, 800, 1e-3


# The networks. What the agents see is ("agent", "observation"), [..., 3, 18]: the group of the
# agents agent_0, agent_1 and agent_2, which is called "agent". A network works on the last
# dimension, so one network acts for all three, whatever stands in front of it.
def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on what one agent sees."""
    return nn.Sequential(
        nn.Linear(18, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def as_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    """Return the policy that samples each agent's action from its logits."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=[("agent", "observation")], out_keys=[("agent", "logits")]),
        ProbabilisticTensorDictModule(
            in_keys=[("agent", "logits")],
            out_keys=[("agent", "action")],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key=("agent", "log_prob"),
        ),
    )


# The advantages, of each agent by itself: rewards and flags of a group are [..., 3, 1]. Episodes
# end by truncation after 25 steps, so the value of what follows counts (it was seen under "next").
def advantages(agents: TensorDict, value: Tensor, next_value: Tensor) -> Tensor:
    """Return generalised advantage estimates ``[environments, steps, 3, 1]``."""
    delta = agents["reward"] + GAMMA * next_value * ~agents["terminated"] - value
    decay = GAMMA * LAMBDA * ~agents["done"]
    result, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(delta.shape[1])):
        result[:, step] = following = delta[:, step] + decay[:, step] * following
    return result


# The loss. It is PPO's: an agent at a step is a row like any other.
def loss_of(actor: nn.Module, critic: nn.Module, rows: list[Tensor]) -> Tensor:
    """Return the clipped PPO loss of a minibatch."""
    observation, action, log_prob, advantage, target = rows
    choice = torch.distributions.Categorical(logits=actor(observation), validate_args=False)
    ratio = (choice.log_prob(action) - log_prob).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
    error = (critic(observation).squeeze(-1) - target).pow(2).mean()
    return 0.5 * error - gain - ENTROPY * choice.entropy().mean()


def train(frames: int = 120_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes and loss after each batch.

    The return of an episode is the mean of the three agents' returns.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    actor, critic = mlp(5), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], RATE, fused=True)
    running, finished = torch.zeros(WORKERS * ENVS), list[float]()

    with MultiSyncCollector(
        simple_spread_v3.parallel_env,  # the collector makes PettingZoo environments as they are
        as_policy(actor),
        num_workers=WORKERS,
        num_envs=ENVS,  # of each worker
        frames_per_batch=WORKERS * ENVS * STEPS,
        total_frames=frames,
    ) as collector:
        collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            batch = batch.flatten(0, 1)  # [environments, steps]
            agents, after = batch["agent"], batch["next", "agent"]  # [environments, steps, 3]
            for step in range(batch.shape[1]):
                running += after["reward"][:, step].mean((1, 2))
                over = batch["next", "done"][:, step, 0]
                finished += running[over].tolist()
                running[over] = 0
            with torch.no_grad():
                value = critic(agents["observation"])
                advantage = advantages(after, value, critic(after["observation"]))
                target = advantage + value
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            columns = agents["observation"], agents["action"], agents["log_prob"]
            columns = [x.flatten(0, 2) for x in (*columns, advantage[..., 0], target[..., 0])]
            for _ in range(EPOCHS):
                for index in torch.randperm(len(columns[0])).split(MINIBATCH):
                    loss = loss_of(actor, critic, [x[index] for x in columns])
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
                    optimizer.step()
            collector.update_policy_weights_()  # the next batch is made with these weights
            recent = finished[-100:]
            yield {
                "frames": number * batch.numel(),
                "return": sum(recent) / len(recent),
                "loss": loss.item(),
            }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=120_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/ippo.png"
