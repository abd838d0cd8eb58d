"""Storages of rows (tensors in memory or in a file, or a list), and their filling."""

from __future__ import annotations

import copy
import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import Key, NestedKey
from gleanrl.core.options import check_int, read_device
from gleanrl.memory.replay.locks import ProcessLock, ThreadLock
from gleanrl.memory.replay.row_visibility import RingIndex
from gleanrl.memory.replay.rows import RowLayout, Rows, Shapes, batch_shape, deduplicate, describe
from gleanrl.memory.replay.stacks import FrameStore
from gleanrl.memory.shared import SharedMemory, check_memory, fence, use_huge_pages

_ALIGN = 64
_AT_ONCE = 1 << 28
"""Bytes that are copied while writers wait."""
_NORESERVE = 0x4000
"""Linux: mapped memory that was never touched does not count."""


class Storage:
    """Rows and the index of complete rows."""

    lock_timeout = 60.0
    """See `ReplayBuffer`."""
    compact: bool | Sequence[NestedKey] = False
    """Which observations are stored once; see `LazyTensorStorage`."""
    _OWN: tuple[str, ...] = ("ring",)
    """Attributes that storages never share."""

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        """Hold ``max_size`` frames.

        Raises:
            ConfigError: ``max_size`` is not positive, or ``ndim`` neither 1 nor 2.
        """
        if ndim not in (1, 2):
            raise ConfigError(f"ndim is 1 (rows) or 2 ([env, time]), not {ndim!r}")
        self.max_size = check_int("max_size", max_size, least=1)
        self.ndim = ndim
        self.shared = False
        self.ring: RingIndex
        self._open()

    def _open(self) -> None:
        """Make the attributes named in `_OWN`, empty."""
        try:
            words = np.zeros(RingIndex.words_for(self.max_size), np.int64)
        except MemoryError as err:
            raise ConfigError(f"max_size ({self.max_size:,}) must be lower: {err}") from err
        self.ring = RingIndex(self.max_size, ThreadLock(), words)

    def __deepcopy__(self, memo: dict[int, Any]) -> Storage:
        """Return a storage with copies of all rows; it is shared if this one is."""
        kept = {name: value for name, value in vars(self).items() if name not in self._OWN}
        twin = self._moved_to(copy.deepcopy(kept, memo))
        memo[id(self)] = twin
        return twin

    def __getstate__(self) -> dict[str, Any]:
        raise ReplayError(
            f"{type(self).__name__} stays in its process, since it holds any objects: send "
            "buffer.state_dict(), or use a LazyTensorStorage, which ReplayBuffer(..., shared=True) "
            "shares between processes"
        )

    def _moved_to(self, attributes: Mapping[str, Any]) -> Self:
        """Return a storage with these attributes and this storage's rows."""
        twin = type(self).__new__(type(self))
        vars(twin).update(attributes)
        with self.ring.section():
            twin._open()
            twin.load_state_dict(self.state_dict(copied=False))
        return twin

    @property
    def envs(self) -> int:
        """Frames per slot of the ring: environments of an ``[env, time]`` storage, else 1."""
        return 1

    def __len__(self) -> int:
        """Return the number of frames that are complete."""
        return self.ring.live * self.envs

    def frames_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the flat places of all frames of ``slots``: slot times envs plus env."""
        envs = self.envs
        return slots if envs == 1 else (slots.unsqueeze(1) * envs + torch.arange(envs)).flatten()

    def slots_of(self, index: torch.Tensor) -> torch.Tensor:
        """Return the slots of flat places."""
        envs = self.envs
        return index if envs == 1 else index.div(envs, rounding_mode="floor")

    def sequence_of(self, index: torch.Tensor) -> torch.Tensor:
        """Return the sequence numbers of the slots of flat places."""
        return self.ring.sequence_tensor.index_select(0, self.slots_of(index))

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

    def extend(self, data: Any, dim: int) -> torch.Tensor:
        """Store ``data`` in place of the oldest rows; of more rows than fit, the last ones.

        Other writers wait meanwhile. Rows become visible when all are complete.

        Args:
            data: Rows along dimension ``dim``.
            dim: 0, or 1 for ``[env, time]`` data.

        Returns:
            The slots that now hold the data, int64.
        """
        values, count = self.prepare(data, dim)
        slots = self.ring.slots
        rows = min(count, slots)
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        with self.ring.append(rows, count) as first:
            self.write(first, rows, values, count - rows)
        places = torch.arange(first % slots, first % slots + rows)
        return places if first % slots + rows <= slots else places % slots

    def write(self, first: int, rows: int, values: Any, offset: int) -> None:
        """Write ``rows`` rows of ``values``, from ``offset`` on, to positions from ``first`` on."""
        raise NotImplementedError

    @property
    def element(self) -> tuple[int, ...]:
        """The batch size of one row, as far as that is known."""
        return ()

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        """Return copies of the frames at flat places ``index``, ``[n]``, and more entries."""
        raise NotImplementedError

    def field(self, key: Key) -> torch.Tensor | None:
        """Return a field of all slots, ``[slots, ...]``, or ``None``."""
        return None

    def state_dict(self, copied: bool = True) -> dict[str, Any]:
        """Return all complete rows and the counters.

        Args:
            copied: Copy the tensors; otherwise they are views that later writes show in.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rows at their places.

        Raises:
            ConfigError: the state is that of a storage of another size.
        """
        self._check_slots(state, self.ring.slots)
        with self.ring.section():
            self.ring.clear_for(state)
            self._put_back(state)

    def _check_slots(self, state: Mapping[str, Any], slots: int) -> None:
        if state["slots"] != slots:
            raise ConfigError(
                f"a state of {state['slots']:,} places for rows does not fit into a storage of "
                f"{slots:,}: load it into one of the same max_size, and move rows by extend"
            )

    def _put_back(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of a state of the same size; inside `section`.

        No reader sees them before they are complete.
        """
        raise NotImplementedError


