"""Evaluate a policy on whole episodes: exactly N of them, padded, with a mask.

python examples/evaluate.py
"""

import torch

from gleanrl.collectors import Collector


def lean(observation: torch.Tensor) -> torch.Tensor:
    """Push the cart towards where the pole falls: a plain function on tensors is a policy."""
    return (observation[..., 2] + 0.5 * observation[..., 3] > 0).long()


def main() -> None:
    """Print return and length of twenty episodes."""
    with Collector(
        "CartPole-v1",
        lean,
        num_envs=4,
        frames_per_batch=400,
        trajs_per_batch=20,
        traj_quota="equal",  # five from each: those that end first would be the shorter ones
    ) as collector:
        collector.set_seed(0)
        episodes = next(iter(collector))
    lengths = episodes["collector", "mask"].sum(-1)
    returns = episodes["next", "reward"].sum((-1, -2))
    print(f"{len(episodes)} episodes: return {returns.mean():.1f} ± {returns.std():.1f}")
    print(f"shortest {lengths.min()}, longest {lengths.max()} steps")


if __name__ == "__main__":
    main()
