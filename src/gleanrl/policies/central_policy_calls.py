"""One policy for several rollouts: a call acts for all environments that wait for an action."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, PolicyError, note
from gleanrl.core.keys import NEXT, Key, format_key, next_key
from gleanrl.core.layout import EnvLayout, first_difference, numpy_dtype
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import JointAct, Policy, Spec
from gleanrl.core.window import Window
from gleanrl.memory.batch_arena import batch_rows
from gleanrl.memory.device_staging import Staging, can_stage
from gleanrl.memory.tensordicts import env_root
from gleanrl.operations.change_watch import writes_so_far
from gleanrl.policies.diagnosis import wrote_otherwise
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.lowering import reads_only_inputs
from gleanrl.policies.policy import make_policy
from gleanrl.policies.probe import PolicySignature, entries_of
from gleanrl.policies.recorded_or_called_policy import (
    ProgramPolicy,
    check_kept,
    check_known,
    item_name,
    known_names,
    make_staging,
)


class JointPolicy:
    """The policy of rollouts that run at their own pace.

    Each call gets a new TensorDict with the rows of all environments that wait: observations,
    states, ``"is_init"``, ``"step_count"`` and the root entries that the policy wrote in the last
    calls for them. Its batch size changes from call to call. A policy that is captured as a graph
    has calls of one size, which are filled up with copies of the first row.
    """

    def __init__(self, inner: Any, most: int | None = None) -> None:
        """Act with ``inner``, the user's policy, on the device that it is on.

        ``most``: the environments that a call acts for, unless one rollout has more.
        """
        self.inner, self._most = inner, most
        self._captured: list[int] = []
        """The environments of each rollout, if the policy is captured."""
        self._least = 0
        """Rows of a call; others are filled up."""
        self.calls = self.rows = 0
        """Calls so far, and environments in all of them."""
        self._called: ProgramPolicy | None = None
        self._layout: EnvLayout
        """Of any number of environments: without their dimension."""
        self._likes: Mapping[Key, torch.Tensor]
        """What the first call wrote."""
        self._known: Mapping[str, Any]
        self._remembers: bool
        """Whether the policy may read its earlier outputs."""
        self._names: set[str]
        """Of the root after the first call; with others, a hook was added that may read them."""
        self._shown: Collection[Key]
        """Root entries that each call is given anew."""
        self._roots: dict[tuple[int, ...], TensorDictBase] = {}
        self._staging: Staging | None = None

    def seat(
        self, policy: Any, contract: EnvContract, specs: Mapping[Key, Spec], options: SourceOptions
    ) -> Policy:
        """Return the policy of one rollout; for the arguments see `make_policy`."""
        env = contract.layout
        assert env is not None
        layout = replace(env, batch_shape=env.batch_shape[1:])
        if options.cudagraph_policy:
            self._captured.append(env.batch_shape[0])
            total = sum(self._captured)
            self._least = max(*self._captured, min(total, self._most or total))
        if self._called is None:
            called = make_policy(policy, contract, specs, replace(options, fast=False))
            if not isinstance(called, ProgramPolicy):
                return called
            _check_delivered(called.signature)
            self._called, self._layout = called, layout
            self._likes = called.signature.trace.outputs
            self._known = known_names(called.signature)
            if can_stage(called.device):
                self._staging = make_staging(called.signature, env, called.device)
            trace = called.signature.trace
            self._remembers = not all(
                reads_only_inputs(unit.module) and not unit.reads_before_written()
                for unit in trace.units
            )
            self._names = {key[0] for key in (*trace.whole.visible, *trace.whole.writes)}
            flags = (key for group in env.dones for key in group.keys())
            self._shown = {*flags, *_root_entries(called, env)}
        elif layout != (first := self._layout):
            difference = first_difference(
                (*env.observations, *env.actions, *env.rewards),
                (*first.observations, *first.actions, *first.rewards),
            )
            raise ConfigError(
                "the environments of workers differ: "
                f"{difference or 'they have other end flags, groups or batch dimensions'}; with "
                "inference='central' all must be alike"
            )
        return Seat(self, self._called, env)

    def counted(self, reset: bool) -> tuple[int, int]:
        """Return calls and rows so far; with ``reset`` they count from 0 again."""
        counts = self.calls, self.rows
        if reset:
            self.calls = self.rows = 0
        return counts

    def act(self, seats: Sequence[Seat]) -> None:
        """Act for all environments of ``seats``, whose rows get the results.

        Seats with other remembered entries, such as none before their first call, have a call of
        their own, because a TensorDict has an entry in one form for all of its rows, or for none.
        """
        alike: dict[Any, list[Seat]] = {}
        for seat in seats:
            form = ((key, v.dtype, v.shape[1:]) for key, v in seat.remembered.items())
            alike.setdefault(frozenset(form) if seat.remembered else None, []).append(seat)
        for some in alike.values():
            self._call(some)

    def _call(self, seats: Sequence[Seat]) -> None:
        began, called = monotonic(), self._called
        assert called is not None
        waiting = sum(seat.batch[0] for seat in seats)
        batch = (max(waiting, self._least), *seats[0].batch[1:])
        rows = {key: [seat.shown[key][seat.t] for seat in seats] for key in seats[0].shown}
        shown = self._show(called.device, rows, batch)
        given = [(item_name(key), value, writes_so_far(value)) for key, value in shown.items()]
        root = self._root(batch, called.device)
        for name, value, _ in given:
            root.set(name, value)
        for key in seats[0].remembered:
            parts = [seat.remembered[key] for seat in seats]
            parts += [parts[0][:1]] * (batch[0] - waiting)
            root.set(item_name(key), torch.cat(parts))
        out = called.on_tensordict(root)
        if out is not root:
            root.update(out)
        check_known(root, self._known)
        check_kept(root, given)
        wrote = {key: _written(root, key, self._likes[key], batch) for key in seats[0].targets}
        for key, value in self._fetch(wrote).items():
            for place in range(len(seats[0].targets[key])):
                _deal(value, [seat.targets[key][place][seat.t] for seat in seats])
        self._remembers = self._remembers or not self._names.issuperset(root.keys())
        if self._remembers:
            self._remember(root, seats)
        self.calls, self.rows = self.calls + 1, self.rows + waiting
        took = monotonic() - began
        for seat in seats:
            seat.seconds += took

    def _remember(self, root: TensorDictBase, seats: Sequence[Seat]) -> None:
        """Keep the root entries that the policy wrote, for the next calls for ``seats``."""
        wrote = {}
        for key, value in entries_of(root).items():
            if key in self._shown or key[0] == NEXT:
                continue
            if not isinstance(value, torch.Tensor):
                raise wrote_otherwise(key, value, self._likes.get(key))
            wrote[key] = value.detach().clone()  # which the policy may write to in its next call
        begin = 0
        for seat in seats:
            end = begin + seat.batch[0]
            seat.remembered = {key: value[begin:end] for key, value in wrote.items()}
            begin = end

    def _show(
        self, device: torch.device, rows: Mapping[Key, Sequence[Any]], batch: tuple[int, ...]
    ) -> Mapping[Key, torch.Tensor]:
        """Return ``rows`` of all environments in new memory on the policy's device."""
        if self._staging is None:
            return {key: _joined(parts).to(device) for key, parts in rows.items()}
        for key, place in self._staging.rows(batch).items():
            _gather(rows[key], place)
        return self._staging.send()

    def _fetch(self, wrote: Mapping[Key, torch.Tensor]) -> Mapping[Key, torch.Tensor]:
        """Return the policy's outputs on the CPU."""
        if self._staging is None:
            return {key: value.detach().cpu() for key, value in wrote.items()}
        return self._staging.fetch(wrote)

    def _root(self, batch: tuple[int, ...], device: torch.device) -> TensorDictBase:
        """Return a new TensorDict for a ``batch`` of environments, with end flags only."""
        found = self._roots.get(batch)
        if found is None:
            env = replace(self._layout, batch_shape=batch)
            found = self._roots[batch] = env_root(env, {}, device)
        return found.copy()