class LazyTensorStorage(Storage):
    """Tensors in memory, allocated for the first data, which decide the layout of rows.

    Args:
        max_size: Frames to hold.
        device: Device of rows and samples; ``None`` is the CPU.
        ndim: 1 for rows; 2 for ``[env, time]`` data, of which each environment's frames follow one
            another (``max_size // envs`` steps are kept).
        compact: Store equal observations of neighbouring rows, and of their successors under
            ``"next"``, once: samples are the same, in half the memory for images. ``True``: every
            entry of more than 24 bytes that has a successor; or root keys. On the CPU only.
        stacks: Entries that are stacks of frames, and the number of frames: ``{"pixels": 4}``.
            Equal frames of neighbouring rows, and of their successors, are stored once. Samples are
            the same. The first dimension of an entry is that of the frames (``[4, 84, 84]``, or
            ``[12, 84, 84]`` for frames of three channels), or the last (``[84, 84, 4]``, which is
            sampled as a view that is not contiguous). On the CPU only.
    """

    _OWN = ("ring", "_rows", "_parts", "_memory", "_words", "_lock")

    def __init__(
        self,
        max_size: int,
        device: torch.device | str | None = None,
        ndim: int = 1,
        compact: bool | Sequence[NestedKey] = False,
        stacks: Mapping[NestedKey, int] | None = None,
    ) -> None:
        self.device = read_device("device", device) or torch.device("cpu")
        self.compact = [compact] if isinstance(compact, str) else compact
        if not isinstance(stacks, Mapping | None):
            raise ConfigError(f"stacks is a mapping like {{'pixels': 4}}, not {stacks!r:.80}")
        self.stacks = dict(stacks or {})
        if self.shares_rows and self.device.type != "cpu":
            raise ConfigError(
                f"compact=True and stacks are for storages on the CPU, not on {self.device}"
            )
        super().__init__(max_size, ndim)

    def _open(self) -> None:
        self._rows: Rows | None = None
        self._parts: list[FrameStore] = []
        self._memory: SharedMemory | None = None
        self._words: SharedMemory | None = None
        self._lock: ProcessLock | None = None
        if self.shared:
            self._words, self._lock = SharedMemory(), ProcessLock()
            self._words.reserve(8 * RingIndex.words_for(self.max_size))
            self._map_ring()
            self._memory = self._new_file()
        else:
            super()._open()

    def _map_ring(self) -> None:
        assert self._words is not None
        assert self._lock is not None
        self._lock.timeout = self.lock_timeout
        words = np.frombuffer(self._words.map(), np.int64)
        self.ring = RingIndex(self.max_size, self._lock, words)

    @property
    def rows(self) -> Rows | None:
        """The tensors; ``None`` before the first data."""
        if self._rows is None and self.ring.ready:
            # Two threads must not both make tensors: one would write into its own.
            with self.ring.section():
                if self._rows is None:
                    layout = RowLayout.from_json(self.ring.layout())
                    rows = Rows(layout, self.ring.slots, self._allocate)
                    self._parts = rows.parts(self.ring, self._take_room)
                    self._rows = rows  # last: other threads that see it use the parts as well
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, for rows and their bookkeeping."""
        rows = self.rows
        return 0 if rows is None else rows.nbytes(self.ring)

    @property
    def shares_rows(self) -> bool:
        """Whether rows have parts in common, so that none can be replaced alone."""
        return self.compact is not False or bool(self.stacks)

    @property
    def envs(self) -> int:
        rows = self.rows
        return 1 if rows is None else rows.layout.envs or 1

    def initialise(self, layout: RowLayout) -> Rows:
        """Allocate for ``layout``, or check that an earlier allocation has the same layout.

        Raises:
            ConfigError: the storage holds other rows, or they do not fit into memory.
        """
        layout = deduplicate(layout, self.compact, self.stacks)
        slots = self.max_size // (layout.envs or 1)
        if slots < 1:
            raise ConfigError(f"max_size ({self.max_size}) is less than {layout.envs} environments")
        with self.ring.section():
            if not self.ring.ready:
                self._reserve_memory(layout, slots)
                self.ring.initialise(slots, layout.to_json())
        rows = self.rows
        assert rows is not None
        if rows.layout != layout:
            raise ConfigError(f"this storage holds rows of {rows.layout}, not of {layout}")
        return rows

    def prepare(self, data: Any, dim: int) -> tuple[list[torch.Tensor], int]:
        """Check ``data``, time first: ``[slots, ...]`` or ``[slots, envs, ...]``."""
        rows = self.rows
        ndim = 2 if dim == 1 else self.ndim
        batch_shape(data, ndim)
        if rows is None:
            rows = self.initialise(describe(data, ndim, dim))
        values = rows.take(data, ndim)
        if dim == 1:
            values = [value.transpose(0, 1) for value in values]
        if self.ndim == 2 and values[0].shape[1] != rows.layout.envs:
            raise ConfigError(
                f"data of {values[0].shape[1]} environments for a storage of {rows.layout.envs}"
            )
        return values, values[0].shape[0]

    def write(self, first: int, rows: int, values: Sequence[torch.Tensor], offset: int) -> None:
        """Copy prepared leaves, after the parts that rows have in common."""
        stored = self._rows
        assert stored is not None
        for part in self._parts:
            part.store(first, rows, values, offset)
        for start, stop, ahead in self.ring.pieces(first, rows):
            begin, end = offset + ahead, offset + ahead + stop - start
            for tensor, place in zip(stored.tensors, stored.kept, strict=False):
                tensor[start:stop].copy_(values[place][begin:end].detach())

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        rows = self._rows or self.rows
        assert rows is not None
        if rows.device.type != "cpu":
            index = index.to(rows.device)
            extra = {name: value.to(rows.device) for name, value in extra.items()}
        return rows.gather(index, extra)

    @property
    def element(self) -> tuple[int, ...]:
        rows = self.rows
        return () if rows is None else rows.layout.element

    def field(self, key: Key) -> torch.Tensor | None:
        rows = self.rows
        return None if rows is None else rows.by_key.get(key)

    def share(self) -> None:
        if self.shared:
            return
        if self.device.type != "cpu":
            raise ConfigError(f"a storage on {self.device} cannot be shared between processes")
        moved = self._moved_to({**vars(self), "shared": True})
        moved.ring.flow[:] = self.ring.flow
        moved.ring.lock.collect(self.ring.lock.collectors)
        vars(self).update(vars(moved))

    def state_dict(self, copied: bool = True) -> dict[str, Any]:
        rows = self.rows
        if rows is None:
            return {"layout": None}
        with self.ring.section() if copied and self.copied_at_once else nullcontext():
            state = self.ring.snapshot()
            top = len(state["stamps"])
            # Read after the sequence numbers: the places of rows that they show lie below.
            tensors = [*(tensor[:top] for tensor in rows.tensors), *rows.beyond(self.ring)]
            if copied:
                tensors = [tensor.clone() for tensor in tensors]
                self.drop_overwritten(state)
        layout = rows.layout.to_json().decode()
        return {**state, "slots": self.ring.slots, "layout": layout, "tensors": tensors}

    @property
    def copied_at_once(self) -> bool:
        """Whether writers wait while rows are copied, so that none is overwritten meanwhile."""
        return self.nbytes <= _AT_ONCE

    def drop_overwritten(self, state: dict[str, Any]) -> None:
        """Drop rows from ``state`` that were written while they were copied."""
        numbers = state["stamps"]
        with self.ring.section():
            numbers[numbers != self.ring.sequence_tensor[: len(numbers)]] = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("layout") is None:
            self.ring.empty()
            return
        layout = RowLayout.from_json(state["layout"].encode())
        if deduplicate(layout, self.compact, self.stacks) != layout:
            raise ConfigError(
                f"rows that were stored with {layout.sharing} do not fit into a storage with "
                f"compact={self.compact!r:.80} and stacks={self.stacks!r:.80}: store them by extend"
            )
        self._check_slots(state, self.max_size // (layout.envs or 1))
        rows = self.initialise(layout)
        with self.ring.section():
            # First of all: on a full disk, nothing changes.
            beyond = state["tensors"][len(rows.tensors) :]
            for part, tensor in zip(self._parts, beyond, strict=True):
                part.places.grow(len(tensor))
            super().load_state_dict(state)

    def _put_back(self, state: Mapping[str, Any]) -> None:
        rows = self.rows
        assert rows is not None
        for to, saved in zip([*rows.tensors, *rows.beyond()], state["tensors"], strict=True):
            to[: len(saved)].copy_(saved)
        fence()
        self.ring.restore(state, self._rebuild)

    def _rebuild(self) -> None:
        for part in self._parts:
            part.rebuild()

    def _new_file(self) -> SharedMemory:
        return SharedMemory()

    def _reserve_memory(self, layout: RowLayout, slots: int) -> None:
        self._check_room(layout.nbytes * slots)
        if self._memory is not None:
            self._memory.clear()
            self._memory.reserve(max(_starts_of(layout.shapes(slots))[-1], mmap.PAGESIZE))
            rows = Rows(layout, slots, self._allocate)
            frames = [part[: rows.frames] for parts in rows.frames_of for part in parts]
            self._take_room([*rows.tensors, *frames])

    def _check_room(self, nbytes: int) -> None:
        if self.device.type == "cpu":
            what = f"{self.max_size:,} such frames"
            check_memory(nbytes, what, "lower max_size, or use LazyMemmapStorage", "memory")

    def _take_room(self, tensors: Sequence[torch.Tensor]) -> None:
        """Reserve space on the disk, for files; the first touch reserves memory."""

    def _allocate(self, shapes: Shapes) -> list[torch.Tensor]:
        if self._memory is None and not self.shares_rows:
            return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes]
        starts = _starts_of(shapes)
        if self._memory is not None:
            memory = self._memory.map()
        else:
            # Half of it may never be needed, and is not taken before.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            memory = mmap.mmap(-1, max(starts[-1], mmap.PAGESIZE), flags=flags)
            use_huge_pages(memory)
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        return [
            everything[start : start + _nbytes(shape, dtype)].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, shapes, strict=False)
        ]

    def __getstate__(self) -> dict[str, Any]:
        if not self.shared:
            raise ReplayError(
                "this replay buffer is private to its process: make it with shared=True, or call "
                "share(), before it is sent to another one"
            )
        return vars(self) | {"_rows": None, "_parts": [], "ring": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_ring()


class LazyMemmapStorage(LazyTensorStorage):
    """Tensors in a file that is mapped, for buffers larger than memory.

    The file has no name: it ends with the last process that maps it. `ReplayBuffer.dumps` makes
    files that stay.

    Args:
        max_size: Frames to hold.
        scratch_dir: Directory of the file; the system's for temporary files by default.
        ndim: As in `LazyTensorStorage`, like ``compact`` and ``stacks``.
    """

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | os.PathLike[str] | None = None,
        ndim: int = 1,
        compact: bool | Sequence[NestedKey] = False,
        stacks: Mapping[NestedKey, int] | None = None,
    ) -> None:
        self.scratch_dir = tempfile.gettempdir() if scratch_dir is None else os.fspath(scratch_dir)
        os.makedirs(self.scratch_dir, exist_ok=True)
        super().__init__(max_size, None, ndim, compact, stacks)

    def _open(self) -> None:
        super()._open()
        self._memory = self._memory or self._new_file()

    def _new_file(self) -> SharedMemory:
        try:
            fd = os.open(self.scratch_dir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            # Some file systems have no files without names: this one loses its name at once.
            fd, path = tempfile.mkstemp(dir=self.scratch_dir)
            os.unlink(path)
        return SharedMemory(fd)

    def _check_room(self, nbytes: int) -> None:
        status = os.statvfs(self.scratch_dir)
        room = status.f_bavail * status.f_frsize
        if nbytes > room:
            raise ConfigError(
                f"a buffer of {self.max_size:,} such frames takes {nbytes:,} bytes and "
                f"{self.scratch_dir} has {room:,} left: lower max_size, or give another scratch_dir"
            )

    def _take_room(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take blocks of the disk: writing to a mapping ends the process (``SIGBUS``) without."""
        assert self._memory is not None
        start = torch.frombuffer(self._memory.map(), dtype=torch.uint8).data_ptr()
        for tensor in tensors:
            try:
                if tensor.nbytes:
                    fd, first = self._memory.fd, tensor.data_ptr() - start
                    os.posix_fallocate(fd, first, tensor.nbytes)
            except OSError as err:
                raise OSError(
                    err.errno,
                    f"{err.strerror}: {tensor.nbytes:,} bytes of a buffer of {self.max_size:,} "
                    f"frames in {self.scratch_dir}; lower max_size, or give another scratch_dir",
                ) from err


