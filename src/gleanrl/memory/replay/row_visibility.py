"""Complete rows of a ring: one writer at a time, safe against death at any instant.

Every row has one word, its *sequence number*: positive when the row is complete, negative while it
is being written, zero when it holds nothing. It contains the row's position, and lies in shared
memory if the rows do. docs/decisions.md ("Replay") says how readers and writers use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.memory.replay.locks import ThreadLock
from gleanrl.memory.shared import fence

Words: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
_AUTHOR_BITS = 20
STEP = 1 << _AUTHOR_BITS
"""Difference between the sequence numbers of rows that one author wrote one after the other."""
_AUTHOR_MASK = STEP - 1
_LAYOUT_WORDS = 16384
_HEADER = 256
# Header words.
_SLOTS, _CURSOR, _COUNT, _LIVE, _CHANGES, _AUTHORS, _BASE, _EPOCH = range(8)
_OP, _TO_CURSOR, _TO_COUNT, _TABLES = range(8, 12)
_TABLE = 3
"""Words of a table of places."""
TABLES = 64
"""Tables of places that a ring can have."""
_COPY, _COMPLETE, _EMPTY = 1, 2, 3
_POSITIONS, _COUNTS = 1 << 42, 1 << 53
"""Bounds above all real values, and far below the overflow of positions and counters."""


class Author:
    """A writer whose rows continue one another.

    Two rows are successive steps only if one author wrote them one after the other. So two
    collectors, whose trajectory ids both begin at 0, are two authors; a collector that leaves out
    frames, or numbers trajectories from an earlier state, becomes another author.

    An author has another number in each process and ring, and after `RingIndex.empty` or `restore`.
    """

    _at: tuple[object, int, int] | None = None
    _number = 0

    def number(self, ring: RingIndex) -> int:
        """Return the number of this author in ``ring``; inside `section`."""
        at = ring._identity, int(ring._h[_EPOCH]), os.getpid()
        if self._at != at:
            ring._h[_AUTHORS] += 1
            self._at, self._number = at, int(ring._h[_AUTHORS])
        return self._number


_current_author: ContextVar[Author | None] = ContextVar("author", default=None)


@contextmanager
def written_by(author: Author) -> Iterator[None]:
    """Attribute the rows that this thread stores in a ``with`` block to ``author``."""
    token = _current_author.set(author)
    try:
        yield
    finally:
        _current_author.reset(token)


class Version(NamedTuple):
    """The state of a ring at one moment; a copy is not a version of any ring."""

    ring: object
    epoch: int
    changes: int
    oldest: int
    """Rows before this position no longer change, unless they are overwritten."""


class _Word:
    """A word of the header as an int attribute."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, ring: RingIndex, kind: type) -> int:
        return int(ring._h[self._place])

    def __set__(self, ring: RingIndex, value: int) -> None:
        ring._h[self._place] = value


