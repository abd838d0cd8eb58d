"""Finished steps of environments with TensorDict methods: their layout and their storage.

Steps of a fixed layout go into rows of a window. Those of an open layout are kept as TensorDicts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.errors import EnvError, PolicyError
from gleanrl.core.keys import NEXT, STEP_COUNT, TRUNCATED, Key, as_key, format_key, next_key
from gleanrl.core.layout import Field, Group
from gleanrl.core.options import SourceOptions
from gleanrl.core.window import Window
from gleanrl.envs.tensordict_envs import EndFlags, spec_groups
from gleanrl.memory.batch_arena import batch_rows
from gleanrl.memory.tensordicts import copied, described, groups_of
from gleanrl.policies.diagnosis import ONE_LAYOUT
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.policy import Actor
from gleanrl.rollout.delivered_fields import DeliveredFields


@dataclass(frozen=True, slots=True)
class ExpectedSteps:
    """The expected contents of finished steps, as far as known before the first step."""

    fields: DeliveredFields
    stored: tuple[Field, ...]
    """The part of it that steps hold; the rest is written in bulk."""
    optional: frozenset[Key]
    """Entries that some steps lack; they are stored as zeros then."""
    ignored: tuple[Key, ...]
    """Entries that steps hold and that are not delivered."""


def shown_entries(
    shown: EnvContract, flags: Sequence[Key], root: TensorDictBase
) -> tuple[Key, ...]:
    """Return the root entries to record before the environment steps, because it may reuse memory.

    These are the entries that it shows, its end ``flags``, and what a policy returned that is an
    observation as it is: of ``root``, a root TensorDict as the environment gets it.
    """
    if shown.layout is None:
        return (*shown.observed, *flags)
    found = {as_key(key): value for key, value in root.items(True, True)}
    places = {
        key: value.untyped_storage().data_ptr()
        for key, value in found.items()
        if isinstance(value, torch.Tensor) and key[0] != NEXT and key not in shown.acted
    }
    observed = [field.key for field in shown.layout.observations]
    memory = {places[key] for key in observed if key in places}
    same = [key for key, place in places.items() if place in memory]
    return tuple(key for key in dict.fromkeys((*observed, *same, *flags)) if key in found)


def expect(
    env: Any, actor: Actor, contract: EnvContract, options: SourceOptions
) -> ExpectedSteps | None:
    """Return the expected contents of steps of ``env``, before the first step.

    Its specs, its first reset and one call of the policy tell. The first step may prove them wrong
    (see `StepRecorder`). ``None`` if the layout is not fixed, or where an entry does not begin with
    the batch dimensions of the environment.
    """
    layout, root = contract.layout, actor.after
    if layout is None:
        return None
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
    fields = DeliveredFields(
        layout,
        [*roots.values(), *late.values()],
        written.values(),
        options,
        groups=tuple(_groups(env, root, size)),
    )
    unset = fields.flags - flags
    stored = tuple(
        field
        for field in fields.layout.fields
        if field.key not in fields.bulk and field.key[field.key[0] == NEXT :] not in unset
    )
    left_out = {field.key for field in layout.observations if options.compact_obs} - written.keys()
    return ExpectedSteps(
        fields,
        stored=stored,
        # Random frames lack states that the policy makes itself, also under "next".
        optional=frozenset((*late, *map(next_key, late), *flags)),
        ignored=(*map(next_key, left_out), *(key for key in actor.provided if key == STEP_COUNT)),
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

_Misfit: TypeAlias = tuple[Key, str, str]
"""An entry that is not what was expected: its key, a description of it, and of what it was."""


@dataclass(slots=True)
class _Leaf:
    """A tensor."""

    rows: Sequence[torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    needed: bool
    """Whether every step has it."""

    def write(self, value: object, t: int) -> _Misfit | None:
        """Store ``value`` as row ``t``, if it is what was expected."""
        if not isinstance(value, torch.Tensor) or (
            value.shape != self.shape or value.dtype is not self.dtype
        ):
            return (), described(value), described(self.rows[0])
        self.rows[t].copy_(value)
        return None


@dataclass(slots=True)
class _Node:
    """A nested part, or the step itself."""

    size: torch.Size
    entries: dict[str, _Leaf | _Node] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    """Entries that are not stored, or were stored before."""

    def write(self, value: object, t: int) -> _Misfit | None:
        """Store every entry of ``value`` as row ``t``; private ones are not delivered."""
        if not isinstance(value, TensorDictBase) or value.batch_size != self.size:
            return (), described(value), f"of batch size {tuple(self.size)}"
        if isinstance(value, LazyStackedTensorDict) and (odd := _only_in_some(value)):
            return (odd,), "an entry of only some environments", "in all or in none"
        entries, found = self.entries, 0
        for name, item in value.items():
            entry = entries.get(name)
            if entry is None:
                if name not in self.others and name[0] != "_":
                    return (name,), described(item), "not there"
            elif wrong := entry.write(item, t):
                return (name, *wrong[0]), *wrong[1:]
            else:
                found += 1
        return None if found == len(entries) else self._fill(value, t)

    def _fill(self, value: TensorDictBase, t: int) -> _Misfit | None:
        """Zero the entries that ``value`` lacks, if it may lack all of them."""
        present = set(value.keys())
        for name, entry in self.entries.items():
            if name not in present:
                if isinstance(entry, _Node) or entry.needed:
                    wrong = entry.write(None, t)
                    return wrong and ((name,), *wrong[1:])
                entry.rows[t].zero_()
        return None


DECLARE_TRUNCATED = (
    "Its done_spec does not have this flag: declare it, by add_truncated_keys() where the "
    "environment is made, or leave it out"
)


class StepRecorder:
    """Keeps the finished steps of one rollout after the other.

    Construction never steps the environment, so the first step of all decides: if it is not what
    was expected, the layout is open, and steps are kept as TensorDicts from then on. A later step
    that differs is an error.
    """

    def __init__(
        self, env_name: str, shown: Iterable[Key], expected: ExpectedSteps | None = None
    ) -> None:
        """Keep steps with root entries ``shown``, recorded before the environment steps.

        Without ``expected`` contents the layout is open.
        """
        self._env_name = env_name
        self._shown = tuple(shown)
        self._expected = expected
        self._bound: weakref.WeakKeyDictionary[Window, _Bound] = weakref.WeakKeyDictionary()
        self._rows: _Bound
        self._t = -1
        self._fixed = False
        """Whether a step was as expected."""
        self._view: TensorDictBase | None = None
        self.steps: list[TensorDictBase] | None = None
        """The steps of an open layout; ``None`` if they are in the window."""

    def begin(self, window: Window | None) -> None:
        """Start a rollout; without a window, or without fields, keep steps unchanged."""
        self._t = -1
        if self._expected is None or window is None or not window.keys():
            self.steps = []
            return
        self.steps = None
        if window not in self._bound:
            self._bound[window] = self._bind(window, self._expected)
        self._rows = self._bound[window]

    def before(self, root: TensorDictBase) -> None:
        """Store the environment's root entries, before it steps; all must be as before."""
        self._t += 1
        for name, leaf in () if self.steps is not None else self._rows[0]:
            value = root.get(name, None)
            if wrong := leaf.write(value, self._t):
                self._open(as_key(name), *wrong[1:])
                break
        if self.steps is not None or not self._fixed:
            kept = root.select(*self._shown, strict=False)
            self._view = None if kept.is_empty() else copied(kept)

    def after(self, finished: TensorDictBase) -> None:
        """Store a finished step, before anything is reset; entries must be as in earlier ones."""
        if self.steps is None:
            node = self._rows[1]
            wrong = node.write(finished, self._t)
            if wrong is None:
                self._fixed = True
                return
            self._open(wrong[0] or (NEXT,), *wrong[1:])
        step = copied(finished)
        if self._view is not None:
            step.update(self._view)
        assert self.steps is not None
        self.steps.append(step)

    def _open(self, key: Key, came: str, before: str) -> None:
        """Keep steps as TensorDicts, as ``key`` changed; an error if some were stored already."""
        if not self._fixed:
            self._expected, self.steps = None, []
            return
        from_env = key[0] == NEXT
        kind = EnvError if from_env else PolicyError
        did = "returned" if from_env else "was given"
        raise kind(
            f"{self._env_name} {did} {format_key(key)} as {came} at step {self._t} of the rollout; "
            f"in the first step it was {before}. "
            + (DECLARE_TRUNCATED if from_env and key[-1:] == TRUNCATED else ONE_LAYOUT)
        )

    def _bind(self, window: Window, expected: ExpectedSteps) -> _Bound:
        layout = expected.fields.layout
        batch = layout.batch_shape
        leaves = {
            field.key: _Leaf(
                batch_rows(window, field.key, batch),
                torch.Size((*batch, *field.shape)),
                field.dtype,
                field.key not in expected.optional,
            )
            for field in expected.stored
        }
        sizes = {group.key: torch.Size((*batch, *group.shape)) for group in layout.groups}
        before = {key: leaves.pop(key) for key in self._shown if key in leaves}
        root = _Node(torch.Size(batch))
        for key, leaf in leaves.items():
            _parent(root, key, sizes).entries[key[-1]] = leaf
        for key in (*before, *expected.ignored):
            _parent(root, key, sizes).others.add(key[-1])
        return [(key[0] if len(key) == 1 else key, leaf) for key, leaf in before.items()], root


_Bound: TypeAlias = tuple[list[tuple[str | Key, _Leaf]], _Node]
"""Where a step goes in one window: before the environment steps, and afterwards."""


def _parent(root: _Node, key: Key, sizes: Mapping[Key, torch.Size]) -> _Node:
    """Return the part that holds ``key``, made where it is missing."""
    node = root
    for depth in range(1, len(key)):
        size = sizes.get(key[:depth], root.size)
        inner = node.entries.setdefault(key[depth - 1], _Node(size))
        assert isinstance(inner, _Node)
        node = inner
    return node


def _only_in_some(stack: LazyStackedTensorDict) -> str | None:
    """Return an entry that not all of ``stack`` have, because it shows only common ones."""
    names = [set(part.keys()) for part in stack.tensordicts]
    return min(set().union(*names) - set.intersection(*names), default=None)
