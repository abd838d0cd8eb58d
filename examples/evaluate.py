"""Evaluation beside training
==========================

PPO learns while a worker plays with the weights of one moment. ::

    python examples/evaluate.py [--frames 100000] [--seed 0]

Returns of training episodes come from a policy that explores and changes meanwhile. An evaluation
plays exactly 20 episodes with the weights of one moment, and says how sure its mean is.
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

from gleanrl import Collector, Evaluation, Evaluator

ENVS, STEPS = 16, 64  # a batch is [16, 64]: 1,024 frames
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, RATE = 6, 256, 1e-3
EPISODES, EVERY = 20, 4  # episodes of an evaluation; batches between two


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's four numbers."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


# The policy. It samples while it collects; in the evaluator it takes the likeliest action.
def as_policy(actor: nn.Module) -> ProbabilisticTensorDictSequential:
    """Return the policy that acts by the actor's logits."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


# One update of PPO; examples/ppo.py explains it.
def update(actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Adam, batch: TensorDict):
    """Learn from a batch ``[environments, steps]``; return the last loss."""
    ends = batch["next"]
    with torch.no_grad():
        value, following = critic(batch["observation"]), critic(ends["observation"])
    delta = ends["reward"] + GAMMA * following * ~ends["terminated"] - value
    decay = GAMMA * LAMBDA * ~ends["done"]
    gain, later = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for step in reversed(range(STEPS)):
        gain[:, step] = later = delta[:, step] + decay[:, step] * later
    columns = batch["observation"], batch["action"], batch["action_log_prob"], gain, gain + value
    columns = [x.flatten(0, 1) for x in columns]
    for _ in range(EPOCHS):
        for index in torch.randperm(batch.numel()).split(MINIBATCH):
            loss = loss_of(actor, critic, *(x[index] for x in columns))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # in place: the collector runs this very policy
    return loss.item()


def loss_of(
    actor: nn.Module,
    critic: nn.Module,
    observation: Tensor,
    action: Tensor,
    log_prob: Tensor,
    gain: Tensor,
    target: Tensor,
) -> Tensor:
    """Return the clipped PPO loss of a minibatch."""
    choice = torch.distributions.Categorical(logits=actor(observation), validate_args=False)
    ratio = (choice.log_prob(action) - log_prob).exp()
    gain = (gain.squeeze(-1) - gain.mean()) / (gain.std() + 1e-8)
    gained = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    error = (critic(observation) - target).pow(2).mean()
    return 0.5 * error - gained - ENTROPY * choice.entropy().mean()


def train(frames: int = 100_000, seed: int = 0) -> Iterator[dict]:
    """Train, and yield what each evaluation found: its frames, return, interval and loss."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    actor, critic = mlp(2), mlp(1)
    policy = as_policy(actor)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], RATE, fused=True)
    losses = {}

    def row(result: Evaluation) -> dict:
        low, high = result.ci95
        loss = losses[result.step]
        return {
            "frames": result.step,
            "return": result.mean,
            "loss": loss,
            "low": low,
            "high": high,
        }

    collector = Collector(
        "CartPole-v1", policy, num_envs=ENVS, frames_per_batch=ENVS * STEPS, total_frames=frames
    )
    # Every evaluation starts from the same twenty states, so that versions compare.
    evaluator = Evaluator(
        "CartPole-v1",
        policy,
        num_trajectories=EPISODES,
        collector_kwargs={"num_envs": 4},  # five episodes each
        seed=seed,
    )
    with collector, evaluator:
        collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            done = number * batch.numel()
            losses[done] = update(actor, critic, optimizer, batch)
            if number % EVERY == 0 and done < frames:  # skipped while the last one is under way
                evaluator.trigger_eval(policy, step=done)  # copies the weights, returns at once
            if (result := evaluator.poll()) is not None:
                yield row(result)
        while (result := evaluator.wait()) is not None:  # what is still under way
            yield row(result)
        yield row(evaluator.evaluate(policy, step=done))


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    for row in train(**vars(parser.parse_args())):
        half = row["high"] - row["return"]
        print(f"{row['frames']:7d} frames  return {row['return']:6.1f} ± {half:5.1f}")


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/evaluate.png"
