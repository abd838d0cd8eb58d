"""Frames on disk: written batch by batch, read back as plain memory.

A dataset is a memory-mapped TensorDict of ``[frames]`` rows, so `TensorDict.load_memmap` opens it,
and a card. `Dataset` reads the raw files by what the card says and never unpickles anything, so it
can look at a directory from anywhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_non_tensor

from gleanrl.cli.card import CARD, Card, Column, DatasetError, card_text, read_card
from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, as_key, format_key
from gleanrl.memory import tensor_files

_CARD_EVERY_S = 2.0
_ROOM, _ROOM_NBYTES = ".room", 1 << 16
"""Room for the last card, if the disk is full by then: a file that is removed before, per entry."""


class DatasetWriter:
    """Writes batches of frames into files whose final size is reserved at the first batch."""

    def __init__(
        self,
        directory: Path,
        capacity: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to write at most ``capacity`` frames to ``directory``, which is made.

        Raises:
            ConfigError: the directory exists and is not empty, or cannot be made.
        """
        check_target(directory)
        # Whatever runs while data are collected may change the working directory.
        directory = directory.resolve()
        self._own = [up for up in (directory, *directory.parents) if not up.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise ConfigError(f"--out {directory} cannot be made: {err.strerror or err}") from err
        self.directory = directory
        """Where the data are, as an absolute path."""
        self.frames = 0
        """Frames written; they stay valid whatever happens next."""
        self._capacity = capacity
        self._clock = clock
        self._card_due = 0.0
        self._columns: dict[Key, Column] = {}
        self._files: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the frames written."""
        return self.frames * sum(column.row_nbytes for column in self._columns.values())

    def write(self, frames: TensorDictBase, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Append ``frames`` ``[K]``; now and then, put what ``facts`` returns on the card.

        Raises:
            DatasetError: there is not enough room, or the frames cannot be stored as arrays.
        """
        frames = _dense(frames)
        if not self._files:
            self._reserve(frames)
        stop = self.frames + frames.shape[0]
        if stop > self._capacity:
            raise DatasetError(f"{stop:,} frames do not fit into the {self._capacity:,} reserved")
        for key, file in self._files.items():
            file[self.frames : stop].copy_(frames.get(key))
        # Counted once complete: an interrupt above leaves a dataset without this batch.
        self.frames = stop
        now = self._clock()
        if now >= self._card_due:
            self._card_due = now + _CARD_EVERY_S
            with contextlib.suppress(OSError):  # frames have their room; `finish` has its own
                card = self._card("collecting", self._capacity, facts())
                tensor_files.replace(self.directory / CARD, card)

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        """Cut the files to what was written and write the final card; idempotent.

        Without any frame, what was made on disk is removed again.

        Raises:
            OSError: the disk is full; the files are as the last card says.
        """
        if not self.frames:
            self._files.clear()
            self._discard()
        if not self._files:
            return
        self._files.clear()
        texts = {self.directory / CARD: self._card(status, self.frames, facts)}
        if self.frames < self._capacity:
            texts |= self._cut_descriptions()
        with contextlib.ExitStack() as undo:
            drafts = {}
            (self.directory / _ROOM).unlink(missing_ok=True)
            for path, text in texts.items():  # all that takes room comes first
                drafts[path] = tensor_files.prepare(path, text)
                undo.callback(drafts[path].unlink, missing_ok=True)
            if self.frames < self._capacity:
                for column in self._columns.values():
                    os.truncate(self.directory / column.file, self.frames * column.row_nbytes)
            for path, draft in drafts.items():
                tensor_files.publish(draft, path)

    def _reserve(self, frames: TensorDictBase) -> None:
        keys = _tensor_keys(frames)
        row = sum(frames.get(key)[:1].nbytes for key in keys)
        free = shutil.disk_usage(self.directory).free
        if row * self._capacity > free:
            raise DatasetError(
                f"{self._capacity:,} frames take {size(row * self._capacity)} but {self.directory} "
                f"has {size(free)} left; collect fewer --frames"
            )
        room = frames[:1].expand(self._capacity).memmap_like(prefix=str(self.directory))
        files = {}
        for key in keys:
            file = room.get(key)
            assert isinstance(file, MemoryMappedTensor)
            self._take_room(Path(file.filename), self._capacity * frames.get(key)[:1].nbytes)
            name = Path(file.filename).relative_to(self.directory).as_posix()
            self._columns[key] = Column(key, tuple(file.shape[1:]), file.dtype, name)
            files[key] = file.as_subclass(torch.Tensor)
        self._take_room(self.directory / _ROOM, _ROOM_NBYTES * (1 + len(keys)))
        self._files = files

    def _take_room(self, path: Path, nbytes: int) -> None:
        path.touch()
        with path.open("r+b") as file:
            try:
                tensor_files.take_room(file.fileno(), 0, nbytes)
            except OSError as err:
                raise DatasetError(
                    f"{size(nbytes)} for {path.name} of {self._capacity:,} frames cannot be "
                    f"reserved in {self.directory} ({err.strerror}); collect fewer --frames"
                ) from err

    def _discard(self) -> None:
        """Remove what this writer made, and nothing that somebody else put there."""
        for pattern in ("*.memmap", "meta.json", ".*.json.*", _ROOM):
            for file in self.directory.rglob(pattern):
                file.unlink(missing_ok=True)
        folders = [path for path in self.directory.rglob("*") if path.is_dir()]
        for folder in (*sorted(folders, reverse=True), *self._own):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _cut_descriptions(self) -> dict[Path, str]:
        """Return what tensordict's own description of each folder is to say."""
        folders = {up for column in self._columns.values() for up in Path(column.file).parents}
        texts = {}
        for meta in (self.directory / folder / "meta.json" for folder in folders):
            content = json.loads(meta.read_text())
            for entry in (content, *content.values()):
                if isinstance(entry, dict) and entry.get("shape"):
                    entry["shape"][0] = self.frames
            texts[meta] = json.dumps(content)
        return texts

    def _card(self, status: str, rows: int, facts: Mapping[str, Any]) -> str:
        columns = [column.as_json() for column in self._columns.values()]
        known = {"status": status, "frames": self.frames, "rows": rows}
        return card_text({**known, **facts, "keys": columns})


def _tensor_keys(frames: TensorDictBase) -> list[Key]:
    entries = {as_key(key): value for key, value in frames.items(include_nested=True)}
    plain = (torch.Tensor, TensorDictBase)
    odd = [
        format_key(key)
        for key, value in entries.items()
        if is_non_tensor(value) or not isinstance(value, plain)
    ]
    if odd:
        raise DatasetError(f"{', '.join(odd)} cannot be written with --out: not a tensor")
    return [key for key, value in entries.items() if isinstance(value, torch.Tensor)]


def _dense(frames: TensorDictBase) -> TensorDictBase:
    if isinstance(frames, TensorDict):
        return frames
    try:
        return frames.contiguous()
    except RuntimeError as err:
        raise DatasetError(
            "entries whose shape changes from frame to frame cannot be written with --out"
        ) from err


def check_target(directory: Path) -> None:
    """Check that a dataset can be written to ``directory``, which need not exist.

    Raises:
        ConfigError: something is there already.
    """
    if directory.is_dir():
        if any(directory.iterdir()):
            raise ConfigError(f"--out {directory} is not empty; choose a new directory")
    elif directory.exists() or directory.is_symlink():
        raise ConfigError(f"--out {directory} is not a directory")


class Dataset:
    """A dataset opened for reading."""

    def __init__(self, directory: Path) -> None:
        """Read the card and check that the files are there and have the right size.

        Raises:
            ConfigError: there is no such directory.
            DatasetError: a file is missing, leads out of the directory or has another size.
        """
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory")
        self.directory = directory
        self.card: Card = read_card(directory)
        self._paths = {column.key: self._locate(column) for column in self.card.columns}

    def _locate(self, column: Column) -> Path:
        root = self.directory.resolve()
        path = (root / column.file).resolve()
        if not path.is_relative_to(root):
            raise DatasetError(f"{column.file!r} of {self.directory} leads out of the dataset")
        if not path.is_file():
            raise DatasetError(
                f"{self.directory} has no file {column.file!r}, which its card names"
            )
        expected, found = self.card.rows * column.row_nbytes, path.stat().st_size
        if found != expected:
            raise DatasetError(
                f"{column.file!r} of {self.directory} has {found:,} bytes; {self.card.rows:,} rows "
                f"of {format_key(column.key)} take {expected:,}"
            )
        return path

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.card.frames * sum(column.row_nbytes for column in self.card.columns)

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of all entries."""
        return tuple(self._paths)

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry as ``[frames, ...]``; it is mapped from its file and cannot change it.

        Raises:
            KeyError: there is no such entry.
        """
        column = next((column for column in self.card.columns if column.key == key), None)
        if column is None:
            raise KeyError(
                f"{format_key(key)} is not in {self.directory}; it has {list(self.keys())}"
            )
        shape = (self.card.frames, *column.shape)
        if math.prod(shape) == 0:
            return torch.empty(shape, dtype=column.dtype)
        path = str(self._paths[key])
        flat = torch.from_file(path, shared=False, size=math.prod(shape), dtype=column.dtype)
        return flat.view(shape)


def size(nbytes: int) -> str:
    """Spell a number of bytes.

    >>> size(999), size(1_500), size(2_340_000_000)
    ('999 B', '1.5 kB', '2.3 GB')
    """
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
