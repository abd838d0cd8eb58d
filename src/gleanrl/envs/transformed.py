"""TorchRL's environments as rows, stepped by their parts or by their own methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import NEXT, Key, as_key, format_key, next_key
from gleanrl.core.layout import DoneGroup, EnvLayout, Field
from gleanrl.core.protocols import Spec
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window
from gleanrl.envs.recorded_step import FLAGS, RecordedStep
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.state_kinds import Node
from gleanrl.envs.tensordict import TensorDictHandle, learn_layout
from gleanrl.envs.torchrl_parts import Parts, Unproven, parts_of, unproven_on_error

_DRAWS = 5
"""Draws that are compared."""


class TransformedRows(EnvRows):
    """A TorchRL environment that consists of `Parts`.

    Its parts are stepped without TensorDicts. Resets of all members, seeds and saved states are the
    environment's own, and so are its steps once it was changed in a way that is not proven.
    """

    def __init__(
        self, handle: TensorDictHandle, parts: Parts, prove: Callable[[TransformedRows], None]
    ) -> None:
        """Record the transforms.

        Args:
            handle: The user's environment, reset once.
            parts: What it consists of.
            prove: Is called after transforms were recorded; raises `Unproven`.

        Raises:
            Unproven: it has to be stepped by its own methods.
        """
        self.handle, self._prove = handle, prove
        env = handle.env
        self.layout = learn_layout(env, handle.root)
        _require_plain_layout(self.layout)
        self.observation_specs = {}
        self._fresh_root = True
        """Whether the results of the last reset of all members were not shown yet."""
        self.on_partial_reset: Callable[[Sequence[int]], None] = _nothing
        """Is told of members that are reset while others go on."""
        self._step: Callable[[int, Sequence[int], bool], Sequence[int]]
        self._passed: Collection[Key] = ()
        """Observations that the policy writes under ``"next"``."""
        self._why = ""
        """Why the environment is stepped by its own methods, if it is."""
        self._record(parts)
        self._drawn = {f.key: _Drawn(self, f) for f in self.layout.actions}
        self.action_specs = dict(self._drawn)

    @property
    def stepped_plainly(self) -> bool:
        """Whether the environment is stepped by its own methods."""
        return bool(self._why)

    def proven_specs(self) -> dict[Key, Spec] | None:
        """Return specs of our own that draw what the environment draws; ``None`` without proof."""
        specs = {key: drawn.own for key, drawn in self._drawn.items() if drawn.own is not None}
        return specs if len(specs) == len(self._drawn) else None

    def own_spec(self, key: Key) -> Spec | None:
        """Return the spec of an action that the Gymnasium environments' space declares."""
        masks = any(type(part).__name__ == "ActionMask" for part in self.parts.transforms)
        return None if masks else self._recorded.action_specs.get(key)

    @property
    def inner(self) -> Any:
        return self.handle.inner

    @property
    def parts(self) -> Parts:
        """What the environment consists of."""
        return self._recorded.parts

    def explain(self) -> str:
        """Return how environments and transforms are stepped."""
        if self._why:
            return f"{self.handle.kind}, called as it is by its TensorDict methods ({self._why})"
        return self._recorded.explain()

    def _record(self, parts: Parts) -> None:
        self._recorded = RecordedStep(self.layout, parts, self._passed)
        self._prove(self)

    @property
    def passed(self) -> Collection[Key]:
        """Observations that the policy writes under ``"next"`` before each step."""
        return self._passed

    def pass_on(self, keys: Collection[Key]) -> None:
        """Have transforms pass on ``keys``, which the policy writes under ``"next"``.

        Raises:
            Unproven: they do something else.
        """
        if keys:
            self._passed = keys
            with unproven_on_error():
                self._record(self.parts)

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; look whether the environment was changed."""
        self._window, self._carry = window, carry
        try:
            with unproven_on_error():
                self._look()
        except Unproven as err:
            self._why = str(err)
        if self._why:
            self._step = self._step_plainly
            self._begin_plainly()
        else:
            self._step = self._recorded.step
            self._recorded.begin(window, carry, self.on_partial_reset)

    def _look(self) -> None:
        """Record transforms again that were changed.

        Raises:
            Unproven: the environment can no longer be stepped by its parts.
        """
        if self._why:
            return
        if not self.parts.intact():
            raise Unproven("its parts or their methods were replaced after construction")
        if self._recorded.changed():
            self._record(parts_of(self.handle.env))

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        return self._step(t, cut, resets)

    def finish(self, steps: int) -> None:
        for stepped in (self._recorded, self.handle):  # either may have been replaced since
            self.reset_s += stepped.reset_s
            stepped.reset_s = 0.0

    # -- by the environment's own methods ----------------------------------------------------------

    def _begin_plainly(self) -> None:
        """Continue from the first root row."""
        handle, window = self.handle, self._window
        handle.begin()
        root: TensorDictBase = handle.root.copy()
        for field in self.layout.observations:
            root.set(field.key, self._shaped(field, window.tensor(field.key)[:, 0]).clone())
        handle.root = root

    def _step_plainly(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        """Step by the environment's own methods.

        Raises:
            EnvError: a step has other entries than when the collector was built.
        """
        handle, layout, window = self.handle, self.layout, self._window
        for field in layout.actions:
            action = self._shaped(field, window.tensor(field.key)[:, t])
            handle.root.set(field.key, action.clone())
        for field in layout.observations:
            if field.key in self._passed:
                written = self._shaped(field, window.tensor(next_key(field.key))[:, t])
                handle.root.set(next_key(field.key), written.clone())
        steps: list[TensorDictBase] = []
        ended = handle.step(cut, steps.append)
        after = steps[0].get(NEXT)
        self._check_entries(after)
        for key in after.keys(True, True):
            rows = next_key(as_key(key))
            if rows in window.keys():
                target = window.tensor(rows)[:, t]
                target.copy_(after.get(key).reshape(target.shape))
        last = t + 1 == window.steps
        for field in layout.observations:
            value = handle.root.get(field.key).reshape(layout.num_envs, *field.shape)
            where = self._carry.tensor(field.key) if last else window.tensor(field.key)
            where[:, 0 if last else t + 1] = value
        self._tell(ended or ())
        return ended or ()

    def _tell(self, ended: Sequence[int]) -> None:
        if 0 < len(ended) < self.layout.num_envs:
            self.on_partial_reset(ended)

    def _shaped(self, field: Field, row: torch.Tensor) -> torch.Tensor:
        return row.reshape(*self.layout.batch_shape, *field.shape)

    def _check_entries(self, after: TensorDictBase) -> None:
        layout = self.layout
        known = {field.key for field in (*layout.observations, *layout.rewards, *FLAGS)}
        if differing := known ^ set(map(as_key, after.keys(True, True))):
            raise EnvError(
                f"{self.handle.kind} was changed after the collector was built: its steps have "
                f"other entries now ({', '.join(sorted(map(format_key, differing)))}); change it "
                "before, or pass fast=False"
            )

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        handle = self.handle
        if envs is not None or options or not self._fresh_root:
            handle.reset(envs, options)
        self._fresh_root = False
        where: Any = slice(None) if envs is None else list(envs)
        for field in self.layout.observations:
            value = handle.root.get(field.key).reshape(self.layout.num_envs, *field.shape)
            carry.tensor(field.key)[where, 0] = value[where]
        self._tell(envs or ())

    def seed(self, seed: int, static: bool = False) -> int:
        """Seed the user's environment; see `TensorDictHandle.seed`."""
        self._fresh_root = False  # what its first reset showed was drawn without this seed
        return self.handle.seed(seed, static)

    def state(self) -> dict[str, Any]:
        """Return the state of the user's environment."""
        return self.handle.state()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a state from `state`."""
        self.handle.load_state(state, strict)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return self.handle.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        self.handle.resume(snapshot, allow_pickle)
        self._fresh_root = False

    def close(self) -> None:
        """Close the user's environment."""
        self.handle.close()


