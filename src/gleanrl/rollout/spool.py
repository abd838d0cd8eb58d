"""The raw steps of a pool, kept until every environment has enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gleanrl.core.keys import IS_INIT, Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.protocols import Array
from gleanrl.memory.window import RolloutWindow


@dataclass(slots=True)
class _Finals:
    """Observations that are not in the root row that follows: their environments were reset."""

    row: int
    envs: Array
    values: dict[Key, Array]


class Spool:
    """A log of raw steps with two parts: what the last rollout left over, and this rollout.

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
        """Reserve memory; it is touched only as far as it is used.

        Args:
            fields: What the log holds.
            shifted: Root keys whose ``"next"`` value is delivered from the root row that follows.
            envs: Environments, ``P``.
            steps: Steps of one rollout, ``T``.
            keep: Raw steps that may be left over.
        """
        # At worst every other step is a reset, beginning with the first.
        room = 2 * steps + 1
        rows = keep + room + 1
        self.steps = steps
        self._envs, self._keep, self._left, self._taken = envs, keep, 0, 0
        kinds = {f.key: torch.empty(0, dtype=f.dtype).numpy().dtype for f in fields}
        self._rows: dict[Key, Array] = {
            field.key: np.zeros((rows, envs, *field.shape), kinds[field.key]) for field in fields
        }
        self._flat = {k: v.reshape(rows * envs, *v.shape[2:]) for k, v in self._rows.items()}
        self._shifted = tuple(shifted)
        self._pending = np.zeros((rows, envs), bool)
        """Steps that wait to be delivered."""
        self._versions = np.zeros(rows, np.int64)
        self._skipped = np.zeros((room, envs), bool)
        self._finals: list[_Finals] = []
        self.window = self._view(keep, room)
        """The rows of this rollout: what pool and policy are bound to."""
        self.carry = self._view(keep + room, 1)
        init = IS_INIT in self._rows
        self._init = self.window.rows(IS_INIT)[1:] + self.carry.rows(IS_INIT) if init else []

    def _view(self, start: int, steps: int) -> RolloutWindow:
        tensors = {
            key: torch.from_numpy(rows[start : start + steps]).transpose(0, 1)
            for key, rows in self._rows.items()
        }
        return RolloutWindow(tensors, self._envs, steps)

    def adopt(self, other: Spool) -> None:
        """Take over what ``other`` has left over; this one must be as wide and keep as much."""
        left = self._left = other._left
        mine = slice(self._keep - left, self._keep)
        theirs = slice(other._keep - left, other._keep)
        for key, rows in self._rows.items():
            rows[mine] = other._rows[key][theirs]
        self._pending[mine] = other._pending[theirs]
        self._versions[mine] = other._versions[theirs]
        offset = self._keep - other._keep
        self._finals = [_Finals(f.row + offset, f.envs, f.values) for f in other._finals]

    @property
    def left(self) -> int:
        """Raw steps left over from the last rollout."""
        return self._left

    def begin(self, carry: RolloutWindow) -> None:
        """Start a rollout from the root fields in ``carry``."""
        self._taken = 0
        self._skipped[...] = False
        if self._init:
            self._rows[IS_INIT][self._keep + 1 :] = False
        for key in carry.keys():
            self._rows[key][self._keep] = carry.rows(key)[0]

    # -- during the loop -------------------------------------------------------------------------

    def skip(self, t: int, envs: Array) -> None:
        """Leave out step ``t`` of ``envs``: it only reset them."""
        self._skipped[t, envs] = True
        self.started(t, envs)

    def started(self, t: int, envs: Array) -> None:
        """Note that root row ``t + 1`` of ``envs`` is the first of an episode."""
        if self._init:
            self._init[t][envs] = True

    def keep_finals(self, t: int, envs: Array) -> None:
        """Put root row ``t + 1`` of ``envs`` aside before a reset overwrites it."""
        row = self._keep + t
        values = {key: self._rows[key][row + 1, envs] for key in self._shifted}
        self._finals.append(_Finals(row, envs, values))

    def counts(self, taken: int) -> Array:
        """Return how many steps of each environment wait, with ``taken`` taken in this rollout."""
        waiting = self._pending[self._keep - self._left : self._keep].sum(0)
        counts: Array = waiting + taken - self._skipped[:taken].sum(0)
        return counts

    # -- after the loop --------------------------------------------------------------------------

    def append(self, taken: int, version: int) -> None:
        """Close this rollout's part of the log: ``taken`` steps by policy ``version``."""
        self._taken = taken
        fresh = slice(self._keep, self._keep + taken)
        np.logical_not(self._skipped[:taken], out=self._pending[fresh])
        self._versions[fresh] = version

    def deliver(self, window: RolloutWindow, steps: int) -> Array:
        """Move the oldest ``steps`` steps of every environment into ``window``.

        Every environment must have as many. Returns their policy versions, ``[P, steps]``.
        """
        first, last = self._keep - self._left, self._keep + self._taken
        pending = self._pending[first:last]
        order = pending.cumsum(0)
        chosen = pending & (order <= steps)
        env, at = np.nonzero(chosen.T)
        row: Array = (at + first).reshape(self._envs, steps)
        source = row * self._envs + env.reshape(self._envs, steps)
        for key, flat in self._flat.items():
            _gather(flat, source, window, key, steps)
        for key in self._shifted:
            _gather(self._flat[key], source + self._envs, window, next_key(key), steps)
        for final in self._finals:
            here = chosen[final.row - first, final.envs]
            envs = final.envs[here]
            place = order[final.row - first, envs] - 1
            for key, values in final.values.items():
                window.array(next_key(key))[envs, place] = values[here]
        pending &= ~chosen
        versions: Array = self._versions[row]
        return versions

    def trim(self) -> tuple[Array, int]:
        """Make what is left over fit, at the cost of environments that are too far ahead.

        Returns:
            The environments whose left-over steps were all discarded, and how many steps that were.
        """
        first, last = self._keep - self._left, self._keep + self._taken
        pending = self._pending[first:last]
        over = len(pending) - self._keep
        ahead = np.flatnonzero(pending[: max(over, 0)].any(0))
        discarded = self.drop(ahead)
        rows = np.flatnonzero(pending.any(1))
        left = len(pending) - int(rows[0]) if len(rows) else 0
        source, target = slice(last - left, last), slice(self._keep - left, self._keep)
        for log in (*self._rows.values(), self._pending, self._versions):
            log[target] = log[source]
        self._pending[: target.start] = False
        self._pending[self._keep :] = False
        moved = [_Finals(f.row - self._taken, f.envs, f.values) for f in self._finals]
        self._finals = [f for f in moved if f.row >= target.start]
        self._left = left
        return ahead, discarded

    def drop(self, envs: Array | slice) -> int:
        """Discard every waiting step of ``envs``; return how many there were."""
        waiting = self._pending[:, envs]
        count = int(np.count_nonzero(waiting))
        if count:
            self._pending[:, envs] = False
        return count

    def root(self, carry: RolloutWindow) -> None:
        """Write the root row that follows the last step into ``carry``."""
        row = self._keep + self._taken
        for key in carry.keys():
            carry.rows(key)[0][...] = self._rows[key][row]


def _gather(flat: Array, source: Array, window: RolloutWindow, key: Key, steps: int) -> None:
    # Clipping changes nothing (all indices are in range) but spares numpy a copy of the output.
    np.take(flat, source, axis=0, out=window.array(key)[:, :steps], mode="clip")
