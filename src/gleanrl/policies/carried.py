"""A policy of the user's, called on one TensorDict that is carried from step to step.

This is what a policy means: it gets everything at the root, also what it wrote there itself at
earlier steps, and whatever it writes stays. Units that are proven equal to tensor calls are
replaced by them; all others are called as they are, in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import NEXT, Key, as_key, format_key, is_private, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Window
from gleanrl.memory.window import batch_rows
from gleanrl.policies.exploration import ExplorationType, exploration_type
from gleanrl.policies.learn import Learnt
from gleanrl.policies.lower import Builder, Parts, Program, describe
from gleanrl.policies.probe import call_on, changes, same_memory
from gleanrl.policies.structure import may_lower, selects
from gleanrl.policies.tape import Check


class CarriedPolicy:
    """Takes a TensorDict and returns one, as the user's policy does."""

    def __init__(
        self,
        call: Callable[[Any], Any],
        learnt: Learnt | None = None,
        batch_shape: tuple[int, ...] = (),
        device: torch.device | None = None,
        *,
        shows_device: bool = True,
    ) -> None:
        """Call ``call``; take it apart only if ``learnt`` says what it is made of.

        Args:
            call: Takes a TensorDict; returns one, or ``None`` after writing into it.
            learnt: What one call showed; ``None`` to call it as it is at every step.
            batch_shape: Batch size of the TensorDicts.
            device: Where the policy runs.
            shows_device: Whether the TensorDicts that the policy gets have their device. TorchRL
                shows one only where it was named for the policy.
        """
        self._calling = call_on if shows_device else _call_without_device
        self._call = partial(self._calling, call)
        self._device = device or torch.device("cpu")
        self._builder: Builder | None = None
        if learnt is not None and not selects(learnt.probed.whole.module):
            self._builder = Builder(learnt.probed, batch_shape, for_rows=False)
        self._known: dict[tuple[ExplorationType | None, bool], Parts] = {}
        self._stages: Sequence[Callable[[TensorDictBase], TensorDictBase]] = (self._call,)
        self._checks: Sequence[Check] = ()
        self.parts: Parts | None = None
        """What the rollout begun last is made of; ``None``: of the policy as it is."""

    def begin(self) -> None:
        """Look at the policy as it is now; reads the exploration type in force."""
        if self._builder is None:
            return
        kind, lower = exploration_type(), may_lower(self._device)
        parts = self._known.get((kind, lower))
        if parts is None or parts.watch.changed():
            parts = self._known[kind, lower] = self._builder.build(kind, lower)
        self.parts = parts
        programs = [part for part in parts.parts if isinstance(part, Program)]
        self._checks = [check for program in programs for check in program.checks]
        for check in self._checks:
            check.begin()
        self._stages = (self._call,)
        if programs:
            self._stages = [
                _Replay(part, self._calling)
                if isinstance(part, Program)
                else partial(self._calling, part.unit.module)
                for part in parts.parts
            ]

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Call the policy on ``td``."""
        for stage in self._stages:
            td = stage(td)
        return td

    def explain(self) -> list[str]:
        """Say what each unit of the policy is run as; reads the exploration type in force."""
        if self._builder is None:
            return [
                "called as it is: fast=False, compiled, data without fixed layout, or outputs "
                "are selected"
            ]
        kind, lower = exploration_type(), may_lower(self._device)
        return describe(self._builder.build(kind, lower), lower)

    def finish(self) -> None:
        """Raise if any step since `begin` was not a number where that is not allowed."""
        for check in self._checks:
            check.finish()


class _Replay:
    """Units in a row, as tensor calls."""

    def __init__(self, program: Program, calling: Callable[..., TensorDictBase]) -> None:
        self._calling = calling
        self._calls = program.calls
        self._loads = [(_name(key), cell) for key, cell in program.reads.items()]
        self._stores = [(_name(key), cell) for key, cell in program.written.items()]
        self._modules = [unit.module for unit in program.units]

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        for key, cell in self._loads:
            value = td.get(key, None)
            if not _fits(value, cell):
                return self._as_it_is(td)
            cell.copy_(value)
        for call in self._calls:
            call()
        for key, cell in self._stores:
            td.set(key, cell.clone())
        return td

    def _as_it_is(self, td: TensorDictBase) -> TensorDictBase:
        for module in self._modules:
            td = self._calling(module, td)
        return td


def _call_without_device(policy: Callable[[Any], Any], td: TensorDictBase) -> TensorDictBase:
    device = td.device
    out = call_on(policy, td.clear_device_())
    td.auto_device_()
    return out if out is not td or device in (None, td.device) else out.to(device)


def _fits(value: Any, cell: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.shape == cell.shape and value.dtype == cell.dtype
    )


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


@dataclass(frozen=True, slots=True)
class Actor:
    """A policy, and what one call of it showed."""

    user: Any = None
    """What the user gave, or a copy of it."""
    policy: CarriedPolicy | None = None
    """What acts; ``None`` acts at random."""
    states: tuple[Field, ...] = ()
    """Root entries that are provided: zero where an episode begins."""
    fed: tuple[Key, ...] = ()
    """Root entries that the policy's ``("next", ...)`` outputs replace."""
    needs_is_init: bool = False
    """Whether to tell the policy, as ``"is_init"``, where an episode begins."""
    silence: TensorDictBase | None = None
    """What random frames hold in place of what the policy writes beside actions."""
    device: torch.device | None = None
    """Where the policy runs, if that is not where the environment's data are."""
    casts: tuple[tuple[Key, torch.dtype], ...] = ()
    """Actions that the environment wants in another dtype, which holds every value."""