class Seat:
    """The `Policy` of one of several rollouts, for all of which a `JointPolicy` acts."""

    def __init__(self, joint: JointPolicy, called: ProgramPolicy, env: EnvLayout) -> None:
        self._joint = joint
        self.inner, self.outputs, self._device = called.inner, called.outputs, called.device
        self.states, self.provided = called.states, called.provided
        self.remembered: Mapping[Key, torch.Tensor] = {}
        """Root entries that the policy wrote in the last call for these environments."""
        self.batch = env.batch_shape
        self.envs = env.num_envs
        self.seconds = 0.0
        """The duration of the calls of the policy in this rollout."""
        self.t = 0
        """The row whose actions are due."""
        self._reads = _root_entries(called, env)
        self.shown: dict[Key, Sequence[Any]] = {}
        """Per entry that the policy is shown: its rows."""
        self.targets: dict[Key, list[Sequence[Any]]] = {}
        """Per entry that the policy writes: the rows that get it, in one place or in two."""

    @property
    def requested(self) -> JointAct | None:
        """This seat; as an attribute it would be a cycle, which keeps the memory of windows."""
        return self

    def begin(self, window: Window, next_root: Window) -> None:
        batch, self.seconds = self.batch, 0.0
        self.shown = {key: _rows(window, key, batch) for key in self._reads}
        self.targets = {f.key: [_rows(window, f.key, batch)] for f in self.outputs}
        for key in self.states:
            rows = *self.shown[key][1:], *_rows(next_root, key, batch)
            self.targets.setdefault(next_key(key), []).append(rows)

    def act(self, t: int) -> None:
        """Leave the action in row ``t`` to `act_with`."""
        self.t = t

    def act_with(self, others: Sequence[Seat]) -> None:
        try:
            self._joint.act([self, *others])
        except Exception as err:
            note(err, f"the policy raised this at step {self.t} of a rollout")
            raise

    def finish(self, steps: int) -> None:
        """Do nothing: all was written by the steps."""

    def forget(self) -> None:
        self.remembered = {}

    @property
    def memory(self) -> Any:
        return {key: value.clone() for key, value in self.remembered.items()} or None

    @memory.setter
    def memory(self, entries: Any) -> None:
        entries = entries or {}
        self.remembered = {k: v.to(self._device, copy=True) for k, v in entries.items()}

    def explain(self) -> list[str]:
        return ["called as it is, at once for all environments of workers that wait for an action"]


