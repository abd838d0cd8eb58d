"""The raw steps of a pool, kept until every environment has enough of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gleanrl.core.keys import DONE, Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.window import Array, Window

_PAD = 4
"""Rows whose size is a power of two would all fall into the same few sets of the cache."""


@dataclass(slots=True)
class _Finals:
    """Observations that are not in the root row that follows: their environments were reset."""

    row: int
    envs: Array
    values: dict[Key, Array]


class StepLog:
    """A log of raw steps with two parts: the rest of the last rollout, and this rollout.

        row:  keep - left ......... keep ............ keep + taken
              steps not delivered   steps of this     the root row
              (of some envs)        rollout           that follows

    Rows lie in the order of time, so that a step's next observation is the root row after it and
    needs no memory of its own. Delivering is one gather per field: the oldest steps of every
    environment, without those that were only a reset. The left-over part is bounded: it holds as
    many raw steps as a rollout has steps.
    """

    def __init__(
        self, fields: Sequence[Field], shifted: Sequence[Key], envs: int, steps: int, keep: int
    ) -> None:
        """Reserve memory, which is touched only as far as it is used.

        ``shifted``: Root keys whose ``"next"`` value is delivered from the root row that follows.
        A rollout has ``steps`` steps, and ``keep`` raw steps may be left over.
        """
        # At worst every other step is a reset, beginning with the first.
        room = 2 * steps + 1
        rows = keep + room + 1
        self._width = width = envs + _PAD
        self.steps = steps
        self._envs, self._keep, self._taken = envs, keep, 0
        self.left = 0
        """Raw steps left over from the last rollout."""
        self._rows: dict[Key, Array] = {
            field.key: np.zeros((rows, width, *field.shape), field.numpy_dtype) for field in fields
        }
        self._shifted = tuple(shifted)
        flat = {k: v.reshape(rows * width, *v.shape[2:]) for k, v in self._rows.items()}
        # The value of a step that is in the root row after it begins one row later.
        after = {next_key(key): flat[key][width:] for key in self._shifted}
        self._delivered: dict[Key, Array] = {**flat, **after}
        self._places = np.arange(rows) * width + np.arange(envs)[:, None]
        """The place of each row and environment in flat rows, ``[P, rows]``."""
        self._done = self._rows[next_key(DONE)][:, :envs, 0]
        self._pending = np.zeros((rows, envs), bool)
        """Steps that wait to be delivered."""
        self._versions = np.zeros(rows, np.int64)
        self.waiting = np.zeros(envs, bool)
        """Environments whose first step in this rollout will only reset them."""
        self._oldest_left = keep
        self._finals: list[_Finals] = []
        self._restarts: list[tuple[int, Array]] = []
        self._stock = np.zeros(envs, np.int64)
        """Steps of every environment that the last rollout left over."""
        self.oldest_version = 0
        """The version of the weights at the oldest step that `deliver` has moved."""
        self.window = self._view(keep, room)
        """The rows of this rollout, to which pool and policy are bound."""
        self.next_root = self._view(keep + room, 1)

    def _view(self, start: int, steps: int) -> Window:
        tensors = {
            key: torch.from_numpy(rows[start : start + steps, : self._envs]).transpose(0, 1)
            for key, rows in self._rows.items()
        }
        return Window(tensors, self._envs, steps)

    def state(self) -> dict[str, Any]:
        """Return the steps left over from the last rollout."""
        left = slice(self._keep - self.left, self._keep)
        rows = {key: _tensor(rows[left, : self._envs]) for key, rows in self._rows.items()}
        finals = [
            (f.row - self._keep, _tensor(f.envs), {k: _tensor(v) for k, v in f.values.items()})
            for f in self._finals
        ]
        return {
            "steps": self.steps,
            "keep": self._keep,
            "left": self.left,
            "rows": rows,
            "pending": _tensor(self._pending[left]),
            "versions": _tensor(self._versions[left]),
            "waiting": _tensor(self.waiting),
            "finals": finals,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the steps of `state`, from a log with as much memory for them or less."""
        self.left = int(state["left"])
        left = slice(self._keep - self.left, self._keep)
        for key, rows in self._rows.items():
            rows[left, : self._envs] = state["rows"][key].numpy()
        self._pending[left] = state["pending"].numpy()
        self._versions[left] = state["versions"].numpy()
        self.waiting = state["waiting"].numpy().copy()
        self._finals = [
            _Finals(row + self._keep, e.numpy().copy(), {k: v.numpy() for k, v in values.items()})
            for row, e, values in state["finals"]
        ]

    def begin(self, next_root: Window) -> None:
        """Start a rollout from the root fields in ``next_root``."""
        self._taken = 0
        self._restarts = []
        self._stock = self._pending[self._keep - self.left : self._keep].sum(0)
        for key in next_root.keys():
            self._rows[key][self._keep, : self._envs] = next_root.rows(key)[0]

    # -- during the loop -------------------------------------------------------------------------

    def ended(self, t: int) -> Array:
        """Return the indices of the environments that ended at step ``t``."""
        return np.flatnonzero(self._done[self._keep + t])

    def restarted(self, t: int, envs: Array) -> None:
        """Prepare for a reset of ``envs`` after step ``t``: keep the data that it will overwrite.

        Without this an end means that the next step is no transition.
        """
        row = self._keep + t
        values = {key: self._rows[key][row + 1, envs] for key in self._shifted}
        self._finals.append(_Finals(row, envs, values))
        self._restarts.append((t, envs))

    def counts(self, taken: int) -> Array:
        """Return how many steps of each environment wait, with ``taken`` taken in this rollout."""
        counts: Array = self._stock + self._real(taken).sum(0, np.int32)
        return counts

    def _real(self, taken: int) -> Array:
        """Return which of this rollout's first ``taken`` steps were transitions, ``[taken, P]``."""
        real = self._pending[self._keep : self._keep + taken]
        if taken:
            np.logical_not(self.waiting, out=real[0])
            np.logical_not(self._done[self._keep : self._keep + taken - 1], out=real[1:])
        for t, envs in self._restarts:
            real[t + 1 : t + 2, envs] = True
        return real

    # -- after the loop --------------------------------------------------------------------------

    def append(self, taken: int, version: int) -> None:
        """Close this rollout's part of the log: ``taken`` steps by policy ``version``."""
        self._taken = taken
        self._real(taken)
        self._versions[self._keep : self._keep + taken] = version
        if taken:
            self.waiting = self._done[self._keep + taken - 1].copy()
            for t, envs in self._restarts[-1:]:
                self.waiting[envs] &= t < taken - 1

    def deliver(self, window: Window, steps: int, versions: bool) -> Array | None:
        """Move the oldest ``steps`` steps of every environment into ``window``.

        Every environment must have as many. Returns the policy version of each, ``[P, steps]``, if
        ``versions`` are asked for.
        """
        first, last = self._keep - self.left, self._keep + self._taken
        pending = self._pending[first:last]
        self.oldest_version = int(self._versions[first + pending.any(1).argmax()])
        oldest = pending.copy()
        # No environment has more than ``steps`` in the first rows.
        late = oldest[steps:]
        late &= oldest[:steps].sum(0, np.int32) + np.add.accumulate(late, 0, np.int32) <= steps
        source = self._places[:, first:last][np.ascontiguousarray(oldest.T)].reshape(-1, steps)
        for key, rows in self._delivered.items():
            out = window.array(key)[:, :steps]
            # Clipping changes nothing (all indices are in range) but spares numpy a copy of out.
            np.take(rows, source, axis=0, out=out, mode="clip")
        until = source[:, -1] // self._width
        if self._finals:
            self._deliver_finals(window, first, until)
        pending ^= oldest
        self._oldest_left = int(until.min()) + 1
        return self._versions[source // self._width] if versions else None

    def _deliver_finals(self, window: Window, first: int, until: Array) -> None:
        for final in self._finals:
            here = self._pending[final.row, final.envs] & (final.row <= until[final.envs])
            envs = final.envs[here]
            place = self._pending[first : final.row, envs].sum(0)
            for key, values in final.values.items():
                window.array(next_key(key))[envs, place] = values[here]

    def trim(self) -> tuple[Array, int]:
        """Trim left-over steps to fit, at the cost of environments that are too far ahead.

        Returns those whose left-over steps were all discarded, and how many steps that were.
        """
        last = self._keep + self._taken
        pending = self._pending[self._oldest_left : last]
        over = len(pending) - self._keep
        ahead = np.flatnonzero(pending[: max(over, 0)].any(0))
        discarded = self._drop(ahead)
        rows = np.flatnonzero(pending.any(1))
        left = len(pending) - int(rows[0]) if len(rows) else 0
        source, target = slice(last - left, last), slice(self._keep - left, self._keep)
        for log in (*self._rows.values(), self._pending, self._versions):
            log[target] = log[source]
        self._pending[: target.start] = False
        self._pending[self._keep :] = False
        moved = [_Finals(f.row - self._taken, f.envs, f.values) for f in self._finals]
        self._finals = [f for f in moved if f.row >= target.start]
        self.left = left
        return ahead, discarded

    def _drop(self, envs: Array | slice) -> int:
        count = int(np.count_nonzero(self._pending[:, envs]))
        if count:
            self._pending[:, envs] = False
        return count

    def reset(self, envs: Array | slice) -> int:
        """Note that ``envs`` were reset between rollouts; return how many steps that discarded."""
        self.waiting[envs] = False
        return self._drop(envs)

    def root(self, next_root: Window) -> None:
        """Write the root row that follows the last step into ``next_root``."""
        row = self._keep + self._taken
        for key in next_root.keys():
            next_root.rows(key)[0][...] = self._rows[key][row, : self._envs]


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
