"""Environments with TensorDict methods as rows, for workers whose learner keeps no TensorDict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import NEXT, Key, as_key, format_key, next_key
from gleanrl.core.protocols import Spec
from gleanrl.core.window import Window
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.state_kinds import Node
from gleanrl.envs.tensordict_envs import TensorDictHandle, learn_layout
from gleanrl.memory.batch_arena import batch_rows


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """A `Spec` over a leaf of specs that need not be ours."""

    leaf: Any
    stepwise: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.leaf.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.leaf.dtype
        return dtype

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        drawn: torch.Tensor = self.leaf.rand(torch.Size(shape))
        return drawn


class TensorDictRows(EnvRows):
    """Steps an environment by its own methods, on the TensorDict that its last step left.

    Actions come from rows and results go to rows, so data must have one fixed layout.
    """

    checks_actions = True
    passed: Collection[Key] = ()
    """Observations that the policy writes under ``"next"`` before each step."""

    def __init__(
        self,
        handle: TensorDictHandle,
        specs: tuple[Mapping[Key, Spec], Mapping[Key, Spec]] = ({}, {}),
    ) -> None:
        """Take over ``handle``; the first `reset` shows the result of the reset before it.

        ``specs``: of observations and of actions.
        """
        self.handle = handle
        self.layout = layout = learn_layout(handle.env, handle.root)
        self.observation_specs, self.action_specs = specs
        self.can_cut = any(key[-1] == "truncated" for key in handle.ends.keys)
        self._actions = [field.key for field in layout.actions]
        self._seen = [field.key for field in layout.observations]
        flags = (key for group in layout.dones for key in group.keys())
        self._after = [*self._seen, *(field.key for field in layout.rewards), *flags]
        self._fresh_root = True
        self._rows: dict[Key, Sequence[torch.Tensor]] = {}

    @property
    def inner(self) -> Any:
        return self.handle.inner

    def begin(self, window: Window, carry: Window) -> None:
        batch = self.layout.batch_shape
        there = {*self._actions, *map(next_key, self._after)}.intersection(window.keys())
        self._rows = {key: batch_rows(window, key, batch) for key in there}
        for key in self._seen:
            after_last = batch_rows(carry, key, batch)
            self._rows[key] = (*batch_rows(window, key, batch), *after_last)
        self.handle.begin()

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        handle = self.handle
        for key in (*self._actions, *map(next_key, self.passed)):
            handle.root.set(key, self._rows[key][t].clone())
        ended = handle.step(cut, lambda finished: self._write(finished, t))
        for key in self._seen:
            self._put(handle.root, key, self._rows[key][t + 1])
        return ended or ()

    def _write(self, finished: TensorDictBase, t: int) -> None:
        """Write the results of the ``finished`` step ``t``."""
        after = finished.get(NEXT)
        if differing := set(map(as_key, after.keys(True, True))).symmetric_difference(self._after):
            raise EnvError(
                f"steps of {self.handle.kind} have other entries now than its specs and its reset "
                f"had when the collector was built: {', '.join(sorted(map(format_key, differing)))}"
            )
        for key in self._after:
            if (rows := self._rows.get(next_key(key))) is not None:
                self._put(after, key, rows[t])

    def finish(self, steps: int) -> None:
        self.reset_s += self.handle.reset_s
        self.handle.reset_s = 0.0

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        if envs is not None or options or not self._fresh_root:
            self.handle.reset(envs, options)
        self._fresh_root = False
        where: Any = slice(None) if envs is None else list(envs)
        for field in self.layout.observations:
            shown = torch.empty(self.layout.batch_shape + field.shape, dtype=field.dtype)
            self._put(self.handle.root, field.key, shown)
            carry.tensor(field.key)[where, 0] = shown.view(-1, *field.shape)[where]

    def _put(self, data: TensorDictBase, key: Key, row: torch.Tensor) -> None:
        """Copy an entry of ``data`` into ``row``."""
        value = data.get(key, None)
        fits = isinstance(value, torch.Tensor) and value.shape == row.shape
        if not fits or value.dtype != row.dtype:
            came = "nothing" if value is None else f"{value!r:.80}"
            raise EnvError(
                f"{self.handle.kind} returned {came} as {format_key(key)}; its first reset "
                f"and its specs have {row.dtype} of shape {tuple(row.shape)}"
            )
        row.copy_(value.detach())

    def seed(self, seed: int, static: bool = False) -> None:
        self._fresh_root = False
        self.handle.seed(seed, static)

    def state(self) -> dict[str, Any]:
        return self.handle.state()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.handle.load_state(state, strict)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return self.handle.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        self.handle.resume(snapshot, allow_pickle)
        self._fresh_root = False

    def close(self) -> None:
        self.handle.close()