def _root_entries(called: ProgramPolicy, env: EnvLayout) -> Collection[Key]:
    """Return the entries of a row that a policy is shown."""
    return {*(field.key for field in env.observations), *called.states, *called.provided}


def _check_delivered(signature: PolicySignature) -> None:
    """Check that rows of known entries hold all that the policy wrote."""
    why, wrote = signature.why_no_rows, signature.trace.whole.writes.items()
    objects = (format_key(key) for key, value in wrote if not isinstance(value, torch.Tensor))
    why = why or next((f"the policy writes {name}, which is no tensor" for name in objects), None)
    if why:
        raise PolicyError(
            f"{why}, which asynchronous central inference does not deliver; use inference='workers'"
        )


def _rows(window: Window, key: Key, batch: tuple[int, ...]) -> Sequence[Any]:
    """Return the rows of an entry, as arrays, which cost less, where numpy has its dtype."""
    rows = batch_rows(window, key, batch)
    if numpy_dtype(rows[0].dtype) is None:
        return rows
    return window.rows(key) if len(batch) == 1 else [row.numpy() for row in rows]


def _joined(rows: Sequence[Any]) -> torch.Tensor:
    if isinstance(rows[0], torch.Tensor):
        return torch.cat(list(rows))
    return torch.from_numpy(np.concatenate(rows))


def _gather(rows: Sequence[Any], value: torch.Tensor) -> None:
    """Copy ``rows`` into ``value``, one after another; fill up with copies of the first."""
    begin, values = 0, value if isinstance(rows[0], torch.Tensor) else value.numpy()
    for row in rows:
        end = begin + len(row)
        values[begin:end] = row
        begin = end
    values[begin:] = rows[0][:1]


def _deal(value: torch.Tensor, rows: Sequence[Any]) -> None:
    """Copy parts of ``value`` into ``rows``, as many environments as each of these has."""
    begin, values = 0, value if isinstance(rows[0], torch.Tensor) else value.numpy()
    for row in rows:
        end = begin + len(row)
        row[...] = values[begin:end]
        begin = end


def _written(
    out: TensorDictBase, key: Key, like: torch.Tensor, batch: tuple[int, ...]
) -> torch.Tensor:
    """Return an entry that the policy wrote for a ``batch`` of environments."""
    value = out.get(item_name(key), None)
    fits = isinstance(value, torch.Tensor) and value.dtype == like.dtype
    if not fits or value.shape != (*batch, *like.shape[len(batch) :]):
        raise wrote_otherwise(key, value, like)
    found: torch.Tensor = value
    return found
