"""The source of one worker of a `ParallelEnv`: environments with one action per command.

What is to be done, and with which actions, lies in a window of one step that learner and worker
share; there the results are written. Results that do not fit it travel as a payload, so every
environment gives what it would give in the learner's process; that they fit is only faster.
"""

from __future__ import annotations

import enum
import random as python_random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core import paths
from gleanrl.core.errors import WeightsError
from gleanrl.core.keys import DONE, NEXT, REWARD, Key, next_key
from gleanrl.core.layout import Field, Group, Layout
from gleanrl.core.messages import Report, Snapshot
from gleanrl.core.protocols import Source, Stop
from gleanrl.core.window import Window
from gleanrl.envs.factory import EnvFactory, closed_on_error, without_call_checks
from gleanrl.envs.gymnasium import FLAGS
from gleanrl.envs.libs.gym import GymEnv, make_tensordict_env
from gleanrl.envs.serial import SerialEnv, gym_source
from gleanrl.envs.specs import Composite
from gleanrl.envs.tensordict import (
    EndFlags,
    EnvMetaData,
    describe,
    needs_carrier,
    spec_fields,
    spec_groups,
    spec_leaves,
    spec_trees,
    state_leaves,
    widened,
)
from gleanrl.memory.trees import copied, tensordict_over

TODO: Key = ("_todo",)
"""The task of a worker, in the row of each of its environments."""
RESET: Key = ("_reset",)
Left: TypeAlias = tuple[TensorDictBase | None, TensorDictBase | None]
"""What was found under ``"next"`` and at the following root, where it does not fit the window."""


class Todo(enum.IntEnum):
    """The task of one command."""

    STEP = 1
    STEP_AND_RESET = 2
    """Step, then reset ended environments."""
    RESET = 3
    RESET_MASKED = 4
    """Reset where the ``"_reset"`` mask in the window is set."""


@dataclass(frozen=True, slots=True)
class EnvWorkerInfo:
    """The learner's description of one worker's environments."""

    batch: tuple[int, ...]
    """Shape of one of them."""
    device: torch.device | None
    specs: tuple[Composite, ...]
    """Of one environment: observations, actions, rewards, end flags."""
    inputs: tuple[Key, ...]
    """The inputs in the window for a step."""
    masked: bool
    """Whether the window takes masks for partial resets."""
    infos: Sequence[Key]
    """The observations that are requested info entries."""


@dataclass(frozen=True, slots=True)
class EnvWorkerBuilder:
    """Makes the environments of one worker, in the worker."""

    create_env_fn: tuple[EnvFactory, ...]
    create_env_kwargs: tuple[Mapping[str, Any], ...]
    stream: int
    """The seed of the worker's random streams until environments are seeded."""

    def __call__(self, worker: int) -> Source:
        """Make the environments one after the other."""
        seed_streams(self.stream)
        made: list[Any] = []
        with closed_on_error(made):
            for factory, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True):
                made.append(make_tensordict_env(factory, kwargs))
            return EnvWorker(made)


def seed_streams(seed: int) -> None:
    """Seed the random generators of this process, which environments may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    python_random.seed(seed)


class EnvWorker:
    """Serves environments of one kind; a `Collect` steps or resets, by the task in its window."""

    def __init__(self, envs: Sequence[Any]) -> None:
        """Take over ``envs``.

        Raises:
            ConfigError: they do not fit together.
        """
        self.envs = SerialEnv.of(envs)
        self.num_envs = self.envs.batch_size.numel()
        self._row: _GymRow | _TensorDictRow | None = _make_row(self.envs)
        self._env: Any = self._row.env if isinstance(self._row, _GymRow) else self.envs
        self._window: Window | None = None

    def layout(self) -> Layout | None:
        """Describe the window; ``None`` if the data have no fixed shapes."""
        if self._row is None:
            return None
        return Layout(tuple(self.envs.batch_size), self._row.fields, groups=self._row.groups)

    def described(self) -> EnvWorkerInfo:
        """Return the description for the learner."""
        first, row = self.envs.members[0], self._row
        return EnvWorkerInfo(
            batch=tuple(first.batch_size),
            device=first.device,
            specs=tuple(widened(tree) for tree in spec_trees(first)),
            inputs=() if row is None else row.inputs,
            masked=isinstance(row, _GymRow),
            infos=self.envs.info_entries,
        )

    def meta_data(self) -> EnvMetaData:
        """Describe the first environment to a user."""
        return describe(self.envs.members[0])

    # -- stepping --------------------------------------------------------------------------------

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Carry out the task in the window, once."""
        row = self._row
        assert row is not None
        if window is not self._window:
            row.bind(window)
            self._window = window
        todo = int(window.rows(TODO)[0][0])
        if todo in (Todo.STEP, Todo.STEP_AND_RESET):
            left = row.step(reset=todo == Todo.STEP_AND_RESET)
        else:
            left = row.reset(masked=todo == Todo.RESET_MASKED)
        return Report(steps, window.envs, 0, payload=left)

    def carry_out(
        self, todo: Todo, data: TensorDictBase | None, options: Mapping[str, Any]
    ) -> Left:
        """Do the same with data outside the window, or reset with ``options``."""
        if todo not in (Todo.STEP, Todo.STEP_AND_RESET):
            return None, copied(self._env.reset(data, **options))
        if todo == Todo.STEP:
            return copied(self._env.step(data).get(NEXT)), None
        finished, root = self._env.step_and_maybe_reset(data)
        return copied(finished.get(NEXT)), copied(root)

    # -- what every source has -------------------------------------------------------------------

    def place(self, base: int, stride: int) -> None:
        """Do nothing, because these environments have no numbers."""

    def load(self, snapshot: Snapshot) -> None:
        """Refuse weights, because this worker has no policy."""
        raise WeightsError("environments of a ParallelEnv have no policy to load weights into")

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed environments, from their next reset on, and this process's random streams."""
        seed_streams(seed if stream is None else stream)
        return int(self._env.set_seed(seed, static_seed=static))

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments."""
        data = None
        if envs is not None:
            batch = tuple(self.envs.batch_size)
            data = self.envs.fake_tensordict().exclude(NEXT)
            for key, mask in EndFlags(self.envs.full_done_spec, batch).masks(envs).items():
                data.set(key, mask)
        self._env.reset(data, **options)

    def state(self) -> dict[str, Any]:
        """Return the environments' states, ``"worker0"`` and so on."""
        return self.envs.state_dict()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a state from `state`."""
        self.envs.load_state_dict(state, strict)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve ``path`` in this worker and call the object."""
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        """Return the object at ``path`` in this worker."""
        return paths.resolve(self, path)

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


