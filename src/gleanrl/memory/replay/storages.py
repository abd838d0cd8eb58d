"""Where rows lie: tensors in memory or in a file, or a list of anything."""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import Key, NestedKey
from gleanrl.memory.available import check_memory
from gleanrl.memory.fence import fence
from gleanrl.memory.replay import files
from gleanrl.memory.replay.files import anonymous, closing, opened, unnamed_file
from gleanrl.memory.replay.gate import ProcessGate, ThreadGate
from gleanrl.memory.replay.handles import Handle
from gleanrl.memory.replay.ledger import Ledger
from gleanrl.memory.replay.once import Successors, choose
from gleanrl.memory.replay.reservation import Reservation
from gleanrl.memory.replay.rows import RowLayout, Rows, batch_shape, describe, flatten
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.tensor_files import take_room


class Storage:
    """Rows and the ledger that says which of them are whole."""

    shareable = False
    lock_timeout = 60.0
    """See `ReplayBuffer`."""
    compact: bool | Sequence[NestedKey] = False
    """Which observations are stored once; see `LazyTensorStorage`."""

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        """Hold ``max_size`` frames.

        Raises:
            ConfigError: ``max_size`` is not positive, or ``ndim`` neither 1 nor 2.
        """
        if isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
            raise ConfigError(f"max_size is a positive number of rows, not {max_size!r}")
        if ndim not in (1, 2):
            raise ConfigError(f"ndim is 1 (rows) or 2 ([env, time]), not {ndim!r}")
        self.max_size = max_size
        self.ndim = ndim
        self.shared = False
        self.ledger = self._private_ledger()

    def _private_ledger(self) -> Ledger:
        words = np.zeros(Ledger.words_for(self.max_size), np.int64)
        return Ledger(self.max_size, ThreadGate(), words)

    def __deepcopy__(self, memo: dict[int, Any]) -> Storage:
        """Return a storage with copies of all rows; it is shared if this one is."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            vars(twin)[name] = None if name in self._OWN else copy.deepcopy(value, memo)
        with self.ledger.section():
            twin._open()
            memo[id(self.ledger)] = twin.ledger
            twin._copy_rows(self)
        return twin

    _OWN: tuple[str, ...] = ("ledger",)
    """What no two storages have in common."""

    def _open(self) -> None:
        """Make what `_OWN` names, empty."""
        self.ledger = self._private_ledger()

    def _copy_rows(self, other: Any) -> None:
        """Copy all rows of a storage of the same kind, inside its ledger's section."""
        self.ledger.take_over(other.ledger)

    @property
    def envs(self) -> int:
        """Frames per slot of the ring: environments of an ``[env, time]`` storage, else 1."""
        return 1

    def __len__(self) -> int:
        """Return the number of frames that are whole."""
        return self.ledger.live * self.envs

    def share(self) -> None:
        """Move to memory that other processes map.

        Raises:
            ConfigError: this kind of storage cannot be.
        """
        raise ConfigError(
            f"{type(self).__name__} holds objects of one process; share a "
            "LazyTensorStorage or LazyMemmapStorage"
        )

    def prepare(self, data: Any, dim: int) -> tuple[Any, int]:
        """Check ``data`` and return it as `write` takes it, and how many slots it fills."""
        raise NotImplementedError

    def link(self, reservation: Reservation, values: Any, offset: int, count: int) -> None:
        """Store what rows need beside themselves, before they are written."""

    def write(self, start: int, values: Any, offset: int, count: int) -> None:
        """Write slots ``start`` to ``start + count`` from ``offset`` on in prepared data."""
        raise NotImplementedError

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        """Return copies of the frames at flat places ``index``, ``[n]``, and more entries."""
        raise NotImplementedError

    def field(self, key: Key) -> torch.Tensor | None:
        """Return a field of all slots, ``[slots, ...]``, or ``None``."""
        return None


