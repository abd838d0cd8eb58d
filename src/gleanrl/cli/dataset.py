"""Frames on disk: written batch by batch, read back as plain memory.

A dataset is a memory-mapped TensorDict of ``[frames]`` rows, so `TensorDict.load_memmap` opens it,
and ``card.json``, which says what the raw files hold and where they came from. `Dataset` reads the
files by what the card says and never unpickles anything, so a directory may come from anyone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_non_tensor

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, as_key, format_key
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFile, TensorFileError

CARD = "card.json"
_FORMAT = "gleanrl-dataset"
_VERSION = 1
_STATUSES = ("collecting", "complete", "interrupted", "failed")
_CARD_EVERY_S = 2.0
_ROOM, _ROOM_NBYTES = ".room", 1 << 16
"""Room for the last card, if the disk is full by then: a file that is removed before, per entry."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A card that was read: what matters for reading the data is checked, the rest is as found."""

    status: str
    frames: int
    """Frames collected."""
    rows: int
    """Frames the files have room for; more than ``frames`` if collection was cut short."""
    files: tuple[TensorFile, ...]
    """One per entry; each describes one row."""
    facts: Mapping[str, Any]
    """The whole card. Nothing in it may be trusted."""

    @classmethod
    def read(cls, directory: Path) -> Metadata:
        """Read and check the card of ``directory``.

        Raises:
            TensorFileError: it is missing, is not a card, or contradicts itself.
        """
        path = directory / CARD
        if not path.is_file():
            raise TensorFileError(
                f"{directory} has no {CARD}, so it was not written by 'gleanrl collect --out'"
            )
        facts = tensor_files.read_description(path)
        if facts.get("format") != _FORMAT:
            raise TensorFileError(
                f"{path} is not the card of a dataset (its 'format' is not {_FORMAT!r})"
            )
        version, status, entries = (
            facts.get(name) for name in ("format_version", "status", "keys")
        )
        if version != _VERSION:
            raise TensorFileError(
                f"{path} has format version {version!r}; this release reads {_VERSION}"
            )
        frames, rows = (_count(path, facts, name) for name in ("frames", "rows"))
        if frames > rows:
            raise TensorFileError(f"{path}: {frames:,} frames cannot be in files of {rows:,} rows")
        if status not in _STATUSES:
            raise TensorFileError(f"{path}: 'status' ({status!r}) is none of {_STATUSES}")
        if not isinstance(entries, list):
            raise TensorFileError(f"{path}: 'keys' must be a list")
        files = tuple(TensorFile.from_json(entry, path) for entry in entries)
        return cls(status, frames, rows, files, facts)


