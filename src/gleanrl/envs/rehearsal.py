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

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.keys import Key, as_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window
from gleanrl.envs.gymnasium import without_call_checks
from gleanrl.envs.recorded_step import FLAGS
from gleanrl.envs.tape import Tape
from gleanrl.envs.tensordict import TensorDictHandle
from gleanrl.envs.torchrl_parts import (
    Parts,
    Unproven,
    is_stateful,
    parts_of,
    tensors_of,
    twin_of,
    unproven_on_error,
)
from gleanrl.envs.transformed import TransformedRows

_STEPS = 10
_MEMBERS = 3
"""Members of a batch that take part; all do if transforms around them may know their number."""
_CUT_AT = 6
"""The step at which the first environment is truncated."""


def transformed_rows(handle: TensorDictHandle, fresh: bool = False) -> TransformedRows:
    """Return the environment of ``handle``, which was reset once, as rows.

    Args:
        handle: A TorchRL environment, perhaps.
        fresh: Whether nobody else uses it, so that it may be changed.

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
        casts = [[Tape(one, i) for i, one in enumerate(parts.gym_envs)] for _ in range(2)]
        plain, other = (_twin(parts, tapes) for tapes in casts)
        twin = TransformedRows(other, parts_of(other.env), _believe)
        twin.pass_on(rows.passed)
        stateful = any(map(is_stateful, parts.transforms))
        if stateful and not _places(parts).isdisjoint(_places(twin.parts)):
            raise Unproven("a copy of its transforms has memory in common with them")
        _compare(plain, twin)
        if stateful:
            _compare_states(parts_of(plain.env), twin.parts)
        if [tape.log for tape in casts[0]] != [tape.log for tape in casts[1]]:
            raise Unproven("the Gymnasium environments got other actions in a rehearsal")


def _twin(parts: Parts, tapes: Sequence[Tape]) -> TensorDictHandle:
    """Return a copy of the environment, reset; all copies draw the same numbers in that."""
    torch.default_generator.manual_seed(0)  # and no accelerator
    return TensorDictHandle(twin_of(parts, tapes))


def _believe(rows: TransformedRows) -> None:
    """Prove nothing, because ``rows`` are part of a proof."""


def _compare(plain: TensorDictHandle, rows: TransformedRows) -> None:
    layout = rows.layout
    after = [*layout.observations, *layout.rewards, *FLAGS]
    nexts = [Field(next_key(field.key), field.shape, field.dtype) for field in after]
    fields = [*layout.observations, *layout.actions, *nexts]
    window = Window.allocate(fields, layout.num_envs, _STEPS)
    carry = Window.allocate(layout.observations, layout.num_envs, 1)
    rows.reset(carry)
    for field in layout.observations:
        window.tensor(field.key)[:, 0] = carry.tensor(field.key)[:, 0]
    rows.begin(window, carry)
    plain.begin()
    shown = {field.key for field in [*fields, *FLAGS]}
    for t in range(_STEPS):
        before = torch.get_rng_state()
        plain.root = plain.env.rand_action(plain.root)
        for field in layout.actions:
            rows_of_action = window.tensor(field.key)[:, t]
            rows_of_action.copy_(plain.root.get(field.key).reshape(rows_of_action.shape))
        for field in (field for field in layout.observations if field.key in rows.passed):
            written = window.tensor(next_key(field.key))[:, t].copy_(_made_up(field, layout, t))
            plain.root.set(next_key(field.key), written.reshape(*layout.batch_shape, *field.shape))
        steps: list[TensorDictBase] = []
        cut = (0,) if t == _CUT_AT else ()
        ended = plain.step(cut, steps.append)
        after_plain = torch.get_rng_state()
        torch.set_rng_state(before)
        drawn = rows.handle.env.rand_action()
        for field in layout.actions:
            _require_equal(field.key, drawn.get(field.key), window.tensor(field.key)[:, t])
        if list(rows.step(t, cut)) != list(ended or ()):
            raise Unproven("other episodes end in a rehearsal")
        if not torch.equal(torch.get_rng_state(), after_plain):
            raise Unproven("it draws other random numbers in a rehearsal")
        found = {as_key(key): value for key, value in steps[0].items(True, True)}
        if found.keys() != shown:
            raise Unproven(f"it adds entries to a step: {sorted(found.keys() ^ shown, key=str)}")
        for field in fields:
            _require_equal(field.key, found[field.key], window.tensor(field.key)[:, t])
    rows.finish(_STEPS)


def _made_up(field: Field, layout: EnvLayout, t: int) -> torch.Tensor:
    """Return values for a field of all environments, others at each step."""
    shape = (layout.num_envs, *field.shape)
    return (torch.arange(math.prod(shape)).reshape(shape) * 7 + t * 5).remainder(11).to(field.dtype)


def _places(parts: Parts) -> set[int]:
    """Return where tensors that transforms change lie."""
    changing = filter(is_stateful, parts.transforms)
    return {tensor.data_ptr() for part in changing for tensor in tensors_of(part)}


def _compare_states(plain: Parts, other: Parts) -> None:
    for one, two in zip(plain.transforms, other.transforms, strict=True):
        for mine, its in zip(tensors_of(one), tensors_of(two), strict=True):
            _require_equal((type(one).__name__, "state"), mine, its)


def _require_equal(key: Key, value: torch.Tensor, row: torch.Tensor) -> None:
    if value.dtype == row.dtype and value.numel() == row.numel():
        mine, its = (np.ascontiguousarray(one.numpy()).tobytes() for one in (value, row))
        if mine == its:
            return
    raise Unproven(f"{'.'.join(key)} differs in a rehearsal")
