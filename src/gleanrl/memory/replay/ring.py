"""Complete rows of a ring: reserve, commit, revoke; safe against death at any instant.

Every row has one word, its *sequence number*: positive when the row is complete, negative while it
is being written, zero when it holds nothing. Positions only grow and a sequence number holds its
position, so a word never has the same value twice: a reader that finds the same number before and
after copying a row has copied a complete row. The words lie in shared memory if the rows do.

Every change is written down first (the write-ahead record), as absolute values, and the word that
makes it valid last. The next process inside finishes what a process that was killed left there.

The lock orders the stores of writers. Readers do without it: `fence` keeps what they copy between
their two looks at the sequence numbers.
"""

from __future__ import annotations

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
_ENTRIES = 1024
_LAYOUT_WORDS = 16384
_HEADER = 64
# Header words.
_READY, _SLOTS, _CURSOR, _COUNT, _LIVE, _CHANGES, _OWNERS, _BASE, _EPOCH = range(9)
_OP, _ENTRY, _FIRST, _N, _OWNER, _TO_CURSOR, _TO_COUNT, _TO_LIVE, _TO_CHANGES = range(10, 19)
_LAYOUT_SIZE, _OVERFLOW, _OVERFLOW_NEXT, _AUTHOR = range(19, 23)
_RESERVE, _COMMIT, _REVOKE, _EMPTY, _LOAD = 1, 2, 3, 4, 5
_POSITIONS, _COUNTS = 1 << 42, 1 << 53
"""Bounds above all real values, and far below the overflow of positions and counters."""


