"""The loop on one TensorDict: environment and policy are called as they are.

The TensorDict is carried from step to step, and whatever stands in it stays until somebody replaces
it: what the policy wrote (also under names that nobody declared), what the environment added beside
its specs. What the policy wrote under ``"next"`` replaces the root entry; a reset replaces what the
environment's reset returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.errors import EnvError, note
from gleanrl.core.keys import (
    IS_INIT,
    MASK,
    NEXT,
    POLICY_VERSION,
    STEP_COUNT,
    TRAJ_IDS,
    Key,
    as_key,
    format_key,
    is_private,
    next_key,
)
from gleanrl.core.layout import DoneGroup, EnvLayout, Field, Group, Layout
from gleanrl.core.messages import Report
from gleanrl.core.options import RolloutOptions
from gleanrl.core.protocols import Stop
from gleanrl.core.streams import preserved
from gleanrl.core.window import Array, Window
from gleanrl.envs.tensordict import EndFlags, TensorDictHandle, spec_groups, spec_leaves
from gleanrl.memory.arena import batch_rows
from gleanrl.memory.trees import copied, groups_of, stacked, tensordict_over, time_named
from gleanrl.policies.policy import Actor
from gleanrl.policies.probe import leaves
from gleanrl.rollout.plan import RolloutPlan, check_options, end_groups, mean_rewards
from gleanrl.rollout.source import BaseSource, explanation
from gleanrl.rollout.tracker import Tracker


@dataclass(frozen=True, slots=True)
class _UnsetFlags:
    """End flags that are delivered though the environment does not set all of them."""

    prefix: Key
    present: frozenset[str]
    missing: frozenset[str]

    def derived(self, flags: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the missing flags: each follows from the others."""
        late = flags.get("truncated")
        if "done" in flags:
            done = flags["done"]
            dead = flags.get("terminated", done if late is None else done & ~late)
        else:
            dead = flags["terminated"]
            done = dead if late is None else dead | late
        whole = {"done": done, "terminated": dead, "truncated": done & ~dead}
        return {name: whole[name] for name in self.missing}


MakeActor = Callable[[TensorDictBase, bool], tuple[Actor, TensorDictBase]]
"""Makes the actor from a root TensorDict, of a copy of the user's module if told so.

Also returns the root as the environment would be given it.
"""


