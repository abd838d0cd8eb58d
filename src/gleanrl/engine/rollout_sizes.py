"""The steps of each worker's rollouts: frames per batch, rounded up to whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gleanrl.core.layout import Layout
from gleanrl.core.options import FrameLimits
from gleanrl.engine.batch_delivery import BatchOptions


class RolloutSizes(NamedTuple):
    """The sizes of rollouts, once the workers' environments are known."""

    steps: tuple[int, ...]
    """Per worker, the steps of its rollouts."""
    frames: list[int]
    """Per worker, the frames of its rollouts."""
    limits: FrameLimits
    """Frames per batch and in all, in whole batches and whole steps."""


def rollout_sizes(
    limits: FrameLimits,
    frames: Sequence[int],
    layouts: Sequence[Layout | None],
    envs: Sequence[int],
    options: BatchOptions,
) -> RolloutSizes:
    """Round frames up to whole steps.

    Args:
        limits: Frames per batch and in all, as the user gave them.
        frames: Per worker, the requested frames of its rollouts.
        layouts: Per worker, the layout of its steps, if that is fixed.
        envs: Per worker, the number of its environments.
        options: Which rollouts make a batch.
    """
    rows = [
        (options.rollout_envs or own) if layout is None else layout.num_envs
        for layout, own in zip(layouts, envs, strict=True)
    ]
    steps = tuple(
        -(-requested // count) if layout is None or layout.steps is None else layout.steps
        for requested, layout, count in zip(frames, layouts, rows, strict=True)
    )
    sizes = [each * count for each, count in zip(steps, rows, strict=True)]
    if options.single:
        return RolloutSizes(steps, sizes, limits.rounded(max(sizes) * options.joined, max(rows)))
    return RolloutSizes(steps, sizes, limits.rounded(sum(sizes), sum(envs)))
