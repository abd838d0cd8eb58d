"""Steps of Gymnasium environments and recorded transforms, on one row of memory.

The Gymnasium environments step into a raw row. Recorded calls compute from it what the transforms
return, for all members at once, and the results are copied into the rows of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

import numpy as np
import torch

from gleanrl.core.keys import DONE, TERMINATED, Key, as_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.window import Array, Window
from gleanrl.envs.recorded_or_called_transforms import (
    Entries,
    Method,
    Phase,
    TransformProgram,
    Unproven,
    record,
    treatment,
)
from gleanrl.envs.torchrl_members import FLAGS, GymMembers, WorkerMembers, after_step
from gleanrl.envs.torchrl_parts import (
    Parts,
    copied_transform,
    is_counter,
    kept_rows,
    tensors_of,
    with_lives,
)
from gleanrl.operations.change_watch import Unwatchable, Watch, same_memory
from gleanrl.operations.op_recorder import array_of

_RESET: Key = ("_reset",)
_NOTHING: tuple[int, ...] = ()


class RecordedStep:
    """The steps of an environment of `Parts`, with the present settings of its transforms."""

    def __init__(self, layout: EnvLayout, parts: Parts, passed: Collection[Key] = ()) -> None:
        """Record the transforms in ``parts``.

        ``passed``: Observations that the policy writes under ``"next"`` before each step.
        """
        self.parts = parts
        self.reset_s = 0.0
        """Seconds in resets."""
        self._besides = _besides_settings(parts)
        self._memory = memory = _Memory(layout, parts, passed)
        self.members = memory.members
        """The environments, without their transforms."""
        settings, constants, batch = parts.numbers, _watched(parts).tensors, layout.batch_shape

        def recorded(name: str, before: Entries, data: Entries) -> TransformProgram:
            phases = _phases(parts, name)
            return record(phases, before, data, batch, settings=settings, constants=constants)

        inverse = recorded("_inv_call", {}, {**memory.root, **memory.given})
        step = recorded("_step", inverse.results, memory.stepped)
        reset = recorded("_reset", {_RESET: memory.mask}, memory.reset)
        if len([*chain.from_iterable(parts.shells[:1]), *parts.wholes]) > 1 and inverse.calls:
            raise Unproven("several transformed environments, one in another, change actions")
        memory.bind(layout, inverse, step, reset)
        self._act_calls: list[Callable[[], Any]] = [*inverse.calls, *memory.acting]
        self._step_calls, self._reset_calls = step.calls, reset.calls
        programs = {"action": inverse, "step": step, "reset": reset}
        self._called = {phase: one.as_they_are for phase, one in programs.items()}
        self._watch = _watched(parts)  # transforms keep names that their first calls look up

    def explain(self) -> str:
        text = self.members.explain()
        for transform in self.parts.transforms:
            name = type(transform).__name__
            called = [phase for phase, names in self._called.items() if name in names]
            how = f"called as it is, on rows, in each {' and '.join(called)}"
            text += f"\n  {name}: {how if called else 'recorded tensor calls'}"
        return text

    def changed(self) -> bool:
        """Tell whether settings of transforms were replaced since they were recorded."""
        held, now = self._memory.held, kept_rows(self.parts)
        moved = held.keys() != now.keys() or any(now[key] is not held[key] for key in held)
        moved |= self._besides != _besides_settings(self.parts)
        return moved or self._watch.changed() or not self.parts.alike()

    def begin(
        self, window: Window, carry: Window, on_partial_reset: Callable[[Sequence[int]], None]
    ) -> None:
        """Bind to the rows of ``window``, whose first root row is the present.

        ``on_partial_reset`` is called with members that are reset while others continue.
        """
        memory, self._on_partial_reset = self._memory, on_partial_reset
        memory.members.begin(window)
        self._given = [(window.rows(key), row) for key, row in memory.given_rows]
        self._shown: list[tuple[list[Array], Array]] = []
        self._roots = []
        for key, source in memory.observed:
            root = window.rows(key)[1:] + carry.rows(key)
            self._roots.append((root, memory.after_reset[key], memory.kept_rows.get(key)))
            self._shown.append((root, source))
            if next_key(key) in window.keys():
                self._shown.append((window.rows(next_key(key)), source))
        self._shown += [(window.rows(next_key(key)), source) for key, source in memory.rewarded]
        self._flags = [(key, window.rows(next_key(key)), row) for key, row in memory.ending]
        self._present = [(kept, window.rows(key)[0]) for key, kept in memory.kept_rows.items()]
        self.read_present()

    def read_present(self) -> None:
        """Have transforms see the first root row of the window, which others may write."""
        for kept, row in self._present:
            kept[...] = row

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        memory = self._memory
        for rows, row in self._given:
            row[...] = rows[t]
        for call in self._act_calls:
            call()
        memory.members.step()
        for call in self._step_calls:
            call()
        for rows, source in self._shown:
            rows[t][...] = source
        if cut or b"\1" in memory.done.tobytes():
            return self._end(t, cut, resets)
        for kept, source in memory.kept:
            kept[...] = source
        return _NOTHING

    def _end(self, t: int, cut: Sequence[int], resets: bool) -> Sequence[int]:
        memory = self._memory
        for kept, source in memory.kept:
            kept[...] = source
        ended = np.flatnonzero(memory.done).tolist()
        late = [env for env in cut if env not in ended]
        for key, rows, source in self._flags:
            rows[t][...] = source
            if late and key != TERMINATED:
                rows[t][late] = True
        ended = sorted(ended + late)
        if resets:
            began = monotonic()
            memory.reset_members(ended)
            for call in self._reset_calls:
                call()
            some = len(ended) < memory.count
            places: Sequence[Any] = ended if some else [...]  # a list as an index takes longer
            for roots, source, root in self._roots:
                row = roots[t]
                for env in places:
                    row[env] = source[env]
                    if root is not None:
                        root[env] = source[env]
            if some:
                self._on_partial_reset(ended)
            self.reset_s += monotonic() - began
        return ended


def _besides_settings(parts: Parts) -> list[Any]:
    """Return what recorded calls rely on besides settings of transforms.

    Calls keep alive what lies in `Parts.places`, so tensors that replace it lie elsewhere. An
    attribute that an environment gets may hide that by which lives are found.
    """
    lives: list[Any] = [part for part in parts.transforms if treatment(part).lives]
    hidden = [part.eol_attribute[0] in vars(env) for part in lives for env in parts.envs]
    return [parts.places, hidden, [member.wrapper_frame_skip for member in parts.members]]


def _watched(parts: Parts) -> Watch:
    """Return a watch over ``parts``, as they are now."""
    watch = Watch()
    try:
        parts.watch(watch)
    except Unwatchable as err:
        raise Unproven(f"settings of a transform cannot be watched: {err}") from err
    return watch


def _phases(parts: Parts, name: str) -> Iterable[Method]:
    """Return a phase of all transforms, in the order in which they are called."""
    transforms: list[Any] = list(zip(parts.transforms, parts.stands_for, strict=True))
    for part, theirs in reversed(transforms) if name == "_inv_call" else transforms:
        trial, state, outside = None, [], []
        only: list[Any] | None = None
        if name == "_inv_call":
            only = [*part.in_keys_inv, *part.out_keys_inv]
        elif treatment(part).lives and parts.members:
            part, lives, read = with_lives(part, parts)
            outside = [(lives, read)]
        elif name in treatment(part).called:
            trial, only = _trial(part, theirs, name), [*part.in_keys, *part.out_keys, "_reset"]
        elif treatment(part).stateful:
            trial = _copied_phase(part, theirs, name)
            state = [one for each in theirs or [part] for one in tensors_of(each)]
            state = [one for one in state if one.dtype is not torch.bool]
        if any(tensor.is_shared() for tensor in state):  # type: ignore[no-untyped-call]  # torch's
            state = []  # other processes change them
        keys = None if only is None else frozenset(map(as_key, only))
        call = _phase_of(part, theirs, name)
        yield Method(type(part).__name__, call, trial, state, keys, outside)


def _trial(part: Any, theirs: Sequence[Any], name: str) -> Phase:
    """Return a function that shows the results of a phase of ``part``, and changes nothing."""
    if is_counter(part):
        return _copied_phase(part, theirs, name)
    if type(part).__name__ == "ActionMask":  # writes the mask into a spec
        return lambda _, data: data
    return _phase_of(part, theirs, name)


def _copied_phase(part: Any, theirs: Sequence[Any], name: str) -> Phase:
    """Return what a phase of copies returns, if these need no tensors but those of now."""
    originals, copied = [part, *theirs], [copied_transform(one) for one in [part, *theirs]]
    phase = _phase_of(copied[0], copied[1:], name)

    def call(before: Any, data: Any) -> Any:
        found = phase(before, data)
        held, needed = ([len(tensors_of(one)) for one in each] for each in (originals, copied))
        if held != needed:
            raise Unproven(f"{type(part).__name__} has no statistics of some of its entries yet")
        return found

    return call


def _phase_of(part: Any, theirs: Sequence[Any], name: str) -> Phase:
    """Return a phase of ``part``, or that of ``theirs``, which act for one member each.

    The rows of members that are not reset may hold anything.
    """
    if name == "_inv_call":
        return lambda _, data: part._inv_call(data)
    if not theirs:
        return getattr(part, name)  # type: ignore[no-any-return]  # TorchRL's
    phases = [getattr(one, name) for one in theirs]

    def call(before: Any, data: Any) -> Any:
        resets = before.get(_RESET, None) if name == "_reset" else None
        given = [i for i in range(len(phases)) if resets is None or bool(resets[i].any())]
        found = {i: phases[i](before[i], data[i]) for i in given}
        each = [found.get(i, found[given[0]]) for i in range(len(phases))]
        return data.empty().update(
            {key: _whole(data, key, each) for key in each[0].keys(True, True)}
        )

    return call


def _whole(data: Any, key: Any, each: Sequence[Any]) -> torch.Tensor:
    """Return an entry of all members: that of ``data`` if the values of ``each`` are its rows."""
    values: list[torch.Tensor] = [one.get(key) for one in each]
    rows: torch.Tensor | None = data.get(key, None)
    if rows is not None and all(map(same_memory, rows, values)):
        return rows
    return torch.stack(values)


class _Memory:
    """The rows of one step, before and behind the transforms; arrays and tensors share memory."""

    def __init__(self, layout: EnvLayout, parts: Parts, passed: Collection[Key]) -> None:
        """Allocate rows; `Unproven` if TorchRL shows other data than the members have."""
        batch, envs = layout.batch_shape, layout.num_envs
        kind = GymMembers if parts.members else WorkerMembers
        self.members, self.count = kind(parts, batch), envs
        members, names, raw = self.members, self.members.names, self.members.raw
        passing = [field for field in layout.observations if field.key in passed]
        if passing and not parts.members:
            raise Unproven("the policy passes entries to workers")
        taken = Window.allocate([*layout.actions, *map(after_step, passing)], envs, 1)
        root = Window.allocate([*layout.observations, *FLAGS], envs, 1)
        self.held = kept_rows(parts)

        def entries(window: Window, fields: Sequence[Field], nxt: bool = False) -> Entries:
            keys = {f.key: next_key(f.key) if nxt else f.key for f in fields}
            shapes = {f.key: (*batch, *f.shape) for f in fields}
            return {
                names.get(key, key): window.tensor(held).view(shapes[key])
                for key, held in keys.items()
            }

        self.given = entries(taken, layout.actions)
        """What the policy wrote."""
        self.action_rows = {f.key: raw.rows(f.key)[0] for f in members.actions}
        self.stepped = entries(raw, [*members.shown, *members.rewards], nxt=True)
        self.reset = entries(members.fresh, members.shown)
        names = {}
        self.root = entries(root, [*layout.observations, *FLAGS])
        """What transforms see of the step before."""
        self.root_rows = {f.key: root.tensor(f.key)[:, 0] for f in layout.observations}
        self.mask = torch.ones(*batch, 1, dtype=torch.bool)
        self._mask = self.mask.view(envs).numpy()
        self.stepped |= entries(taken, passing, nxt=True)
        self.given_rows = [(key, taken.rows(key)[0]) for key in taken.keys()]

    def bind(
        self,
        layout: EnvLayout,
        inverse: TransformProgram,
        step: TransformProgram,
        reset: TransformProgram,
    ) -> None:
        """Find the results of recorded calls; `Unproven` if specs declare other entries."""
        envs = layout.num_envs
        observed = {f.key: f for f in layout.observations}
        rewards = {f.key: f for f in layout.rewards}
        flags = {flag.key: flag for flag in FLAGS}
        _require_fields(step.results, {**observed, **rewards, **flags}, layout, "a step")
        _require_fields(reset.results, {**observed, **flags}, layout, "a reset")
        inner = {f.key: f for f in self.members.actions}
        _require_fields(inverse.results, {**observed, **flags, **inner}, layout, "an action")
        if any(inverse.results[key] is not value for key, value in self.root.items()):
            raise Unproven("transforms change more than actions before a step")

        def rows(program: TransformProgram, key: Key) -> Array:
            value = array_of(program.results[key])
            if value is None:
                raise Unproven(f"{key} is no array")
            return value.reshape(envs, *value.shape[len(layout.batch_shape) :])

        self.acting = [
            partial(np.copyto, to, rows(inverse, key)) for key, to in self.action_rows.items()
        ]
        self.observed = [(key, rows(step, key)) for key in observed]
        self.rewarded = [(key, rows(step, key)) for key in rewards]
        self.ending = [(key, rows(step, key)) for key in flags]
        self.done = rows(step, DONE)
        self.after_reset = {key: rows(reset, key) for key in observed}
        programs = [step.ops, inverse.ops]
        used = [key for key in observed if any(ops.reads(self.root[key]) for ops in programs)]
        self.kept_rows = {key: self.root_rows[key].numpy() for key in used}
        self.kept = [(self.kept_rows[key], rows(step, key)) for key in used]

    def reset_members(self, envs: list[int]) -> None:
        """Reset members, into the row for this."""
        self.members.reset(envs)
        self._mask.fill(False)
        for env in envs:
            self._mask[env] = True


def _require_fields(
    found: Entries, fields: Mapping[Key, Field], layout: EnvLayout, what: str
) -> None:
    wanted = {key: ((*layout.batch_shape, *f.shape), f.dtype) for key, f in fields.items()}
    came = {key: (tuple(value.shape), value.dtype) for key, value in found.items()}
    if came != wanted:
        differing = sorted(key for key in {*came, *wanted} if came.get(key) != wanted.get(key))
        raise Unproven(f"transforms make other entries of {what} than declared: {differing}")