class TensorDictRollout(BaseSource):
    """The source of environments that are stepped by their TensorDict methods.

    Rollouts go into the window as long as their steps are what was expected, and are delivered as
    payloads otherwise: step TensorDicts stacked along the last dimension, densely where shapes
    agree and lazily where they do not. One that is stopped keeps its length: beyond its last step
    tensors are zero, and other entries of payloads repeat what that step has.
    """

    def __init__(
        self,
        handle: TensorDictHandle,
        actor: Actor,
        options: RolloutOptions,
        *,
        expected: ExpectedSteps | None = None,
        make_actor: MakeActor | None = None,
        why: str = "the environment works on TensorDicts",
    ) -> None:
        """Collect from the environment of ``handle``, which was reset once.

        Args:
            handle: The environment. Closed by `close`.
            actor: What acts.
            options: What the user asked for.
            expected: What steps are expected to be; ``None`` if they have no fixed layout.
            make_actor: How to make the actor again, of a copy of the user's policy.
            why: Why this is the loop that fits.

        Raises:
            ConfigError: ``max_frames_per_traj`` with an environment that counts steps itself.
            EnvError: ``set_truncated`` with an environment that cannot tell truncation.
        """
        env = handle.env
        super().__init__(handle, env, actor.user, options)
        self._handle, self._actor, self._make_actor = handle, actor, make_actor
        self._why = why
        self._batch = tuple(env.batch_size)
        groups = handle.ends.groups
        self._groups = end_groups(options, groups)
        self._unset_flags = _unset_flags(self._groups, handle.ends.keys)
        observed = [key for key, _ in spec_leaves(env.full_observation_spec)]
        check_options(options, observed, self._groups)
        self.num_envs = envs = handle.num_envs
        self.tracker = Tracker(envs, options.max_frames_per_traj)
        # The tracker looks for "is_init" rows, which are part of the steps here.
        self._no_rows = Window({}, envs, 1)
        self._rewards = [next_key(key) for key, _ in spec_leaves(env.full_reward_spec)]
        self._finite = {
            key
            for spec in (env.full_observation_spec, env.full_reward_spec)
            for key, _ in spec_leaves(spec)
        }
        hidden = map(next_key, observed) if expected is None else expected.ignored
        self._hidden = tuple(hidden) if options.compact else ()
        self._plan = None if expected is None else expected.plan
        known = () if expected is None else expected.shown
        shown = dict.fromkeys((*observed, *handle.ends.keys, *known))
        self._recorder = _Recorder(shown, expected)
        self._begin_episodes(list(range(envs)))

    def own_policy(self) -> None:
        """Act with a copy of the policy from now on: the learner trains the original meanwhile."""
        if self._make_actor is None:
            return
        with preserved():
            self._actor, _ = self._make_actor(self._handle.root.clone(), True)
        self.policy = self._actor.user

    def explain(self) -> str:
        """Say which path every part takes, and why."""
        policy = self._actor.policy
        with self._exploration(), torch.no_grad():
            parts = ["random actions, drawn by the environment"]
            parts = parts if policy is None else policy.explain()
        fixed = "steps go into rows as long as they are what was expected"
        loop = f"one TensorDict, carried from step to step ({self._why}); "
        return explanation(
            loop + (fixed if self._plan else "steps have no fixed layout"),
            f"{type(self.env).__name__}, called as it is by its TensorDict methods",
            parts,
        )

    def layout(self) -> Layout | None:
        """Describe one step; ``None`` if rollouts travel as payloads."""
        return None if self._plan is None else self._plan.layout

    def collect(self, window: Window | None, steps: int, stop: Stop, random: bool) -> Report:
        """Take ``steps`` steps, fewer if ``stop`` is raised."""
        recorder, policy = self._recorder, self._actor.policy
        with self.rolling(torch.no_grad()):
            act = self._act
            if random or policy is None:
                act = self._begin_random()
            if policy is not None:
                policy.begin()
            recorder.begin(window)
            if self._plan is not None and recorder.steps is None:
                assert window is not None
                self._plan.begin(window, self._no_rows)
            self.tracker.begin(self._no_rows, self._no_rows)
            self._handle.begin()
            act, step = self._clock.begin(act, self._handle.step)
            taken = self._loop(act, step, steps, stop)
            times = self._clock.end()
            if policy is not None:
                policy.finish()
            payload = self._finish(window, taken, steps)
        return self._report(taken, times, payload=payload)

    # -- one step --------------------------------------------------------------------------------

    def _loop(
        self, act: Callable[[], None], step: Callable[..., Sequence[int]], steps: int, stop: Stop
    ) -> int:
        handle, tracker, recorder = self._handle, self.tracker, self._recorder
        follow = (
            self._follow if self._actor.policy_written_state or self._actor.needs_is_init else None
        )
        before, after = recorder.before, recorder.after
        for t in range(steps):
            try:
                act()
            except Exception as err:
                note(err, f"the policy raised this at step {t} of the rollout")
                raise
            before(handle.root)
            try:
                ended = step(tracker.due(t) if t == tracker.next_due else (), after)
            except Exception as err:
                note(err, f"{type(handle.env).__name__} raised this at step {t} of the rollout")
                raise
            if follow is not None:
                follow()
            if ended:
                tracker.end(t, ended)
                self._begin_episodes(ended)
            if stop[0]:
                return t + 1
        return steps

    def _act(self) -> None:
        root, actor = self._handle.root, self._actor
        policy = actor.policy
        assert policy is not None
        if actor.device is None:
            out = policy(root)
            if out is not root:
                root.update(out)
        else:
            home = root.device or torch.device("cpu")
            root.update(policy(root.to(actor.device)).to(home))
        for key, dtype in actor.casts:
            root.set(key, root.get(key).to(dtype))

    def _begin_random(self) -> Callable[[], None]:
        """Return what acts at random; what the policy would write is zero, and carried like it."""
        handle, actor = self._handle, self._actor
        if actor.zero_outputs is not None:
            handle.root.update(actor.zero_outputs.clone())
        states = [(state.key, next_key(state.key)) for state in actor.states]

        def act() -> None:
            root = handle.root = handle.env.rand_action(handle.root)
            for key, after in states:
                root.set(after, torch.zeros_like(root.get(key)))

        return act

    def _follow(self) -> None:
        """Let what the policy wrote under ``"next"`` replace its root entries."""
        root, after = self._handle.root, self._handle.after
        assert after is not None
        for key in self._actor.policy_written_state:
            value = after.get(key, None)
            if value is not None:
                root.set(key, value)
        if self._actor.needs_is_init:
            flags = torch.zeros((*self._batch, 1), dtype=torch.bool, device=root.device)
            root.set(IS_INIT, flags)

    def _begin_episodes(self, envs: Sequence[int]) -> None:
        """Zero the states that are provided and raise ``"is_init"`` in ``envs``."""
        root = self._handle.root
        for state in self._actor.states:
            value = root.get(state.key, None)
            if value is None:
                shape = (*self._batch, *state.shape)
                value = torch.zeros(shape, dtype=state.dtype, device=root.device)
            root.set(state.key, self._fill(value, envs, 0))
        if self._actor.needs_is_init:
            value = root.get(IS_INIT, None)
            if value is None:
                value = torch.zeros((*self._batch, 1), dtype=torch.bool, device=root.device)
            root.set(IS_INIT, self._fill(value, envs, 1))

    def _fill(self, value: torch.Tensor, envs: Sequence[int], with_: int) -> torch.Tensor:
        flat = value.reshape((self.num_envs, *value.shape[len(self._batch) :])).clone()
        flat[list(envs)] = with_
        return flat.reshape(value.shape)

    # -- a whole rollout -------------------------------------------------------------------------

    def _finish(self, window: Window | None, taken: int, steps: int) -> TensorDictBase | None:
        """Complete the window; or return what did not fit it."""
        recorder = self._recorder
        if recorder.steps is not None:
            return self._assemble(recorder.steps, steps)
        assert self._plan is not None
        assert window is not None
        for unset in self._unset_flags:
            prefix = (NEXT, *unset.prefix)
            flags = {name: window.tensor((*prefix, name))[:, :taken] for name in unset.present}
            for name, value in unset.derived(flags).items():
                window.tensor((*prefix, name))[:, :taken] = value
        self._plan.finish(window, self.tracker, taken, self.policy_version)
        return None

    def _assemble(self, taken: list[TensorDictBase], steps: int) -> TensorDictBase:
        """Stack the steps, and add what is counted in bulk."""
        options, valid = self.options, len(taken)
        if options.check_finite:
            for t, step in enumerate(taken):
                self._check_finite(step, t)
        # Each its own: lazy stacks set entries in what they hold.
        never = [taken[-1].apply(torch.zeros_like) for _ in range(valid, steps)]
        stack = stacked([*taken, *never], len(self._batch))
        batch = time_named(self._delivered(stack), len(self._batch))
        ids = np.zeros((self.num_envs, steps), np.int64)
        counts = np.zeros((self.num_envs, steps + 1), np.int64)
        self.tracker.finish(valid, self._payload_rewards(taken), ids, counts)
        if options.track_traj_ids:
            batch.set(TRAJ_IDS, self._shaped(ids))
        self._add_flags(batch)
        if options.counts:
            after = counts[:, :-1] + 1
            counts[:, valid:], after[:, valid:] = 0, 0
            batch.set(STEP_COUNT, self._shaped(counts[:, :-1]).unsqueeze(-1))
            batch.set(next_key(STEP_COUNT), self._shaped(after).unsqueeze(-1))
        made = torch.arange(steps).expand(batch.batch_size) < valid
        if options.track_policy_version:
            batch.set(POLICY_VERSION, made * self.policy_version)
            batch.set(next_key(POLICY_VERSION), made * self.policy_version)
        if options.mask:
            batch.set(MASK, made)
        if options.set_truncated:
            self._truncate(batch, valid - 1)
        return batch

    def _payload_rewards(self, steps: list[TensorDictBase]) -> Array:
        """Return one reward per frame, ``[P, T]``; steps need not be alike."""
        found = []
        for step in steps:
            rewards = [step.get(key) for key in self._rewards]
            found.append(mean_rewards(rewards, self._batch).reshape(-1))
        return np.stack(found, 1)

    def _add_flags(self, batch: TensorDictBase) -> None:
        """Add flags that steps lack: at the root they are down, others follow from each other."""
        there = leaves(batch)
        for unset in _unset_flags(self._groups, [key[1:] for key in there if key[0] == NEXT]):
            prefix = (NEXT, *unset.prefix)
            flags = {name: batch.get((*prefix, name)) for name in unset.present}
            for name, value in unset.derived(flags).items():
                batch.set((*prefix, name), value)
        there = leaves(batch)
        for group in self._groups:
            for key in group.keys():
                if key not in there and next_key(key) in there:
                    batch.set(key, torch.zeros_like(batch.get(next_key(key))))

    def _delivered(self, batch: TensorDictBase) -> TensorDictBase:
        drop = [*self._hidden, *(key for key in leaves(batch) if is_private(key))]
        return batch.exclude(*drop) if drop else batch

    def _check_finite(self, step: TensorDictBase, t: int) -> None:
        def look(name: Any, value: torch.Tensor) -> None:
            key = as_key(name)
            own = key[1:] if key[0] == NEXT else key
            if own in self._finite and value.is_floating_point() and not value.isfinite().all():
                raise EnvError(
                    f"{format_key(key)} holds NaN or infinity at step {t} of the rollout "
                    "(check_finite=True)"
                )

        step.named_apply(look, nested_keys=True, filter_empty=True)

    def _shaped(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values.copy()).reshape(*self._batch, -1)

    def _truncate(self, batch: TensorDictBase, step: int) -> None:
        """Mark ``step`` as truncated where the episode did not end by itself."""
        dim = len(self._batch)
        for group in self._groups:
            if group.truncated:
                late, done = (
                    batch.get((NEXT, *group.prefix, name)).clone() for name in ("truncated", "done")
                )
                last = done.select(dim, step)
                late.select(dim, step).logical_or_(~last)
                last.fill_(True)
                batch.set((NEXT, *group.prefix, "truncated"), late)
                batch.set((NEXT, *group.prefix, "done"), done)

    # -- between rollouts ------------------------------------------------------------------------

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        handle, before = self._handle, self._handle.root
        handle.reset(envs, options)
        if self._keeps and handle.root is not before:
            handle.root = before.exclude(NEXT).update(handle.root)
        self.tracker.restart(envs)
        self._begin_episodes(range(self.num_envs) if envs is None else envs)


