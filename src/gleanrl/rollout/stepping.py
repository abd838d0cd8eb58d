"""The source behind one worker of a `ParallelEnv`: environments that do one thing per command.

What is to be done, and with which actions, lies in a window of one step; there the results are
written. Results that do not fit it travel as a payload, so every environment gives what it would
give in the learner's process; that they fit is only faster.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core import paths
from gleanrl.core.errors import WeightsError
from gleanrl.core.keys import NEXT, Key
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Payload, Report, Snapshot
from gleanrl.core.protocols import Source, Stop, Window
from gleanrl.envs.factory import EnvFactory, closed_on_error
from gleanrl.envs.gym_env import make_tensordict_env
from gleanrl.envs.serial import SerialEnv, Signature, signature
from gleanrl.envs.specs import Composite
from gleanrl.envs.tensordict import EndFlags, EnvMetaData, describe, spec_trees, widened
from gleanrl.memory.trees import copied
from gleanrl.rollout.row import TODO, GymRow, Row, Todo, make_row


@dataclass(frozen=True, slots=True)
class Described:
    """What the learner has to know of one worker's environments."""

    number: int
    """How many environments there are."""
    batch: tuple[int, ...]
    """Shape of one of them."""
    device: torch.device | None
    specs: tuple[Composite, ...]
    """Of one environment: what it shows, is told, is rewarded with, its end flags."""
    signature: Signature
    inputs: tuple[Key, ...]
    """What has to be in the window for a step."""
    groups: Mapping[Key, tuple[int, ...]]
    """Per nested group, the dimensions its batch has beyond those of the environments."""
    masked: bool
    """Whether the window takes masks for partial resets."""


@dataclass(frozen=True, slots=True)
class SteppingBuilder:
    """Makes the environments of one worker, there."""

    create_env_fn: tuple[EnvFactory, ...]
    create_env_kwargs: tuple[Mapping[str, Any], ...]
    stream: int
    """What the worker's random streams are made from until environments are seeded."""

    def __call__(self, worker: int) -> Source:
        """Make them one after the other."""
        seed_streams(self.stream)
        made: list[Any] = []
        with closed_on_error(made):
            for factory, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True):
                made.append(make_tensordict_env(factory, kwargs))
            return Stepping(made)


def seed_streams(seed: int) -> None:
    """Seed what environments of this process may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    python_random.seed(seed)


class Stepping:
    """Serves environments of one kind; a `Collect` takes a step, or resets, as its window says."""

    def __init__(self, envs: Sequence[Any]) -> None:
        """Take over ``envs``.

        Raises:
            ConfigError: they do not fit together.
        """
        self.envs = list(envs)
        self._all = SerialEnv.of(self.envs)
        self.num_envs = self._all.batch_size.numel()
        self._row: Row | None = make_row(self._all)
        self._env: Any = self._row.env if isinstance(self._row, GymRow) else self._all
        self._window: Window | None = None

    def layout(self) -> Layout | None:
        """Describe the window; ``None`` if the data have no fixed shapes."""
        if self._row is None:
            return None
        return Layout(tuple(self._all.batch_size), self._row.fields)

    def described(self) -> Described:
        """Tell the learner what it has to know."""
        first, row = self.envs[0], self._row
        return Described(
            number=len(self.envs),
            batch=tuple(first.batch_size),
            device=first.device,
            specs=tuple(widened(tree) for tree in spec_trees(first)),
            signature=signature(first),
            inputs=() if row is None else row.inputs,
            groups={} if row is None else row.groups,
            masked=isinstance(row, GymRow),
        )

    def meta_data(self) -> EnvMetaData:
        """Describe the first environment to a user."""
        return describe(self.envs[0])

    # -- stepping --------------------------------------------------------------------------------

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Do what the window says, once."""
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
        return Report(steps, window.envs, 0, payload=None if left is None else Payload(left))

    def advance(
        self, data: TensorDictBase, reset: bool
    ) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Step with data that do not lie in a window; return ``"next"`` and the following root."""
        if not reset:
            return copied(self._env.step(data).get(NEXT)), None
        finished, root = self._env.step_and_maybe_reset(data)
        return copied(finished.get(NEXT)), copied(root)

    def restart(
        self, data: TensorDictBase | None, options: Mapping[str, Any]
    ) -> tuple[None, TensorDictBase]:
        """Reset with data that do not lie in a window; return the root."""
        return None, copied(self._env.reset(data, **options))

    # -- what every source has -------------------------------------------------------------------

    def place(self, base: int, stride: int) -> None:
        """Nothing is numbered."""

    def load(self, snapshot: Snapshot) -> None:
        """Refuse weights: there is no policy here."""
        raise WeightsError("environments of a ParallelEnv have no policy to load weights into")

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed environments, from their next reset on, and this process's random streams."""
        seed_streams(seed if stream is None else stream)
        return int(self._env.set_seed(seed, static_seed=static))

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments."""
        data = None
        if envs is not None:
            batch = tuple(self._all.batch_size)
            data = self._all.fake_tensordict().exclude(NEXT)
            for key, mask in EndFlags(self._all.full_done_spec, batch).masks(envs).items():
                data.set(key, mask)
        self._env.reset(data, **options)

    def state(self) -> dict[str, Any]:
        """Return what the environments keep, ``"worker0"`` and so on."""
        return self._all.state_dict()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state` returned."""
        self._all.load_state_dict(state, strict)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve ``path`` here and call it."""
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        """Return what ``path`` names here."""
        return paths.resolve(self, path)

    def get_attr(self, path: str) -> list[Any]:
        """Return what ``path`` names in every environment."""
        return self._all.get_attr(path)

    def call_each(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call what ``path`` names in every environment."""
        return self._all.call(path, *args, **kwargs)

    def close(self) -> None:
        """Close the environments."""
        self._all.close()
