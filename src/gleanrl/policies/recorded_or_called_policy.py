"""Policies of the user's at work: as replayed calls on rows of a window, or on a TensorDict.

Called on one TensorDict that stays from step to step is what a policy means: it gets everything at
the root, also what it wrote there itself at earlier steps, and whatever it writes stays. Units that
are proven equal to tensor calls are replaced by them; all others are called as they are, in their
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.keys import NEXT, Key, as_key, format_key, is_private, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import JointAct
from gleanrl.core.window import Window
from gleanrl.memory.batch_arena import batch_rows
from gleanrl.memory.device_staging import Staging, can_stage
from gleanrl.memory.tensordicts import env_root, nest
from gleanrl.operations.change_watch import equal, same_memory, writes_so_far
from gleanrl.operations.proofs import may_lower
from gleanrl.policies.diagnosis import unlike_first_call, wrote_otherwise
from gleanrl.policies.lowering import Lowered, Lowering, Program, check_unchanged, is_like
from gleanrl.policies.probe import PolicySignature, call_on
from gleanrl.policies.submodules import selects


class ProgramPolicy:
    """A policy that acts on the rows of a window.

    Nothing is decided between `begin` and `finish`: the exploration type, hooks, training mode and
    the identity of weights are read in `begin`, and the program is built anew where they changed.
    Values of weights are read by every call, so what an optimizer wrote shows at once. A policy
    that is not proven equal to a program is called on a TensorDict instead. A step at which the
    policy writes other entries, shapes or dtypes than in its first call is an error.
    """

    requested: JointAct | None = None

    def __init__(
        self,
        inner: Any,
        call: Callable[[Any], Any],
        signature: PolicySignature,
        env: EnvLayout,
        *,
        device: torch.device,
        output_device: torch.device | None = None,
        lower: bool = True,
    ) -> None:
        """Run ``inner``, the user's policy, on ``device``; ``call`` takes and returns a TensorDict.

        ``output_device`` is the same if outputs may stay there until their batch is delivered. To
        ``lower`` is to take modules apart; else the policy is called as it is.
        """
        self.inner = inner
        staged = can_stage(device) and env.device is None
        self._output_device = env.device or (output_device if staged else None)
        """The device of the rows of outputs, except actions; ``None`` for memory of the host."""
        self.signature = signature = _with_outputs_on(self._output_device, signature, env)
        self._batch_dims = len(env.batch_shape)
        self.outputs: tuple[Field, ...] = signature.outputs
        self.states: tuple[Key, ...] = signature.states
        self.provided: Collection[Key] = signature.provided
        self.device = device
        self.on_tensordict = TensorDictPolicy(
            call, signature if lower else None, env.batch_shape, device
        )
        """The policy on one TensorDict, for environments that also work on one."""
        called = _StagedOverRows if staged else _TensorDictOverRows
        self.called = called(self.on_tensordict, signature, env, device)
        """The policy called as it is, in rows."""
        self._replayed = _ProgramOverRows(env, signature)
        self._now: Lowered
        self._lowering = Lowering(signature.trace, env.batch_shape, for_rows=True)
        written = set(signature.policy_written_state)
        self._lower = lower and not signature.rewrites and written == set(signature.states)
        self._lower = self._lower and env.device is None  # programs read arrays
        self._rows: _TensorDictOverRows | _ProgramOverRows = self.called
        self.act: Callable[[int], None] = self._rows.act
        """Read root row ``t``, write the outputs there and the states at root row ``t + 1``."""

    def begin(self, window: Window, next_root: Window) -> None:
        self._now = self._current()
        program, kept = self._now.program, self._lowering.kept
        replayed = self._rows is self._replayed
        if program is None or self._now.rest or (kept and self.called.gets_back is not None):
            # What the step before wrote, if a program did.
            last = {**self._replayed.program.written, **kept} if replayed else {}
            self.called.begin(window, next_root, last)
            self._rows = self.called
        else:
            if kept and not replayed:
                self.called.write_remembered(kept)
            self._replayed.begin(program, window, next_root)
            self._rows = self._replayed
        self.act = self._rows.act

    def finish(self, steps: int) -> None:
        """Raise `PolicyError` if a step gave NaN, or a setting has changed."""
        if self._rows is self._replayed:
            check_unchanged(self._now, self._current())
        self._rows.finish()

    def forget(self) -> None:
        self._rows = self.called
        self.called.forget()

    @property
    def memory(self) -> Any:
        """What the policy wrote at the root before, ``None`` if nobody reads it."""
        if self._rows is not self._replayed:
            return self.called.remembered()
        return {key: value.clone() for key, value in self._lowering.kept.items()} or None

    @memory.setter
    def memory(self, entries: Any) -> None:
        if entries is not None:
            self._rows = self.called
            self.called.remember(entries)

    def zero_memory(self, envs: Sequence[int]) -> None:
        """Zero the policy's earlier outputs at the root, in the rows of ``envs``.

        TorchRL's environments do so where they reset some of their members.
        """
        if self._rows is self.called:
            self.called.zero_memory(envs)
        for value in self._lowering.kept.values():
            value.view(-1, *value.shape[self._batch_dims :])[list(envs)] = 0

    def explain(self) -> list[str]:
        device = self._output_device
        stay = [] if device is None else [f"outputs stay on {device}"]
        if self._current().rest:
            return self.on_tensordict.explain() + stay
        return self._lowering.explain(True) + stay

    def _current(self) -> Lowered:
        return self._lowering.current(self._lower and may_lower(self.device))


class _ProgramOverRows:
    """Copies root rows into a program's entries, replays its calls, copies results out.

    Where numpy has the dtype of an entry, a row is one copy of an array.
    """

    def __init__(self, env: EnvLayout, signature: PolicySignature) -> None:
        self.program: Program
        self._calls: list[Callable[[], Any]] = []
        self._loads: list[tuple[Any, Sequence[Any]]] = []
        self._stores: list[tuple[Sequence[Any], Any]] = []
        self._outputs, self._states = signature.outputs, signature.states
        # Root keys that change from step to step.
        observed = (field.key for field in env.observations)
        self._roots = {*signature.provided, *signature.states, *observed}

    def begin(self, program: Program, window: Window, next_root: Window) -> None:
        """Connect ``program`` to ``window``; root row ``T`` is row 0 of ``next_root``."""
        self.program, self._calls = program, program.calls
        self._loads, self._stores = [], []  # `__class__` is no call, in every rollout
        for key, held in program.inputs.items():
            if key in self._roots:
                rows = window.rows if held.__class__ is np.ndarray else window.tensor_rows
                self._loads.append((held, rows(key)))
        for field in self._outputs:
            held = program.values[field.key]
            rows = window.rows if held.__class__ is np.ndarray else window.tensor_rows
            self._stores.append((rows(field.key), held))
        for key in self._states:  # that after step ``t`` is read at ``t + 1``
            held = program.values[next_key(key)]
            if held.__class__ is np.ndarray:
                after: Any = window.rows(key)[1:] + next_root.rows(key)
            else:
                after = *window.tensor_rows(key)[1:], *next_root.tensor_rows(key)
            self._stores.append((after, held))
        for check in program.checks:
            check.begin()

    def act(self, t: int) -> None:
        for held, rows in self._loads:
            held[...] = rows[t]
        for call in self._calls:
            call()
        for rows, held in self._stores:
            rows[t][...] = held

    def finish(self) -> None:
        for check in self.program.checks:
            check.finish()


# -- on a TensorDict -------------------------------------------------------------------------------


class TensorDictPolicy:
    """Takes a TensorDict and returns one, as the user's policy does."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        signature: PolicySignature | None = None,
        batch_shape: tuple[int, ...] = (),
        device: torch.device | None = None,
        *,
        shows_device: bool = True,
    ) -> None:
        """Call ``call``, which returns a TensorDict or writes into the one that it takes.

        It is taken apart only if ``signature`` lists its parts. ``shows_device``: The TensorDicts
        that it gets have their device. TorchRL shows one only where it was named for the policy.
        """
        self._calling = call_on if shows_device else _call_without_device
        self._call = partial(self._calling, call)
        self._device = device or torch.device("cpu")
        self._lowering: Lowering | None = None
        if signature is not None and not selects(signature.trace.whole.module):
            self._lowering = Lowering(signature.trace, batch_shape, for_rows=False)
        self._now: Lowered
        self._program: Program | None = None
        self._loads: list[tuple[Any, torch.Tensor]] = []
        self._stores: list[tuple[Any, torch.Tensor]] = []
        self._rest: list[Callable[[Any], Any]] = []

    def begin(self) -> None:
        """Look at the policy as it is now; reads the exploration type in force."""
        if self._lowering is None:
            return
        self._now = self._lowering.current(may_lower(self._device))
        self._program = program = self._now.program
        if program is not None:
            self._loads = [(item_name(key), cell) for key, cell in program.reads.items()]
            self._stores = [(item_name(key), cell) for key, cell in program.written.items()]
            self._rest = [unit.module for unit in self._now.rest]
            for check in program.checks:
                check.begin()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Call the policy on ``td``, or replay its program and call the rest of it."""
        if self._program is None:
            return self._call(td)
        for name, cell in self._loads:
            value = td.get(name, None)
            if not is_like(value, cell):
                return self._call(td)
            cell.copy_(value)
        for call in self._program.calls:
            call()
        for name, cell in self._stores:
            td.set(name, cell.clone())
        for module in self._rest:
            td = self._calling(module, td)
        return td

    def explain(self) -> list[str]:
        """Say how each unit of the policy is run; reads the exploration type in force."""
        if self._lowering is None:
            return [
                "called as it is: fast=False, compiled, data without fixed layout, or outputs "
                "are selected"
            ]
        return self._lowering.explain(may_lower(self._device))

    def finish(self) -> None:
        """Raise `PolicyError` if a step since `begin` gave NaN, or a setting has changed."""
        if self._lowering is None or self._program is None:
            return
        for check in self._program.checks:
            check.finish()
        check_unchanged(self._now, self._lowering.current(may_lower(self._device)))


def _call_without_device(policy: Callable[[Any], Any], td: TensorDictBase) -> TensorDictBase:
    device = td.device
    out = call_on(policy, td.clear_device_())
    td.auto_device_()
    return out if out is not td or device in (None, td.device) else out.to(device)


def item_name(key: Key) -> Any:
    """Return the name of an entry for the methods of a TensorDict."""
    return key[0] if len(key) == 1 else key


class _TensorDictOverRows:
    """Calls a policy on a TensorDict, for environments whose data lie in rows of a window."""

    def __init__(
        self,
        policy: TensorDictPolicy,
        signature: PolicySignature,
        env: EnvLayout,
        device: torch.device,
    ) -> None:
        self._policy, self._signature, self._env = policy, signature, env
        self._device = device
        self.gets_back: Collection[Key] | None = None
        """Outputs of the last step that the policy gets back, besides states; ``None`` for all."""
        self._root: TensorDictBase | None = None
        outputs = signature.trace.outputs
        self._shown = {field.key: field.dtype for field in env.observations}
        self._shown |= {key: outputs[next_key(key)].dtype for key in signature.states}
        self._shown |= signature.provided
        self._known = known_names(signature)
        self._loads: list[tuple[Any, Key, Sequence[torch.Tensor]]] = []
        written = dict.fromkeys(
            (*(f.key for f in signature.outputs), *map(next_key, signature.states))
        )
        self._likes = [(key, item_name(key), outputs[key]) for key in written]
        self._targets: list[tuple[Key, Sequence[torch.Tensor]]] = []

    def begin(self, window: Window, next_root: Window, last: Mapping[Key, torch.Tensor]) -> None:
        """Bind to the rows of ``window``; ``last``: what others wrote at the step before."""
        self._policy.begin()
        self._root = self._first() if self._root is None else self._root
        for key, value in last.items():
            if key[0] != NEXT:
                self._root.set(item_name(key), value.clone())
        signature, batch = self._signature, self._env.batch_shape
        self._loads = [(item_name(key), key, batch_rows(window, key, batch)) for key in self._shown]
        self._targets = [
            (field.key, batch_rows(window, field.key, batch)) for field in signature.outputs
        ]
        for key in signature.states:
            after = (*batch_rows(window, key, batch)[1:], *batch_rows(next_root, key, batch))
            self._targets.append((next_key(key), after))

    def act(self, t: int) -> None:
        root = self._root
        assert root is not None
        if self.gets_back is not None:
            last, root = root, self._first()
            root.update(last.select(*map(item_name, self.gets_back), strict=False))
        shown = []
        for name, value in self._load(t):
            root.set(name, value)
            shown.append((name, value, writes_so_far(value)))
        out = self._policy(root)
        if out is not root:
            root.update(out)
        check_known(root, self._known)
        check_kept(root, shown)
        wrote = {}
        for key, name, like in self._likes:
            wrote[key] = value = root.get(name, None)
            if not is_like(value, like):
                raise wrote_otherwise(key, value, like)
        self._store(wrote, t)
        after = root.pop(NEXT, None)
        if after is not None:
            for state in self._signature.policy_written_state:
                value = after.get(state, None)
                if value is not None:
                    root.set(item_name(state), value)
        # The policy may keep the one that it was called on.
        self._root = root.copy() if self._signature.trace.keeps else root

    def _load(self, t: int) -> Iterable[tuple[Any, torch.Tensor]]:
        """Return the entries of row ``t``, which the policy may keep."""
        return [
            (name, rows[t].to(self._device, self._shown[key], copy=True))
            for name, key, rows in self._loads
        ]

    def _store(self, wrote: Mapping[Key, torch.Tensor], t: int) -> None:
        """Write outputs to row ``t``, and states to the row after it."""
        for key, rows in self._targets:
            rows[t].copy_(wrote[key])

    def finish(self) -> None:
        self._policy.finish()

    def forget(self) -> None:
        self._root = None

    def remembered(self) -> dict[Key, torch.Tensor] | None:
        root = self._root
        if root is None:
            return None
        return {as_key(key): root.get(key).detach().clone() for key in root.keys(True, True)}

    def remember(self, entries: Mapping[Key, torch.Tensor]) -> None:
        self._root = self._first()
        for key, value in entries.items():
            self._root.set(item_name(key), value.to(self._device, copy=True))

    def write_remembered(self, entries: Mapping[Key, torch.Tensor]) -> None:
        """Write the policy's earlier outputs at the root, or zeros, into ``entries``."""
        for key, target in entries.items():
            value = None if self._root is None else self._root.get(item_name(key), None)
            target.copy_(torch.zeros(()) if value is None else value)

    def zero_memory(self, envs: Sequence[int]) -> None:
        root = self._root
        if root is None:  # random actions came first
            return
        for key in [*root.keys(True, True)]:
            value = root.get(key)
            if as_key(key) not in self._shown and isinstance(value, torch.Tensor):
                value = value.clone()
                value[list(envs)] = 0
                root.set(key, value)

    def _first(self) -> TensorDictBase:
        return env_root(self._env, {}, self._device)


