"""PPO on CartPole that survives SIGTERM: it saves all that it needs, and continues when it is started again.

python examples/resume.py --checkpoint ppo.pt [--frames 307200] [--seed 0]

Stop it (`kill PID`, the time limit of a Slurm job, a preempted machine) and run the same command again. Environments
begin new episodes then; all else continues: both networks, the optimizer, torch's generator, and the collector's count of
frames, random streams and trajectory ids.
"""

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl import MultiSyncCollector

WORKERS, ENVS, STEPS = 2, 8, 64
"""Processes, environments of each, and steps of each environment in a batch."""
GAMMA, LAMBDA, CLIP, RATE = 0.99, 0.95, 0.2, 1e-3
EPOCHS, MINIBATCH = 4, 256
EVERY = 20
"""Batches from one checkpoint to the next, for ends that send no signal."""


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's observation."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def update(actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer, batch) -> float:
    """Learn from a batch ``[envs, steps]`` by PPO; return the last loss."""
    after = batch["next"]
    with torch.no_grad():
        value, future = critic(batch["observation"]), critic(after["observation"])
        delta = after["reward"] + GAMMA * future * ~after["terminated"] - value
        gain, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
        for t in reversed(range(STEPS)):
            running = delta[:, t] + GAMMA * LAMBDA * running * ~after["done"][:, t]
            gain[:, t] = running
    rows, target = batch.reshape(-1), (gain + value).flatten()
    gain = ((gain - gain.mean()) / gain.std()).flatten()
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
    return loss.item()


def save(path: Path, state: dict) -> None:
    """Write a file that is complete, or leave the one that was there."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())
    part.replace(path)  # at once, whenever the process ends


def train(
    frames: int = 307_200, seed: int = 0, checkpoint: Path | None = None
) -> Iterator[dict]:
    """Learn until so many frames were collected, from a checkpoint on if there is one."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the networks are small, and the other cores are the workers'
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
    learner = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(learner.parameters(), lr=RATE)
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))  # acted on between two batches

    with MultiSyncCollector(
        "CartPole-v1",
        policy,
        num_workers=WORKERS,
        num_envs=ENVS,
        frames_per_batch=WORKERS * ENVS * STEPS,
        total_frames=frames,
        cat_results=0,  # [all environments, steps]
    ) as collector:
        seen = 0
        if checkpoint and checkpoint.exists():
            saved = torch.load(checkpoint)
            learner.load_state_dict(saved["learner"])
            optimizer.load_state_dict(saved["optimizer"])
            collector.load_state_dict(saved["collector"])  # the workers' weights, too
            torch.set_rng_state(saved["generator"])
            seen = saved["collector"]["frames"]
        else:
            collector.set_seed(seed)
        for number, batch in enumerate(collector, 1):
            seen += batch.numel()
            loss = update(actor, critic, optimizer, batch)
            collector.update_policy_weights_()
            if checkpoint and (stopping or number % EVERY == 0):
                save(checkpoint, {
                    "learner": learner.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "collector": collector.state_dict(),
                    "generator": torch.get_rng_state(),
                })
            yield {"frames": seen, "return": 0.0, "loss": loss}
            if stopping:
                break


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=307_200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("ppo.pt"))
    given = parser.parse_args()
    for row in train(given.frames, given.seed, given.checkpoint):
        print("{frames:8d} frames  return {return:6.1f}  loss {loss:8.3f}".format(**row), flush=True)


if __name__ == "__main__":
    main()