class RowCarrier:
    """Carries the TensorDict of a policy for environments whose data lie in rows of a window."""

    def __init__(
        self, policy: CarriedPolicy, learnt: Learnt, env: EnvLayout, device: torch.device
    ) -> None:
        """Carry what ``policy`` is called on.

        Args:
            policy: Called once per step.
            learnt: What one call of it showed.
            env: The environment's side of the step.
            device: Where the policy runs.
        """
        self.policy = policy
        self._learnt = learnt
        self._env = env
        self._device = device
        self._root: TensorDictBase | None = None
        self._shown = [field.key for field in env.observations]
        self._shown += list(learnt.states)
        if learnt.needs_is_init:
            self._shown.append(("is_init",))
        self._known = {
            key[0]
            for key in (*learnt.probed.outputs, *_keys(learnt.after), *learnt.fed)
            if not is_private(key)
        }
        self._loads: list[tuple[Any, Sequence[torch.Tensor]]] = []
        self._stores: list[tuple[Any, Sequence[torch.Tensor], torch.Size, torch.dtype]] = []
        self._states: list[tuple[Any, Sequence[torch.Tensor]]] = []

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        self.policy.begin()
        batch = self._env.batch_shape
        self._loads = [(_name(key), batch_rows(window, key, batch)) for key in self._shown]
        self._stores = [
            (
                _name(field.key),
                batch_rows(window, field.key, batch),
                torch.Size((*batch, *field.shape)),
                self._learnt.probed.outputs[field.key].dtype,
            )
            for field in self._learnt.outputs
        ]
        self._states = [
            (
                _name(next_key(key)),
                (*batch_rows(window, key, batch)[1:], *batch_rows(carry, key, batch)),
            )
            for key in self._learnt.states
        ]

    def act(self, t: int) -> None:
        """Call the policy on what root row ``t`` shows; write its outputs there."""
        root = self._root
        if root is None:
            root = self._root = self._first()
        shown = []
        for key, rows in self._loads:
            value = rows[t].to(self._device, copy=True)
            root.set(key, value)
            shown.append((key, value, changes(value)))
        out = self.policy(root)
        if out is not root:
            root.update(out)
        self._check(root, shown)
        for key, rows, shape, dtype in self._stores:
            value = root.get(key, None)
            if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, dtype):
                raise _changed(key, value, shape, dtype)
            rows[t].copy_(value)
        for key, rows in self._states:
            rows[t].copy_(root.get(key))
        self._advance(root)

    def reset(self, t: int, ended: Sequence[int]) -> None:
        """Zero the provided states of the environments that ended at step ``t``."""
        index, envs = list(ended), self._env.num_envs
        for _, rows in self._states:
            rows[t].view((envs, *rows[t].shape[len(self._env.batch_shape) :]))[index] = 0

    def forget(self) -> None:
        """Begin with nothing but what the environment shows."""
        self._root = None

    def _first(self) -> TensorDictBase:
        root = TensorDict({}, batch_size=self._env.batch_shape)
        for group in self._env.dones:
            for key in group.keys():
                flags = torch.zeros((*self._env.batch_shape, *group.shape), dtype=torch.bool)
                root.set(_name(key), flags.to(self._device))
        return root

    def _advance(self, root: TensorDictBase) -> None:
        """Let what the policy wrote under ``"next"`` replace its root entries."""
        after = root.pop(NEXT, None)
        if after is not None:
            for key in self._learnt.fed:
                value = after.get(key, None)
                if value is not None:
                    root.set(_name(key), value)

    def _check(self, root: TensorDictBase, shown: Sequence[tuple[Any, torch.Tensor, int]]) -> None:
        """Refuse what rows of known entries cannot hold."""
        unknown = [name for name in root.keys() if name not in self._known and name[0] != "_"]
        if unknown:
            raise PolicyError(
                f"the policy wrote {unknown[0]!r}, which it did not write in its first call; pass "
                "fast=False to have such entries delivered"
            )
        for key, value, version in shown:
            now = root.get(key)
            if not same_memory(now, value) or changes(value) != version:
                raise PolicyError(
                    f"the policy changed {format_key(as_key(key))}, which it did not do in its "
                    "first call; pass fast=False to have such changes delivered"
                )


def _keys(td: TensorDictBase) -> list[Key]:
    return [as_key(key) for key in td.keys(True, True)]


def _changed(key: Any, value: Any, shape: torch.Size, dtype: torch.dtype) -> PolicyError:
    name = format_key(as_key(key))
    if not isinstance(value, torch.Tensor):
        return PolicyError(f"the policy wrote {name} before, and now {value!r:.100}")
    return PolicyError(
        f"the policy wrote {name} as {value.dtype} of shape {tuple(value.shape)}; before, it was "
        f"{dtype} of shape {tuple(shape)}, and what is collected cannot change; pass fast=False"
    )
