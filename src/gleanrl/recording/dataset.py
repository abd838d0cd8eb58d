"""Frames on disk, read as plain memory.

A dataset is a directory with ``card.json``, which describes the other files and their origin.
Frames are raw files, one per entry: in the directory itself, where `TensorDict.load_memmap` opens
them, or in one folder per writer (a shard) as long as the recording is not finished. Nothing is
unpickled, so a directory may come from anyone.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import END_FLAGS, Key, format_key
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFile, TensorFileError
from gleanrl.recording.formats import FORMATS, module_of

CARD = "card.json"
_FORMAT, _VERSION = "gleanrl-dataset", 1
SHARDS, DATA = "shards", "data"
"""Folders of writers, and of data other than raw files."""
LOCK = ".lock"
"""Locked by the process that records, for as long as it lives."""
NESTED = "nested"
"""The cards' name for further batch dimensions of nested entries."""
NO_OBSERVATION = (*END_FLAGS, "step_count", "is_init", "reward")
"""Last parts of keys, at the root and under ``"next"``, of entries other than observations."""
OF_ENV = ("env_spec", "observation_space", "action_space")
"""The entries of cards about the environment, so that it can be made again."""
ENDS = ("complete", "interrupted", "failed")


def card(facts: Mapping[str, Any]) -> str:
    """Return the text of a card."""
    return json.dumps({"format": _FORMAT, "format_version": _VERSION, **facts}, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Metadata:
    """A card after reading: the parts needed to read the data are checked, the rest is not."""

    status: str
    data: str
    """The kind of the files: one of `FORMATS`, or ``"shards"``."""
    frames: int
    files: tuple[TensorFile, ...]
    """One per entry; each describes one row."""
    facts: Mapping[str, Any]
    """The whole card. Nothing in it may be trusted."""

    @classmethod
    def read(cls, directory: Path) -> Metadata:
        """Read and check the card of ``directory``."""
        path = directory / CARD
        if not os.path.isfile(path):
            raise TensorFileError(
                f"{directory} has no {CARD}, so neither 'gleanrl collect --out' nor a Recorder "
                "wrote it"
            )
        facts = tensor_files.read_description(path)
        if facts.get("format") != _FORMAT:
            raise TensorFileError(
                f"{path} is not the card of a dataset (its 'format' is not {_FORMAT!r})"
            )
        names = ("format_version", "status", "keys", "frames")
        version, status, entries, frames = (cast("Any", facts.get(name)) for name in names)
        data = "tensordict" if facts.get("data") is None else facts["data"]
        for right, problem in (
            (version == _VERSION, f"has format version {version!r}; this release reads {_VERSION}"),
            (data in (*FORMATS, SHARDS), f"'data' ({data!r:.50}) is none of {tuple(FORMATS)}"),
            (tensor_files.is_count(frames), f"'frames' ({frames!r:.50}) must be a whole number"),
            (status in ("collecting", *ENDS), f"'status' ({status!r:.50}) is none of {ENDS}"),
            (isinstance(entries, list), "'keys' must be a list"),
        ):
            if not right:
                raise TensorFileError(f"{path}: {problem}")
        files = tuple(TensorFile.from_json(entry, path) for entry in entries)
        if status == "collecting" and _abandoned(directory):
            status = "interrupted"
        return cls(status, data, frames, files, facts)


def _abandoned(directory: Path) -> bool:
    """Tell whether the recording process has ended."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(directory / LOCK, flags)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


class Part:
    """Frames in one place: those of one writer, or a whole dataset."""

    frames: int
    files: Sequence[TensorFile]
    """The entries that can be read."""
    facts: Mapping[str, Any] = {}
    """The card of a writer; empty without one."""

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry as ``[frames, ...]``."""
        try:
            file = {file.key: file for file in self.files}[key]
            return self._values(file).reshape(self.frames, *file.shape).to(file.dtype)
        except (LookupError, OSError, RuntimeError, TypeError, ValueError) as err:
            raise TensorFileError(f"{format_key(key)} is not as its card says: {err}") from err

    def _values(self, file: TensorFile) -> torch.Tensor:
        """Return the elements of an entry, in any shape."""
        raise NotImplementedError

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of all frames, of a bounded number and size at a time."""
        row = sum(file.nbytes for file in self.files)
        size = max(1, min(1 << 16, (1 << 25) // max(row, 1)))
        for start in range(0, self.frames, size):
            yield slice(start, start + size)


class Dataset:
    """A dataset opened for reading, in any format; entries are read if it has raw files."""

    def __init__(self, directory: Path) -> None:
        """Read the card and check that raw files exist and have the right size."""
        if not os.path.isdir(directory):
            raise ConfigError(f"{directory} is not a directory")
        self.directory = directory
        metadata = Metadata.read(directory)
        format = "tensordict" if metadata.data == SHARDS else metadata.data
        self.parts: Sequence[Part] = module_of(format).parts(directory, metadata)
        """Where the frames are, in order."""
        frames = sum(part.frames for part in self.parts)
        if metadata.data == SHARDS:
            known = self.parts[0].facts if self.parts else {}
            known = {name: known[name] for name in (*OF_ENV, NESTED) if known.get(name) is not None}
            metadata = replace(metadata, frames=frames, facts={**metadata.facts, **known})
        elif frames != metadata.frames:
            raise TensorFileError(
                f"{directory} holds {frames:,} frames, its card counts {metadata.frames:,}"
            )
        if self.parts:
            metadata = replace(metadata, files=tuple(self.parts[0].files))
        self.metadata = metadata

    @property
    def writers(self) -> int:
        """How many wrote the frames, each its own after the other's."""
        count = self.metadata.facts.get("writers", len(self.parts))
        return count if tensor_files.is_count(count) else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return self.metadata.frames * sum(file.nbytes for file in self.metadata.files)

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of all entries."""
        return tuple(file.key for file in self.metadata.files)

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry as ``[frames, ...]``, mapped from its file unless there are several."""
        if key not in self.keys():
            known = list(self.keys())
            raise KeyError(f"{format_key(key)} is not in {self.directory}; it has {known}")
        entries = [part.read(key) for part in self.parts]
        return entries[0] if len(entries) == 1 else torch.cat(entries)

    def frames(self, entries: Mapping[Key, torch.Tensor]) -> TensorDict:
        """Return ``entries``, ``[K, ...]`` each, as a TensorDict ``[K]`` nested as the recorded."""
        count = next(iter(entries.values())).shape[0]
        frames = TensorDict(batch_size=[count])
        try:
            for key, value in entries.items():
                frames[key] = value
            for key, shape in self.metadata.facts.get(NESTED) or ():
                frames[tuple(key)].batch_size = [count, *shape]
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as err:
            raise TensorFileError(
                f"the card of {self.directory} contradicts itself: {err}"
            ) from err
        return frames


def load_dataset(path: str | os.PathLike[str]) -> TensorDict:
    """Open a dataset of a `Recorder` or of ``gleanrl collect --out``.

    Nothing is unpickled. Recordings that were killed are opened as well, with every frame that was
    written.

    Returns:
        A `TensorDict` ``[frames]``. In the ``tensordict`` format it is mapped from the files, which
        it cannot change. Minari and Parquet data, and unfinished data of several workers, are
        copied into memory.

    Raises:
        ConfigError: there is no such directory, or a package that reads it is missing.
        TensorFileError: its files are damaged.

    Example:
        >>> import tempfile, gleanrl
        >>> path = tempfile.mkdtemp()
        >>> with gleanrl.Recorder(path) as recorder:
        ...     with gleanrl.Collector("CartPole-v1", frames_per_batch=50, total_frames=100,
        ...                            replay_buffer=recorder) as collector:
        ...         for _ in collector:
        ...             pass
        >>> gleanrl.load_dataset(path)["observation"].shape
        torch.Size([100, 4])
    """
    dataset = Dataset(Path(path))
    if not (dataset.metadata.frames and dataset.keys()):
        raise TensorFileError(f"{path} holds no frames (yet)")
    return dataset.frames({key: dataset.read(key) for key in dataset.keys()})
