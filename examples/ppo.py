"""PPO on CartPole: collect with GleanRL, learn with plain PyTorch. Reaches 400+ in about a minute.

python examples/ppo.py [--frames 200000]
"""

import argparse

import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gleanrl.collectors import Collector


def mlp(outputs: int) -> nn.Sequential:
    """Return a 64-64 network on CartPole's observation."""
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def advantages(values: torch.Tensor, batch: dict, gamma: float = 0.99, lam: float = 0.95):
    """Return generalised advantage estimates, bootstrapping where an episode was only cut."""
    after = batch["next"]
    delta = after["reward"] + gamma * values[1] * ~after["terminated"] - values[0]
    out, running = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        running = delta[:, t] + gamma * lam * running * ~after["done"][:, t]
        out[:, t] = running
    return out


def main() -> None:
    """Train and print the mean return of finished episodes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=200_000)
    frames = parser.parse_args().frames
    torch.manual_seed(0)

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
    running, finished = torch.zeros(16), [0.0]

    with Collector(
        "CartPole-v1", policy, num_envs=16, frames_per_batch=2048, total_frames=frames
    ) as collector:
        log_prob_key = next(key for key in collector.fake_tensordict().keys() if "log_prob" in key)
        collector.set_seed(0)
        for number, batch in enumerate(collector):
            for t in range(batch.shape[1]):
                running += batch["next", "reward"][:, t, 0]
                over = batch["next", "done"][:, t, 0]
                finished += running[over].tolist()
                running[over] = 0
            with torch.no_grad():
                values = critic(batch["observation"]), critic(batch["next", "observation"])
                gain = advantages(values, batch)
                target = (gain + values[0]).flatten()
            flat, gain = batch.reshape(-1), ((gain - gain.mean()) / gain.std()).flatten()
            for index in torch.cat([torch.randperm(len(flat)) for _ in range(6)]).split(256):
                rows = flat[index]
                choice = torch.distributions.Categorical(logits=actor(rows["observation"]))
                ratio = (choice.log_prob(rows["action"]) - rows[log_prob_key]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                surrogate = torch.minimum(ratio * gain[index], clipped * gain[index]).mean()
                error = (critic(rows["observation"]).flatten() - target[index]).pow(2).mean()
                loss = 0.5 * error - surrogate - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()  # the collector runs this very policy: nothing to send
            recent = finished[-30:]
            print(f"{(number + 1) * 2048:7d} frames  return {sum(recent) / len(recent):6.1f}")


if __name__ == "__main__":
    main()
