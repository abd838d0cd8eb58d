"""Vectorised environments of torch tensors, on any device: rows are written from tensors.

Nothing of a step is read by the host. Where an episode ends, masks decide on the device; the end
flags of a whole rollout come to the host in one copy, which is when ids and returns are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import EnvError, note
from gleanrl.core.keys import ACTION, DONE, REWARD, TERMINATED, TRUNCATED, format_key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import SourceOptions
from gleanrl.core.window import Array, Window
from gleanrl.envs.result_checks import not_five, write_rewards
from gleanrl.envs.result_writers import (
    FieldWriter,
    VectorReset,
    entry_of,
    finals_missing,
    part_missing,
)
from gleanrl.envs.spaces import Leaf, rebuild, space_leaves
from gleanrl.envs.vector import VectorAdapter, VectorResets, vectorised

_FLAGS = (TERMINATED, TRUNCATED, DONE)


def tensor_device(observation: Any) -> torch.device | None:
    """Return the device of an observation of tensors, ``None`` if it is one of arrays."""
    while isinstance(observation, Mapping | tuple) and observation:
        parts = observation.values() if isinstance(observation, Mapping) else observation
        observation = next(iter(parts))
    return observation.device if isinstance(observation, torch.Tensor) else None


class TensorLeafWriter(FieldWriter):
    """One tensor of a vectorised environment's observation."""

    def __init__(self, leaf: Leaf, field: Field, casts: str) -> None:
        """Write ``leaf`` to ``field``; nothing is cast but narrower whole numbers."""
        super().__init__(field)
        self._leaf = leaf
        self._root_rows: Sequence[torch.Tensor] = ()
        self._next_rows: Sequence[torch.Tensor] | None = None

    def begin(self, window: Window, carry: Window) -> None:
        key = self._field.key
        self._root_rows = (*window.tensor_rows(key)[1:], *carry.tensor_rows(key))
        after = next_key(key)
        self._next_rows = window.tensor_rows(after) if after in window.keys() else None

    def write_step(self, t: int, observation: Any, final: Any, done: torch.Tensor) -> None:
        """Write root row ``t + 1``, and row ``t`` under ``"next"``: ``final`` where ``done``."""
        row = self._root_rows[t]
        self._copy(row, observation, "the vector environment")
        if self._next_rows is None:
            return
        after = self._next_rows[t]
        if final is None:
            after.copy_(row)
            return
        self._copy(after, final, "final_obs")
        torch.where(done.view(-1, *[1] * (row.ndim - 1)), after, row, out=after)

    def write_carry(self, carry: Window, where: Any, returned: VectorReset) -> None:
        row = carry.tensor_rows(self._field.key)[0]
        self._copy(row, returned.observation, "the vector environment")

    def _copy(self, row: torch.Tensor, observation: Any, who: str) -> None:
        try:
            value = self._leaf.of(observation)
        except (LookupError, TypeError) as err:
            raise part_missing(who, self._leaf, observation) from err
        copy_tensor(row, value, f"{who} returned {format_key(self._field.key)}", exact=True)


def copy_tensor(row: torch.Tensor, value: Any, what: str, *, exact: bool = False) -> None:
    """Copy ``value`` to ``row``; if ``exact``, its dtype must be the same or narrower integers."""
    if isinstance(value, torch.Tensor) and value.shape == row.shape:
        same = not exact or value.dtype is row.dtype
        whole = not (value.is_floating_point() or row.is_floating_point())
        if same or (whole and torch.promote_types(value.dtype, row.dtype) is row.dtype):
            row.copy_(value.detach())  # simulators may be differentiable, rows are not
            return
    came = f"{value!r:.100}"
    if isinstance(value, torch.Tensor):
        came = f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    raise EnvError(
        f"{what} as {came}; it must be a tensor of {row.dtype} and shape {tuple(row.shape)}"
    )


