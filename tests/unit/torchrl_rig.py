"""Collects from TorchRL's environments on every path, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from tests.zoo import gym_toys
from tests.zoo.laws import Outcome, differences, quiet
from tests.zoo.reference import seed_all
from torch import nn
from torchrl.collectors import Collector as TheirCollector
from torchrl.envs import GymWrapper

from gleanrl import Collector

SEEN = ["observation"]
BY_PARTS = "stepped without TensorDicts"


def toy(space: Any = None) -> Any:
    return GymWrapper(gym_toys.Small(gym_toys.MOVES if space is None else space))


def policy(sizes: tuple[int, int] = (3, 2)) -> Any:
    torch.manual_seed(1)
    return TensorDictModule(nn.Linear(*sizes), in_keys=SEEN, out_keys=["action"])


def unchanged(env: Any, collector: Any) -> None:
    """Change nothing between batches."""


def collected(
    build: Callable[[], Any],
    *,
    fast: bool,
    change: Callable[[Any, Any], None] = unchanged,
    actor: Callable[[], Any] | None = policy,
    rounds: int = 3,
    **kwargs: Any,
) -> tuple[Outcome, list[str]]:
    """Return batches, and what the collector explained after each."""
    env = build()
    env.set_seed(5)
    seed_all(0)
    kwargs = {"frames_per_batch": 7 * env.batch_size.numel(), "total_frames": -1, **kwargs}
    with Collector(env, actor() if actor else None, fast=fast, **kwargs) as collector:
        iterator, batches, explained = iter(collector), [], []
        for _ in range(rounds):
            batches.append(next(iterator).clone())
            explained.append(collector.explain())
            change(env, collector)
    return Outcome(batches), explained


def assert_equal(build: Callable[[], Any], **kwargs: Any) -> list[str]:
    """Compare both paths; return what the fast one explained."""
    fast, explained = collected(build, fast=True, **kwargs)
    plain, _ = collected(build, fast=False, **kwargs)
    assert not differences(plain, fast)
    return explained


def assert_like_torchrl(build: Callable[[], Any], actor: Callable[[], Any] = policy) -> None:
    """Compare with TorchRL's own collector, from a reset on."""
    theirs, ours = (_from_reset(kind, build, actor) for kind in (TheirCollector, Collector))
    assert not differences(theirs, ours)


def _from_reset(kind: Any, build: Callable[[], Any], actor: Callable[[], Any]) -> Outcome:
    with quiet():
        env = build()
        frames = 7 * env.batch_size.numel()
        collector = kind(env, actor(), frames_per_batch=frames, total_frames=-1)
        env.set_seed(5)
        seed_all(0)
        collector.reset()
        iterator: Sequence[Any] | Any = iter(collector)
        batches = [next(iterator).clone() for _ in range(3)]
        collector.shutdown()
    return Outcome(batches)
