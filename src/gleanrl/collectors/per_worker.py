"""Arguments that concern several workers: read, checked and dealt out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch

from gleanrl.core.errors import ArgumentTypeError, ConfigError
from gleanrl.core.options import DevicePlan, check_int, users_stacklevel


def env_functions(
    create_env_fn: Any, num_workers: int | None, default: int | None = None
) -> list[Any]:
    """Return what each worker collects from; one environment is for ``default`` workers.

    Raises:
        TypeError: one environment and no number of workers.
        ConfigError: no workers.
    """
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if not create_env_fn:
            raise ConfigError("create_env_fn is empty: give one environment per worker")
        if num_workers is not None and num_workers != len(create_env_fn):
            warnings.warn(
                f"num_workers ({num_workers!r}) is ignored: create_env_fn has an entry for each of "
                f"{len(create_env_fn)} workers",
                UserWarning,
                stacklevel=users_stacklevel(),
            )
        _warn_of_copies(list(create_env_fn))
        return list(create_env_fn)
    num_workers = default if num_workers is None else num_workers
    if num_workers is None:
        raise ArgumentTypeError(
            "one create_env_fn for several workers needs num_workers=; or pass a list with one "
            "entry per worker"
        )
    functions = [create_env_fn] * check_int("num_workers", num_workers, least=1)
    _warn_of_copies(functions)
    return functions


def _warn_of_copies(functions: Sequence[Any]) -> None:
    """Warn where one Gymnasium environment that exists already is meant for several workers."""
    built = [env for env in functions if isinstance(env, gym.Env)]
    if len({id(env) for env in built}) < len(built):
        warnings.warn(
            f"create_env_fn is one {built[0]} for several workers: each gets a copy in its present "
            "state, random numbers included; pass an id or a callable that makes one",
            UserWarning,
            stacklevel=users_stacklevel(),
        )


def env_functions_of(create_env_fn: Any, num_collectors: int | None) -> list[Any]:
    """Return what each worker collects from, where a list has to match ``num_collectors``.

    Raises:
        ConfigError: it does not, or there are no workers.
    """
    functions = env_functions(create_env_fn, None, default=num_collectors or 1)
    if num_collectors not in (None, len(functions)):
        raise ConfigError(
            f"num_collectors ({num_collectors}) does not match create_env_fn, which lists "
            f"{len(functions)}"
        )
    return functions


def deal(name: str, value: Any, workers: int) -> list[Any]:
    """Deal ``value`` out: one for all, or a list with one entry per worker.

    Raises:
        ConfigError: a list of another length.
    """
    if isinstance(value, list | tuple):
        if len(value) != workers:
            raise ConfigError(f"{name} has {len(value)} entries for {workers} workers")
        return list(value)
    return [value] * workers


@dataclass(frozen=True, slots=True)
class Devices:
    """What each worker does where."""

    plans: tuple[DevicePlan, ...]

    @classmethod
    def read(cls, workers: int, **given: Any) -> Devices:
        """Read device arguments, each one for all workers or a list."""
        lists = [deal(name, value, workers) for name, value in given.items()]
        plans = [DevicePlan.from_arguments(*column) for column in zip(*lists, strict=True)]
        return cls(tuple(plans))

    def storing(self) -> torch.device | None:
        """Where batches of all workers are delivered: the CPU if workers differ."""
        devices = {plan.storing for plan in self.plans}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def policies(self) -> list[torch.device | None]:
        """Where each worker's policy is."""
        return [plan.policy for plan in self.plans]


def frames_per_worker(frames_per_batch: Any, workers: int, sync: bool) -> list[int]:
    """Return what each worker is asked for per batch, in frames.

    Synchronous workers share a number out (rounded up); asynchronous ones collect all of it each.
    A sequence gives each its own.

    Raises:
        ConfigError: a sequence of another length, or numbers that are not positive.
    """
    if isinstance(frames_per_batch, Sequence) and not isinstance(frames_per_batch, str):
        given = deal("frames_per_batch", list(frames_per_batch), workers)
        return [check_int("frames_per_batch", frames, least=1) for frames in given]
    frames = check_int("frames_per_batch", frames_per_batch, least=1)
    return [-(-frames // workers) if sync else frames] * workers


def read_cat(cat_results: str | int | None, sync: bool) -> int | None:
    """Return the dimension to concatenate along, ``None`` to stack.

    Raises:
        ConfigError: another string, or batches that are not ``sync``.
    """
    if cat_results is None or cat_results == "stack":
        return None
    if not sync:
        raise ConfigError(
            f"cat_results ({cat_results!r}) is for synchronous collectors: otherwise every batch "
            "is the rollout of one worker"
        )
    if isinstance(cat_results, str):
        raise ConfigError(f"cat_results ({cat_results!r}) must be 'stack' or a dimension")
    return check_int("cat_results", cat_results)


def read_threshold(threshold: float | None, workers: int) -> int | None:
    """Return how many workers have to finish before the others are stopped, ``None`` for all.

    Raises:
        ConfigError: outside [0, 1].
    """
    if threshold is None:
        return None
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise ConfigError(f"preemptive_threshold ({threshold!r}) must be a number in [0, 1]")
    if not 0 <= threshold <= 1:
        raise ConfigError(f"preemptive_threshold ({threshold}) must lie in [0, 1]")
    return None if threshold == 1 else int(workers * threshold)


def env_kwargs(given: Any, workers: int) -> list[Mapping[str, Any]]:
    """Return each worker's ``create_env_kwargs``."""
    dealt = deal("create_env_kwargs", given, workers)
    for kwargs in dealt:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigError(f"create_env_kwargs ({kwargs!r:.100}) must be a mapping")
    return [dict(kwargs or {}) for kwargs in dealt]


class Threads:
    """The learner's torch threads: fewer while workers run, as before afterwards."""

    def __init__(self, wanted: int | None, workers: int) -> None:
        """Leave the cores of ``workers`` workers alone, unless a number is ``wanted``."""
        self._before = torch.get_num_threads()
        default = max(1, self._before - workers)
        self._set = default if wanted is None else check_int("num_threads", wanted, least=1)
        torch.set_num_threads(self._set)

    def restore(self) -> None:
        """Put the number back, unless somebody has changed it since. Idempotent."""
        if torch.get_num_threads() == self._set:
            torch.set_num_threads(self._before)
        self._set = self._before
