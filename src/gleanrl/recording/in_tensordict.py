"""Raw files, one per entry: those of each recording process, and a finished dataset."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal as size
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_non_tensor

from gleanrl.core.keys import Key, as_key, format_key
from gleanrl.core.raw_bytes import raw_bytes
from gleanrl.memory import tensor_files
from gleanrl.memory.tensor_files import TensorFile, TensorFileError, inside
from gleanrl.recording.dataset import CARD, NESTED, SHARDS, Dataset, Metadata, Part, card

_COPY_BYTES = 1 << 24


class Shard:
    """Appends frames to one file per entry.

    The card is written once: how many frames there are is the number of rows that are whole in
    every file. So a process that is killed loses the frames it was writing, and nothing else.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any], expected: int | None) -> None:
        """Prepare to write to ``directory``, which is made with the first frames.

        The card gets ``facts`` besides the layout; ``expected`` frames need room, if that is known.
        """
        self.directory = directory
        self.frames = 0
        self._facts, self._expected = facts, expected
        self._files: list[TensorFile] = []
        self._open: list[int] = []

    def write(self, frames: TensorDictBase) -> None:
        """Append ``frames`` ``[K]``; if that fails, everything before stays valid."""
        if not frames.shape[0]:
            return
        if not isinstance(frames, TensorDict):
            try:
                frames = frames.contiguous()
            except RuntimeError as err:
                raise TensorFileError(
                    "entries whose shape changes from frame to frame cannot be recorded"
                ) from err
        keys = _tensor_keys(frames)
        if not self._files:
            self._begin(frames, keys)
        values = self._matching(frames, keys)
        try:
            for fd, value in zip(self._open, values, strict=True):
                _append(fd, value)
        except BaseException as err:
            for fd, file in zip(self._open, self._files, strict=True):
                os.truncate(fd, self.frames * file.nbytes)
            if isinstance(err, OSError):
                raise TensorFileError(
                    f"{self.directory} cannot be written to: {err.strerror}; the {self.frames:,} "
                    "frames before are kept"
                ) from err
            raise
        self.frames += frames.shape[0]

    def _begin(self, frames: TensorDictBase, keys: list[Key]) -> None:
        row = sum(frames.get(key)[:1].nbytes for key in keys)
        free = shutil.disk_usage(self.directory.parent).free
        if self._expected is not None and row * self._expected > free:
            raise TensorFileError(
                f"{self._expected:,} frames take {size(row * self._expected)} but "
                f"{self.directory.parent} has {size(free)} left; collect fewer frames"
            )
        draft = self.directory.with_name(f".{self.directory.name}")
        try:
            room = frames[:1].memmap_like(prefix=str(draft))
            files = []
            for key in keys:
                tensor = room.get(key)
                assert isinstance(tensor, MemoryMappedTensor)
                name = Path(tensor.filename).relative_to(draft).as_posix()
                files.append(TensorFile(key, tuple(tensor.shape[1:]), tensor.dtype, name))
            del room, tensor
            for file in files:  # there is none for an entry without elements
                (draft / file.file).write_bytes(b"")
            counts = {"status": "collecting", "shard": True, "frames": 0}
            entries = {"keys": [file.to_json() for file in files], NESTED: _nested(frames)}
            text = card({**counts, **self._facts, **entries})
            tensor_files.write_new(draft / CARD, text.encode())
            draft.rename(self.directory)
        except OSError as err:
            shutil.rmtree(draft, ignore_errors=True)
            raise TensorFileError(
                f"{self.directory} cannot be made: {err.strerror or err}; free some room, or "
                "record elsewhere"
            ) from err
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        self._open = [os.open(self.directory / file.file, flags) for file in files]
        self._files = files

    def _matching(self, frames: TensorDictBase, keys: list[Key]) -> list[torch.Tensor]:
        """Return the entries in the order of the files."""
        expected = {file.key: (file.shape, file.dtype) for file in self._files}
        found = {key: (tuple(v.shape[1:]), v.dtype) for key in keys for v in [frames.get(key)]}
        if odd := sorted(key for key, _ in expected.items() ^ found.items()):
            key = odd[0]
            raise TensorFileError(
                f"{format_key(key)} is {_spell(found.get(key))} in these frames and "
                f"{_spell(expected.get(key))} in those before; all frames of a dataset have the "
                "same entries"
            )
        return [frames.get(file.key).detach().cpu().contiguous() for file in self._files]

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._open:
            os.close(self._open.pop())


def _append(fd: int, value: torch.Tensor) -> None:
    left = raw_bytes(value)
    while left:
        left = left[os.write(fd, left) :]