def _count(path: Path, facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if not tensor_files.is_count(value):
        raise TensorFileError(f"{path}: {name!r} ({value!r:.50}) must be a whole number, 0 or more")
    return value


class Dataset:
    """A dataset opened for reading."""

    def __init__(self, directory: Path) -> None:
        """Read the card and check that the files are there and have the right size.

        Raises:
            ConfigError: there is no such directory.
            TensorFileError: a file is missing, leads out of the directory or has another size.
        """
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory")
        self.directory = directory
        self.metadata = Metadata.read(directory)
        rows = self.metadata.rows
        self._found = {f.key: (f, f.locate(directory, rows)) for f in self.metadata.files}

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.metadata.frames * sum(file.nbytes for file in self.metadata.files)

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of all entries."""
        return tuple(self._found)

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry as ``[frames, ...]``; it is mapped from its file and cannot change it.

        Raises:
            KeyError: there is no such entry.
        """
        if key not in self._found:
            known = list(self._found)
            raise KeyError(f"{format_key(key)} is not in {self.directory}; it has {known}")
        file, path = self._found[key]
        return file.load(path, self.metadata.frames)


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
        self._created = [up for up in (directory, *directory.parents) if not up.exists()]
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
        self._files: list[TensorFile] = []
        self._mapped: dict[Key, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the frames written."""
        return self.frames * sum(file.nbytes for file in self._files)

    def write(self, frames: TensorDictBase, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Append ``frames`` ``[K]``; now and then, put what ``facts`` returns on the card.

        Raises:
            TensorFileError: there is not enough room, or the frames cannot be stored as arrays.
        """
        if not isinstance(frames, TensorDict):
            try:
                frames = frames.contiguous()
            except RuntimeError as err:
                raise TensorFileError(
                    "entries whose shape changes from frame to frame cannot be written with --out"
                ) from err
        if not self._mapped:
            self._reserve(frames)
        stop = self.frames + frames.shape[0]
        if stop > self._capacity:
            raise TensorFileError(
                f"{stop:,} frames do not fit into the {self._capacity:,} reserved"
            )
        for key, tensor in self._mapped.items():
            tensor[self.frames : stop].copy_(frames.get(key))
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
            self._mapped.clear()
            self._discard()
        if not self._mapped:
            return
        self._mapped.clear()
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
                for file in self._files:
                    os.truncate(self.directory / file.file, self.frames * file.nbytes)
            for path, draft in drafts.items():
                tensor_files.publish(draft, path)

    def _reserve(self, frames: TensorDictBase) -> None:
        keys = _tensor_keys(frames)
        row = sum(frames.get(key)[:1].nbytes for key in keys)
        free = shutil.disk_usage(self.directory).free
        if row * self._capacity > free:
            raise TensorFileError(
                f"{self._capacity:,} frames take {size(row * self._capacity)} but {self.directory} "
                f"has {size(free)} left; collect fewer --frames"
            )
        room = frames[:1].expand(self._capacity).memmap_like(prefix=str(self.directory))
        mapped, files = {}, []
        for key in keys:
            tensor = room.get(key)
            assert isinstance(tensor, MemoryMappedTensor)
            name = Path(tensor.filename).relative_to(self.directory).as_posix()
            files.append(TensorFile(key, tuple(tensor.shape[1:]), tensor.dtype, name))
            self._take_room(Path(tensor.filename), self._capacity * files[-1].nbytes)
            mapped[key] = tensor.as_subclass(torch.Tensor)
        self._take_room(self.directory / _ROOM, _ROOM_NBYTES * (1 + len(keys)))
        self._mapped, self._files = mapped, files

    def _take_room(self, path: Path, nbytes: int) -> None:
        path.touch()
        with path.open("r+b") as file:
            try:
                tensor_files.take_room(file.fileno(), 0, nbytes)
            except OSError as err:
                raise TensorFileError(
                    f"{size(nbytes)} for {path.name} of {self._capacity:,} frames cannot be "
                    f"reserved in {self.directory} ({err.strerror}); collect fewer --frames"
                ) from err

    def _discard(self) -> None:
        """Remove what this writer made, and nothing that somebody else put there."""
        for pattern in ("*.memmap", "meta.json", ".*.json.*", _ROOM):
            for file in self.directory.rglob(pattern):
                file.unlink(missing_ok=True)
        folders = [path for path in self.directory.rglob("*") if path.is_dir()]
        for folder in (*sorted(folders, reverse=True), *self._created):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    def _cut_descriptions(self) -> dict[Path, str]:
        """Return what tensordict's own description of each folder is to say."""
        folders = {up for file in self._files for up in Path(file.file).parents}
        texts = {}
        for meta in (self.directory / folder / "meta.json" for folder in folders):
            content = json.loads(meta.read_text())
            for entry in (content, *content.values()):
                if isinstance(entry, dict) and entry.get("shape"):
                    entry["shape"][0] = self.frames
            texts[meta] = json.dumps(content)
        return texts

    def _card(self, status: str, rows: int, facts: Mapping[str, Any]) -> str:
        head = {"format": _FORMAT, "format_version": _VERSION}
        counts = {"status": status, "frames": self.frames, "rows": rows}
        keys = [file.to_json() for file in self._files]
        return json.dumps({**head, **counts, **facts, "keys": keys}, indent=2) + "\n"


def _tensor_keys(frames: TensorDictBase) -> list[Key]:
    entries = {as_key(key): value for key, value in frames.items(include_nested=True)}
    odd = [
        format_key(key)
        for key, value in entries.items()
        if is_non_tensor(value) or not isinstance(value, (torch.Tensor, TensorDictBase))
    ]
    if odd:
        raise TensorFileError(f"{', '.join(odd)} cannot be written with --out: not a tensor")
    return [key for key, value in entries.items() if isinstance(value, torch.Tensor)]


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
