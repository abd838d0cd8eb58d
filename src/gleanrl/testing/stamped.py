"""Data that prove their own integrity: every element of a row is a function of where it belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.layout import Field, Layout
from gleanrl.core.messages import Report, Snapshot
from gleanrl.core.protocols import Stop, Window

_STAMP = ("stamp",)
_WIDE = ("next", "wide")


class StampedSource:
    """Writes ``worker * 10**6 + rollout`` into every element of its rollout, wide rows included."""

    def __init__(self, worker: int, envs: int = 2, width: int = 64) -> None:
        """Serve ``envs`` environments with rows of ``width`` elements."""
        self._worker = worker
        self._layout = Layout(
            (envs,), (Field(_STAMP, (), torch.int64), Field(_WIDE, (width,), torch.int32))
        )
        self._rollouts = 0
        self.num_envs = envs

    def layout(self) -> Layout:
        """Describe one step."""
        return self._layout

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Stamp every element of the rollout."""
        stamp = self._worker * 10**6 + self._rollouts
        self._rollouts += 1
        for step in range(steps):
            window.tensor(_STAMP)[:, step] = stamp
            window.tensor(_WIDE)[:, step] = stamp
        return Report(steps, steps * window.envs, 0)

    def place(self, base: int, stride: int) -> None:
        """Nothing is numbered."""

    def load(self, snapshot: Snapshot) -> None:
        """Nothing to load."""

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Nothing is random."""
        return seed

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Nothing to reset."""

    def state(self) -> dict[str, Any]:
        """Return the rollout counter."""
        return {"rollouts": self._rollouts}

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from a saved counter."""
        self._rollouts = int(state["rollouts"])

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return an attribute."""
        return getattr(self, path)

    def get(self, path: str) -> Any:
        """Return an attribute."""
        return getattr(self, path)

    def close(self) -> None:
        """Nothing to release."""


def check_stamps(batch: TensorDictBase) -> list[int]:
    """Check that every rollout in a stacked batch is whole; return one stamp per worker.

    Raises:
        AssertionError: a rollout holds elements of another one.
    """
    stamps = []
    for rollout in batch.unbind(0):
        values = set(rollout["stamp"].unique().tolist())
        values |= set(rollout["next", "wide"].unique().tolist())
        assert len(values) == 1, f"a torn rollout holds {sorted(values)}"
        stamps.append(values.pop())
    return stamps
