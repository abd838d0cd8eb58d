"""Environments with TensorDict methods as rows, for workers whose learner keeps no TensorDict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import NEXT, Key, format_key, next_key
from gleanrl.core.protocols import Spec
from gleanrl.core.window import Window
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.state_kinds import Node
from gleanrl.envs.tensordict import TensorDictHandle, learn_layout
from gleanrl.memory.arena import batch_rows


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """A `Spec` over a leaf of specs that need not be ours."""

    leaf: Any
    stepwise: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of one value."""
        return torch.Size(self.leaf.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of one value."""
        dtype: torch.dtype = self.leaf.dtype
        return dtype

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw values."""
        drawn: torch.Tensor = self.leaf.rand(torch.Size(shape))
        return drawn


class TensorDictRows(EnvRows):
    """Steps an environment by its own methods, on the TensorDict that its last step left.

    Actions come from rows and results go to rows, so data must have one fixed layout.
    """

    checks_actions = True

    def __init__(self, handle: TensorDictHandle, specs: Sequence[Mapping[Key, Spec]]) -> None:
        """Step the environment of ``handle``, whose observations and actions have ``specs``."""
        self._handle = handle
        self.layout = layout = learn_layout(handle.env, handle.root)
        self.observation_specs, self.action_specs = specs
        self.can_cut = any(key[-1] == "truncated" for key in handle.ends.keys)
        self._actions = [field.key for field in layout.actions]
        self._seen = [field.key for field in layout.observations]
        flags = (key for group in layout.dones for key in group.keys())
        self._after = [*self._seen, *(field.key for field in layout.rewards), *flags]
        self._rows: dict[Key, Sequence[torch.Tensor]] = {}

    @property
    def inner(self) -> Any:
        return self._handle.inner

    def begin(self, window: Window, carry: Window) -> None:
        batch = self.layout.batch_shape
        keys = {*self._actions, *map(next_key, self._after)}
        self._rows = {key: batch_rows(window, key, batch) for key in keys}
        for key in self._seen:
            after_last = batch_rows(carry, key, batch)
            self._rows[key] = (*batch_rows(window, key, batch), *after_last)
        self._handle.begin()

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        handle, rows = self._handle, self._rows
        for key in self._actions:
            handle.root.set(key, rows[key][t].clone())
        ended = handle.step(cut, lambda finished: self._put(finished.get(NEXT), t, True))
        self._put(handle.root, t + 1)
        self.reset_s = handle.reset_s
        return ended or ()

    def finish(self, steps: int) -> None:
        """Do nothing: all was written by the steps."""

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        self._handle.reset(envs, options)
        batch = self.layout.batch_shape
        self._rows = {key: batch_rows(carry, key, batch) for key in self._seen}
        self._put(self._handle.root, 0)

    def seed(self, seed: int, static: bool = False) -> int:
        return self._handle.seed(seed, static)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return self._handle.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        self._handle.resume(snapshot, allow_pickle)

    def _put(self, data: TensorDictBase, t: int, after: bool = False) -> None:
        """Write observations into root row ``t``, or the results of step ``t`` into its row."""
        for key in self._after if after else self._seen:
            row, value = self._rows[next_key(key) if after else key][t], data.get(key, None)
            fits = isinstance(value, torch.Tensor) and value.shape == row.shape
            if not fits or value.dtype != row.dtype:
                came = "nothing" if value is None else f"{value!r:.80}"
                raise EnvError(
                    f"{self._handle.kind} returned {came} as {format_key(key)}; its first reset "
                    f"and its specs have {row.dtype} of shape {tuple(row.shape)}"
                )
            row.copy_(value.detach())
