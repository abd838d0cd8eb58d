"""Finished steps of environments with TensorDict methods: their layout and their storage.

Steps go into rows of a window as long as they are what was expected, and are kept as they are
otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.keys import (
    NEXT,
    STEP_COUNT,
    Key,
    as_key,
    next_key,
)
from gleanrl.core.layout import EnvLayout, Field, Group
from gleanrl.core.options import SourceOptions
from gleanrl.core.window import Window
from gleanrl.envs.tensordict import EndFlags, spec_groups
from gleanrl.memory.arena import batch_rows
from gleanrl.memory.tensordicts import copied, groups_of
from gleanrl.policies.policy import Actor
from gleanrl.rollout.plan import RolloutPlan


@dataclass(frozen=True, slots=True)
class ExpectedSteps:
    """The expected contents of finished steps, as far as known before the first step."""

    plan: RolloutPlan
    """The delivered fields."""
    stored: tuple[Field, ...]
    """The part of it that steps hold; the rest is written in bulk."""
    shown: tuple[Key, ...]
    """Root entries that the environment shows, and what is their memory: stored before it steps,
    because it may use that again."""
    optional: frozenset[Key]
    """Entries that some steps lack; they are stored as zeros then."""
    ignored: tuple[Key, ...]
    """Entries that steps hold and that are not delivered."""


def expect(
    env: Any, layout: EnvLayout, root: TensorDictBase, actor: Actor, options: SourceOptions
) -> ExpectedSteps | None:
    """Return the expected contents of steps of ``env``, before the first step.

    Its specs, its first reset and one call of the policy tell. A step that is something else is no
    error: the rollout it is part of travels as a payload.

    Args:
        env: The environment.
        layout: Its side of a step.
        root: A root TensorDict as the environment gets it.
        actor: What acts in it.
        options: What the user asked for.

    Returns:
        ``None`` where an entry does not begin with the batch dimensions of the environment.
    """
    leaves = {as_key(key): value for key, value in root.items(True, True)}
    size = len(layout.batch_shape)
    plain = all(
        isinstance(value, torch.Tensor) and tuple(value.shape[:size]) == layout.batch_shape
        for value in leaves.values()
    )
    if not plain:
        return None
    found = {key: Field(key, tuple(v.shape[size:]), v.dtype) for key, v in leaves.items()}
    flags = set(EndFlags(env.full_done_spec, layout.batch_shape).keys)
    roots = {field.key: field for field in layout.actions}
    roots |= {key: field for key, field in found.items() if key[0] != NEXT and key not in flags}
    written = {
        key[1:]: replace(field, key=key[1:]) for key, field in found.items() if key[0] == NEXT
    }
    late = {
        key: written[key]
        for key in actor.policy_written_state
        if key not in roots and key in written
    }
    shown = () if options.compact_obs else layout.observations
    after = {field.key: field for field in (*layout.rewards, *shown)}
    after |= written
    plan = RolloutPlan(
        layout.batch_shape,
        [*roots.values(), *late.values()],
        after.values(),
        options,
        dones=layout.dones,
        finite={field.key for field in (*layout.observations, *layout.rewards)},
        rewards=layout.rewards,
        groups=tuple(_groups(env, root, size)),
    )
    unset = plan.flags - flags
    stored = tuple(
        field
        for field in plan.layout.fields
        if field.key not in plan.bulk and field.key[field.key[0] == NEXT :] not in unset
    )
    observed = [field.key for field in layout.observations]
    # A policy may return an observation as it is: the step overwrites what is the same memory.
    places = {key: leaves[key].untyped_storage().data_ptr() for key in roots if key in leaves}
    memory = {places[key] for key in observed if key in places}
    acted = {field.key for field in layout.actions}
    same = [key for key, place in places.items() if place in memory and key not in acted]
    return ExpectedSteps(
        plan,
        stored=stored,
        shown=tuple(key for key in dict.fromkeys((*observed, *same, *flags)) if key in found),
        # Random frames lack states that the policy makes itself, also under "next".
        optional=frozenset((*late, *map(next_key, late), *flags)),
        ignored=(
            *(next_key(key) for key in observed if key not in after),
            *(key for key in actor.provided if key == STEP_COUNT),
        ),
    )


def _groups(env: Any, root: TensorDictBase, size: int) -> Iterable[Group]:
    """Yield nested parts with a batch size of their own, at the root and under ``"next"``.

    Data are believed where they differ from specs.
    """
    trees = (env.full_observation_spec, env.full_action_spec, env.full_reward_spec)
    found = {group.key: group for tree in trees for group in spec_groups(tree, size)}
    own = {group.key: group for group in groups_of(root)}
    nested = {as_key(key) for key in root.keys(True) if isinstance(root.get(key), TensorDictBase)}
    found = {key: group for key, group in found.items() if key not in nested} | own
    for group in found.values():
        yield group
        if group.key[0] != NEXT and next_key(group.key) not in found:
            yield Group(next_key(group.key), group.shape, group.names)


# -- where finished steps go -----------------------------------------------------------------------


@dataclass(slots=True)
class _Unstored:
    """An entry of a step that is not stored, or was stored before."""

    needed: bool = False
    """Whether every step has it."""

    def write(self, value: object, t: int) -> bool:
        """Store ``value`` as row ``t``; return whether it fits the expectation."""
        return True

    def clear(self, t: int) -> None:
        """Store that step ``t`` lacks the entry."""


@dataclass(slots=True)
class _Leaf:
    """A tensor."""

    rows: Sequence[torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    needed: bool = True

    def write(self, value: object, t: int) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        if value.shape != self.shape or value.dtype is not self.dtype:
            return False
        self.rows[t].copy_(value)
        return True

    def clear(self, t: int) -> None:
        self.rows[t].zero_()


@dataclass(slots=True)
class _Node:
    """A nested part, or the step itself."""

    size: torch.Size
    entries: dict[str, _Entry]
    needed: bool = True

    def write(self, value: object, t: int) -> bool:
        """Store every entry of ``value`` as row ``t``; private ones are not delivered."""
        if not isinstance(value, TensorDictBase) or value.batch_size != self.size:
            return False
        if isinstance(value, LazyStackedTensorDict) and not _even(value):
            return False
        entries, found = self.entries, 0
        for name, item in value.items():
            entry = entries.get(name)
            if entry is None:
                if name[0] != "_":
                    return False
            elif entry.write(item, t):
                found += 1
            else:
                return False
        return found == len(entries) or self._fill(value, t)

    def _fill(self, value: TensorDictBase, t: int) -> bool:
        """Clear the entries that ``value`` lacks; return whether it may lack all of them."""
        present = set(value.keys())
        missing = [entry for name, entry in self.entries.items() if name not in present]
        for entry in missing:
            entry.clear(t)
        return not any(entry.needed for entry in missing)

    def clear(self, t: int) -> None:
        for entry in self.entries.values():
            entry.clear(t)


_Entry: TypeAlias = _Unstored | _Leaf | _Node


class StepRecorder:
    """Keeps the finished steps of one rollout after the other."""

    def __init__(self, shown: Iterable[Key], fields: ExpectedSteps | None = None) -> None:
        """Keep steps of ``fields``; ``None`` if these change from step to step."""
        self._shown = tuple(shown)
        self._fields = fields
        self._trees: weakref.WeakKeyDictionary[Window, tuple[_Node, _Node]] = (
            weakref.WeakKeyDictionary()
        )
        self._window: Window | None = None
        self._before: _Node
        self._after: _Node
        self._t = -1
        self._view: TensorDictBase | None = None
        self.steps: list[TensorDictBase] | None = None
        """The steps as TensorDicts; ``None`` while all of them are in the window."""

    def begin(self, window: Window | None) -> None:
        """Start a rollout; without a window, or without fields, keep steps unchanged."""
        self._t, self._window = -1, window
        rows = self._fields is not None and window is not None and window.keys()
        self.steps = None if rows else []
        if rows:
            assert window is not None
            if window not in self._trees:
                self._trees[window] = self._bind(window)
            self._before, self._after = self._trees[window]

    def before(self, root: TensorDictBase) -> None:
        """Store the environment's root entries, before it steps."""
        self._t += 1
        if self.steps is None and not _write_some(self._before, root, self._t):
            self.steps = [self._row(t, root.device) for t in range(self._t)]
        if self.steps is not None:
            self._view = _view_of(root, self._shown)

    def after(self, finished: TensorDictBase) -> None:
        """Store a finished step, before anything is reset."""
        if self.steps is None:
            if self._after.write(finished, self._t):
                return
            self.steps = [self._row(t, finished.device) for t in range(self._t)]
            self._view = _view_of(self._row(self._t, finished.device), self._shown)
        step = copied(finished)
        if self._view is not None:
            step.update(self._view)
        self.steps.append(step)

    def _bind(self, window: Window) -> tuple[_Node, _Node]:
        fields = self._fields
        assert fields is not None
        batch = fields.plan.layout.batch_shape
        sizes = {group.key: (*batch, *group.shape) for group in fields.plan.layout.groups}
        leaves: dict[Key, _Entry] = {
            field.key: _Leaf(
                batch_rows(window, field.key, batch),
                torch.Size((*batch, *field.shape)),
                field.dtype,
                field.key not in fields.optional,
            )
            for field in fields.stored
        }
        shown = {key: leaves[key] for key in fields.shown if key in leaves}
        elsewhere = {key: _Unstored(needed=True) for key in shown}
        elsewhere |= {key: _Unstored() for key in fields.ignored}
        return _tree(shown, batch, sizes), _tree({**leaves, **elsewhere}, batch, sizes)

    def _row(self, t: int, device: torch.device | None) -> TensorDictBase:
        """Return a step out of the rows, on the ``device`` of the others."""
        fields, window = self._fields, self._window
        assert fields is not None
        assert window is not None
        row = fields.plan.row(window, t, [field.key for field in fields.stored])
        return row if device is None else row.to(device)


