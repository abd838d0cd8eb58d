"""A policy of the user's, run as a program of tensor calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from gleanrl.core.keys import IS_INIT, Key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Array, Window
from gleanrl.policies.bind import Binding
from gleanrl.policies.exploration import exploration_type
from gleanrl.policies.learn import Learnt
from gleanrl.policies.lower import Builder, Program
from gleanrl.policies.structure import may_lower


class ProgramPolicy:
    """Copies root rows in, replays the calls of a program, copies results out.

    Nothing is decided between `begin` and `finish`: the exploration type, hooks, training mode and
    the identity of weights are read in `begin`, and the program is built anew where they changed.
    Values of weights are read by every call, so what an optimizer wrote shows at once.
    """

    def __init__(
        self,
        inner: Any,
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
            learnt: The policy's units, inputs and outputs.
            env: The environment's side of the step.
            device: Where the policy runs.
            lower: Take modules apart; else every unit is called as it is.
            inference: Run under ``inference_mode``: for private copies of the user's modules only.
        """
        self.inner = inner
        self.outputs: tuple[Field, ...] = learnt.outputs
        self.states: tuple[Key, ...] = learnt.states
        self.needs_is_init = learnt.needs_is_init
        """Whether the root field ``"is_init"`` (bool ``[P, 1]``) must be in the window."""
        self.lowered = 0
        """Modules that the rollout begun last runs as plain tensor calls."""
        self._lower = lower
        self._inference = inference
        self._device = device
        rows = {field.key for field in env.observations} | {IS_INIT, *learnt.states}
        constants = set(learnt.inputs) - rows
        self._builder = Builder(learnt.probed, learnt.inputs, constants, env.batch_shape)
        self._binding = Binding(env, learnt.outputs, learnt.states, rows, device)
        self._programs: dict[Any, Program] = {}
        self._program: Program
        self._loads: Sequence[tuple[Array, Sequence[Array]]] = ()
        self._stores: Sequence[tuple[Sequence[Array], Array]] = ()
        self._tensor_loads: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]] = ()
        self._tensor_stores: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]] = ()
        self._calls: list[Callable[[], Any]] = []

    def context(self) -> AbstractContextManager[Any]:
        """Return what a rollout runs in: no gradients are recorded by `act` itself."""
        return torch.inference_mode() if self._inference else torch.no_grad()

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; reads the exploration type in force."""
        program = self._current()
        binding = self._binding
        binding.bind(program, window, carry)
        self._loads, self._tensor_loads = binding.loads, binding.tensor_loads
        self._stores, self._tensor_stores = binding.stores, binding.tensor_stores
        self._calls = program.calls
        self._program, self.lowered = program, program.lowered
        for check in program.checks:
            check.begin()

    def act(self, t: int) -> None:
        """Read root row ``t``, write the outputs there and the states at root row ``t + 1``."""
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

    def reset(self, t: int, ended: Sequence[int]) -> None:
        """Zero the states of the environments that ended at step ``t``."""
        index = list(ended)
        for rows in self._binding.state_rows:
            rows[t][index] = 0

    def finish(self, steps: int) -> None:
        """Move what stayed on the device; raise if any step was not a number."""
        for check in self._program.checks:
            check.finish()
        self._binding.finish(steps)

    def _current(self) -> Program:
        kind, lower = exploration_type(), self._lower and may_lower(self._device)
        program = self._programs.get((kind, lower))
        if program is None or program.watch.changed():
            program = self._programs[kind, lower] = self._builder.build(kind, lower)
        return program