class Reservation(NamedTuple):
    """Rows that one writer may write; travels between processes."""

    entry: int
    owner: int
    first: int
    """Position of the first row; its place is ``first % slots``."""
    rows: int
    author: int
    """Number that the sequence numbers of these rows contain."""


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
        at = ring._identity, int(ring._h[_EPOCH]), ring._owner()
        if self._at != at:
            self._at, self._number = at, ring._new_number()
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
    """The sequence numbers of a ring of rows, and the reservations of its writers."""

    slots = _Word(_SLOTS)
    """Rows in the ring."""
    count = _Word(_COUNT)
    """Rows ever committed since the last `empty`."""
    live = _Word(_LIVE)
    """Rows that are complete now."""
    overflow = _Word(_OVERFLOW)
    """Overflow places (see `dedup`) that were ever needed; changed inside `section`."""
    overflow_next = _Word(_OVERFLOW_NEXT)
    """The first overflow place to check for a free one."""

    def __init__(self, max_slots: int, lock: ThreadLock, words: Words) -> None:
        """Use ``words`` (zeroed, `words_for` of them), which others may share."""
        self.lock = lock
        self._identity = object()
        self._author = Author()
        """Of the rows that no collector stores."""
        self._h = words[:_HEADER]
        self.flow: Words = words[_HEADER - 8 : _HEADER]
        """Words for the limiter of the rates of writing and sampling; zero at first."""
        start = _HEADER
        self._table = words[start : start + 3 * _ENTRIES].reshape(_ENTRIES, 3)
        start += 3 * _ENTRIES
        self._layout = words[start : start + _LAYOUT_WORDS].view(np.uint8)
        start += _LAYOUT_WORDS
        self._all = words[: self.words_for(max_slots)]  # a mapping ends at the end of a page
        self.sequence: Words = words[start : start + max_slots]
        """The sequence number of every row."""
        self.sequence_tensor = torch.from_numpy(self.sequence)
        """The same memory as a tensor."""
        self._ramp: Words = np.arange(256, dtype=np.int64) << _AUTHOR_BITS

    @staticmethod
    def words_for(max_slots: int) -> int:
        """Return how many words the index of ``max_slots`` rows needs."""
        return _HEADER + 3 * _ENTRIES + _LAYOUT_WORDS + max_slots

    @property
    def ready(self) -> bool:
        """Whether the layout of a row is known."""
        return bool(self._h[_READY])

    @property
    def top(self) -> int:
        """The place above all rows that were ever reserved."""
        # Readers take no lock: `empty` and `restore` write one of the two words before the other.
        return max(0, min(int(self._h[_CURSOR] - self._h[_BASE]), int(self._h[_SLOTS])))

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
            if self._h[_OP]:
                self._recover()
            yield

    def initialise(self, slots: int, layout: bytes) -> None:
        """Fix the size of the ring and describe its rows; inside `section`."""
        if len(layout) > self._layout.nbytes:
            raise ReplayError(f"rows with a layout of {len(layout):,} bytes have too many fields")
        self._layout[: len(layout)] = np.frombuffer(layout, np.uint8)
        self._h[_LAYOUT_SIZE] = len(layout)
        self._h[_SLOTS] = slots
        self._h[_READY] = 1

    def layout(self) -> bytes:
        """Return the layout passed to `initialise`."""
        return self._layout[: int(self._h[_LAYOUT_SIZE])].tobytes()

    def reserve(self, count: int) -> Reservation:
        """Take the next ``count`` rows (at most `slots`) for writing; their old contents are lost.

        Raises:
            ReplayError: so much is being written by others that no room is left.
        """
        with self.section():
            entry = self._free_entry()
            first = self._place(count)
            live = self.live - sum(
                int(np.count_nonzero(self.sequence[a:b] > 0))
                for a, b, _ in self.pieces(first, count)
            )
            author = (_current_author.get() or self._author).number(self)
            reservation = Reservation(entry, self._owner(), first, count, author)
            self._enact(_RESERVE, reservation, cursor=first + count, live=live)
            return reservation

    def commit(self, reservation: Reservation, counted: int | None = None) -> bool:
        """Make rows visible.

        Args:
            reservation: What `reserve` returned, in whatever process.
            counted: By how much `count` grows; the number of rows by default.

        Returns:
            False if the buffer was emptied since the reservation: the rows go with the rest.

        Raises:
            ReplayError: the reservation was revoked, or committed before.
        """
        with self.section():
            self._check_held(reservation)
            if reservation.first < self._h[_BASE]:
                self._enact(_REVOKE, reservation)
                return False
            rows = reservation.rows
            self._enact(
                _COMMIT,
                reservation,
                count=self.count + (rows if counted is None else counted),
                live=self.live + rows,
            )
            return True

    def revoke(self, reservation: Reservation) -> None:
        """Return reserved rows unwritten; nobody may write them after this call begins."""
        with self.section():
            self._check_held(reservation)
            self._enact(_REVOKE, reservation)

    def empty(self, count: bool = True) -> None:
        """Forget all rows; rows under way are forgotten at their commit."""
        with self.section():
            cursor = self._next_lap()
            self._enact(
                _EMPTY,
                Reservation(0, 0, cursor, 0, 0),
                cursor=cursor,
                count=0 if count else self.count,
                live=0,
            )

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

        Positions are given out in order: what changes is what is being written, and what follows;
        the slot behind that is among them.

        Returns:
            ``None`` for slots if everything has to be looked at.
        """
        h = self._h
        with self.section():
            cursor, held = int(h[_CURSOR]), self._table[self._table[:, 0] != 0, 1]
            oldest = min([cursor, *held.tolist()])
            now = Version(self._identity, int(h[_EPOCH]), int(h[_CHANGES]), oldest)
        if since is None or since[:2] != now[:2] or cursor - since.oldest >= self.slots:
            return now, None
        return now, np.arange(since.oldest, cursor + 1) % self.slots

    def snapshot(self) -> dict[str, Any]:
        """Return cursor, counters and sequence numbers; incomplete rows count as nothing."""
        with self.section():
            return {
                "cursor": int(self._h[_CURSOR]),
                "base": int(self._h[_BASE]),
                "count": self.count,
                "stamps": torch.from_numpy(np.maximum(self.sequence[: self.top], 0)),
            }

    def clear_for(self, state: Mapping[str, Any]) -> None:
        """Forget all rows, before rows of a state take their places; inside `section`."""
        if self._table[:, 0].any():
            self._sweep()
        if self._table[:, 0].any():
            raise ReplayError("a replay buffer cannot be loaded while rows of it are being written")
        if self._cursor_after(state, self._next_lap()) >= _POSITIONS:
            raise ReplayError("this buffer has numbered too many rows to be loaded: make a new one")
        self.empty()
        fence()

    def restore(self, state: Mapping[str, Any], then: Callable[[], None] | None = None) -> None:
        """Show the rows of a checked `snapshot`, which were copied; after `clear_for`.

        Their positions are moved behind all that were ever given out, so that no reader takes them
        for rows that it has seen; in a ring that was never used they stay what they are.

        Args:
            state: Cursor, counters and sequence numbers, of a ring of the same size.
            then: What belongs to it: if the process ends before, nothing was restored.
        """
        h, cursor, numbers = self._h, state["cursor"], state["stamps"].numpy()
        after = self._cursor_after(state, int(h[_BASE]))
        h[_TO_CURSOR] = after
        h[_OP] = _LOAD
        h[_BASE] = h[_BASE] or state["base"]
        shift = np.where(numbers > 0, after - cursor, 0) << _AUTHOR_BITS
        np.add(numbers, shift, out=self.sequence[: len(numbers)])
        h[_CURSOR], h[_COUNT] = after, state["count"]
        h[_LIVE] = int(np.count_nonzero(numbers > 0))
        h[_EPOCH] += 1
        # The rows to come continue none of these: their authors get numbers that none of these has.
        h[_OWNERS] = max(int(h[_OWNERS]), int((numbers & _AUTHOR_MASK).max(initial=0)))
        if then is not None:
            then()
        h[_OP] = 0

    def _next_lap(self) -> int:
        slots = max(self.slots, 1)
        return -(-int(self._h[_CURSOR]) // slots) * slots

    def _cursor_after(self, state: Mapping[str, Any], base: int) -> int:
        """Return the cursor after the rows of a state, which begin at the position ``base``."""
        if not base:
            return int(state["cursor"])
        after = base + _span(state)
        return int(after + (state["cursor"] - after) % max(self.slots, 1))

    def mark(self, places: Words) -> None:
        """Commit single rows out of order, as the newest (no ring; one process)."""
        with self.section():
            first, fresh = int(self._h[_CURSOR]), int(np.count_nonzero(self.sequence[places] == 0))
            ranks = first + 1 + np.arange(len(places), dtype=np.int64)
            # Neighbours get different authors: what was placed one by one follows no other row.
            self.sequence[places] = ranks << _AUTHOR_BITS | places & 1
            self._h[_CURSOR] = first + len(places)
            self._h[_LIVE] += fresh
            self._h[_EPOCH] += 1

    def add_count(self, rows: int) -> None:
        """Count rows that were received and not stored."""
        with self.section():
            self._h[_COUNT] += rows

    def _owner(self) -> int:
        owner = self.lock.owner
        if owner is None:
            # Numbers are never given out twice, so a new process never looks like a dead one.
            owner = self._new_number()
            self.lock.claim(owner)
        return owner

    def _new_number(self) -> int:
        self._h[_OWNERS] += 1
        return int(self._h[_OWNERS])

    def _free_entry(self) -> int:
        free = np.flatnonzero(self._table[:, 0] == 0)
        if not len(free):
            self._sweep()
            free = np.flatnonzero(self._table[:, 0] == 0)
        if not len(free):
            raise ReplayError(f"{_ENTRIES} writers write at once, more than a buffer can note")
        return int(free[0])

    def _place(self, count: int) -> int:
        slots, cursor = self.slots, int(self._h[_CURSOR])
        first = cursor
        while first + count <= cursor + 2 * slots:
            after = self._blocked_until(first, count)
            if after is None:
                return first
            first = after
        raise ReplayError(
            f"{count} rows cannot be reserved in a buffer of {slots}: too many of its rows are "
            "being written; make max_size larger than what all writers hold at once"
        )

    def _blocked_until(self, first: int, count: int) -> int | None:
        if not any(self.sequence[a:b].min() < 0 for a, b, _ in self.pieces(first, count)):
            return None
        self._sweep()
        slots = self.slots
        for owner, held, rows in self._table.tolist():
            behind, ahead = (first - held) % slots, (held - first) % slots
            if owner and behind < rows:
                return first + rows - behind
            if owner and ahead < count:
                return first + ahead + rows
        return None

    def _sweep(self) -> None:
        """Revoke the reservations of dead processes."""
        for entry in np.flatnonzero(self._table[:, 0]).tolist():
            owner, first, count = self._table[entry].tolist()
            if not self.lock.alive(owner):
                self._enact(_REVOKE, Reservation(entry, owner, first, count, 0))

    def _check_held(self, reservation: Reservation) -> None:
        entry = self._table[reservation.entry].tolist()
        if entry != [reservation.owner, reservation.first, reservation.rows]:
            raise ReplayError(f"{reservation} is not held (any more): committed or revoked before")

    def _enact(
        self,
        op: int,
        reservation: Reservation,
        cursor: int | None = None,
        count: int | None = None,
        live: int | None = None,
    ) -> None:
        """Write the change down, then do it."""
        h = self._h
        h[_ENTRY], h[_OWNER], h[_FIRST], h[_N], h[_AUTHOR] = reservation
        h[_TO_CURSOR] = h[_CURSOR] if cursor is None else cursor
        h[_TO_COUNT] = h[_COUNT] if count is None else count
        h[_TO_LIVE] = h[_LIVE] if live is None else live
        h[_TO_CHANGES] = h[_CHANGES] + 1
        h[_OP] = op
        self._apply()

    def _recover(self) -> None:
        if self._h[_OP] == _LOAD:
            # What was to be shown cannot be known any more; the positions are used up.
            self._h[_CURSOR] = self._h[_TO_CURSOR]
            self.empty()
            return
        reserving = self._h[_OP] == _RESERVE
        words = (_ENTRY, _OWNER, _FIRST, _N, _AUTHOR)
        reservation = Reservation(*(int(self._h[word]) for word in words))
        self._apply()
        if reserving:
            self._enact(_REVOKE, reservation)

    def _apply(self) -> None:
        """Make the change that is written down; a second call changes nothing."""
        h = self._h
        op, first, count = int(h[_OP]), int(h[_FIRST]), int(h[_N])
        if op == _EMPTY:
            np.minimum(self.sequence, 0, out=self.sequence)
            h[_BASE] = first
            h[_EPOCH] += 1
        else:
            self._number(first, count, int(h[_AUTHOR]), op)
            row = self._table[int(h[_ENTRY])]
            row[1], row[2] = first, count
            row[0] = h[_OWNER] if op == _RESERVE else 0
        h[_CURSOR], h[_COUNT], h[_LIVE] = h[_TO_CURSOR], h[_TO_COUNT], h[_TO_LIVE]
        h[_CHANGES] = h[_TO_CHANGES]
        h[_OP] = 0

    def _number(self, first: int, count: int, author: int, op: int) -> None:
        if len(self._ramp) < count:
            self._ramp = np.arange(count, dtype=np.int64) << _AUTHOR_BITS
        for start, stop, offset in self.pieces(first, count):
            out = self.sequence[start:stop]
            base = (first + offset + 1) << _AUTHOR_BITS | author & _AUTHOR_MASK
            # Ufuncs store whole words, which a plain copy of bytes does not promise.
            if op == _COMMIT:
                np.add(self._ramp[: stop - start], base, out=out)
            elif op == _RESERVE:
                np.subtract(-base, self._ramp[: stop - start], out=out)
            else:
                np.multiply(self._ramp[: stop - start], 0, out=out)


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
