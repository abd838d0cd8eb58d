"""PPO on CartPole that survives SIGTERM and SIGKILL
=================================================

It saves what it needs, and goes on when started again. ::

    python examples/resume.py [--checkpoint ppo.pt] [--frames 200704] [--seed 0]

Stop it (``kill PID``, the time limit of a Slurm job, a preempted machine), and run the same command
again. Everything goes on: both networks, the optimizer, torch's generator, and the collector with
its environments in the middle of their episodes. So it prints what the run would have printed that
was never stopped, number for number. After ``kill -9`` it repeats the batches since the last save.
"""

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn

from gleanrl import MultiSyncCollector

WORKERS, ENVS, STEPS = 2, 8, 128  # a batch is [16, 128]: 2,048 frames
GAMMA, LAMBDA, CLIP, ENTROPY = 0.99, 0.95, 0.2, 0.01
EPOCHS, MINIBATCH, RATE = 6, 256, 1e-3
NEVER = threading.Event()
EVERY = 20  # batches from one checkpoint to the next, for ends that give no warning


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


# What is saved. The collector's state asks for as many workers; it also holds their weights.
def save(path: Path, learner: nn.Module, optimizer, counters: dict) -> None:
    """Write a checkpoint; whatever happens meanwhile, the file at ``path`` is a complete one."""
    state = {
        "learner": learner.state_dict(),
        "optimizer": optimizer.state_dict(),
        "collector": counters,
        "generator": torch.get_rng_state(),
    }
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path, learner: nn.Module, optimizer, collector: MultiSyncCollector) -> None:
    """Take over a checkpoint: `total_frames` counts those before it, too."""
    state = torch.load(path)
    learner.load_state_dict(state["learner"])
    optimizer.load_state_dict(state["optimizer"])
    collector.load_state_dict(state["collector"])
    collector.update_policy_weights_()  # the workers had those from before the last update
    torch.set_rng_state(state["generator"])


def update(learner: nn.ModuleDict, optimizer: torch.optim.Optimizer, batch: TensorDict) -> Tensor:
    """Learn from a batch ``[environments, steps]`` with PPO; return the last loss."""
    actor, critic, ends = learner["actor"], learner["critic"], batch["next"]
    with torch.no_grad():
        value = critic(batch["observation"])
        delta = ends["reward"] + GAMMA * critic(ends["observation"]) * ~ends["terminated"] - value
        decay = GAMMA * LAMBDA * ~ends["done"]
        advantage, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
        for step in reversed(range(STEPS)):
            advantage[:, step] = following = delta[:, step] + decay[:, step] * following
        target = (advantage + value).flatten()
        advantage = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).flatten()
    flat = batch.reshape(-1)
    for index in torch.cat([torch.randperm(len(flat)) for _ in range(EPOCHS)]).split(MINIBATCH):
        rows = flat[index]
        choice = torch.distributions.Categorical(logits=actor(rows["observation"]))
        ratio = (choice.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantage[index], clipped * advantage[index]).mean()
        error = (critic(rows["observation"]).squeeze(-1) - target[index]).pow(2).mean()
        loss = 0.5 * error - gain - ENTROPY * choice.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def train(
    frames: int = 200_704,
    seed: int = 0,
    checkpoint: Path | None = None,
    stop: threading.Event = NEVER,
) -> Iterator[dict]:
    """Train, and yield frames, mean return of the latest 100 episodes and loss after each batch.

    Args:
        frames: To collect in all, those before the checkpoint included.
        seed: Of a training that begins.
        checkpoint: Where to save, and what to go on from if it is there.
        stop: Once set, training saves and ends after the batch under way.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # small networks: more threads only wait for each other
    learner = nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})
    optimizer = torch.optim.Adam(learner.parameters(), RATE, fused=True)

    counters = None
    with MultiSyncCollector(
        "CartPole-v1",
        as_policy(learner["actor"]),
        num_workers=WORKERS,
        num_envs=ENVS,  # of each worker
        frames_per_batch=WORKERS * ENVS * STEPS,
        total_frames=frames,
        cat_results=0,  # [environments of all workers, steps]
    ) as collector:
        collector.set_seed(seed)
        if checkpoint and checkpoint.exists():
            load(checkpoint, learner, optimizer, collector)
        for number, batch in enumerate(collector, 1):
            counters = collector.state_dict()
            loss = update(learner, optimizer, batch)
            collector.update_policy_weights_()
            if checkpoint and number % EVERY == 0:
                save(checkpoint, learner, optimizer, counters)
            stats = collector.stats()
            yield {
                "frames": stats["frames"],
                "return": stats["return_mean"],
                "loss": loss.item(),
            }
            if stop.is_set():
                break
    if checkpoint and counters:
        save(checkpoint, learner, optimizer, counters)


def main() -> None:
    """Train and print, until it is done or told to end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=200_704)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("ppo.pt"))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # no more than that: a batch is under way
    for row in train(**vars(parser.parse_args()), stop=stop):
        print(
            f"{row['frames']:7d} frames  return {row['return']:6.1f}  loss {row['loss']:8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
# sphinx_gallery_thumbnail_path = "curves/resume.png"