class ListStorage(Storage):
    """A list of arbitrary objects, in one process.

    Args:
        max_size: Items to hold.
    """

    _OWN = ("ring", "items")

    def _open(self) -> None:
        super()._open()
        self.items: list[Any] = []
        with self.ring.section():
            self.ring.initialise(self.max_size, b"{}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Storage:
        """Return a storage with deep copies of the items."""
        twin = super().__deepcopy__(memo)
        vars(twin)["items"] = copy.deepcopy(self.items, memo)
        return twin

    def prepare(self, data: Any, dim: int) -> tuple[list[Any], int]:
        if isinstance(data, Mapping) and not isinstance(data, TensorDictBase):
            raise ConfigError("a mapping is no list of items: use LazyTensorStorage, or add() it")
        items = list(data.unbind(0)) if isinstance(data, TensorDictBase) else list(data)
        return items, len(items)

    def write(self, first: int, rows: int, values: Sequence[Any], offset: int) -> None:
        """Keep references to items."""
        for start, stop, ahead in self.ring.pieces(first, rows):
            self.items.extend([None] * (stop - len(self.items)))
            self.items[start:stop] = values[offset + ahead : offset + ahead + stop - start]

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> list[Any]:
        return [self.items[place] for place in index.tolist()]

    def state_dict(self, copied: bool = True) -> dict[str, Any]:
        with self.ring.section():
            return {**self.ring.snapshot(), "slots": self.max_size, "items": [*self.items]}

    def _put_back(self, state: Mapping[str, Any]) -> None:
        self.items[:] = state["items"]
        self.ring.restore(state)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _starts_of(shapes: Shapes) -> list[int]:
    """Return the offsets of consecutive tensors of these shapes, and the end of the last."""
    return [0, *accumulate(-(-_nbytes(*shape) // _ALIGN) * _ALIGN for shape in shapes)]