def _tree(
    leaves: Mapping[Key, _Entry], batch: Sequence[int], sizes: Mapping[Key, Sequence[int]]
) -> _Node:
    root = _Node(torch.Size(batch), {})
    for key, leaf in leaves.items():
        node = root
        for depth in range(1, len(key)):
            size = torch.Size(sizes.get(key[:depth], batch))
            inner = node.entries.setdefault(key[depth - 1], _Node(size, {}))
            assert isinstance(inner, _Node)
            node = inner
        node.entries[key[-1]] = leaf
    return root


def _write_some(node: _Node, data: TensorDictBase, t: int) -> bool:
    """Write the entries of ``node`` only; ``data`` may have others."""
    for name, entry in node.entries.items():
        value = data.get(name, None)
        if isinstance(entry, _Node):
            if not isinstance(value, TensorDictBase) or not _write_some(entry, value, t):
                return False
        elif not entry.write(value, t):
            return False
    return True


def _view_of(root: TensorDictBase, shown: Sequence[Key]) -> TensorDictBase | None:
    kept = root.select(*shown, strict=False)
    return None if kept.is_empty() else copied(kept)


def _even(stack: LazyStackedTensorDict) -> bool:
    """Tell whether all of ``stack`` have the same entries, because it shows only common ones."""
    names = set(stack.keys())
    return all(set(part.keys()) == names for part in stack.tensordicts)