class LazyTensorStorage(Storage):
    """Tensors in memory, allocated when the first data is stored, which decides what rows are.

    Args:
        max_size: Frames to hold.
        device: Where they lie; ``None`` is the CPU. Samples come out there.
        ndim: 1 for rows; 2 for ``[env, time]`` data, of which each environment's frames follow one
            another (``max_size // envs`` steps are kept).
        compact: Store an observation once where the next row begins with what ``("next", ...)``
            held: samples are the same, in half the memory for images. Successors that are not
            there (ends of episodes, the last row of each `extend`) are kept beside the rows.
            ``True``: every entry of more than 8 bytes that has a successor; or root keys. On the
            CPU only.
    """

    shareable = True

    def __init__(
        self,
        max_size: int,
        device: torch.device | str | None = None,
        ndim: int = 1,
        compact: bool | Sequence[NestedKey] = False,
    ) -> None:
        super().__init__(max_size, ndim)
        self.device = torch.device("cpu" if device is None else device)
        self.compact = [compact] if isinstance(compact, str) else compact
        if self.compact is not False and self.device.type != "cpu":
            raise ConfigError(f"compact=True is for storages on the CPU, not on {self.device}")
        self._rows: Rows | None = None
        self._successors: Successors | None = None
        self._memory: SharedMemory | None = None
        self._words: SharedMemory | None = None
        self._gate: ProcessGate | None = None

    @property
    def rows(self) -> Rows | None:
        """The tensors, ``None`` while nothing was stored by anybody."""
        if self._rows is None and self.ledger.ready:
            with (
                self.ledger.section()
            ):  # two threads must not both make tensors: one would write into its own
                if self._rows is None:
                    layout = RowLayout.from_json(self.ledger.layout())
                    rows = Rows(layout, self.ledger.slots, self._allocate)
                    self._successors = self._link_up(rows) if layout.once else None
                    self._rows = rows  # last: who sees it uses the other as well
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory that were needed so far, for rows and what is kept beside them."""
        rows = self.rows
        if rows is None:
            return 0
        return rows.nbytes + self.ledger.spare * rows.layout.spare_nbytes

    @property
    def envs(self) -> int:
        """Frames per slot of the ring."""
        rows = self.rows
        return 1 if rows is None else rows.layout.envs or 1

    def initialise(self, layout: RowLayout) -> Rows:
        """Allocate for ``layout``, or check that what was allocated is the same.

        Raises:
            ConfigError: the storage holds other rows, or they do not fit into memory.
        """
        layout = choose(layout, self.compact)
        slots = self.max_size // (layout.envs or 1)
        if slots < 1:
            raise ConfigError(f"max_size ({self.max_size}) is less than {layout.envs} environments")
        with self.ledger.section():
            if not self.ledger.ready:
                self._reserve_memory(layout, slots)
                self.ledger.initialise(slots, layout.to_json())
        rows = self.rows
        assert rows is not None
        if rows.layout != layout:
            raise ConfigError(f"this storage holds rows of {rows.layout}, not of {layout}")
        return rows

    def prepare(self, data: Any, dim: int) -> tuple[list[torch.Tensor], int]:
        """Check ``data``, time first: ``[slots, ...]`` or ``[slots, envs, ...]``."""
        rows = self.rows
        if dim == 1:
            batch_shape(data, 2)
            if rows is None:
                flipped = {k: v.transpose(0, 1) for k, v in flatten(data).items()}
                rows = self.initialise(describe(flipped, 2, batch_shape(data, 2)[2:]))
            values = [value.transpose(0, 1) for value in rows.take(data, 2)]
        else:
            batch_shape(data, self.ndim)
            if rows is None:
                rows = self.initialise(describe(data, self.ndim))
            values = rows.take(data, self.ndim)
        if self.ndim == 2 and values[0].shape[1] != rows.layout.envs:
            raise ConfigError(
                f"data of {values[0].shape[1]} environments for a storage of {rows.layout.envs}"
            )
        return values, values[0].shape[0]

    def link(
        self, reservation: Reservation, values: Sequence[torch.Tensor], offset: int, count: int
    ) -> None:
        """Find and store successors, if they are stored once."""
        if self._successors is not None:
            self._successors.link(reservation, values, offset, count)

    def write(self, start: int, values: Sequence[torch.Tensor], offset: int, count: int) -> None:
        """Copy prepared leaves into slots."""
        rows = self._rows
        assert rows is not None
        for tensor, place in zip(rows.tensors, rows.kept, strict=False):
            value = values[place]
            tensor[start : start + count].copy_(value[offset : offset + count].detach())

    def scatter(self, places: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Copy prepared leaves to single places."""
        rows = self._rows
        assert rows is not None
        for tensor, value in zip(rows.tensors, values, strict=True):
            tensor.index_copy_(0, places.to(tensor.device), value.detach().to(tensor.device))

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        """Copy frames out."""
        rows = self._rows or self.rows
        assert rows is not None
        if rows.device.type != "cpu":
            index = index.to(rows.device)
            extra = {name: value.to(rows.device) for name, value in extra.items()}
        return rows.gather(index, extra)

    def field(self, key: Key) -> torch.Tensor | None:
        """Return a field of all slots."""
        rows = self.rows
        return None if rows is None else rows.field(key)

    def windows(self, reservation: Reservation) -> Iterator[dict[Key, torch.Tensor]]:
        """Yield views of reserved rows by key, in order: two if they wrap, else one."""
        rows = self.rows
        assert rows is not None
        for start, stop, _ in self.ledger.pieces(reservation.first, reservation.rows):
            yield rows.view(start, stop)

    def share(self) -> None:
        """Move what is stored to anonymous memory that other processes map."""
        if self.shared:
            return
        if self.device.type != "cpu":
            raise ConfigError(f"a storage on {self.device} cannot be shared between processes")
        kept = dict(vars(self))
        try:
            self._move()
        except BaseException:  # the disk is full, for one
            vars(self).update(kept)
            raise

    def _move(self) -> None:
        before, old = self.ledger, self.rows
        state = before.snapshot()
        self.shared = True
        self._open()
        self.ledger.flow[:] = before.flow
        if old is None:
            return
        spare = before.spare
        self.initialise(old.layout)
        with self.ledger.section():
            self.put_back(
                state, [t[: before.top] for t in old.tensors], old.spare_up_to(spare), True
            )

    def put_back(
        self,
        state: Mapping[str, Any],
        stored: Sequence[torch.Tensor],
        spare: Sequence[torch.Tensor],
        verbatim: bool = False,
    ) -> None:
        """Replace all rows by those of a checked state, which nobody sees before they are whole.

        Inside the ledger's section.

        Args:
            state: Cursor, counters and stamps.
            stored: The stored fields of slots from the first on.
            spare: The spare places from the first on.
            verbatim: See `Ledger.restore`.
        """
        rows, successors = self.rows, self._successors
        assert rows is not None
        if successors is not None:
            successors.grow(max(map(len, spare)))
        self.ledger.clear_for(state)
        for to, saved in zip((*rows.tensors, *rows.spare()), (*stored, *spare), strict=True):
            to[: len(saved)].copy_(saved)
        fence()
        if successors is None:
            self.ledger.restore(state, verbatim)
        else:
            self.ledger.restore(state, verbatim, successors.rebuild)

    _OWN = ("ledger", "_rows", "_successors", "_memory", "_words", "_gate")

    def _open(self) -> None:
        self._rows = self._successors = self._memory = self._words = self._gate = None
        if self.shared:
            self._words, self._gate = anonymous(), ProcessGate(SharedMemory().fd)
            self._words.reserve(8 * Ledger.words_for(self.max_size))
            self._map_ledger()
            self._memory = self._new_file()
        else:
            self.ledger = self._private_ledger()

    def _copy_rows(self, other: LazyTensorStorage) -> None:
        old, top, spare = other.rows, other.ledger.top, other.ledger.spare
        if old is not None:
            self._reserve_memory(old.layout, old.slots)
            self._take_room(old.layout, old.slots, range(spare))
        with self.ledger.section():
            self.ledger.take_over(other.ledger)
            new = self.rows
        if old is None or new is None:
            return
        for to, tensor in zip(new.tensors, old.tensors, strict=True):
            to[:top].copy_(tensor[:top])
        for to, tensor in zip(new.spare_up_to(spare), old.spare_up_to(spare), strict=True):
            to.copy_(tensor)
        if old.layout.once:
            new.owners[:spare].copy_(old.owners[:spare])

    def _map_ledger(self) -> None:
        assert self._words is not None
        assert self._gate is not None
        self._gate.timeout = self.lock_timeout
        words = np.frombuffer(self._words.map(), np.int64)
        self.ledger = Ledger(self.max_size, self._gate, words)

    def _new_file(self) -> SharedMemory:
        return anonymous()

    def _reserve_memory(self, layout: RowLayout, slots: int) -> None:
        self._check_room(layout.nbytes * slots)
        if self._memory is not None:
            self._memory.clear()
            self._memory.reserve(max(files.nbytes_of(layout.shapes(slots)), mmap.PAGESIZE))
            self._take_room(layout, slots, None)

    def _take_room(self, layout: RowLayout, slots: int, spare: range | None) -> None:
        """Take what is mapped from where it comes from; memory is taken when it is touched."""

    def _link_up(self, rows: Rows) -> Successors:
        return Successors(
            rows, self.ledger, lambda spare: self._take_room(rows.layout, rows.slots, spare)
        )

    def _check_room(self, nbytes: int) -> None:
        if self.device.type == "cpu":
            what = f"{self.max_size:,} such frames"
            check_memory(nbytes, what, "lower max_size, or use LazyMemmapStorage", "memory")

    def _allocate(
        self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> list[torch.Tensor]:
        if self._memory is not None:
            return files.carve(self._memory.map(), shapes)
        if self.compact is not False:
            # Half of it may never be needed, and is not taken before.
            return files.carve(files.sparse(files.nbytes_of(shapes)), shapes)
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]

    def __getstate__(self) -> dict[str, Any]:
        if self._words is None or self._gate is None or self._memory is None or not self.shared:
            raise ReplayError(
                "this replay buffer is private to its process: make it with shared=True, or call "
                "share(), before it is sent to another one"
            )
        state = {
            k: v for k, v in self.__dict__.items() if k not in ("ledger", "_rows", "_successors")
        }
        for name in ("_words", "_memory", "_gate"):
            state[name] = Handle.of(state[name].fd)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._words, self._memory = opened(state["_words"]), opened(state["_memory"])
        self._gate = ProcessGate.of(state["_gate"])
        self._rows = self._successors = None
        self._map_ledger()


