"""A policy of the user's that acts on rows of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gleanrl.core.keys import IS_INIT, Key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Array, Window
from gleanrl.policies.bind import Binding
from gleanrl.policies.carried import CarriedPolicy, RowCarrier
from gleanrl.policies.exploration import ExplorationType, exploration_type
from gleanrl.policies.learn import Learnt
from gleanrl.policies.lower import Builder, Parts, Program, describe
from gleanrl.policies.structure import may_lower


class ProgramPolicy:
    """Copies root rows in, replays the calls of a program, copies results out.

    Nothing is decided between `begin` and `finish`: the exploration type, hooks, training mode and
    the identity of weights are read in `begin`, and the program is built anew where they changed.
    Values of weights are read by every call, so what an optimizer wrote shows at once. A policy
    that is not proven equal to a program is called on a TensorDict instead (`RowCarrier`).
    """

    def __init__(
        self,
        inner: Any,
        call: Callable[[Any], Any],
        learnt: Learnt,
        env: EnvLayout,
        *,
        device: torch.device,
        lower: bool = True,
        inference: bool = False,
    ) -> None:
        """Run what ``learnt`` describes.

        Args:
            inner: What the user gave; answers ``getattr_policy``.
            call: The same as a callable on TensorDicts.
            learnt: The policy's units, inputs and outputs.
            env: The environment's side of the step.
            device: Where the policy runs.
            lower: Take modules apart; else the policy is called as it is.
            inference: Run under ``inference_mode``: for private copies of the user's modules only.
        """
        self.inner = inner
        self.learnt = learnt
        self.outputs: tuple[Field, ...] = learnt.outputs
        self.states: tuple[Key, ...] = learnt.states
        self.needs_is_init = learnt.needs_is_init
        """Whether the root field ``"is_init"`` (bool ``[P, 1]``) must be in the window."""
        self.parts: Parts | None = None
        """What the rollout begun last is made of."""
        self.device = device
        self._inference = inference
        rows = {field.key for field in env.observations} | {IS_INIT, *learnt.states}
        self._builder = Builder(learnt.probed, env.batch_shape, for_rows=True)
        self._binding = Binding(env, learnt.outputs, learnt.states, rows, device)
        self._lower = lower and not learnt.rewrites and set(learnt.fed) == set(learnt.states)
        taken_apart = learnt if lower else None
        carried = CarriedPolicy(call, taken_apart, env.batch_shape, device)
        self._carrier = RowCarrier(carried, learnt, env, device)
        self._known: dict[tuple[ExplorationType | None, bool], Parts] = {}
        self._program: Program | None = None
        self._loads: Sequence[tuple[Array, Sequence[Array]]] = ()
        self._stores: Sequence[tuple[Sequence[Array], Array]] = ()
        self._tensor_loads: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]] = ()
        self._tensor_stores: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]] = ()
        self._calls: list[Callable[[], Any]] = []
        self.act: Callable[[int], None] = self._replay
        """Read root row ``t``, write the outputs there and the states at root row ``t + 1``."""
        self.reset: Callable[[int, Sequence[int]], None] = self._zero_states
        """Zero the states of the environments that ended at step ``t``."""

    @property
    def carried(self) -> CarriedPolicy:
        """The policy on one TensorDict, for environments that work on one, too."""
        return self._carrier.policy

    @property
    def lowered(self) -> int:
        """Units that the rollout begun last runs as plain tensor calls."""
        if self.parts is None:
            return 0
        return sum(len(part.units) for part in self.parts.parts if isinstance(part, Program))

    def context(self) -> AbstractContextManager[Any]:
        """Return what a rollout runs in: no gradients are recorded by `act` itself."""
        return torch.inference_mode() if self._inference else torch.no_grad()

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; reads the exploration type in force."""
        parts = self._current()
        self._program = program = parts.program
        if program is None:
            self._carrier.begin(window, carry)
            self.act, self.reset = self._carrier.act, self._carrier.reset
            self.parts = self._carrier.policy.parts
            return
        self.parts = parts
        self.act, self.reset = self._replay, self._zero_states
        binding = self._binding
        binding.bind(program, window, carry)
        self._loads, self._tensor_loads = binding.loads, binding.tensor_loads
        self._stores, self._tensor_stores = binding.stores, binding.tensor_stores
        self._calls = program.calls
        for check in program.checks:
            check.begin()

    def _replay(self, t: int) -> None:
        for array, rows in self._loads:
            array[...] = rows[t]
        for tensor, tensor_rows in self._tensor_loads:
            tensor.copy_(tensor_rows[t])
        for call in self._calls:
            call()
        for rows, array in self._stores:
            rows[t][...] = array
        for tensor_rows, tensor in self._tensor_stores:
            tensor_rows[t].copy_(tensor)

    def _zero_states(self, t: int, ended: Sequence[int]) -> None:
        index = list(ended)
        for rows in self._binding.state_rows:
            rows[t][index] = 0

    def finish(self, steps: int) -> None:
        """Move what stayed on the device; raise if any step was not a number."""
        if self._program is None:
            self._carrier.policy.finish()
            return
        for check in self._program.checks:
            check.finish()
        self._binding.finish(steps)

    def forget(self) -> None:
        """Drop what the policy wrote at earlier steps; all environments begin anew."""
        self._carrier.forget()

    def explain(self) -> list[str]:
        """Say what each unit of the policy is run as; reads the exploration type in force."""
        parts = self._current()
        if parts.program is None:
            return self._carrier.policy.explain()
        return describe(parts, lower=True)

    def _current(self) -> Parts:
        kind, lower = exploration_type(), self._lower and may_lower(self.device)
        parts = self._known.get((kind, lower))
        if parts is None or parts.watch.changed():
            parts = self._known[kind, lower] = self._builder.build(kind, lower)
        return parts
