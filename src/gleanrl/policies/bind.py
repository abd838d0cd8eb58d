"""Which row of a window goes where at every step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gleanrl.core.keys import Key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Array, Window
from gleanrl.policies.lower import Program
from gleanrl.policies.tape import Cell


class Binding:
    """Connects the cells of a program to the rows of a window.

    On the CPU every cell has a numpy array over its memory and a row is one array copy. On another
    device observations cross to it and what the environment reads crosses back at every step;
    everything else stays there until the rollout is over.
    """

    def __init__(
        self,
        env: EnvLayout,
        outputs: Sequence[Field],
        states: Sequence[Key],
        roots: Collection[Key],
        device: torch.device,
    ) -> None:
        """Bind to nothing yet.

        Args:
            env: Says how many environments there are and which outputs are actions.
            outputs: What is written.
            states: Root keys fed by ``("next", ...)`` outputs.
            roots: Root keys that change from step to step.
            device: Where the cells are.
        """
        self.loads: list[tuple[Array, Sequence[Array]]] = []
        self.stores: list[tuple[Sequence[Array], Array]] = []
        self.tensor_loads: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        self.tensor_stores: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
        self.state_rows: list[Sequence[Any]] = []
        """Per state, the rows it has after each step: root row ``t + 1`` at index ``t``."""
        self._outputs = outputs
        self._states = states
        self._roots = frozenset(roots)
        self._prompt = {*(field.key for field in env.actions), *env.fed}
        """Outputs the environment reads at the same step."""
        self._remote = device.type != "cpu"
        self._stages: dict[Key, torch.Tensor] = {}
        self._moves: list[Callable[[int], None]] = []

    def bind(self, program: Program, window: Window, carry: Window) -> None:
        """Connect ``program`` to ``window``; root row ``T`` is row 0 of ``carry``."""
        for table in (self.loads, self.stores, self.tensor_loads, self.tensor_stores):
            table.clear()
        self.state_rows.clear()
        self._moves.clear()
        for key, cell in program.inputs.items():
            if key in self._roots and not (self._remote and key in self._states):
                self._load(window, key, cell)
        for field in self._outputs:
            self._store(window, field.key, program.values[field.key])
        for key in self._states:
            self._carry_over(program, window, carry, key)

    def finish(self, steps: int) -> None:
        """Move what was kept on the device into the window."""
        for move in self._moves:
            move(steps)

    def _load(self, window: Window, key: Key, cell: Cell) -> None:
        if cell.array is None:
            self.tensor_loads.append((cell.tensor, window.tensor_rows(key)))
        else:
            self.loads.append((cell.array, window.rows(key)))

    def _store(self, window: Window, key: Key, cell: Cell) -> None:
        if self._remote and key not in self._prompt:
            stage = self._stage(key, window.steps, cell.tensor)
            self.tensor_stores.append((stage.unbind(0), cell.tensor))
            self._moves.append(_mover(stage, window.tensor(key)))
        elif cell.array is None:
            self.tensor_stores.append((window.tensor_rows(key), cell.tensor))
        else:
            self.stores.append((window.rows(key), cell.array))

    def _carry_over(self, program: Program, window: Window, carry: Window, key: Key) -> None:
        """Make the state after step ``t`` the one that is read at ``t + 1``."""
        after = program.values[next_key(key)]
        if self._remote:
            self._stay(program, window, carry, key)
        elif after.array is None:
            tensors = (*window.tensor_rows(key)[1:], *carry.tensor_rows(key))
            self.tensor_stores.append((tensors, after.tensor))
            self.state_rows.append(tensors)
        else:
            rows = window.rows(key)[1:] + carry.rows(key)
            self.stores.append((rows, after.array))
            self.state_rows.append(rows)

    def _stay(self, program: Program, window: Window, carry: Window, key: Key) -> None:
        """Carry a state over on the device."""
        after, steps = program.values[next_key(key)].tensor, window.steps
        stage = self._stage(key, steps + 1, after)
        stage[0].copy_(window.tensor_rows(key)[0])
        rows = stage.unbind(0)
        if key in program.inputs:
            self.tensor_loads.append((program.inputs[key].tensor, rows))
        self.tensor_stores.append((rows[1:], after))
        self.state_rows.append(rows[1:])
        self._moves.append(_mover(stage[:steps], window.tensor(key)))

        def leave(taken: int) -> None:
            if taken == steps:
                carry.tensor_rows(key)[0].copy_(stage[steps])

        self._moves.append(leave)

    def _stage(self, key: Key, steps: int, cell: torch.Tensor) -> torch.Tensor:
        stage = self._stages.get(key)
        if stage is None or len(stage) != steps:
            shape = (steps, *cell.shape)
            stage = torch.zeros(shape, dtype=cell.dtype, device=cell.device)
            self._stages[key] = stage
        return stage


def _mover(stage: torch.Tensor, target: torch.Tensor) -> Callable[[int], None]:
    def move(steps: int) -> None:
        target[:, :steps].copy_(stage[:steps].transpose(0, 1))

    return move