def _spell(layout: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if layout is None:
        return "missing"
    return f"{list(layout[0])} {tensor_files.dtype_name(layout[1])}"


def _tensor_keys(frames: TensorDictBase) -> list[Key]:
    entries = {as_key(key): value for key, value in frames.items(include_nested=True)}
    odd = [
        format_key(key)
        for key, value in entries.items()
        if is_non_tensor(value) or not isinstance(value, (torch.Tensor, TensorDictBase))
    ]
    if odd:
        raise TensorFileError(f"{', '.join(odd)} cannot be recorded: not a tensor")
    found = [key for key, value in entries.items() if isinstance(value, torch.Tensor)]
    if not found:
        raise TensorFileError("frames without entries cannot be recorded")
    for key in found:  # parts of keys are names of files
        if not tensor_files.stays_inside("/".join(key)) or key[0] == SHARDS:
            raise TensorFileError(
                f"{format_key(key)} cannot be recorded, because no file can be called so; rename it"
            )
    return found


def _nested(frames: TensorDictBase) -> list[tuple[Key, tuple[int, ...]]]:
    """Return the nested entries with batch dimensions of their own, and these."""
    entries = [(as_key(key), value) for key, value in frames.items(include_nested=True)]
    inner = [(key, value.shape[1:]) for key, value in entries if isinstance(value, TensorDictBase)]
    return [(key, tuple(shape)) for key, shape in inner if shape]


class RawPart(Part):
    """Raw files of one directory: a whole dataset, or the part of one writer."""

    def __init__(self, directory: Path) -> None:
        """Read the card and check that the files exist and have the right size."""
        metadata = Metadata.read(directory)
        self.directory, self.facts = directory, metadata.facts
        files = self.files = metadata.files
        self.frames = metadata.frames
        """Frames that are whole in every file."""
        if self.facts.get("shard") is True:  # a kill leaves what was written until then
            sizes = {f.key: inside(directory, f.file).stat().st_size for f in files}
            self.frames = min((sizes[f.key] // f.nbytes for f in files if f.nbytes), default=0)
        else:
            for file in files:
                file.locate(directory, self.frames)

    def _values(self, file: TensorFile) -> torch.Tensor:
        """Map the file of an entry, which the tensor cannot change."""
        return file.load(inside(self.directory, file.file), self.frames)


def parts(directory: Path, metadata: Metadata) -> list[RawPart]:
    """Open a finished dataset, or the parts that writers have written until now."""
    if metadata.data != SHARDS:
        return [RawPart(directory)]
    root, folders = os.path.realpath(directory), sorted(directory.glob(f"{SHARDS}/[!.]*"))
    folders = [path for path in folders if Path(os.path.realpath(path)).is_relative_to(root)]
    found = [part for part in map(RawPart, folders) if part.frames]
    for part in found[1:]:
        layouts = [{(f.key, f.shape, f.dtype) for f in one.files} for one in (found[0], part)]
        if odd := layouts[0] ^ layouts[1]:
            raise TensorFileError(
                f"{part.directory} and {found[0].directory} hold different entries: "
                f"{sorted({format_key(entry[0]) for entry in odd})}; read them one by one"
            )
    return found


def write(dataset: Dataset, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Put the shards of ``dataset`` into one memory-mapped TensorDict in its directory.

    The files of a single shard are linked, those of several are copied one after the other; the
    shards stay as they are. If the disk is full, the new files are removed again.
    """
    directory, files, frames = dataset.directory, dataset.metadata.files, dataset.metadata.frames
    shards = [part.directory for part in dataset.parts if isinstance(part, RawPart)]
    with contextlib.ExitStack() as undo:
        for file in files:
            target = directory / file.file
            target.parent.mkdir(parents=True, exist_ok=True)
            undo.callback(target.unlink, missing_ok=True)
            sizes = [part.frames * file.nbytes for part in dataset.parts]
            sources = [inside(shard, file.file) for shard in shards]
            _join_files(list(zip(sources, sizes, strict=True)), target)
        for folder in sorted({up for file in files for up in Path(file.file).parents}):
            content = tensor_files.read_description(shards[0] / folder / "meta.json")
            for entry in (content, *content.values()):
                if isinstance(entry, dict) and entry.get("shape"):
                    entry["shape"][0] = frames
            target = directory / folder / "meta.json"
            undo.callback(target.unlink, missing_ok=True)
            tensor_files.write_new(target, json.dumps(content).encode())
        undo.pop_all()
    return {}


def _join_files(found: list[tuple[Path, int]], target: Path) -> None:
    """Make ``target`` of the first bytes of each file, which loses rows that were cut short."""
    for source, nbytes in found:
        os.truncate(source, nbytes)
    if len(found) == 1:
        with contextlib.suppress(OSError):  # a file system without links
            os.link(found[0][0], target)
            return
    with target.open("xb") as out:
        for source, _ in found:
            with source.open("rb") as file:
                shutil.copyfileobj(file, out, _COPY_BYTES)
