"""Checks of environments' results: the shape of a step and of a reset, end flags, rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import EnvError
from gleanrl.core.window import Array

NUMBERS = "biuf"
"""Kinds of numpy dtypes that hold plain numbers."""
_BOOLS = (bool, np.bool_)
_PLAIN_NUMBERS = frozenset(
    {float, int, bool, np.bool_}
    | {np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["Float"]}
)
"""Types of numbers that never change, so that a reference is as good as a copy."""


def check_reset(result: Any, who: str, pair: str = "(observation, info)") -> tuple[Any, Any]:
    """Return the checked results of ``reset``."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{who} must return {pair}, it returned {result!r:.200}")
    return result


def not_five(result: Any, who: str, names: str = "terminated, truncated, info") -> EnvError:
    """Return the error for a ``step`` that did not return five values."""
    size = len(result) if isinstance(result, tuple) else type(result).__name__
    return EnvError(
        f"{who} must return (observation, reward, {names}), it returned {size} instead; wrap old "
        "Gym environments with shimmy"
    )


def check_flag(flag: Any, env: int, name: str) -> bool:
    """Return one environment's end flag."""
    if type(flag) in _BOOLS:
        return bool(flag)
    value = np.asarray(flag)
    number = value.item() if value.size == 1 and value.dtype.kind in NUMBERS else None
    if number not in (0, 1) or bool(flag) != bool(number):
        raise EnvError(
            f"environment {env} returned {name}={flag!r:.100}; it must be a bool (what steps "
            "several environments at once must be a gymnasium.vector.VectorEnv)"
        )
    return bool(number)


def check_rewards(rewards: Sequence[Sequence[Any]], when: str, tensors: bool) -> Array:
    """Return ``rewards``, per step one of each environment, as one array ``[T, P]``.

    Without ``tensors``, tensors are refused, because an environment may have written a later reward
    into the memory of an earlier one.
    """
    steps, envs = len(rewards), len(rewards[0])
    if _PLAIN_NUMBERS.issuperset(map(type, chain.from_iterable(rewards))):
        with contextlib.suppress(OverflowError):  # an int beyond all floats is found below
            flat = np.fromiter(chain.from_iterable(rewards), np.float64, steps * envs)
            return flat.reshape(steps, envs)
    values = np.empty((steps, envs))
    for t, row in enumerate(rewards):
        for env, reward in enumerate(row):
            tensor = isinstance(reward, torch.Tensor)
            value = np.asarray(reward.tolist() if tensor else reward)  # numpy has no bfloat16
            late = tensor and not tensors
            if late or value.shape != () or value.dtype.kind not in NUMBERS:
                raise EnvError(
                    f"environment {env} returned reward {reward!r}{when.format(t)}; it must be a "
                    f"number{', because its first reward was no tensor' * late}"
                )
            values[t, env] = value
    return values


def write_rewards(
    target: Array, rewards: Array, *, when: str = " at step {}", wrapper: str = "TransformReward"
) -> None:
    """Narrow ``rewards`` ``[T, P]`` into ``target``, ``[P, T]`` float32.

    The message tells the step by ``when``, and advises a ``wrapper`` of ``gymnasium.wrappers``.
    """
    try:
        with np.errstate(over="raise"):
            target[...] = rewards.T
    except FloatingPointError as err:
        with np.errstate(over="ignore"):
            lost = np.isinf(rewards.astype(np.float32)) & np.isfinite(rewards)
        t, env = (int(index) for index in np.argwhere(lost)[0])
        raise EnvError(
            f"environment {env} returned reward {rewards[t, env]}{when.format(t)}, which overflows "
            f"float32; scale it with gymnasium.wrappers.{wrapper}"
        ) from err