class _StagedOverRows(_TensorDictOverRows):
    """The same for a policy on an accelerator: one copy there and one back per step."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._staging = make_staging(self._signature, self._env, self._device)

    def _load(self, t: int) -> Iterable[tuple[Any, torch.Tensor]]:
        places = self._staging.rows(self._env.batch_shape)
        for _, key, rows in self._loads:
            if key in places:
                places[key].copy_(rows[t])
        sent = self._staging.send()
        # States of a policy whose outputs stay on the device are there.
        return [
            (name, sent[key] if key in sent else rows[t].clone()) for name, key, rows in self._loads
        ]

    def _store(self, wrote: Mapping[Key, torch.Tensor], t: int) -> None:
        super()._store({**wrote, **self._staging.fetch(wrote)}, t)


def _with_outputs_on(
    device: torch.device | None, signature: PolicySignature, env: EnvLayout
) -> PolicySignature:
    """Return ``signature`` with outputs on ``device``, except for those the environment reads."""
    read = {*(field.key for field in env.actions), *map(next_key, env.passed)}
    outputs = (f if f.key in read else replace(f, device=device) for f in signature.outputs)
    return replace(signature, outputs=tuple(outputs))


def make_staging(signature: PolicySignature, env: EnvLayout, device: torch.device) -> Staging:
    """Return the memory for what a policy on ``device`` is shown and writes, by key.

    It is for entries whose rows are in memory of the host.
    """
    outputs, size = signature.trace.outputs, len(env.batch_shape)
    there = {field.key for field in signature.outputs if field.device is not None}
    states = (key for key in signature.states if next_key(key) not in there)
    after = {key: outputs[next_key(key)] for key in states}
    written = {f.key: (f.shape, f.dtype) for f in signature.outputs if f.key not in there}
    written |= {next_key(key): (value.shape[size:], value.dtype) for key, value in after.items()}
    shown = {field.key: (field.shape, field.dtype) for field in env.observations}
    shown |= {key: (value.shape[size:], value.dtype) for key, value in after.items()}
    shown |= {key: ((1,), dtype) for key, dtype in signature.provided.items()}
    return Staging(device, shown, written)


def known_names(signature: PolicySignature) -> Mapping[str, Any]:
    """Return the nested names of all entries that may be at the root after a step."""
    known = {*signature.trace.outputs, *map(as_key, signature.after.keys(True, True))}
    known |= {*signature.policy_written_state}
    return nest({key: {} for key in sorted(known) if not is_private(key)})


def check_known(data: TensorDictBase, names: Mapping[str, Any], at: Key = ()) -> None:
    """Check that all entries of ``data`` are among the nested ``names``."""
    for name in data.keys():
        if name not in names:
            if name[0] != "_":
                raise wrote_otherwise((*at, name), data.get(name), None)
        elif names[name]:
            value = data.get(name)
            if not isinstance(value, TensorDictBase):
                raise wrote_otherwise((*at, name), value, None)
            check_known(value, names[name], (*at, name))


def check_kept(root: TensorDictBase, shown: Sequence[tuple[Any, torch.Tensor, int]]) -> None:
    """Check that entries are what was ``shown`` to the policy, or copies of it."""
    for name, value, version in shown:
        now = root.get(name, None)
        alike = isinstance(now, torch.Tensor) and (same_memory(now, value) or equal(now, value))
        if not alike or writes_so_far(value) != version:
            raise unlike_first_call(f"changed {format_key(as_key(name))}", "left it as it was")
