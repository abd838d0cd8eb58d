"""Tensors on disk: raw files, and a JSON description that lists them. Nothing is unpickled.

A description has one entry per tensor: ``{"key": ["next", "reward"], "shape": [1], "dtype":
"float32", "file": "next/reward.memmap"}``. Nothing in it is trusted: files lie within the
directory and have the size that shape and dtype say. Files that are written in one piece also have
their ``crc32`` there, and a `sealed` description has its own.

Files and descriptions are complete or not there. Reading damaged files, or files that do not match
their description, raises `TensorFileError`; writing to a full disk raises `OSError`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch

from gleanrl.core.errors import GleanError
from gleanrl.core.keys import Key, format_key
from gleanrl.core.layout import Field
from gleanrl.core.raw_bytes import raw_bytes

_BYTES_PER_WRITE = 1 << 26
"""A write can be interrupted between two calls."""
_MAX_DESCRIPTION_BYTES = 16 * 2**20
_SEAL = b'{"checksum": "%08x",'
"""The beginning of a description that has its own checksum."""
_MAX_DIMS = 32
_MAX_DEPTH = 64
_NOT_PLAIN = re.compile(r"q.*|u?int[1-7]")
"""Dtypes that need a scale besides their bytes, and dtypes that torch can name but not copy."""
_DTYPES = {
    name: dtype
    for name, dtype in {str(d).removeprefix("torch."): d for d in vars(torch).values()}.items()
    if isinstance(dtype, torch.dtype) and not _NOT_PLAIN.fullmatch(name)
}


class TensorFileError(GleanError, ValueError):
    """Files are damaged, or do not match their description."""


def dtype_named(name: Any) -> torch.dtype | None:
    """Return ``torch.float32`` for ``"float32"``, and ``None`` for an unknown name."""
    return _DTYPES.get(name) if isinstance(name, str) else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def checked_field(source: object, key: Any, shape: Any, dtype: Any) -> Field:
    """Return the field that a description ``source`` has."""
    if not isinstance(key, list) or not all(isinstance(part, str) for part in key):
        raise TensorFileError(f"{source}: a key ({key!r:.50}) must be a list of strings")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(is_count, shape)):
        raise TensorFileError(
            f"{source}: the shape of {key} ({shape!r:.50}) must list whole numbers"
        )
    known = dtype_named(dtype)
    if known is None:
        raise TensorFileError(f"{source}: the dtype of {key} ({dtype!r:.50}) is not known")
    return Field(tuple(key), tuple(shape), known)


@dataclass(frozen=True, slots=True)
class TensorFile(Field):
    """An entry of a description: one tensor in a raw file.

    The file of an entry that describes one row holds ``[rows, *shape]``; methods take ``rows``.
    """

    file: str
    """Path within the directory, parts separated by ``/``."""
    checksum: int | None = None
    """The CRC-32 of the file, ``None`` if rows are appended to it."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry for a description."""
        return {
            "key": list(self.key),
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
            "file": self.file,
            **({} if self.checksum is None else {"crc32": self.checksum}),
        }

    @classmethod
    def from_json(cls, entry: Any, source: Path) -> TensorFile:
        """Check and read an entry of the description ``source``."""
        if not isinstance(entry, dict):
            raise TensorFileError(f"{source}: an entry of 'keys' is not an object")
        key, shape, dtype, file = (entry.get(name) for name in ("key", "shape", "dtype", "file"))
        field = checked_field(source, key or None, shape, dtype)
        if not isinstance(file, str) or not stays_inside(file):
            raise TensorFileError(
                f"{source}: the file of {field.key} ({file!r:.100}) must be within the dataset"
            )
        return cls(field.key, field.shape, field.dtype, file, entry.get("crc32"))

    def locate(self, directory: Path, rows: int | None = None) -> Path:
        """Return the path of the file, which must lie in ``directory`` and have its size."""
        path = inside(directory, self.file)
        expected, size = self.nbytes * (1 if rows is None else rows), path.stat().st_size
        if size != expected:
            what = (
                f"{list(self.shape)} {dtype_name(self.dtype)}" if rows is None else f"{rows:,} rows"
            )
            raise TensorFileError(
                f"{self.file!r} of {directory} has {size:,} bytes; {what} of "
                f"{format_key(self.key)} take {expected:,}"
            )
        return path

    def load(self, path: Path, rows: int | None = None) -> torch.Tensor:
        """Map the file of `locate`, or its first ``rows``; changes do not reach the file."""
        shape = self.shape if rows is None else (rows, *self.shape)
        nbytes = math.prod(shape) * self.dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=self.dtype)
        data = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
        if self.checksum is not None and (found := _checksum(data)) != self.checksum:
            raise TensorFileError(
                f"{path} is damaged: its checksum is {found}, and was {self.checksum} when saved"
            )
        return data.view(self.dtype).view(shape)