def _nothing(envs: Sequence[int]) -> None:
    """Do nothing."""


def _require_plain_layout(layout: EnvLayout) -> None:
    if list(layout.dones) != [DoneGroup(())] or layout.groups:
        raise Unproven("it has other end flags than done, terminated and truncated")
    if len(layout.actions) != 1:
        raise Unproven("it has several actions")


class _Drawn:
    """The spec of an action, drawn as the environment draws it.

    A spec of our own takes its place where it is proven to draw the same numbers.
    """

    def __init__(self, rows: TransformedRows, field: Field) -> None:
        self._rows, self._key, self._envs = rows, field.key, rows.layout.num_envs
        self.shape, self.dtype = torch.Size(field.shape), field.dtype
        self.own: Spec | None = None
        own = rows.own_spec(field.key)
        self.own = own if own is not None and self._draws_alike(own) else None

    @property
    def stepwise(self) -> bool:
        return self.own is not None

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw actions of all members, ``shape`` is ``(P,)`` or ``(T, P)``."""
        if self.own is not None and not self._rows.stepped_plainly:
            return self.own.rand(shape)
        draws = range(math.prod(shape) // self._envs)
        drawn = [self._rows.handle.env.rand_action().get(self._key) for _ in draws]
        return torch.stack(drawn).reshape(*shape, *self.shape)

    def _draws_alike(self, own: Spec) -> bool:
        """Tell whether ``own`` draws what the environment draws, and leaves the stream alike."""
        shape = (_DRAWS, self._envs)
        if not own.stepwise or own.shape != self.shape or own.dtype != self.dtype:
            return False
        found = []
        with preserved():
            for rand in (own.rand, self.rand):
                torch.default_generator.manual_seed(_DRAWS)
                found.append((rand(shape), torch.get_rng_state()))
        (mine, after), (theirs, after_theirs) = found
        return torch.equal(mine, theirs) and torch.equal(after, after_theirs)
