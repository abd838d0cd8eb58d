"""The proof that a TorchRL environment may be stepped by its parts.

A copy of the environment, with made-up Gymnasium environments in it, takes some steps by its
TensorDict methods. It takes them again by `TransformedRows`, or another copy does if it may still
know of the first ones. All data and all actions have to be equal, bit for bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.keys import Key, as_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window
from gleanrl.envs.gymnasium import without_call_checks
from gleanrl.envs.recorded_or_called_transforms import Unproven, unproven_on_error
from gleanrl.envs.rehearsal_stand_ins import Tape, TapedWorker
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.envs.tensordict_rows import TensorDictRows
from gleanrl.envs.torchrl_members import FLAGS
from gleanrl.envs.torchrl_parts import Parts, keep_nothing, parts_of, tensors_of, twin_of
from gleanrl.envs.torchrl_rows import TransformedRows

_STEPS = 10
_MEMBERS = 3
"""Members of a batch that take part; all do if transforms around them may know their number."""
_CUTS = (0, 6)
"""Steps at which the first environment is truncated: in the first one no other was reset alone."""


def transformed_rows(handle: TensorDictHandle, fresh: bool = False) -> TransformedRows:
    """Return the environment of ``handle``, which was reset once, as rows, or raise `Unproven`.

    A ``fresh`` one has no other user, so it may be changed.
    """
    with unproven_on_error():
        parts = parts_of(handle.env)
        if fresh:
            for member in parts.members:
                member._env = without_call_checks(member._env)
            gym_envs = tuple(member._env for member in parts.members)
            parts = replace(parts, gym_envs=gym_envs)
        return TransformedRows(handle, parts, _prove)


def _prove(rows: TransformedRows) -> None:
    """Raise `Unproven` unless stepping by ``rows`` is proven equal."""
    parts = rows.parts if rows.parts.wholes else rows.parts.first(_MEMBERS)
    # Warnings about copies repeat those about the originals.
    with preserved(), torch.no_grad(), warnings.catch_warnings(action="ignore"):
        tapes: list[Any] = _cast(parts)
        others = tapes
        plain = TensorDictRows(_reset(twin_of(parts, tapes)))
        plain.passed = rows.passed
        if keep_nothing(parts):
            expected, log = _steps_of(plain, rows.can_cut), [tape.rewind() for tape in tapes]
            twin = _recorded(plain.handle.env, rows)
        else:
            others = _cast(parts)
            twin = _recorded(twin_of(parts, others), rows)
            if not set(parts.places).isdisjoint(twin.parts.places):
                raise Unproven("a copy of its transforms has memory in common with them")
            expected, log = _steps_of(plain, rows.can_cut), [tape.log for tape in tapes]
        _compare(expected, _steps_of(twin, rows.can_cut))
        if parts.stateful:
            _compare_states(parts_of(plain.handle.env), twin.parts)
        _require(log == [tape.log for tape in others], "the environments got other actions")


def _cast(parts: Parts) -> list[Tape] | list[TapedWorker]:
    """Return the stand-ins of the members."""
    if parts.members:
        return [Tape(one, i) for i, one in enumerate(parts.gym_envs)]
    return [TapedWorker(i) for i in range(parts.base.num_workers)]


def _reset(env: Any) -> TensorDictHandle:
    """Return ``env``, reset; all draw the same numbers in that."""
    torch.default_generator.manual_seed(0)  # and no accelerator
    return TensorDictHandle(env)


def _recorded(env: Any, rows: TransformedRows) -> TransformedRows:
    """Return ``env``, reset and stepped as ``rows`` are, without a proof of its own."""
    twin = TransformedRows(_reset(env), parts_of(env), prove=lambda rows: None)
    twin.pass_on(rows.passed)
    return twin


@dataclass(frozen=True, slots=True)
class _Steps:
    """What some steps gave."""

    window: Window
    ends: list[list[int]]
    streams: list[torch.Tensor]
    """The state of torch's generator before and after each step."""


def _steps_of(rows: TensorDictRows, can_cut: bool) -> _Steps:
    """Take some steps with the environment's own random actions."""
    layout = rows.layout
    after = [*layout.observations, *layout.rewards, *FLAGS]
    nexts = [Field(next_key(field.key), field.shape, field.dtype) for field in after]
    fields = [*layout.observations, *layout.actions, *nexts]
    taken = _Steps(_opened(rows, fields), [], [])
    recorded = isinstance(rows, TransformedRows)
    passing = [field for field in layout.observations if field.key in rows.passed]
    torch.default_generator.manual_seed(0)
    for t in range(_STEPS):
        drawn = rows.handle.env.rand_action(None if recorded else rows.handle.root.copy())
        given = {field.key: drawn.get(field.key) for field in layout.actions}
        given |= {next_key(field.key): _made_up(field, layout, t) for field in passing}
        for key, value in given.items():
            target = taken.window.tensor(key)[:, t]
            target.copy_(value.reshape(target.shape))
        taken.streams.append(torch.get_rng_state())
        taken.ends.append(list(rows.step(t, (0,) if t in _CUTS and can_cut else ())))
        taken.streams.append(torch.get_rng_state())
    if recorded:
        rows.finish(_STEPS)
    else:
        shown = {field.key for field in [*fields, *FLAGS]}
        odd = set(map(as_key, rows.handle.root.keys(True, True))) - shown
        what = f"it shows entries that its specs do not declare ({sorted(odd, key=str)})"
        _require(not odd, what)
    return taken


def _compare(steps: _Steps, others: _Steps) -> None:
    for key in steps.window.keys():
        _require_equal(key, *(each.window.tensor(key) for each in (steps, others)))
    _require(steps.ends == others.ends, "other episodes end")
    _require(all(map(torch.equal, steps.streams, others.streams)), "it draws other random numbers")


def _opened(rows: TensorDictRows, fields: Sequence[Field]) -> Window:
    """Return a window of ``fields`` in which ``rows`` are about to step."""
    layout = rows.layout
    window = Window.allocate(fields, layout.num_envs, _STEPS)
    carry = Window.allocate(layout.observations, layout.num_envs, 1)
    rows.reset(carry)
    for field in layout.observations:
        window.tensor(field.key)[:, 0] = carry.tensor(field.key)[:, 0]
    rows.begin(window, carry)
    return window


def _made_up(field: Field, layout: EnvLayout, t: int) -> torch.Tensor:
    """Return values for a field of all environments, others at each step."""
    shape = (layout.num_envs, *field.shape)
    return (torch.arange(math.prod(shape)).reshape(shape) * 7 + t * 5).remainder(11).to(field.dtype)


def _compare_states(plain: Parts, other: Parts) -> None:
    for one, two in zip(plain.stateful, other.stateful, strict=True):
        for mine, its in zip(tensors_of(one), tensors_of(two), strict=True):
            _require_equal((type(one).__name__, "state"), mine, its)


def _require(proven: bool, what: str) -> None:
    if not proven:
        raise Unproven(f"{what} in a rehearsal")


def _require_equal(key: Key, value: torch.Tensor, row: torch.Tensor) -> None:
    mine, its = (np.ascontiguousarray(one.numpy()).tobytes() for one in (value, row))
    _require(value.dtype == row.dtype and mine == its, f"{'.'.join(key)} differs")