def _unset_flags(groups: Sequence[DoneGroup], given: Sequence[Key]) -> tuple[_UnsetFlags, ...]:
    found = []
    for group in groups:
        present = frozenset(key[-1] for key in group.keys() if key in given)
        missing = frozenset(key[-1] for key in group.keys()) - present
        if missing and present & {"done", "terminated"}:
            found.append(_UnsetFlags(group.prefix, present, missing))
    return tuple(found)


# -- what steps are expected to be -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectedSteps:
    """What finished steps consist of, as far as it is known before one was taken."""

    plan: RolloutPlan
    """What is delivered."""
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
    env: Any, layout: EnvLayout, root: TensorDictBase, actor: Actor, options: RolloutOptions
) -> ExpectedSteps | None:
    """Return what steps of ``env`` are expected to be, before one was taken.

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
    shown = () if options.compact else layout.observations
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
        ignored=tuple(next_key(key) for key in observed if key not in after),
    )


def _groups(env: Any, root: TensorDictBase, size: int) -> Iterable[Group]:
    """Yield nested parts with a batch size of their own, at the root and under ``"next"``.

    Data are believed where they differ from specs.
    """
    trees = (env.full_observation_spec, env.full_action_spec, env.full_reward_spec)
    shapes = {key: shape[size:] for tree in trees for key, shape in spec_groups(tree)}
    found = {key: Group(key, more, (None,) * len(more)) for key, more in shapes.items() if more}
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
        """Store ``value`` as row ``t``; tell whether it is what was expected."""
        return True

    def clear(self, t: int) -> None:
        """Store that step ``t`` does not have it."""


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
        """Clear what ``value`` lacks; tell whether it may lack all of it."""
        present = set(value.keys())
        missing = [entry for name, entry in self.entries.items() if name not in present]
        for entry in missing:
            entry.clear(t)
        return not any(entry.needed for entry in missing)

    def clear(self, t: int) -> None:
        for entry in self.entries.values():
            entry.clear(t)


_Entry: TypeAlias = _Unstored | _Leaf | _Node


class _Recorder:
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
        """The steps as TensorDicts; ``None`` as long as all of them lie in the window."""

    def begin(self, window: Window | None) -> None:
        """Start a rollout; without a window, or without fields, steps are kept as they are."""
        self._t, self._window = -1, window
        rows = self._fields is not None and window is not None and window.keys()
        self.steps = None if rows else []
        if rows:
            assert window is not None
            if window not in self._trees:
                self._trees[window] = self._bind(window)
            self._before, self._after = self._trees[window]

    def before(self, root: TensorDictBase) -> None:
        """Store what the environment showed, before it steps."""
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
        batch = fields.plan.layout.batch_shape
        views = {f.key: batch_rows(window, f.key, batch)[t].clone() for f in fields.stored}
        row = tensordict_over(views, batch, [None] * len(batch), fields.plan.layout.groups)
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
    """Write the entries of ``node`` only; there may be others in ``data``."""
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
    """Tell whether all of ``stack`` have the same entries: it shows only those."""
    names = set(stack.keys())
    return all(set(part.keys()) == names for part in stack.tensordicts)