class TensorVectorEnv(VectorAdapter):
    """A vectorised environment in SAME_STEP mode that takes and returns tensors.

    Its rows are on its device if `device_rows` allows that, else in memory of the host.
    """

    _leaf_writer: Any = TensorLeafWriter
    _writers: list[Any]
    on_ended: Callable[[int, torch.Tensor], None] | None = None
    """Is told of each step and of the mask of environments that ended with it, on the rows'
    device, after all else was written."""
    done: Array
    """After `finish`: which environments ended at which step, bool ``[P, T]``."""

    def __init__(self, resets: VectorResets, options: SourceOptions, device: torch.device) -> None:
        """Take over the environment of ``resets``, which showed tensors on ``device``."""
        options.storing().check_unused(resets.env)
        super().__init__(resets, options.storing())
        self._there, self.can_cut = device, False
        where = device if options.device_rows and device.type != "cpu" else None
        layout = self.layout
        observations, actions, rewards = (
            tuple(replace(field, device=where) for field in fields)
            for fields in (layout.observations, layout.actions, layout.rewards)
        )
        self.layout = replace(layout, observations=observations, actions=actions, rewards=rewards)
        self._space = vectorised(resets.env).single_action_space
        self._acted = space_leaves(self._space, ACTION)
        firsts = (getattr(leaf.space, "start", 0) for leaf in self._acted)
        self._firsts = [torch.as_tensor(one).to(device) if np.any(one) else None for one in firsts]
        """The number of each leaf's first action, if that is not 0."""

    def explain(self) -> str:
        rows = self.layout.device or "the host"
        return f"{super().explain()}: tensors on {self._there}, rows on {rows}"

    def begin(self, window: Window, carry: Window) -> None:
        self._window = window
        self._step = self._resets.step
        for writer in self._writers:
            writer.begin(window, carry)
        self._action_rows = [window.tensor_rows(leaf.key) for leaf in self._acted]
        self._flag_rows = [window.tensor(next_key(key))[..., 0].unbind(1) for key in _FLAGS]
        self._reward = window.tensor(next_key(REWARD))[..., 0]
        self._reward_rows: Sequence[torch.Tensor] = self._reward.unbind(1)
        self._wide: torch.Tensor | None = None
        self._with_finals: list[bool] = []

    def _actions_of(self, t: int) -> Any:
        """Return copies of the actions in row ``t``, as values of the batched space."""
        values = {}
        for leaf, rows, first in zip(self._acted, self._action_rows, self._firsts, strict=True):
            value = rows[t].to(self._there, copy=True)
            values[leaf.path] = value if first is None else value + first
        return rebuild(self._space, (), values)

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        try:
            result = self._step(self._actions_of(t))
        except Exception as err:
            note(err, f"the vector environment raised this at step {t} of the rollout")
            raise
        try:
            observation, reward, terminated, truncated, infos = result
        except (TypeError, ValueError) as err:
            who = "the vector environment's step"
            raise not_five(result, who, "terminated, truncated, infos") from err
        dead, late, done = (rows[t] for rows in self._flag_rows)
        copy_tensor(dead, terminated, "the vector environment returned terminated")
        copy_tensor(late, truncated, "the vector environment returned truncated")
        torch.logical_or(dead, late, out=done)
        if self._wide is None and getattr(reward, "dtype", None) is torch.float64:
            self._wide = self._reward.double()  # narrowed when the rollout ends
            self._reward_rows = self._wide.unbind(1)
        copy_tensor(self._reward_rows[t], reward, "the vector environment returned rewards")
        final = entry_of(infos, "final_obs")
        self._with_finals.append(final is not None)
        for writer in self._writers:
            writer.write_step(t, observation, final, done)
        if self.on_ended is not None:
            self.on_ended(t, done)
        return ()

    def finish(self, steps: int) -> None:
        """Bring the end flags to the host; check what a step could not tell without waiting."""
        self.done = self._window.tensor(next_key(DONE))[:, :steps, 0].cpu().numpy()
        for t in np.flatnonzero(self.done.any(0)):
            if not self._with_finals[t]:
                raise finals_missing(np.flatnonzero(self.done[:, t]), f" at step {t}")
        if self._wide is not None:
            host = torch.zeros((self.num_envs, steps))
            rewards = self._wide[:, :steps].cpu().numpy().T
            write_rewards(host.numpy(), rewards, wrapper="vector.TransformReward")
            self._reward[:, :steps] = host.to(self._reward.device)
        if self._actions.limits:
            keys = [leaf.key for leaf in self._acted]
            taken = {key: self._window.tensor(key)[:, :steps].cpu() for key in keys}
            self._actions.begin(Window(taken, self.num_envs, steps))
            self._actions.check(0, steps)