class LazyMemmapStorage(LazyTensorStorage):
    """Tensors in a file that is mapped, for buffers larger than memory.

    The file has no name: it is gone with the last process that maps it. `ReplayBuffer.dumps` makes
    files that stay.

    Args:
        max_size: Frames to hold.
        scratch_dir: Where the file lies; the system's directory for temporary files by default.
        ndim: As in `LazyTensorStorage`.
        compact: As in `LazyTensorStorage`.
    """

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        compact: bool | Sequence[NestedKey] = False,
    ) -> None:
        super().__init__(max_size, None, ndim, compact)
        self.scratch_dir = tempfile.gettempdir() if scratch_dir is None else os.fspath(scratch_dir)
        os.makedirs(self.scratch_dir, exist_ok=True)
        self._memory = self._new_file()

    def _open(self) -> None:
        super()._open()
        self._memory = self._memory or self._new_file()

    def _new_file(self) -> SharedMemory:
        return closing(SharedMemory(unnamed_file(self.scratch_dir)))

    def _check_room(self, nbytes: int) -> None:
        files.check_disk(nbytes, self.max_size, self.scratch_dir)

    def _take_room(self, layout: RowLayout, slots: int, spare: range | None) -> None:
        """Take blocks of the disk: one that is full must not end the process later."""
        assert self._memory is not None
        starts = files.starts_of(layout.shapes(slots))
        for number, first, nbytes in layout.extents(slots, spare):
            try:
                take_room(self._memory.fd, starts[number] + first, nbytes)
            except OSError as err:
                raise OSError(
                    err.errno,
                    f"{err.strerror}: {nbytes:,} bytes of a buffer of {self.max_size:,} frames in "
                    f"{self.scratch_dir}; lower max_size, or give another scratch_dir",
                ) from err


class ListStorage(Storage):
    """A list of anything, of one process.

    Args:
        max_size: Items to hold.
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)
        self.items: list[Any] = []
        with self.ledger.section():
            self.ledger.initialise(max_size, b"{}")

    def prepare(self, data: Any, dim: int) -> tuple[list[Any], int]:
        """Split ``data`` into items."""
        items = list(data.unbind(0)) if isinstance(data, TensorDictBase) else list(data)
        return items, len(items)

    def write(self, start: int, values: Sequence[Any], offset: int, count: int) -> None:
        """Keep references to items."""
        self.items.extend([None] * (start + count - len(self.items)))
        self.items[start : start + count] = values[offset : offset + count]

    def scatter(self, places: torch.Tensor, values: Sequence[Any]) -> None:
        """Keep references at single places."""
        for place, value in zip(places.tolist(), values, strict=True):
            self.write(place, [value], 0, 1)

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the items at ``index``."""
        return [self.items[place] for place in index.tolist()]

    def snapshot(self) -> list[Any]:
        """Return a shallow copy of what is stored."""
        return copy.copy(self.items)
