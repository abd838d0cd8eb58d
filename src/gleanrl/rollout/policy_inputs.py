"""The root entries that a collector provides for its policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.keys import IS_INIT, STEP_COUNT, Key
from gleanrl.core.layout import numpy_dtype
from gleanrl.core.window import Array, Window


class Provided:
    """Recurrent states, ``"is_init"`` and ``"step_count"`` in the rows of a window.

    Where an episode begins, states are zero and ``"is_init"`` is true; ``"step_count"`` counts the
    steps taken in the episode before each step.
    """

    def __init__(self, states: Sequence[Key], others: Collection[Key], next_root: Window) -> None:
        """Provide ``states``, and of ``others`` the entries that have a meaning here.

        ``next_root``: the root row that begins the next rollout.
        """
        self._next_root = next_root
        self._firsts = dict.fromkeys(states, 0)
        if IS_INIT in others:
            self._firsts[IS_INIT] = 1
        self._counting = STEP_COUNT in others
        self._rows: list[tuple[Sequence[Any], int]] = []
        """Per entry, the rows that follow the steps, and the value where an episode begins."""
        self._counts: Array
        self.restart(None)

    def __bool__(self) -> bool:
        """Whether there is anything to provide."""
        return self._counting or bool(self._firsts)

    def begin(self, window: Window, ages: Array, next_root: Window | None = None) -> None:
        """Start a rollout in ``window``, whose row 0 holds states and ``"is_init"``.

        ``ages``: Steps taken in each running episode; negative before it begins. ``next_root``
        receives root row ``T``, if another window does in this rollout.
        """
        next_root = next_root or self._next_root
        if IS_INIT in self._firsts:
            window.tensor(IS_INIT)[:, 1:] = False
            next_root.tensor(IS_INIT).zero_()
        self._rows = [
            ((*_rows(window, key)[1:], *_rows(next_root, key)), first)
            for key, first in self._firsts.items()
        ]
        if self._counting:
            self._counts = window.array(STEP_COUNT)[..., 0]
            self._counts[...] = (ages[:, None] + np.arange(window.steps)).clip(0)

    def started(self, t: int, envs: Sequence[int] | Array) -> None:
        """Note that the row after step ``t`` is the first of an episode of ``envs``."""
        index = list(envs)
        for rows, first in self._rows:
            rows[t][index] = first
        if self._counting:
            later = self._counts[:, t + 1 :]
            later[index] = np.arange(later.shape[1])

    def started_where(self, t: int, mask: torch.Tensor) -> None:
        """Note like `started`, for environments in ``mask``, bool ``[P]`` on the rows' device.

        Nothing is read from a device.
        """
        if mask.device.type == "cpu":
            self.started(t, np.flatnonzero(mask.numpy()))
            return
        for rows, first in self._rows:
            row = rows[t]
            row.masked_fill_(mask.view(-1, *[1] * (row.ndim - 1)), first)

    def restart(self, envs: Sequence[int] | None) -> None:
        """Have ``envs`` (all if ``None``) begin episodes with the next rollout."""
        index = slice(None) if envs is None else list(envs)
        for key, first in self._firsts.items():
            self._next_root.tensor(key)[index] = first


def _rows(window: Window, key: Key) -> Sequence[Any]:
    """Return the rows of an entry, as arrays where numpy has its dtype and can reach them."""
    arrays = window.on_host(key) and numpy_dtype(window.tensor(key).dtype) is not None
    return window.rows(key) if arrays else window.tensor_rows(key)
