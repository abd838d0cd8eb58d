"""One step of a batch of environments, as it lies in memory that learner and worker share."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl.core.keys import DONE, NEXT, REWARD, TERMINATED, TRUNCATED, Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.protocols import Window
from gleanrl.envs.factory import without_call_checks
from gleanrl.envs.gym_env import GymEnv
from gleanrl.envs.gymnasium import FLAGS
from gleanrl.envs.serial import SerialEnv, gym_source
from gleanrl.envs.tensordict import (
    needs_carrier,
    spec_groups,
    spec_leaves,
    spec_trees,
    state_leaves,
)
from gleanrl.memory.trees import copied, nest
from gleanrl.memory.window import RolloutWindow

TODO: Key = ("_todo",)
"""What a worker is to do, in the row of each of its environments."""
RESET: Key = ("_reset",)
Left: TypeAlias = tuple[TensorDictBase | None, TensorDictBase | None]
"""What was found under ``"next"`` and at the following root, where it does not fit the window."""


class Todo(enum.IntEnum):
    """What one command asks for."""

    STEP = 1
    STEP_AND_RESET = 2
    """Step, then reset what ended."""
    RESET = 3
    RESET_MASKED = 4
    """Reset where the ``"_reset"`` mask in the window is set."""


class Row(Protocol):
    """Environments whose data lie in a window of one step."""

    fields: tuple[Field, ...]
    inputs: tuple[Key, ...]
    """What has to be there before a step."""
    groups: Mapping[Key, tuple[int, ...]]
    """Per nested group, the dimensions its batch has beyond those of the environments."""

    def bind(self, window: Window) -> None:
        """Read from and write to ``window`` from now on."""
        ...

    def step(self, reset: bool) -> Left | None:
        """Step, and ``reset`` what ended; return what does not fit the window."""
        ...

    def reset(self, masked: bool) -> Left | None:
        """Reset all, or where the mask is set; return what does not fit the window."""
        ...


def make_row(envs: SerialEnv) -> Row | None:
    """Return how ``envs`` share memory, ``None`` if their data have no fixed layout."""
    bare = gym_source(envs)
    if bare is not None:
        # Made by this worker, so nobody else relies on the checks.
        fast = tuple(without_call_checks(env) for env in bare.envs)
        return GymRow(GymEnv.of(replace(bare, envs=fast)))
    shown = {key for key, _ in spec_leaves(envs.full_observation_spec)}
    hidden = any(key not in shown for env in envs.members for key, _ in state_leaves(env))
    on_cpu = envs.device is None or envs.device.type == "cpu"
    return None if hidden or not on_cpu or needs_carrier(envs) else TensorDictRow(envs)


class GymRow:
    """Gymnasium environments, stepped without TensorDicts."""

    def __init__(self, env: GymEnv) -> None:
        """Take over ``env``."""
        self.env = env
        self._batch = env.batch
        self.groups: Mapping[Key, tuple[int, ...]] = {}
        actions, shown = _fields(env.full_action_spec, env), self._batch.layout.observations
        flags = tuple(Field(key, (1,), torch.bool) for key in FLAGS)
        after = (*shown, Field(REWARD, (1,), torch.float32), *flags)
        self.inputs = tuple(field.key for field in actions)
        self.fields = (
            Field(TODO, (), torch.uint8),
            Field(RESET, (1,), torch.bool),
            *actions,
            *shown,
            *flags,
            *(replace(field, key=next_key(field.key)) for field in after),
        )

    def bind(self, window: Window) -> None:
        """Keep the present observations in the root row of ``window``; its end flags stay down."""
        keys = [field.key for field in self._batch.layout.observations]
        now = RolloutWindow({key: window.tensor(key) for key in keys}, window.envs, 1)
        self.env.move(window, now)
        self._now = now
        self._actions = [window.rows(key)[0] for key in self._batch.action_specs]
        self._mask = window.rows(RESET)[0]
        self._rewards, self._dead, self._late, self._done = (
            window.rows(next_key(key))[0] for key in (REWARD, TERMINATED, TRUNCATED, DONE)
        )

    def step(self, reset: bool) -> Left | None:
        """Step, and ``reset`` what ended."""
        # Copied, because an environment may keep its action, and the window is used again.
        outcome = self._batch.advance([a.copy() for a in self._actions])
        self._rewards[...] = outcome.rewards
        self._dead[...], self._late[...] = outcome.terminated, outcome.truncated
        done = np.logical_or(outcome.terminated, outcome.truncated, out=self._done)
        if reset and done.any():
            self._batch.reset(self._now, np.flatnonzero(done).tolist())
        return None

    def reset(self, masked: bool) -> Left | None:
        """Reset all, or where the mask is set."""
        chosen = np.flatnonzero(self._mask).tolist() if masked else range(len(self._mask))
        self._batch.reset(self._now, chosen)
        return None


class TensorDictRow:
    """Any other environments, stepped with TensorDicts."""

    def __init__(self, env: SerialEnv) -> None:
        """Read the specs of ``env``."""
        self._env = env
        actions = _fields(env.full_action_spec, env)
        flags = _fields(env.full_done_spec, env)
        shown = _fields(env.full_observation_spec, env)
        rewards = _fields(env.full_reward_spec, env)
        found = spec_trees(env.members[0])
        inner = len(env.members[0].batch_size)
        self.groups: Mapping[Key, tuple[int, ...]] = {
            key: shape[inner:] for tree in found for key, shape in spec_groups(tree)
        }
        self._shapes = {key: (*env.batch_size, *more) for key, more in self.groups.items()}
        self._actions = [field.key for field in actions]
        root = {field.key: field for field in (*shown, *flags)}
        after = {next_key(f.key): f for f in (*shown, *rewards, *flags)}
        self._roots, self._afters = tuple(root), tuple(after)
        self.inputs = (*self._actions, *root)
        self.fields = (
            Field(TODO, (), torch.uint8),
            *actions,
            *root.values(),
            *(replace(field, key=key) for key, field in after.items()),
        )

    def bind(self, window: Window) -> None:
        """Make views of ``window`` in the shape of the environments."""
        batch = tuple(self._env.batch_size)

        def view(key: Key) -> torch.Tensor:
            tensor = window.tensor(key)[:, 0]
            return tensor.view((*batch, *tensor.shape[1:]))

        given = {key: view(key) for key in self.inputs}
        self._given = grouped(given, batch, self.groups)
        self._root = {key: view(key) for key in self._roots}
        self._after = {key[1:]: view(key) for key in self._afters}

    def step(self, reset: bool) -> Left | None:
        """Step, and ``reset`` what ended."""
        given = self._given.clone()
        if not reset:
            after = self._env.step(given).get(NEXT)
            return None if self._put(after, self._after) else (copied(after), None)
        finished, root = self._env.step_and_maybe_reset(given)
        after, root = finished.get(NEXT), root.exclude(*self._actions)
        fits = self._put(after, self._after) and self._put(root, self._root)
        return None if fits else (copied(after), copied(root))

    def reset(self, masked: bool) -> Left | None:
        """Reset all."""
        root = self._env.reset()
        return None if self._put(root, self._root) else (None, copied(root))

    def _put(self, data: TensorDictBase, views: Mapping[Key, torch.Tensor]) -> bool:
        """Write ``data`` if they are exactly what ``views`` expect; tell whether they are."""
        found: dict[Key, torch.Tensor] = {}
        if not self._take_apart(data, (), found) or found.keys() != views.keys():
            return False
        if any(v.shape != views[k].shape or v.dtype != views[k].dtype for k, v in found.items()):
            return False
        for key, value in found.items():
            views[key].copy_(value.detach())
        return True

    def _take_apart(self, data: TensorDictBase, at: Key, found: dict[Key, torch.Tensor]) -> bool:
        """Find the tensors in ``data``; ``False`` if there is anything but nested tensors."""
        batch = self._shapes.get(at, tuple(self._env.batch_size))
        if isinstance(data, LazyStackedTensorDict) or tuple(data.batch_size) != batch:
            return False
        if any(name is not None for name in data.names):
            return False
        for name, value in data.items():
            key = (*at, name)
            if isinstance(value, torch.Tensor):
                found[key] = value
            elif not isinstance(value, TensorDictBase) or not self._take_apart(value, key, found):
                return False
        return True


def grouped(
    views: Mapping[Key, torch.Tensor], batch: tuple[int, ...], groups: Mapping[Key, tuple[int, ...]]
) -> TensorDict:
    """Return ``views`` as a TensorDict whose nested ones have the batch sizes of ``groups``."""
    data = TensorDict(nest(views), batch)
    for key, more in groups.items():
        if data.get(key, None) is not None:
            data.get(key).batch_size = (*batch, *more)
    return data


def _fields(tree: Any, env: Any) -> tuple[Field, ...]:
    ndim = len(env.batch_size)
    leaves: Iterable[tuple[Key, Any]] = spec_leaves(tree)
    return tuple(Field(key, tuple(spec.shape[ndim:]), spec.dtype) for key, spec in leaves)
