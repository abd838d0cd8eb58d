"""Contradictions between arguments, found before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gleanrl.core.errors import ConfigError
from gleanrl.weights.version import PolicyVersion

_LATER = ("process", "multiprocessing", "distributed", "submitit", "rpc", "ray", "thread")


def check_front_door(
    backend: str | None,
    num_collectors: int | None,
    sync: bool | None,
    options: Mapping[str, Any] | None,
) -> None:
    """Accept the selectors that mean "in this process"."""
    if backend in _LATER:
        raise NotImplementedError(
            f"backend={backend!r} is not available in this version; only 'inline' is"
        )
    if backend not in (None, "inline", "direct"):
        raise ConfigError(f"backend ({backend!r}) must be 'inline' (alias 'direct')")
    if num_collectors is not None:
        if isinstance(num_collectors, bool) or not isinstance(num_collectors, int):
            raise TypeError(f"num_collectors ({num_collectors!r}) must be a whole number")
        if num_collectors != 1:
            raise ConfigError(
                f"num_collectors ({num_collectors}) must be at most one in this process; use "
                "num_envs= for several environments"
            )
    if sync is not None:
        raise ConfigError("sync= is for collectors with several workers")
    if options:
        raise ConfigError(f"backend_options ({sorted(options)}) have no meaning in this process")


def check_later(updater: Any, receivers: Any, trajs_per_write: int | None) -> None:
    """Refuse what only collectors with several workers have."""
    for name, value in (
        ("weight_updater", updater),
        ("weight_recv_schemes", receivers),
        ("trajs_per_write", trajs_per_write),
    ):
        if value is not None:
            raise NotImplementedError(
                f"{name} belongs to collectors with several workers, which this version does not "
                f"have"
            )


def check_buffer(replay_buffer: Any, use_buffers: bool | None, same_td: bool) -> None:
    """A replay buffer takes the place of delivered batches."""
    if replay_buffer is None:
        return
    if use_buffers:
        raise TypeError("use_buffers=True and replay_buffer exclude each other")
    if same_td:
        raise TypeError(
            "return_same_td=True and replay_buffer exclude each other: nothing is returned"
        )


def check_trajectories(
    track: bool, split: bool | None, per_batch: int | None, same_td: bool
) -> None:
    """Whole trajectories are found by their ids and are copies."""
    if (split or per_batch is not None) and not track:
        raise ConfigError("split_trajs and trajs_per_batch need track_traj_ids=True")
    if per_batch is not None and same_td:
        raise ConfigError("return_same_td=True and trajs_per_batch exclude each other")


def check_update(worker_ids: Any, kwargs: Mapping[str, Any]) -> None:
    """An in-process collector has no workers to choose from."""
    if worker_ids is not None:
        raise TypeError("worker_ids needs a collector with several workers; this one has none")
    if kwargs:
        raise TypeError(
            f"unexpected arguments {sorted(kwargs)}: there is no weight updater to take them"
        )


def read_version(track: bool | PolicyVersion) -> PolicyVersion | None:
    """Return the version counter to show, or ``None``."""
    if isinstance(track, PolicyVersion):
        return track
    if not isinstance(track, bool):
        raise TypeError(f"track_policy_version ({track!r}) must be a bool or a PolicyVersion")
    return PolicyVersion() if track else None


def read_index(index: Sequence[int] | torch.Tensor, num_envs: int) -> tuple[int, ...]:
    """Return environment positions from indices or a boolean mask."""
    chosen = torch.as_tensor(index)
    if chosen.dtype == torch.bool:
        if chosen.numel() != num_envs:
            raise ConfigError(f"index has {chosen.numel()} entries for {num_envs} environments")
        chosen = chosen.reshape(-1).nonzero()
    found = tuple(int(i) for i in chosen.reshape(-1))
    outside = [i for i in found if not 0 <= i < num_envs]
    if outside:
        raise ConfigError(f"index {outside} is outside the {num_envs} environments")
    return found


def check_state(state: Mapping[str, Any], strict: bool) -> None:
    """A strict load needs every entry."""
    expected = ("policy_state_dict", "env_state_dict", "frames", "iter", "worker")
    missing = [name for name in expected if name not in state]
    if strict and missing:
        raise KeyError(f"state_dict lacks {missing}; load with strict=False to keep what is there")
