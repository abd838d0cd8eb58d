"""The proof that a TorchRL environment may be stepped by its parts.

Two copies of the environment, with made-up Gymnasium environments in them, take some steps: one by
its TensorDict methods, one by `TransformedRows`. All data and all actions have to be equal, bit for
bit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.keys import Key, as_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window
from gleanrl.envs.gymnasium import without_call_checks
from gleanrl.envs.recorded_or_called_transforms import Unproven, treatment, unproven_on_error
from gleanrl.envs.rehearsal_stand_ins import Tape, TapedWorker
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.envs.tensordict_rows import TensorDictRows
from gleanrl.envs.torchrl_members import FLAGS
from gleanrl.envs.torchrl_parts import (
    Parts,
    parts_of,
    tensors_of,
    twin_of,
)
from gleanrl.envs.torchrl_rows import TransformedRows

_STEPS = 10
_MEMBERS = 3
"""Members of a batch that take part; all do if transforms around them may know their number."""
_CUTS = (0, 6)
"""Steps at which the first environment is truncated: in the first one no other was reset alone."""


def transformed_rows(handle: TensorDictHandle, fresh: bool = False) -> TransformedRows:
    """Return the environment of ``handle``, which was reset once, as rows.

    A ``fresh`` one has no other user, so it may be changed.

    Raises:
        Unproven: it has to be stepped by its own methods.
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
        casts: list[list[Any]] = [_cast(parts) for _ in range(2)]
        handle, other = (_twin(parts, tapes) for tapes in casts)
        twin = TransformedRows(other, parts_of(other.env), _believe)
        twin.pass_on(rows.passed)
        stateful = any(treatment(part).stateful for part in parts.transforms)
        if stateful and not _places(parts).isdisjoint(_places(twin.parts)):
            raise Unproven("a copy of its transforms has memory in common with them")
        plain = TensorDictRows(handle)
        plain.passed = rows.passed
        _compare(plain, twin)
        if stateful:
            _compare_states(parts_of(handle.env), twin.parts)
        logs = [[tape.log for tape in cast] for cast in casts]
        _require(logs[0] == logs[1], "the environments got other actions")


def _cast(parts: Parts) -> list[Tape] | list[TapedWorker]:
    """Return what takes the place of the members."""
    if parts.members:
        return [Tape(one, i) for i, one in enumerate(parts.gym_envs)]
    return [TapedWorker(i) for i in range(parts.base.num_workers)]


def _twin(parts: Parts, tapes: Sequence[Any]) -> TensorDictHandle:
    """Return a copy of the environment, reset; all copies draw the same numbers in that."""
    torch.default_generator.manual_seed(0)  # and no accelerator
    return TensorDictHandle(twin_of(parts, tapes))


def _believe(rows: TransformedRows) -> None:
    """Prove nothing, because ``rows`` are part of a proof."""


def _compare(plain: TensorDictRows, rows: TransformedRows) -> None:
    layout = rows.layout
    after = [*layout.observations, *layout.rewards, *FLAGS]
    nexts = [Field(next_key(field.key), field.shape, field.dtype) for field in after]
    fields = [*layout.observations, *layout.actions, *nexts]
    windows = [_opened(each, fields) for each in (plain, rows)]
    for t in range(_STEPS):
        stream = torch.get_rng_state()
        actions = plain.handle.env.rand_action(plain.handle.root.copy())
        after_draw = torch.get_rng_state()
        torch.set_rng_state(stream)
        drawn = rows.handle.env.rand_action()
        for field in layout.actions:
            _require_equal(field.key, drawn.get(field.key), actions.get(field.key))
        _require(torch.equal(torch.get_rng_state(), after_draw), "it draws other actions")
        given = {field.key: drawn.get(field.key) for field in layout.actions}
        passing = [field for field in layout.observations if field.key in rows.passed]
        given |= {next_key(field.key): _made_up(field, layout, t) for field in passing}
        ends, streams = [], []
        for each, window in zip((plain, rows), windows, strict=True):
            for key, value in given.items():
                target = window.tensor(key)[:, t]
                target.copy_(value.reshape(target.shape))
            torch.set_rng_state(after_draw)
            ends.append(list(each.step(t, (0,) if t in _CUTS and rows.can_cut else ())))
            streams.append(torch.get_rng_state())
        _require(ends[0] == ends[1], "other episodes end")
        _require(torch.equal(*streams), "it draws other random numbers")
        for field in fields:
            _require_equal(field.key, *(window.tensor(field.key)[:, t] for window in windows))
    shown = {field.key for field in [*fields, *FLAGS]}
    odd = set(map(as_key, plain.handle.root.keys(True, True))) - shown
    _require(not odd, f"it shows entries that its specs do not declare ({sorted(odd, key=str)})")
    rows.finish(_STEPS)


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


def _places(parts: Parts) -> set[int]:
    """Return where tensors that transforms change lie."""
    changing = (part for part in parts.transforms if treatment(part).stateful)
    return {tensor.data_ptr() for part in changing for tensor in tensors_of(part)}


def _compare_states(plain: Parts, other: Parts) -> None:
    for one, two in zip(plain.transforms, other.transforms, strict=True):
        for mine, its in zip(tensors_of(one), tensors_of(two), strict=True):
            _require_equal((type(one).__name__, "state"), mine, its)


def _require(proven: bool, what: str) -> None:
    if not proven:
        raise Unproven(f"{what} in a rehearsal")


def _require_equal(key: Key, value: torch.Tensor, row: torch.Tensor) -> None:
    mine, its = (np.ascontiguousarray(one.numpy()).tobytes() for one in (value, row))
    _require(value.dtype == row.dtype and mine == its, f"{'.'.join(key)} differs")