class RingIndex:
    """The sequence numbers of a ring of rows."""

    slots = _Word(_SLOTS)
    """Rows in the ring."""
    count = _Word(_COUNT)
    """Rows ever completed since the last `empty`."""
    live = _Word(_LIVE)
    """Rows that are complete now."""

    def __init__(self, max_slots: int, lock: ThreadLock, words: Words) -> None:
        """Use ``words`` (zeroed, `words_for` of them), which others may share."""
        self.lock = lock
        self._identity = object()
        self._author = Author()
        """Of the rows that no collector stores."""
        self._h = words[:_HEADER]
        self.flow: Words = words[_HEADER - 8 : _HEADER]
        """Words for the limiter of the rates of writing and sampling; zero at first."""
        start = _HEADER + _LAYOUT_WORDS
        self._layout = words[_HEADER:start].view(np.uint8)
        self._all = words[: self.words_for(max_slots)]  # a mapping ends at the end of a page
        self.sequence: Words = words[start : start + max_slots]
        """The sequence number of every row."""
        self.sequence_tensor = torch.from_numpy(self.sequence)
        """The same memory as a tensor."""
        self._ramp: Words = np.arange(256, dtype=np.int64) << _AUTHOR_BITS

    @staticmethod
    def words_for(max_slots: int) -> int:
        """Return how many words the index of ``max_slots`` rows needs."""
        return _HEADER + _LAYOUT_WORDS + max_slots

    def table(self, number: int) -> Words:
        """Return the words of a table of places (see `Places`); changed inside `section`."""
        first = _TABLES + number * _TABLE
        return self._h[first : first + _TABLE]

    @property
    def ready(self) -> bool:
        """Whether the layout of a row is known."""
        return bool(self._h[_SLOTS])

    @property
    def top(self) -> int:
        """The place above all rows that were ever written."""
        # Readers take no lock: `empty` and `restore` write one of the two words before the other.
        return max(0, min(int(self._h[_CURSOR] - self._h[_BASE]), int(self._h[_SLOTS])))

    @property
    def next_number(self) -> int:
        """A bound above all sequence numbers of complete rows: later rows have larger ones."""
        return (int(self._h[_CURSOR]) + 1) << _AUTHOR_BITS

    def is_at(self, version: Version | None) -> bool:
        """Tell whether no sequence number has changed since ``version``."""
        return version is not None and version[:3] == (
            self._identity,
            self._h[_EPOCH],
            self._h[_CHANGES],
        )

    @contextmanager
    def section(self) -> Iterator[None]:
        """Keep all others from changing the index, and finish the work of a dead process."""
        with self.lock:
            if self._h[_OP] and self.lock.depth == 1:
                self._repair()
            yield

    def initialise(self, slots: int, layout: bytes) -> None:
        """Fix the size of the ring and describe its rows; inside `section`."""
        if len(layout) > self._layout.nbytes:
            raise ReplayError(f"rows with a layout of {len(layout):,} bytes have too many fields")
        self._layout[: len(layout)] = np.frombuffer(layout, np.uint8)
        self._h[_SLOTS] = slots

    def layout(self) -> bytes:
        """Return the layout passed to `initialise`."""
        return self._layout.tobytes().rstrip(b"\0")

    @contextmanager
    def append(self, rows: int, counted: int) -> Iterator[int]:
        """Replace the oldest ``rows`` rows (at most `slots`), which a ``with`` block writes.

        They become visible when the block ends, and `count` grows by ``counted``. After an
        exception they hold nothing. The block gets the position of the first row; its place is
        ``first % slots``.
        """
        with self.section():
            h, first = self._h, int(self._h[_CURSOR])
            author = (_current_author.get() or self._author).number(self)
            number = (first + 1) << _AUTHOR_BITS | author & _AUTHOR_MASK
            if len(self._ramp) < rows:
                self._ramp = np.arange(rows, dtype=np.int64) << _AUTHOR_BITS
            parts = [self.sequence[start:stop] for start, stop, _ in self.pieces(first, rows)]
            live = self.live - sum(int(np.count_nonzero(part > 0)) for part in parts)
            self._begin(_COPY, first + rows, self.count + counted)
            begin = 0
            for part in parts:
                # Ufuncs store whole words, which a plain copy of bytes does not promise.
                np.subtract(-number, self._ramp[begin : begin + len(part)], out=part)
                begin += len(part)
            h[_LIVE] = live
            h[_CHANGES] += 1
            try:
                yield first
            except BaseException:
                self._repair()
                raise
            h[_OP] = _COMPLETE
            for part in parts:
                np.negative(part, out=part)
            self._end(self.count + counted, live + rows)

    def empty(self, count: bool = True) -> None:
        """Forget all rows."""
        with self.section():
            self._begin(_EMPTY, int(self._h[_CURSOR]), 0 if count else self.count)
            self._repair()

    def pieces(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Split positions into ``(start, stop)`` places and the offset of the first in them."""
        slots = int(self._h[_SLOTS])
        start = first % slots
        before_end = min(count, slots - start)
        yield start, start + before_end, 0
        if before_end < count:
            yield 0, count - before_end, before_end

    def changes(self, since: Version | None) -> tuple[Version, Words | None]:
        """Return the current version, and the slots that may have changed since another one.

        Positions are given out in order: the slots that change are those being written and those
        that follow; the slot behind these is among them. ``None`` stands for all slots.
        """
        h = self._h
        # Writers store these words in the opposite order, so no lock is needed.
        epoch, changes = int(h[_EPOCH]), int(h[_CHANGES])
        fence()
        now, after = Version(self._identity, epoch, changes, int(h[_CURSOR])), int(h[_TO_CURSOR])
        if since is None or since[:2] != now[:2] or after - since.oldest >= self.slots:
            return now, None
        return now, np.arange(since.oldest, after + 1) % self.slots

    def snapshot(self) -> dict[str, Any]:
        """Return cursor, counters and sequence numbers."""
        with self.section():
            return {
                "cursor": int(self._h[_CURSOR]),
                "base": int(self._h[_BASE]),
                "count": self.count,
                "stamps": torch.from_numpy(self.sequence[: self.top].copy()),
            }

    def clear_for(self, state: Mapping[str, Any]) -> None:
        """Forget all rows, before rows of a state take their places; inside `section`."""
        if self._cursor_after(state, self._lap_after(int(self._h[_CURSOR]))) >= _POSITIONS:
            raise ReplayError("this buffer has numbered too many rows to be loaded: make a new one")
        self.empty()
        fence()

    def restore(self, state: Mapping[str, Any], then: Callable[[], None] | None = None) -> None:
        """Show the rows of a `snapshot`, which were copied; after `clear_for`.

        Their positions are moved behind all that were ever given out, so that no reader takes them
        for rows that it has seen; a ring that was never used keeps them.

        Args:
            state: Cursor, counters and sequence numbers, of a ring of the same size.
            then: Called before the rows show; if the process ends earlier, nothing was restored.
        """
        h, cursor, numbers = self._h, state["cursor"], state["stamps"].numpy()
        after = self._cursor_after(state, int(h[_BASE]))
        self._begin(_EMPTY, after, 0)
        h[_BASE] = h[_BASE] or state["base"]
        shift = np.where(numbers > 0, after - cursor, 0) << _AUTHOR_BITS
        np.add(numbers, shift, out=self.sequence[: len(numbers)])
        h[_EPOCH] += 1
        # The rows to come continue none of these: their authors get numbers that none of these has.
        h[_AUTHORS] = max(int(h[_AUTHORS]), int((numbers & _AUTHOR_MASK).max(initial=0)))
        if then is not None:
            then()
        self._end(state["count"], int(np.count_nonzero(numbers > 0)))

    def _lap_after(self, cursor: int) -> int:
        slots = max(self.slots, 1)
        return -(-cursor // slots) * slots

    def _cursor_after(self, state: Mapping[str, Any], base: int) -> int:
        """Return the cursor after the rows of a state, which begin at the position ``base``."""
        if not base:
            return int(state["cursor"])
        after = base + _span(state)
        return int(after + (state["cursor"] - after) % max(self.slots, 1))

    def mark(self, places: Words) -> None:
        """Complete single rows out of order, as the newest (no ring; one process)."""
        with self.section():
            first, fresh = int(self._h[_CURSOR]), int(np.count_nonzero(self.sequence[places] == 0))
            ranks = first + 1 + np.arange(len(places), dtype=np.int64)
            # Neighbours get different authors: rows placed one by one follow no other row.
            self.sequence[places] = ranks << _AUTHOR_BITS | places & 1
            self._h[_CURSOR] = first + len(places)
            self._h[_LIVE] += fresh
            self._h[_EPOCH] += 1

    def _begin(self, op: int, cursor: int, count: int) -> None:
        """Note a change of the index before it is made; inside `section`."""
        h = self._h
        if h[_OP]:
            raise ReplayError(
                "this thread was already writing to this replay buffer: a signal handler writes to "
                "it in the middle of extend(). Set a flag in the handler, and write after extend()"
            )
        h[_TO_CURSOR], h[_TO_COUNT] = cursor, count
        h[_OP] = op

    def _end(self, count: int, live: int) -> None:
        h = self._h
        h[_COUNT], h[_LIVE], h[_CURSOR] = count, live, h[_TO_CURSOR]
        h[_CHANGES] += 1
        h[_OP] = 0

    def _repair(self) -> None:
        """Complete or undo a change that was begun; a second call changes nothing."""
        h, numbers, count = self._h, self.sequence, int(self._h[_TO_COUNT])
        if h[_OP] == _COMPLETE:
            np.absolute(numbers, out=numbers)
        elif h[_OP] == _COPY:
            # Also rows that were to be overwritten and still are whole: later rows are gone first.
            cursor = int(h[_CURSOR])
            for start, stop, _ in self.pieces(cursor, int(h[_TO_CURSOR]) - cursor):
                np.multiply(numbers[start:stop], 0, out=numbers[start:stop])
            count = self.count
        else:
            np.multiply(numbers, 0, out=numbers)
            h[_BASE] = h[_TO_CURSOR] = self._lap_after(int(h[_TO_CURSOR]))
            h[_EPOCH] += 1
        self._end(count, int(np.count_nonzero(numbers > 0)))


def check_snapshot(state: Mapping[str, Any], slots: int) -> None:
    """Check cursor, counters and sequence numbers of a `RingIndex.snapshot`."""
    cursor, base, count = (state[name] for name in ("cursor", "base", "count"))
    for name, value, most in (
        ("cursor", cursor, _POSITIONS),
        ("base", base, _POSITIONS),
        ("count", count, _COUNTS),
        ("slots", slots, _POSITIONS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < most:
            raise ConfigError(f"a replay buffer's {name} is no number like {value!r:.50}")
    numbers = state["stamps"]
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64 or numbers.ndim != 1:
        raise ConfigError("a replay buffer's stamps are int64 [rows]")
    if slots < 1 or base > cursor or base % slots or len(numbers) != min(cursor - base, slots):
        raise ConfigError(
            f"rows {base} to {cursor} of a replay buffer of {slots} slots are not {len(numbers)}"
        )
    places = (numbers[numbers != 0] >> _AUTHOR_BITS) - 1
    if len(places) and not base <= int(places.min()) <= int(places.max()) < cursor:
        raise ConfigError(f"stamps of a replay buffer lie outside its rows, {base} to {cursor}")
    if len(torch.unique(places)) < len(places) or count < len(places):
        raise ConfigError(
            f"{len(places)} rows of a replay buffer that counted {count} are not one each"
        )
    if _span(state) >= _POSITIONS // 2:
        raise ConfigError(f"rows of a replay buffer lie {_span(state)} positions apart")


def _span(state: Mapping[str, Any]) -> int:
    """Return the distance from the oldest row to the cursor."""
    numbers, cursor = state["stamps"], state["cursor"]
    complete = numbers[numbers > 0]
    oldest = int(complete.min() >> _AUTHOR_BITS) - 1 if len(complete) else cursor
    return max(int(cursor) - oldest, len(numbers))
