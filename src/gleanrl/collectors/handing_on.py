"""What a collector inside a worker hands on: batches outward, versions inward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor

from gleanrl.collectors.updating import UpdatingCollector
from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK, TRAJ_IDS, as_key, format_key
from gleanrl.core.layout import Layout
from gleanrl.core.protocols import Window


def write_batch(batch: TensorDictBase, layout: Layout, window: Window) -> int:
    """Copy ``batch`` into ``window``; return its steps, beyond which the window holds nothing.

    Args:
        batch: ``[*layout.batch_shape, t]``, with the fields of ``layout``.
        layout: What was said of it.
        window: Of at least ``t`` steps.

    Raises:
        ConfigError: it has another shape, or other fields.
    """
    taken = int(batch.shape[-1])
    if tuple(batch.shape[:-1]) != layout.batch_shape or taken > window.steps:
        raise _misfit("it", tuple(batch.shape), (*layout.batch_shape, window.steps))
    found = {
        as_key(key): value
        for key, value in batch.items(True, leaves_only=True, is_leaf=is_leaf_nontensor)
    }
    for field in layout.fields:
        value = found.pop(field.key, None)
        shape = (*layout.batch_shape, taken, *field.shape)
        if not isinstance(value, torch.Tensor):
            raise _misfit(format_key(field.key), type(value).__name__, f"{field.dtype} {shape}")
        if tuple(value.shape) != shape or value.dtype != field.dtype:
            raise _misfit(
                format_key(field.key),
                f"{value.dtype} {tuple(value.shape)}",
                f"{field.dtype} {shape}",
            )
        rows = value.reshape(window.envs, taken, *field.shape)
        window.tensor(field.key)[:, :taken].copy_(rows)
    if found:
        raise _misfit(format_key(next(iter(found))), "there", "not there")
    if taken < window.steps:
        window.zero_from(taken)
        if TRAJ_IDS in window.keys():
            window.tensor(TRAJ_IDS)[:, taken:] = -1
    return taken


def _misfit(what: str, now: Any, before: Any) -> ConfigError:
    return ConfigError(
        f"a batch of the collector in this worker is not like those it announced: {what} is {now}, "
        f"not {before}; what changes batches has to be there when the collector is built (postproc="
        " or post_collect_hook=)"
    )


def valid_frames(batch: TensorDictBase) -> int:
    """Return the number of frames of ``batch`` that were collected, not padded."""
    mask = batch.get(MASK, None)
    if isinstance(mask, torch.Tensor) and mask.shape == batch.shape:
        return int(mask.sum())
    frames: int = batch.numel()
    return frames


def takes_versions(collector: UpdatingCollector) -> bool:
    """Whether it takes a parent's versions; one that receives in a way of its own may not."""
    return type(collector).receive_models is UpdatingCollector.receive_models
