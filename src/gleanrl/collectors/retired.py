"""Spellings of earlier APIs: accepted with a warning, or refused with what to use instead."""

from __future__ import annotations

import warnings
from typing import Any

from tensordict.nn import InteractionType

from gleanrl.core.errors import ConfigError
from gleanrl.policies.policy import parse_exploration_mode


def read_exploration(
    exploration_type: InteractionType | None, exploration_mode: str | None
) -> InteractionType:
    """Return the interaction type; ``None`` is RANDOM. ``exploration_mode`` is a retired spelling.

    Raises:
        ConfigError: the two contradict each other, or the mode is unknown.
    """
    if exploration_type is not None and not isinstance(exploration_type, InteractionType):
        raise ConfigError(
            f"exploration_type ({exploration_type!r}) must be an ExplorationType, such as "
            "ExplorationType.MODE"
        )
    if exploration_mode is None:
        return InteractionType.RANDOM if exploration_type is None else exploration_type
    _warn("exploration_mode", "exploration_type=ExplorationType....")
    parsed = parse_exploration_mode(exploration_mode)
    if exploration_type is not None and exploration_type != parsed:
        raise ConfigError(
            f"exploration_mode ({exploration_mode!r}) contradicts exploration_type "
            f"({exploration_type}); drop exploration_mode"
        )
    return parsed


def read_extend_buffer(extend_buffer: bool, replay_buffer_chunk: bool | None) -> bool:
    """Return ``extend_buffer``; ``replay_buffer_chunk`` is its retired spelling.

    Raises:
        ConfigError: the two contradict each other.
    """
    if replay_buffer_chunk is None:
        return extend_buffer
    _warn("replay_buffer_chunk", "extend_buffer")
    if replay_buffer_chunk != extend_buffer:
        raise ConfigError(
            f"replay_buffer_chunk ({replay_buffer_chunk}) contradicts extend_buffer "
            f"({extend_buffer})"
        )
    return extend_buffer


def check_reset_when_done(reset_when_done: bool) -> None:
    """Accept ``True``, which is what happens.

    Raises:
        ConfigError: ``False``.
    """
    if not reset_when_done:
        raise ConfigError(
            "reset_when_done=False is not supported: environments that end are always reset; use "
            "split_trajs=True or trajs_per_batch= to get whole trajectories, or the rollout("
            "break_when_any_done=True) of an environment"
        )


def note_local_init_rb(local_init_rb: bool | None) -> None:
    """Accept ``local_init_rb``, which changes nothing here."""
    if local_init_rb is not None:
        _warn("local_init_rb", "nothing: buffers are initialised by the first real data")


def _warn(name: str, instead: Any) -> None:
    warnings.warn(f"{name} is retired; use {instead}", DeprecationWarning, stacklevel=4)
