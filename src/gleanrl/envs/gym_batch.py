"""Gymnasium environments of one kind, stepped one after the other into rows of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key
from gleanrl.core.layout import Field
from gleanrl.core.options import InfoKeys
from gleanrl.core.protocols import Array, Window
from gleanrl.envs.declared import EnvSpecs
from gleanrl.envs.returned import check_flag, check_reset, check_rewards, not_five, write_rewards
from gleanrl.envs.spaces import (
    action_decoder,
    action_leaves,
    assemble,
    leaf_field,
    observation_leaves,
    space_spec,
)
from gleanrl.envs.specs import Binary, Composite, TensorSpec, Unbounded
from gleanrl.envs.step_calls import StepCalls
from gleanrl.envs.writers import InfoWriter, Writer, info_fields, make_writer

FLAGS = (DONE, TERMINATED, TRUNCATED)
"""The end flags of a Gymnasium environment."""


@dataclass(frozen=True, slots=True)
class GymSource:
    """What is inside a `GymEnv`, for stepping it without TensorDicts. Internal to the package."""

    envs: tuple[gym.Env[Any, Any], ...]
    batch_shape: tuple[int, ...]
    categorical: bool
    observation_dtype: torch.dtype | None
    info_keys: InfoKeys
    seeds: tuple[int | None, ...] = ()
    """What the next reset of each environment is to be seeded with."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step of ``P`` environments led to, besides observations; arrays ``[P, 1]``."""

    rewards: Array
    """float32."""
    terminated: Array
    truncated: Array


class GymBatch:
    """``P`` environments whose present observations lie in memory of the caller's choice.

    Nothing is reset unless asked for: this is what `GymEnv` and the workers of `ParallelEnv` share.
    """

    def __init__(self, source: GymSource) -> None:
        """Read the spaces of the first environment; the others are like it.

        Raises:
            ConfigError: a space without fixed shape, or with nothing to choose.
        """
        self.source = source
        self._envs = source.envs
        first = source.envs[0]
        self._leaves = observation_leaves(first.observation_space)
        fields = [leaf_field(leaf, source.observation_dtype) for leaf in self._leaves]
        self._infos = info_fields(source.info_keys, fields)
        self.observations: tuple[Field, ...] = (*fields, *self._infos.values())
        """What is shown, requested entries of ``info`` included."""
        self._writers: list[Writer] = [
            *(make_writer(leaf, field) for leaf, field in zip(self._leaves, fields, strict=True)),
            *(InfoWriter(name, field) for name, field in self._infos.items()),
        ]
        self._told = action_leaves(first.action_space)
        self.action_keys: tuple[Key, ...] = tuple(leaf.key for leaf in self._told)
        self._decoders = [action_decoder(leaf.space, source.categorical) for leaf in self._told]
        self._seeds = list(source.seeds or [None] * len(source.envs))
        self._calls = StepCalls(self._envs, self._check)
        self._now: Window

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """What the next reset of each environment is seeded with."""
        return tuple(self._seeds)

    def specs(self) -> EnvSpecs:
        """Return what the environments declare, batch dimensions in front."""
        batch, categorical = self.source.batch_shape, self.source.categorical
        shown: dict[Key, TensorSpec] = {
            leaf.key: _shown(leaf.space, field.dtype)
            for leaf, field in zip(self._leaves, self.observations, strict=False)
        }
        shown |= {
            field.key: Unbounded(field.shape, dtype=field.dtype) for field in self._infos.values()
        }
        told = {leaf.key: space_spec(leaf.space, categorical) for leaf in self._told}
        return EnvSpecs(
            observation=Composite(shown).expand(batch),
            action=Composite(told).expand(batch),
            reward=Composite({REWARD: Unbounded((1,), dtype=torch.float32)}).expand(batch),
            done=Composite({key: Binary(1, dtype=torch.bool) for key in FLAGS}).expand(batch),
        )

    def begin(self, window: Window, now: Window) -> None:
        """Bind to memory.

        Args:
            window: One step long; observations are also written under ``"next"`` if it has that.
            now: One step long; always holds the present observations of all environments.
        """
        self._now = now
        for writer in self._writers:
            writer.begin(window, now)

    def decode(self, actions: Sequence[Array]) -> Sequence[Any]:
        """Return each environment's action, given an array ``[P, ...]`` per action key."""
        pairs = zip(self._decoders, actions, strict=True)
        parts = [decode(values) for decode, values in pairs]
        if len(self._told) == 1 and not self._told[0].path:
            return parts[0]
        space = self._envs[0].action_space
        return [assemble(self._told, values, space) for values in zip(*parts, strict=True)]

    def step(self, actions: Sequence[Any]) -> Outcome:
        """Step every environment and write its observation.

        Raises:
            EnvError: an environment returned something else than it declares.
        """
        moves = zip(self._calls.look_up(), actions, strict=True)
        results: list[Any] = [step(action) for step, action in moves]
        for env, result in enumerate(results):
            if not isinstance(result, tuple) or len(result) != 5:
                raise not_five(result, f"environment {env}: step")
        observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
        for writer in self._writers:
            writer.write(0, observations, infos)
        narrow = np.empty((len(results), 1), np.float32)
        write_rewards(narrow, check_rewards([rewards], when=""), when="")
        dead, late = _flags(terminated, "terminated"), _flags(truncated, "truncated")
        return Outcome(narrow, dead, late)

    def _check(self, env: int, observation: Any, info: Any) -> None:
        for writer in self._writers:
            writer.check(env, observation, info)

    def reset(self, chosen: Iterable[int], options: Mapping[str, Any]) -> None:
        """Reset the ``chosen`` environments and write their observations."""
        for env in chosen:
            seed, self._seeds[env] = self._seeds[env], None
            result = self._envs[env].reset(seed=seed, options=dict(options) or None)
            observation, info = check_reset(result, f"environment {env}: reset")
            for writer in self._writers:
                writer.write_carry(self._now, env, observation, info)

    def seed(self, seed: int, static: bool) -> None:
        """Seed environment ``i`` with ``seed + i`` (``seed`` if static) from its next reset on."""
        for i, env in enumerate(self._envs):
            own = seed if static else seed + i
            self._seeds[i] = own
            env.action_space.seed(own)


def _flags(given: Sequence[Any], name: str) -> Array:
    try:
        flags = np.array(given, bool)
    except ValueError:  # arrays of different shapes
        flags = np.empty(0, bool)
    if flags.shape != (len(given),):
        flags = np.array([check_flag(flag, env, name) for env, flag in enumerate(given)])
    return flags[:, None]


def _shown(space: gym.Space[Any], dtype: torch.dtype) -> TensorSpec:
    spec = space_spec(space)
    return spec if spec.dtype == dtype else Unbounded(spec.shape, dtype=dtype)
