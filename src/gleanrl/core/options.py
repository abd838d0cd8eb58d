"""Records of arguments: frozen, picklable, each checks itself.

`SourceOptions` is the record of one worker's arguments, which travels to it. "No limit" has one
spelling inside, ``None``; the spellings users know (``-1``, ``0``) are read here and nowhere else.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict.nn import InteractionType

from gleanrl.core.errors import ConfigError, PolicyTypeError

InfoKeys: TypeAlias = Sequence[str] | Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Numeric ``info`` entries to deliver: names of float32 scalars, or names with shape and dtype."""

_CASTS = (torch.float16, torch.float32, torch.float64)
_MOST_S = 2_000_000
"""The longest deadline: poll counts milliseconds in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """How much is collected, in frames."""

    frames_per_batch: int
    """Frames of one batch, rounded up to whole env steps."""
    total_frames: int | None
    """Frames after which iteration ends, rounded up to whole batches; ``None`` for endless."""
    init_random_frames: int = 0
    """Frames for which the policy is not called, rounded up to whole batches."""

    @classmethod
    def from_arguments(
        cls,
        frames_per_batch: int,
        total_frames: int | None,
        init_random_frames: int | None,
    ) -> FrameLimits:
        """Read the users' spellings."""
        if isinstance(total_frames, float) and math.isinf(total_frames):
            raise ConfigError(
                f"total_frames ({total_frames}) must be a whole number; "
                "use -1 for endless collection"
            )
        total = None if total_frames is None else check_int("total_frames", total_frames)
        return cls(
            frames_per_batch=check_int("frames_per_batch", frames_per_batch, least=1),
            total_frames=None if total is None or total < 0 else total,
            init_random_frames=limit(init_random_frames, "init_random_frames") or 0,
        )

    def rounded(self, frames_per_batch: int, num_envs: int) -> FrameLimits:
        """Return the limits of batches that hold ``frames_per_batch`` frames, with a warning."""
        given, total, notes = self.frames_per_batch, self.total_frames, []
        if given != frames_per_batch:
            uneven = (
                "is not a multiple of" if given % num_envs else "cannot be shared out evenly by"
            )
            notes.append(
                f"frames_per_batch ({given}) {uneven} the {num_envs} environments: batches hold "
                f"{frames_per_batch} frames"
            )
        if total is not None and (missing := -total % frames_per_batch):
            notes.append(
                f"total_frames ({total}) is not a multiple of the batch ({frames_per_batch}): "
                f"{missing} additional frames will be collected, {total + missing} in all"
            )
            total += missing
        if notes and os.environ.get("RL_WARNINGS", "1") != "0":
            warn("; ".join(notes))
        return replace(self, frames_per_batch=frames_per_batch, total_frames=total)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with ``text`` at the line where the user's code called this library."""
    frame, level, ours = sys._getframe(), 1, ("gleanrl.", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def check_int(name: str, value: Any, least: int | None = None) -> int:
    """Return ``value`` as a whole number; numpy's integers and ``1e6`` are accepted."""
    number: int | None = None
    try:
        number = operator.index(value)
    except TypeError:  # numbers of frames are often written in scientific notation
        if isinstance(value, (float, np.floating)) and float(value).is_integer():
            number = int(value)
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be a whole number")
    if least is not None and number < least:
        raise ConfigError(f"{name} ({number}) must be at least {least}")
    return number


def check_word(name: str, value: Any, words: Collection[str | None]) -> Any:
    """Return ``value``, one of ``words``."""
    if value not in words:
        *others, last = map(repr, words)
        raise ConfigError(f"{name} ({value!r}) must be {', '.join(others)} or {last}")
    return value


def check_callables(**arguments: Any) -> None:
    """Raise an error unless hooks and factories are callable."""
    for name, value in arguments.items():
        if value is not None and not callable(value):
            raise ConfigError(f"{name} ({value!r:.100}) must be callable")


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is a number of Python's or NumPy's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def seconds(name: str, value: Any) -> float:
    """Return ``value`` as a positive number of seconds."""
    if not (is_number(value) and 0 < value <= _MOST_S):
        raise ConfigError(
            f"{name} ({value!r}) must be a positive number of seconds, at most {_MOST_S:,}"
        )
    return float(value)


def read_device(name: str, value: torch.device | str | int | None) -> torch.device | None:
    """Return the device that the argument ``name`` means, ``None`` for none.

    It compares equal to the device of tensors there: accelerators have an index, the CPU has none.
    """
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as err:
        raise ConfigError(f"{name} ({value!r}) is not a device torch knows: {err}") from err
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    there = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if there and there.type == device.type else 0
    if count == 0 or (device.index or 0) >= count:
        kind = device.type.upper()
        found = f"only {count} {kind} devices" if count else f"no {kind} device"
        raise ConfigError(f"{name} ({value!r}): this torch build or machine has {found}")
    return torch.empty(0, device=device).device if device.index is None else device


@dataclass(frozen=True, slots=True, kw_only=True)
class GymOptions:
    """How the data of Gymnasium environments are stored; see `CommonArguments`."""

    categorical_action_encoding: bool = True
    observation_dtype: torch.dtype | None = None
    info_keys: InfoKeys = ()

    def check_unused(self, env: Any) -> None:
        """Check that nothing is asked of ``env``, which stores its data as it wants."""
        for part in fields(GymOptions):
            value = getattr(self, part.name)
            if (tuple(value) if part.name == "info_keys" else value) != part.default:
                raise ConfigError(
                    f"{part.name} ({value}) is for Gymnasium environments; a "
                    f"{type(env).__name__} decides itself: have it give and take what you want, "
                    "or drop this argument"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnOptions(GymOptions):
    """The arguments of collectors that each worker may have for itself, under their names."""

    create_env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_envs: int | None = None
    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    set_truncated: bool = False
    track_traj_ids: bool = True
    check_finite: bool = False
    compact_obs: bool = False
    trust_policy: bool | None = None
    compile_policy: bool | Mapping[str, Any] | None = None
    cudagraph_policy: bool | Mapping[str, Any] | None = None
    auto_register_policy_transforms: bool | None = None
    fast: bool = True
    on_env_error: str = "raise"
    max_env_restarts: int | tuple[int, float] = 10
    init_fn: Callable[[], Any] | None = None
    pre_collect_hook: Callable[[], None] | None = None
    post_collect_hook: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        """Read numbers, and check them and the dtype."""
        if self.num_envs is not None:
            object.__setattr__(self, "num_envs", check_int("num_envs", self.num_envs, least=1))
        check_observation_dtype(self.observation_dtype)
        object.__setattr__(self, "max_frames_per_traj", limit(self.max_frames_per_traj))

    def storing(self) -> GymOptions:
        """Return the part that a Gymnasium environment keeps."""
        return GymOptions(**{part.name: getattr(self, part.name) for part in fields(GymOptions)})

    def unusual(self, given: Collection[str]) -> dict[str, Any]:
        """Return the arguments that were ``given`` or differ from their defaults, by name."""
        usual = OwnOptions()
        found = {part.name: getattr(self, part.name) for part in fields(OwnOptions)}
        return {n: value for n, value in found.items() if n in given or value != getattr(usual, n)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(OwnOptions):
    """All settings of a worker: its arguments, and the decisions of its collector."""

    create_env_fn: Any = None
    """An id, an environment, a callable that returns one, or a sequence of these."""
    env_device: torch.device | None = None
    """Where a TensorDict environment is cast to."""
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None
    policy_device: torch.device | None = None
    exploration_type: InteractionType = InteractionType.RANDOM
    track_policy_version: bool = False
    drop_batch: bool = False
    """Deliver the rollouts of one environment as ``[T]`` where it counts as a batch of one."""
    mask: bool = False
    """Deliver ``("collector", "mask")``: rollouts may be stopped early."""
    stream: int | None = None
    """Number the random streams are made from; ``None`` draws from the global ones until seeded."""
    count_steps: bool = True
    """Deliver ``step_count`` if there is a limit, so that the environment need not have one."""
    frames_per_batch: int = 1
    """Frames of each rollout of the worker."""
    random_frames: bool = False
    """Whether the first frames are random."""
    replay_buffer: Any = None
    """The buffer that the worker writes into."""
    learner_extends: bool = False
    """Whether there is a buffer, but in the learner's process."""
    device_rows: bool = False
    """Whether rows may lie on a device, as nothing but this process needs them."""
    storing_device: torch.device | None = None
    """Where batches are delivered; ``None`` leaves that to the environment."""

    def __post_init__(self) -> None:
        """Check the combination."""
        OwnOptions.__post_init__(self)
        if self.policy is not None and self.policy_factory is not None:
            raise PolicyTypeError("give either policy or policy_factory, not both")

    @property
    def counts(self) -> bool:
        """Whether ``step_count`` is delivered."""
        return self.count_steps and self.max_frames_per_traj is not None


def check_observation_dtype(dtype: Any) -> None:
    """Check a dtype floating observations are to be cast to; ``None`` leaves them as they are."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype) or dtype not in _CASTS:
        raise ConfigError(
            f"observation_dtype ({dtype!r}) must be one of {', '.join(map(str, _CASTS))}: only "
            "floating observations are cast"
        )


def limit(value: int | None, name: str = "max_frames_per_traj") -> int | None:
    """Read a limit as users write it: ``None``, zero and negative numbers mean no limit."""
    number = 0 if value is None else check_int(name, value)
    return number if number > 0 else None