# -- environments whose data lie in a window of one step -------------------------------------------


def _make_row(envs: SerialEnv) -> _GymRow | _TensorDictRow | None:
    """Return how ``envs`` share memory, ``None`` if their data have no fixed layout."""
    source = gym_source(envs)
    if source is not None:
        # Made by this worker, so nobody else relies on the checks.
        fast = tuple(without_call_checks(env) for env in source.envs)
        return _GymRow(GymEnv.of(replace(source, envs=fast)))
    shown = {key for key, _ in spec_leaves(envs.full_observation_spec)}
    hidden = any(key not in shown for env in envs.members for key, _ in state_leaves(env))
    on_cpu = envs.device is None or envs.device.type == "cpu"
    return None if hidden or not on_cpu or needs_carrier(envs) else _TensorDictRow(envs)


class _GymRow:
    """Gymnasium environments, stepped without TensorDicts."""

    def __init__(self, env: GymEnv) -> None:
        self.env = env
        self._batch = env.batch
        self.groups: tuple[Group, ...] = ()
        actions, shown = self._batch.layout.actions, self._batch.layout.observations
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
        """Step in ``window``, whose root row holds the present; its end flags stay False."""
        self.env.move(window)
        self._window = window
        self._mask, self._done = window.rows(RESET)[0], window.rows(next_key(DONE))[0]

    def step(self, reset: bool) -> Left | None:
        """Step, and ``reset`` what ended."""
        self._batch.advance()
        if reset and self._done.any():
            self._batch.reset(self._window, np.flatnonzero(self._done).tolist())
        return None

    def reset(self, masked: bool) -> Left | None:
        """Reset all environments, or those in the mask."""
        chosen = np.flatnonzero(self._mask).tolist() if masked else range(len(self._mask))
        self._batch.reset(self._window, chosen)
        return None


class _TensorDictRow:
    """Any other environments, stepped with TensorDicts."""

    def __init__(self, env: SerialEnv) -> None:
        self._env = env
        batch, trees = tuple(env.batch_size), spec_trees(env)
        shown, actions, rewards, flags = (spec_fields(tree, batch) for tree in trees)
        groups = {group.key: group for tree in trees for group in spec_groups(tree, len(batch))}
        self.groups = tuple(groups.values())
        self._shapes = {group.key: (*batch, *group.shape) for group in self.groups}
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
        self._given = tensordict_over(given, batch, [None] * len(batch), self.groups)
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
        """Reset all environments."""
        root = self._env.reset()
        return None if self._put(root, self._root) else (None, copied(root))

    def _put(self, data: TensorDictBase, views: Mapping[Key, torch.Tensor]) -> bool:
        """Write ``data`` if they fit ``views`` exactly; return whether they do."""
        found: dict[Key, torch.Tensor] = {}
        if not self._take_apart(data, (), found) or found.keys() != views.keys():
            return False
        if any(v.shape != views[k].shape or v.dtype != views[k].dtype for k, v in found.items()):
            return False
        for key, value in found.items():
            views[key].copy_(value.detach())
        return True

    def _take_apart(self, data: TensorDictBase, at: Key, found: dict[Key, torch.Tensor]) -> bool:
        """Find the tensors in ``data``; ``False`` if ``data`` has other objects."""
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