def inside(directory: Path, file: str) -> Path:
    """Return the path of ``file``, which may come from anyone; it must lie in ``directory``."""
    # Unlike `Path.resolve` this raises nothing: links in a circle lead to no file.
    root, path = (Path(os.path.realpath(where)) for where in (directory, directory / file))
    if not path.is_relative_to(root):
        raise TensorFileError(f"{file!r} of {directory} leads out of the dataset")
    if not os.path.isfile(path):
        raise TensorFileError(f"{directory} has no file {file!r}, which its description names")
    return path


def save(directory: Path, key: Key, tensor: torch.Tensor, file: str) -> TensorFile:
    """Write ``tensor`` to the new file ``file`` of ``directory``."""
    data, path = tensor.detach().cpu().contiguous(), directory / file
    write_new(path, raw_bytes(data), sync=False)
    entry = TensorFile(key, tuple(data.shape), data.dtype, file)
    # That of the file, because others may change the tensor; meanwhile the disk takes the file in.
    with ThreadPoolExecutor(1) as pool:
        checksum = pool.submit(_checksum, entry.load(path))
        _sync_file(path)
    return TensorFile(key, entry.shape, entry.dtype, file, checksum.result())


def _checksum(data: torch.Tensor) -> int:
    return zlib.crc32(raw_bytes(data))


def sealed(text: bytes) -> bytes:
    """Return a JSON object with its own checksum as its first entry."""
    return _SEAL % zlib.crc32(text[1:]) + text[1:]


def read_description(path: Path, is_sealed: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``path``, a regular file of at most 16 MiB, unchecked.

    Numbers that are not finite become ``None``. With ``is_sealed`` it must be one of `sealed`,
    unchanged.
    """
    try:
        return _read_object(path, is_sealed)
    except (OSError, ValueError, RecursionError) as err:
        why = err.strerror if isinstance(err, OSError) else err
        raise TensorFileError(f"{path} cannot be read as JSON: {why}") from err


def _read_object(path: Path, is_sealed: bool) -> dict[str, Any]:
    with open_regular(path, os.O_NOFOLLOW) as file:
        if os.fstat(file.fileno()).st_size > _MAX_DESCRIPTION_BYTES:
            raise ValueError("it must be a regular file of at most 16 MiB")
        text = file.read(_MAX_DESCRIPTION_BYTES)
    if is_sealed and text != sealed(b"{" + text[len(_SEAL % 0) :]):
        raise ValueError("it is damaged: its checksum differs")
    description = json.loads(text, parse_constant=lambda _: None)
    if not isinstance(description, dict) or not _is_shallow(description, _MAX_DEPTH):
        raise ValueError(f"it must be an object, nested at most {_MAX_DEPTH} deep")
    return description


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a file to read it; refuse pipes and devices without waiting, by a `ValueError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("it must be a regular file")
    return os.fdopen(fd, "rb")


def _is_shallow(value: object, levels: int) -> bool:
    """Tell whether JSON has at most ``levels`` levels, because later functions are recursive."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in items)


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a number of a description is a whole number, 0 or more, that fits 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def stays_inside(file: str) -> bool:
    """Tell whether a path of a description is within its directory, without regard to links."""
    parts = file.split("/")
    tame = file.isprintable() and not set(file) & set("\\:")
    return tame and all(part not in ("", ".", "..") for part in parts)


def write_new(path: Path, *parts: Any, sync: bool = True) -> None:
    """Write a new file of parts with the buffer protocol; a write that fails leaves no file.

    An `OSError` names the file. Without ``sync``, it is left to `sync_tree` to flush it to the
    disk.
    """
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with _naming(path):
            _write_all(fd, views)
            if sync:
                os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, views: Sequence[memoryview]) -> None:
    for view in views:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done : done + _BYTES_PER_WRITE])
    size, expected = os.fstat(fd).st_size, sum(map(len, views))
    if size != expected:
        raise OSError(errno.EIO, f"{size:,} of {expected:,} bytes written")


def publish(draft: Path, path: Path) -> None:
    """Put ``draft`` in place of ``path``, at once for all readers."""
    with _naming(path):
        os.replace(draft, path)
    sync_directory(path.parent)


def replace(path: Path, text: str) -> None:
    """Replace a file at once; the old one stays if that fails."""
    with drafted(path) as draft:
        write_new(draft, text.encode())
        publish(draft, path)


@contextlib.contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield the path of a draft of ``path``; if the block raises, the draft goes.

    An `OSError` about the draft then names ``path``.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield draft
    except BaseException as err:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(err, OSError) and err.filename == str(draft):
            err.filename = str(path)
        raise


def sync_tree(path: Path) -> None:
    """Flush all regular files and all names below a directory to the disk."""
    for folder, _, names in os.walk(path):
        for file in (Path(folder, name) for name in names):
            if not stat.S_ISREG(file.lstat().st_mode):
                continue
            _sync_file(file)
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    _sync_file(path, os.O_DIRECTORY)


def _sync_file(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        err.filename = err.filename or os.fspath(path)
        raise
