"""Contradictions between arguments, found before anything is built."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import seconds
from gleanrl.engine.interruptor import Interruptor
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion


def check_buffer(
    replay_buffer: Any,
    use_buffers: bool | None,
    same_td: bool,
    extend: bool,
    changes_shape: bool,
    compact_obs: bool = False,
) -> None:
    """A replay buffer takes the place of delivered batches."""
    if replay_buffer is None:
        return
    if compact_obs and isinstance(replay_buffer, ReplayBuffer) and replay_buffer.storage.compact:
        raise ConfigError(
            "compact_obs=True leaves out what the compact replay_buffer needs where an episode or "
            "a rollout ends: drop it, the buffer stores each observation once by itself"
        )
    if use_buffers:
        raise TypeError("use_buffers=True and replay_buffer exclude each other")
    if same_td:
        raise TypeError(
            "return_same_td=True and replay_buffer exclude each other: nothing is returned"
        )
    if not extend and changes_shape:
        raise TypeError(
            "extend_buffer=False stores steps as they were made; it excludes split_trajs, "
            "trajs_per_batch and postproc, which work on whole batches"
        )


def check_trajectories(
    track: bool, split: bool | None, per_batch: int | None, same_td: bool, set_truncated: bool
) -> None:
    """Whole trajectories are found by their ids and are copies."""
    if (split or per_batch is not None) and not track:
        raise ConfigError("split_trajs and trajs_per_batch need track_traj_ids=True")
    if (split or per_batch is not None) and same_td:
        raise ConfigError(
            "return_same_td=True needs batches of one shape; it excludes split_trajs and "
            "trajs_per_batch"
        )
    if set_truncated and per_batch is not None:
        raise ConfigError(
            "set_truncated=True would cut trajectories where batches end; it excludes "
            "trajs_per_batch, which delivers whole ones"
        )


def check_quota(quota: str | None, reset_at_each_iter: bool) -> None:
    """Equal quotas are there so that short trajectories are not preferred."""
    if quota is not None and reset_at_each_iter:
        raise ConfigError(
            "reset_at_each_iter=True drops trajectories that outlast a batch, so that short ones "
            "are preferred; it excludes traj_quota"
        )


def check_callables(**given: Any) -> None:
    """Hooks and factories have to be callable."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} ({value!r:.100}) must be callable")


def check_timeout(timeout: float | None) -> None:
    """A deadline is a positive number of seconds."""
    if timeout is not None:
        seconds("timeout", timeout)


def check_schemes(schemes: Mapping[str, Any] | None) -> None:
    """Every weight sync scheme has to be one."""
    if schemes is not None and not isinstance(schemes, Mapping):
        raise ConfigError(
            f"weight sync schemes ({schemes!r:.100}) must be a mapping from model id to scheme"
        )
    for name, scheme in (schemes or {}).items():
        if not isinstance(scheme, WeightSyncScheme):
            raise ConfigError(
                f"the weight sync scheme of {name!r} is a {type(scheme).__name__}, not a "
                "WeightSyncScheme"
            )
        if scheme.initialized_on_sender or scheme.initialized_on_receiver:
            raise ConfigError(
                f"the weight sync scheme of {name!r} was initialised by hand; a collector needs a "
                "fresh one and sends by itself: give first weights to update_policy_weights_"
            )


def check_updater(updater: Any, schemes: Mapping[str, Any] | None) -> None:
    """Weights go one way."""
    if updater is not None and schemes is not None:
        raise TypeError("give weight_sync_schemes or weight_updater, not both")


def check_multi(given: Any) -> None:
    """Contradictions between the arguments of a collector with several workers."""
    check_updater(given.weight_updater, given.weight_sync_schemes)
    both = given.policy is not None and given.policy_factory is not None
    if both and given.weight_updater is not None:
        raise TypeError(
            "policy and policy_factory exclude each other with a weight_updater; drop it, and "
            "weights are taken from policy"
        )
    factories = given.policy_factory
    if factories is not None:
        several = isinstance(factories, Sequence)
        for number, factory in enumerate(factories if several else [factories]):
            check_callables(
                **{f"policy_factory[{number}]" if several else "policy_factory": factory}
            )
    if given.interruptor is not None and not isinstance(given.interruptor, Interruptor):
        raise ConfigError(
            f"interruptor ({type(given.interruptor).__name__}) must be a gleanrl.collectors."
            "Interruptor: workers look at its flag in shared memory"
        )


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


def read_seed(seed: Any) -> int:
    """Return a seed as a whole number that is not negative."""
    try:
        number = operator.index(seed)
    except TypeError as err:
        raise ConfigError(f"seed ({seed!r}) must be a whole number") from err
    if number < 0:
        raise ConfigError(f"seed ({number}) must not be negative")
    return number


def read_flags(name: str, given: Any) -> list[bool]:
    """Return a list or a tensor of bools as a list."""
    try:
        flags = list(given.tolist() if isinstance(given, torch.Tensor | np.ndarray) else given)
    except TypeError:
        raise ConfigError(f"{name} ({given!r:.100}) must be a list of bools") from None
    flags = [f.item() if isinstance(f, torch.Tensor | np.generic) else f for f in flags]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ConfigError(
            f"{name} ({given!r:.100}) must hold one bool per worker, no indices: [True, False, ...]"
        )
    return flags


def read_index(index: Sequence[int] | torch.Tensor, num_envs: int) -> tuple[int, ...]:
    """Return environment positions from indices or a boolean mask."""
    chosen = torch.as_tensor(index)
    if chosen.is_floating_point() or chosen.is_complex():
        raise ConfigError(f"index ({index!r:.100}) must hold whole numbers or be a boolean mask")
    if chosen.dtype == torch.bool:
        if chosen.numel() != num_envs:
            raise ConfigError(f"index has {chosen.numel()} entries for {num_envs} environments")
        chosen = chosen.reshape(-1).nonzero()
    found = tuple(sorted({int(i) for i in chosen.reshape(-1)}))
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
