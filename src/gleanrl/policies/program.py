"""Policies of the user's at work: as replayed calls on rows of a window, or on a TensorDict.

Called on one TensorDict that stays from step to step is what a policy means: it gets everything at
the root, also what it wrote there itself at earlier steps, and whatever it writes stays. Units that
are proven equal to tensor calls are replaced by them; all others are called as they are, in their
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import NEXT, Key, as_key, format_key, is_private, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.window import Array, Window
from gleanrl.memory.arena import batch_rows
from gleanrl.memory.tensordicts import nest
from gleanrl.operations.op_recorder import Slot
from gleanrl.operations.proofs import may_lower
from gleanrl.operations.watch import equal, same_memory, writes_so_far
from gleanrl.policies.lowering import Lowered, Lowering, Odd, Program, check_unchanged
from gleanrl.policies.probe import PolicySignature, call_on
from gleanrl.policies.units import selects


class ProgramPolicy:
    """A policy that acts on the rows of a window.

    Nothing is decided between `begin` and `finish`: the exploration type, hooks, training mode and
    the identity of weights are read in `begin`, and the program is built anew where they changed.
    Values of weights are read by every call, so what an optimizer wrote shows at once. A policy
    that is not proven equal to a program is called on a TensorDict instead; so is one from the step
    on at which a function in it is not what it was, until all environments begin anew.
    """

    def __init__(
        self,
        inner: Any,
        call: Callable[[Any], Any],
        signature: PolicySignature,
        env: EnvLayout,
        *,
        device: torch.device,
        lower: bool = True,
    ) -> None:
        """Run what ``signature`` describes.

        Args:
            inner: What the user gave; answers ``getattr_policy``.
            call: The same as a callable on TensorDicts.
            signature: The policy's units, inputs and outputs.
            env: The environment's side of the step.
            device: Where the policy runs.
            lower: Take modules apart; else the policy is called as it is.
        """
        self.inner = inner
        self.signature = signature
        self.outputs: tuple[Field, ...] = signature.outputs
        self.states: tuple[Key, ...] = signature.states
        self.provided: Collection[Key] = signature.provided
        self.device = device
        self.on_tensordict = TensorDictPolicy(
            call, signature if lower else None, env.batch_shape, device
        )
        """The policy on one TensorDict, for environments that work on one, too."""
        over = _KeptOverRows if signature.trace.keeps else _TensorDictOverRows
        self._called = over(self.on_tensordict, signature, env, device)
        self._replayed = _ProgramOverRows(env, signature, self._act_oddly)
        self._windows: tuple[Window, Window]
        self._now: Lowered
        self._last: Program | None = None
        """What acted at the step before this rollout, if it was a program."""
        self._odd = False
        """Whether the policy was not what it was at some step."""
        self._lowering = Lowering(signature.trace, env.batch_shape, for_rows=True)
        written = set(signature.policy_written_state)
        self._lower = lower and not signature.rewrites and written == set(signature.states)
        self._rows: _TensorDictOverRows | _ProgramOverRows = self._called
        self.act: Callable[[int], None] = self._rows.act
        """Read root row ``t``, write the outputs there and the states at root row ``t + 1``."""
        self.reset: Callable[[int, Sequence[int]], None] = self._rows.reset
        """Zero the states of the environments that ended at step ``t``."""

    def begin(self, window: Window, next_root: Window) -> None:
        """Bind to the rows of ``window``; reads the exploration type in force."""
        self._now = self._current()
        program, self._windows = self._now.program, (window, next_root)
        self._last = self._replayed.program if self._rows is self._replayed else None
        if self._odd or program is None or self._now.rest:
            self._call(self._last)
        else:
            self._rows = self._replayed
            self._replayed.begin(program, window, next_root)
        self.act, self.reset = self._rows.act, self._rows.reset

    def _call(self, last: Program | None) -> None:
        """Go on with a TensorDict, of which ``last`` wrote what the step before wrote."""
        self._rows, self.reset = self._called, self._called.reset
        self._called.begin(*self._windows, {} if last is None else last.written)

    def _act_oddly(self, t: int, odd: Odd) -> None:
        """Act at step ``t`` on a TensorDict, from where the replay of the program ended."""
        if self._rows is self._called:
            self._called.act(t)
            return
        check_unchanged(self._now, self._current())
        program, self._odd = self._replayed.program, True
        self._replayed.leave(t)
        self._call(program if t else self._last)
        self._called.act(t, partial(program.resume, odd))

    def finish(self, steps: int) -> Mapping[int, tuple[Key, TensorDictBase]]:
        """Return what does not fit the window.

        Raises:
            PolicyError: some step was not a number, or a setting of the policy has changed.
        """
        if self._rows is self._replayed:
            check_unchanged(self._now, self._current())
        return self._rows.finish(steps)

    def forget(self) -> None:
        """Drop what the policy wrote at earlier steps; all environments begin anew."""
        self._odd, self._rows = False, self._called
        self._called.forget()

    def explain(self) -> list[str]:
        """Say what each unit of the policy is run as; reads the exploration type in force."""
        if self._odd or self._current().rest:
            return self.on_tensordict.explain()
        return self._lowering.explain(True)

    def _current(self) -> Lowered:
        return self._lowering.current(self._lower and may_lower(self.device))


class _ProgramOverRows:
    """Copies root rows into the slots of a program, replays its calls, copies results out.

    Where numpy has the dtype of a slot, a row is one copy of an array.
    """

    def __init__(
        self,
        env: EnvLayout,
        signature: PolicySignature,
        act_oddly: Callable[[int, Odd], None],
    ) -> None:
        self.program: Program
        self._act_oddly = act_oddly
        self._calls: list[Callable[[], Any]] = []
        self._loads: list[tuple[Array, Sequence[Array]]] = []
        self._stores: list[tuple[Sequence[Array], Array]] = []
        self._tensor_loads: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        self._tensor_stores: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self._state_rows: list[Sequence[Any]] = []
        """Per state, the rows it has after each step: root row ``t + 1`` at index ``t``."""
        self._outputs, self._states = signature.outputs, signature.states
        # Root keys that change from step to step.
        observed = (field.key for field in env.observations)
        self._roots = {*signature.provided, *signature.states, *observed}

    def begin(self, program: Program, window: Window, next_root: Window) -> None:
        """Connect ``program`` to ``window``; root row ``T`` is row 0 of ``next_root``."""
        self.program, self._calls = program, program.calls
        self._loads, self._tensor_loads = [], []
        self._stores, self._tensor_stores = [], []
        self._state_rows = []
        for key, slot in program.inputs.items():
            if key not in self._roots:
                continue
            if slot.array is None:
                self._tensor_loads.append((slot.tensor, window.tensor_rows(key)))
            else:
                self._loads.append((slot.array, window.rows(key)))
        for field in self._outputs:
            self._store(window, field.key, program.values[field.key])
        for key in self._states:
            self._bind_state(program, window, next_root, key)
        for check in program.checks:
            check.begin()

    def act(self, t: int) -> None:
        for array, rows in self._loads:
            array[...] = rows[t]
        for tensor, tensor_rows in self._tensor_loads:
            tensor.copy_(tensor_rows[t])
        try:
            for call in self._calls:
                call()
        except Odd as odd:
            self._act_oddly(t, odd)
            return
        for rows, array in self._stores:
            rows[t][...] = array
        for tensor_rows, tensor in self._tensor_stores:
            tensor_rows[t].copy_(tensor)

    def reset(self, t: int, ended: Sequence[int]) -> None:
        index = list(ended)
        for rows in self._state_rows:
            rows[t][index] = 0

    def finish(self, steps: int) -> Mapping[int, tuple[Key, TensorDictBase]]:
        for check in self.program.checks:
            check.finish()
        return {}

    def leave(self, t: int) -> None:
        """End at step ``t``, of which the states are there, and nothing else."""
        self.finish(t + 1)
        odd = Odd(0, {}, [], None)

        def call() -> None:
            raise odd

        self._calls = [call]

    def _store(self, window: Window, key: Key, slot: Slot) -> None:
        if slot.array is None:
            self._tensor_stores.append((window.tensor_rows(key), slot.tensor))
        else:
            self._stores.append((window.rows(key), slot.array))

    def _bind_state(self, program: Program, window: Window, next_root: Window, key: Key) -> None:
        """Make the state after step ``t`` the one that is read at ``t + 1``."""
        after = program.values[next_key(key)]
        if after.array is None:
            tensors = (*window.tensor_rows(key)[1:], *next_root.tensor_rows(key))
            self._tensor_stores.append((tensors, after.tensor))
            self._state_rows.append(tensors)
        else:
            rows = window.rows(key)[1:] + next_root.rows(key)
            self._stores.append((rows, after.array))
            self._state_rows.append(rows)


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
        """Call ``call``; take it apart only if ``signature`` says what it is made of.

        Args:
            call: Takes a TensorDict; returns one, or ``None`` after writing into it.
            signature: What one call showed; ``None`` to call it as it is at every step.
            batch_shape: Batch size of the TensorDicts.
            device: Where the policy runs.
            shows_device: Whether the TensorDicts that the policy gets have their device. TorchRL
                shows one only where it was named for the policy.
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
            self._loads = [(_name(key), cell) for key, cell in program.reads.items()]
            self._stores = [(_name(key), cell) for key, cell in program.written.items()]
            self._rest = [unit.module for unit in self._now.rest]
            for check in program.checks:
                check.begin()

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Call the policy on ``td``, or replay its program and call the rest of it."""
        if self._program is None:
            return self._call(td)
        for name, cell in self._loads:
            value = td.get(name, None)
            if not _is_like(value, cell):
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
        """Say what each unit of the policy is run as; reads the exploration type in force."""
        if self._lowering is None:
            return [
                "called as it is: fast=False, compiled, data without fixed layout, or outputs "
                "are selected"
            ]
        return self._lowering.explain(may_lower(self._device))

    def finish(self) -> None:
        """Look back at the steps since `begin`.

        Raises:
            PolicyError: a value was not a number where that is not allowed, or a setting of the
                policy has changed.
        """
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


def _is_like(value: Any, cell: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.shape == cell.shape and value.dtype == cell.dtype
    )


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


class _TensorDictOverRows:
    """Calls a policy on a TensorDict, for environments whose data lie in rows of a window.

    A step at which the policy wrote something else than in its first call does not fit these rows.
    """

    def __init__(
        self,
        policy: TensorDictPolicy,
        signature: PolicySignature,
        env: EnvLayout,
        device: torch.device,
    ) -> None:
        self._policy, self._signature, self._env = policy, signature, env
        self._device = device
        self._root: TensorDictBase | None = None
        outputs = signature.trace.outputs
        self._shown = {field.key: field.dtype for field in env.observations}
        self._shown |= {key: outputs[next_key(key)].dtype for key in signature.states}
        self._shown |= signature.provided
        self._acted = {field.key for field in env.actions}
        known = {*outputs, *map(as_key, signature.after.keys(True, True))}
        known |= {*signature.policy_written_state}
        self._known = nest({key: {} for key in sorted(known) if not is_private(key)})
        self._loads: list[tuple[Any, Key, Sequence[torch.Tensor]]] = []
        self._stores: list[tuple[Any, Sequence[torch.Tensor], torch.Size, torch.dtype]] = []
        self._states: list[tuple[Key, Any, Sequence[torch.Tensor]]] = []
        self._unfit: dict[int, tuple[Key, TensorDictBase]] = {}

    def begin(self, window: Window, next_root: Window, last: Mapping[Key, torch.Tensor]) -> None:
        """Bind to the rows of ``window``; ``last``: what others wrote at the step before."""
        self._policy.begin()
        self._root = self._first() if self._root is None else self._root
        for key, value in last.items():
            if key[0] != NEXT:
                self._root.set(_name(key), value.clone())
        self._unfit = {}
        signature, batch = self._signature, self._env.batch_shape
        self._loads = [(_name(key), key, batch_rows(window, key, batch)) for key in self._shown]
        self._stores = [
            (
                _name(field.key),
                batch_rows(window, field.key, batch),
                torch.Size((*batch, *field.shape)),
                signature.trace.outputs[field.key].dtype,
            )
            for field in signature.outputs
        ]
        self._states = [
            (
                key,
                _name(next_key(key)),
                (*batch_rows(window, key, batch)[1:], *batch_rows(next_root, key, batch)),
            )
            for key in signature.states
        ]

    def act(self, t: int, policy: Callable[[TensorDictBase], TensorDictBase] | None = None) -> None:
        """Act at step ``t``, this once by ``policy`` if it is given."""
        root = self._root
        assert root is not None
        shown = []
        for name, key, rows in self._loads:
            value = rows[t].to(self._device, self._shown[key], copy=True)
            root.set(name, value)
            shown.append((name, value, writes_so_far(value)))
        out = self._policy(root) if policy is None else policy(root)
        if out is not root:
            root.update(out)
        odd = _unknown(root, self._known) or _changed(root, shown)
        for name, rows, shape, dtype in self._stores:
            value = _entry(root, name)
            if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (shape, dtype):
                rows[t].copy_(value)
            else:
                odd = as_key(name)
                self._store_odd(odd, value, rows[t], dtype)
        for key, name, rows in self._states:
            value = root.get(name)
            self._shown[key] = value.dtype
            rows[t].copy_(value)
        if odd is not None:
            self._unfit[t] = odd, root.apply(_on_cpu, filter_empty=False)
        after = root.pop(NEXT, None)
        if after is not None:
            for state in self._signature.policy_written_state:
                value = after.get(state, None)
                if value is not None:
                    root.set(_name(state), value)

    def _store_odd(self, key: Key, value: Any, row: torch.Tensor, dtype: torch.dtype) -> None:
        """Store an entry of another dtype if environment or policy read it in its row.

        Raises:
            PolicyError: the row does not hold it.
        """
        state = key[1:] if key[0] == NEXT else None
        if key not in self._acted and state not in self._signature.states:
            return
        alike = isinstance(value, torch.Tensor) and value.shape == row.shape
        alike = alike and value.is_floating_point() == row.is_floating_point()
        if alike:
            row.copy_(value)
            alike = row.is_floating_point() if key in self._acted else False
            alike = alike or torch.equal(row.to(value), value)
        if not alike:
            raise PolicyError(
                f"the policy wrote {format_key(key)} as {_described(value)}; before, it was "
                f"{dtype} of shape {tuple(row.shape)}: give it the same dtype and shape always"
            )

    def finish(self, steps: int) -> Mapping[int, tuple[Key, TensorDictBase]]:
        self._policy.finish()
        return self._unfit

    def reset(self, t: int, ended: Sequence[int]) -> None:
        index, envs = list(ended), self._env.num_envs
        for _, _, rows in self._states:
            rows[t].view((envs, *rows[t].shape[len(self._env.batch_shape) :]))[index] = 0

    def forget(self) -> None:
        self._root = None

    def _first(self) -> TensorDictBase:
        root = TensorDict({}, batch_size=self._env.batch_shape)
        for group in self._env.dones:
            for key in group.keys():
                flags = torch.zeros((*self._env.batch_shape, *group.shape), dtype=torch.bool)
                root.set(_name(key), flags.to(self._device))
        return root


class _KeptOverRows(_TensorDictOverRows):
    """Has a policy that keeps the TensorDict of a step get another one for the next."""

    def act(self, t: int, policy: Callable[[TensorDictBase], TensorDictBase] | None = None) -> None:
        super().act(t, policy)
        assert self._root is not None
        self._root = self._root.copy()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{value!r:.100}"


def _entry(root: TensorDictBase, name: Any) -> Any:
    try:
        return root.get(name, None)
    except ValueError:  # a tensor, where the first call wrote a TensorDict
        return None


def _unknown(data: TensorDictBase, names: Mapping[str, Any], at: Key = ()) -> Key | None:
    """Return an entry of ``data`` that is not among the nested ``names``."""
    for name in data.keys():
        if name not in names:
            if name[0] != "_":
                return (*at, name)
        elif names[name]:
            value = data.get(name)
            nested = isinstance(value, TensorDictBase)
            found = _unknown(value, names[name], (*at, name)) if nested else (*at, name)
            if found is not None:
                return found
    return None


def _changed(root: TensorDictBase, shown: Sequence[tuple[Any, torch.Tensor, int]]) -> Key | None:
    """Return an entry that is not what was ``shown`` to the policy, nor a copy of it."""
    for name, value, version in shown:
        now = root.get(name, None)
        alike = isinstance(now, torch.Tensor) and (same_memory(now, value) or equal(now, value))
        if not alike or writes_so_far(value) != version:
            return as_key(name)
    return None


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True)
