"""Rollouts of an asynchronous pool: one environment each, put together from raw steps of some."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import DONE, Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.window import Array, Window

_ROWS_NBYTES = 1 << 22
"""Memory of the raw steps that are sorted into chunks at once: it stays in the caches."""
_FEWEST_ROWS, _MOST_ROWS = 8, 128


class Chunks:
    """``T`` consecutive transitions of each of ``N`` environments, in whatever order they come.

    The pool and the policy work on rows of ``M`` environments, the raw steps. Every environment
    has a chunk with places for ``T`` transitions. Rows are sorted into chunks in bulk: a row's
    observation and action go to the next free place of its environment, and the reward and flags
    with which it came there to the place that its environment had in an earlier row. A chunk is
    full when its last transition has arrived; then it waits to be delivered, first come, first
    served, and its environment gets another one. So nothing is ever lost, and there are never more
    than ``2 N + M`` chunks.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        shifted: Sequence[Key],
        arriving: Collection[Key],
        size: tuple[int, int, int],
    ) -> None:
        """Reserve memory, which is touched only as far as it is used.

        ``shifted``: Root keys whose ``"next"`` value is the root value of the transition after it.
        ``arriving``: Those of ``fields`` that tell how an environment got into the next row.
        ``size``: ``N``, ``M`` and ``T``.
        """
        self._envs, self._width, self.steps = envs, width, steps = size
        nbytes = width * sum(field.nbytes for field in fields)
        self.most = rows = min(
            steps, max(_FEWEST_ROWS, min(_MOST_ROWS, _ROWS_NBYTES // max(1, nbytes)))
        )
        """The rows that can be taken before they are sorted."""
        self.rows: dict[Key, Array] = {
            field.key: np.zeros((rows + 1, width, *field.shape), field.numpy_dtype)
            for field in fields
        }
        self.window = self._view(0, rows)
        """The rows, to which pool and policy are bound."""
        self.next_root = self._view(rows, 1)
        count = 2 * envs + width
        self._trash = count * steps
        """The place of data outside of transitions."""
        finals = [replace(f, key=next_key(f.key)) for f in fields if f.key in shifted]
        stored = {f.key: f for f in (*fields, *finals)}
        self._stored: dict[Key, Array] = {
            key: np.zeros((self._trash + 1, *field.shape), field.numpy_dtype)
            for key, field in stored.items()
        }
        self._versions = np.zeros(self._trash + 1, np.int64)
        self._by_chunk = {
            key: places[:-1].reshape(count, steps, *places.shape[1:])
            for key, places in self._stored.items()
        }
        self._shifted = tuple(shifted)
        self._arriving = tuple(arriving)
        self._acting = [f.key for f in fields if f.key not in arriving]
        self._dense = [f.key for f in fields]
        self._done = self.rows[next_key(DONE)][:, :, 0]
        self._all = np.ones(width, bool)
        self.full: deque[int] = deque()
        """Chunks that wait to be delivered."""
        self._start()

    def _view(self, start: int, steps: int) -> Window:
        tensors = {
            key: torch.from_numpy(rows[start : start + steps]).transpose(0, 1)
            for key, rows in self.rows.items()
        }
        return Window(tensors, self._width, steps)

    def reset(self) -> int:
        """Forget all transitions, because all environments were reset; return how many."""
        lost = len(self.full) * self.steps + self.left
        self._start()
        return lost

    def _start(self) -> None:
        envs, count = self._envs, 2 * self._envs + self._width
        self.full.clear()
        self._free = list(range(envs, count))
        self._chunk = np.arange(envs)
        """The chunk of each environment."""
        self.owner = np.arange(count)
        """The environment of each chunk."""
        self._position = np.zeros(envs, np.int64)
        """The next free place of each environment in its chunk, ``T`` at most."""
        self._last = np.full(envs, self._trash)
        """The place in which each environment acted last, unless it is at hand."""
        self._at_hand = np.arange(0)
        self._over = np.zeros(self._width, bool)
        """Whether the next action of an environment at hand only resets it."""

    @property
    def left(self) -> int:
        """Transitions in chunks that are not full."""
        under_way = np.delete(self._last, self._at_hand) < self._trash
        return int(self._position.sum() - under_way.sum())

    def begin(self, next_root: Window) -> None:
        """Continue from the root fields in ``next_root``, of the environments at hand."""
        for key in next_root.keys():
            self.rows[key][0] = next_root.rows(key)[0]

    def rows_needed(self, waiting: int) -> int:
        """Return the number of rows to take before looking whether ``waiting`` chunks are full.

        They will be if environments come about equally often. In ``T`` rows none fills two.
        """
        short = np.partition(self.steps - self._position, waiting - 1)[waiting - 1]
        rows = int(short) * self._envs // self._width
        # Resets are no transitions. What is left over waits, so a few rows more are not in vain.
        return min(max(_FEWEST_ROWS, rows + rows // 16 + 4), self.most)

    def take(self, count: int, ids: Array, version: int) -> None:
        """Sort ``count`` rows, in which environments acted by policy ``version``, into chunks.

        One more row shows those that are at hand then. ``ids``: ``[count + 1, M]``, the environment
        of each entry.
        """
        order, envs, first = self._in_order(ids[: count + 1].reshape(-1))
        width, own = self._width, envs[first]
        # In the last of these rows none has acted.
        over = np.concatenate((self._over, self._done[: count - 1].reshape(-1), self._all))
        found = self._places(envs, over[order])
        before = np.empty_like(found)
        before[1:] = found[:-1]
        before[first], self._last[own] = (
            self._last[own],
            found[np.append(first[1:], len(found)) - 1],
        )
        places, arrivals = np.empty((2, len(found)), np.int64)
        places[order], arrivals[order] = found, before
        places = places[:-width]
        self._store(count, places, arrivals[width:])
        self._versions[places] = version
        self._over, self._at_hand = self._done[count - 1].copy(), ids[count].copy()
        for rows in self.rows.values():
            rows[0] = rows[count]

    def _in_order(self, envs: Array) -> tuple[Array, Array, Array]:
        """Return the order by environment, and by time within each.

        Also returns the sorted ``envs``, and where in these each environment begins.
        """
        # Numpy sorts numbers of 16 bits in a fraction of the time.
        narrow = envs.astype(np.int16) if self._envs < 1 << 15 else envs
        order = np.argsort(narrow, kind="stable")
        envs, row = envs[order], order // self._width
        same = envs[1:] == envs[:-1]
        twice = same & (row[1:] == row[:-1])
        if twice.any() or envs[0] < 0 or envs[-1] >= self._envs:
            env = envs[int(np.argmax(twice))] if twice.any() else envs[-1]
            raise EnvError(f"the pool answered for environment {env}, which had no action")
        return order, envs, np.append(0, np.flatnonzero(~same) + 1)

    def _places(self, envs: Array, over: Array) -> Array:
        """Return the places of the sorted ``envs`` that are not ``over``; give them new chunks."""
        real, steps = ~over, self.steps
        each = np.bincount(envs[real], minlength=self._envs)
        index = real.cumsum() - 1 + (self._position - each.cumsum() + each)[envs]
        self._position += each
        fresh = self._chunk.copy()
        crossing = np.flatnonzero(self._position > steps)
        fresh[crossing] = self._new(crossing)
        self._position[crossing] -= steps
        found: Array = index + steps * np.where(index < steps, self._chunk[envs], fresh[envs] - 1)
        found[over] = self._trash
        self._chunk = fresh
        return found

    def _store(self, count: int, places: Array, arrivals: Array) -> None:
        """Write what ``count`` rows hold to ``places``, and with what they ended to ``arrivals``.

        An arrival's place is that in which its environment acted before.
        """
        for keys, where in ((self._acting, places), (self._arriving, arrivals)):
            for key in keys:
                self._stored[key][where] = _flat(self.rows[key][:count])
        last = arrivals % self.steps == self.steps - 1
        final = np.flatnonzero(self._done[:count].reshape(-1) | last)
        for key in self._shifted:
            after = _flat(self.rows[key][1 : count + 1])[final]
            self._stored[next_key(key)][arrivals[final]] = after
        self._retire(arrivals[last] // self.steps)

    def _new(self, envs: Array) -> list[int]:
        chunks = [self._free.pop() for _ in envs]
        self.owner[chunks] = envs
        return chunks

    def _retire(self, chunks: Array) -> None:
        """Note that ``chunks`` are full; environments that did not get others get them now."""
        found = chunks[chunks < len(self.owner)]
        self.full.extend(found.tolist())
        envs = self.owner[found]
        late = envs[self._chunk[envs] == found]
        self._chunk[late] = self._new(late)
        self._position[late] = 0

    def deliver(self, window: Window) -> tuple[Array, Array]:
        """Move the oldest ``M`` full chunks into ``window``.

        Returns the environment of each row, ``[M]``, and the policy version of each step.
        """
        delivered = [self.full.popleft() for _ in range(self._width)]
        self._free += delivered
        chunks, stored = np.array(delivered), self._by_chunk
        for key in self._dense:
            np.take(stored[key], chunks, axis=0, out=window.array(key), mode="clip")
        ends = window.array(next_key(DONE))[..., 0].copy()
        ends[:, -1] = True
        row, step = ends.nonzero()
        for key in self._shifted:
            after = window.array(next_key(key))
            after[:, :-1] = window.array(key)[:, 1:]
            after[row, step] = stored[next_key(key)][chunks[row], step]
        return self.owner[chunks], self._versions[:-1].reshape(-1, self.steps)[chunks]

    def root(self, next_root: Window) -> None:
        """Write the root fields of the environments at hand into ``next_root``."""
        for key in next_root.keys():
            next_root.rows(key)[0][...] = self.rows[key][0]


def _flat(rows: Array) -> Array:
    return rows.reshape(-1, *rows.shape[2:])
