"""States of collectors on disk: a file, or a directory with the replay buffer of the same moment.

A directory has the file ``state``, which names one of the folders ``buffer-…`` in it. The file is
written last, so it and the folder belong together whatever ends the program. Earlier files
(``state.1``, …) name folders of their own.

A file is ``MAGIC``, the length and the checksum of all that follows, the length of the description,
the description, and the bytes of the tensors that it lists, each at a multiple of 64. Nothing in a
file is trusted, and nothing of it runs.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import uuid
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from gleanrl.collectors.state_types import explained
from gleanrl.core.errors import ConfigError
from gleanrl.core.raw_bytes import raw_bytes
from gleanrl.core.version import __version__
from gleanrl.envs.saved_state import load_state, save_state
from gleanrl.memory import tensor_files
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.saving import locked
from gleanrl.memory.replay.storages import LazyTensorStorage

_STATE = "state"
_FOLDER = re.compile(r"buffer-[0-9a-f]{32}")
_MAGIC = b"GleanRL collector state\n"
_VERSION = 1
_HEAD = struct.Struct("<qIq")
"""Bytes after this, their checksum, and how many of them are the description."""
_ALIGNMENT = 64
_FACTS = ("collector", "workers", "pickled", "buffer")
_MARK = "!"
"""The key of JSON objects that are no dict with names as keys."""


def check_saves(buffer: Any) -> ReplayBuffer:
    """Return a replay buffer that can be saved with a collector."""
    if not isinstance(buffer, ReplayBuffer) or not isinstance(buffer.storage, LazyTensorStorage):
        raise ConfigError(
            "a collector is saved and loaded with a ReplayBuffer of tensors (LazyTensorStorage and "
            f"its kinds); its replay_buffer is {buffer!r:.200}"
        )
    return buffer


def write(
    path: Path,
    facts: Mapping[str, Any],
    state: Mapping[str, Any],
    keep: int,
    buffer: ReplayBuffer | None,
) -> None:
    """Write a state to the file ``path``, or with a ``buffer`` to the directory ``path``."""
    if buffer is None:
        if path.is_dir():
            raise ConfigError(
                f"{path} is a directory: give the path of a file in it; a directory is written by "
                "save(..., replay_buffer=True)"
            )
        _write_file(path, {**facts, "buffer": None}, state, keep)
        return
    if path.is_file():
        raise ConfigError(f"{path} is a file: save(..., replay_buffer=True) writes a directory")
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"buffer-{uuid.uuid4().hex}"
    with locked(path):
        try:
            buffer.dumps(folder)
            _write_file(path / _STATE, {**facts, "buffer": folder.name}, state, keep)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _remove_unnamed(path)


def _remove_unnamed(root: Path) -> None:
    """Remove folders of buffers that no state names, such as those of a process that was killed."""
    try:
        named = [_read_facts(path)["buffer"] for path in root.glob(f"{_STATE}*")]
    except ConfigError:  # a damaged state may name any of them
        return
    for other in root.iterdir():
        if _FOLDER.fullmatch(other.name) and other.name not in named:
            shutil.rmtree(other, ignore_errors=True)


def read(path: Path) -> tuple[dict[str, Any], Any, Path | None]:
    """Return the facts and the state that `write` has written, and the folder of the buffer."""
    file = path / _STATE if path.is_dir() else path
    facts, state = _read_file(file)
    name = facts["buffer"]
    if name is None:
        return facts, state, None
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise ConfigError(f"{file} names {name!r:.80} as its replay buffer")
    return facts, state, file.parent / name


# -- files: a JSON description, raw tensors and a checksum; no pickle ------------------------------


def _write_file(path: Path, facts: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> None:
    """Write a state; a file at ``path`` is a complete one at any moment.

    Earlier ones are ``path.1``, ``path.2`` and so on, ``keep`` in all. All files are as they were
    if it raises an error; these are listed by `BaseCollector.save`.
    """
    writer = _Writer()
    described = writer.plain(state, "state")
    head = {"version": _VERSION, "library": __version__, **facts, "tensors": writer.entries}
    head["pickled"] = sorted(writer.pickled)
    head["state"] = described
    text = json.dumps(head, separators=(",", ":"), check_circular=False).encode()
    text += b" " * (-(len(_MAGIC) + _HEAD.size + len(text)) % _ALIGNMENT)
    checksum, size = zlib.crc32(text), len(text)
    for part in writer.parts:
        checksum, size = zlib.crc32(part, checksum), size + len(part)
    head_bytes = _MAGIC + _HEAD.pack(size, checksum, len(text))
    with tensor_files.drafted(path) as draft:
        tensor_files.write_new(draft, head_bytes, text, *writer.parts)
        _rotate(path, keep)
        tensor_files.publish(draft, path)


def _rotate(path: Path, keep: int) -> None:
    """Number earlier files; ``path`` itself stays."""
    numbered = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, keep))]
    for older, newer in zip(numbered[:1:-1], numbered[-2:0:-1], strict=True):
        if newer.exists():
            os.replace(newer, older)
    if keep > 1 and path.exists():
        copy = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            os.link(path, copy)
        except OSError:  # a file system without links
            shutil.copyfile(path, copy)
        os.replace(copy, numbered[1])


_SCALARS = frozenset({type(None), bool, int, float, str})


class _Writer:
    """Collects the tensors of a state while it turns the rest into JSON."""

    def __init__(self) -> None:
        self.entries: list[list[Any]] = []
        """Dtype and shape of each tensor."""
        self.parts: list[memoryview] = []
        """Their bytes, and padding."""
        self.pickled: set[str] = set()
        """The places of everything in the state that was pickled."""
        self._added: dict[int, tuple[int, torch.Tensor]] = {}
        """Numbers by address, as models of a batch have one state; and the owners of these."""

    def plain(self, value: Any, at: str) -> Any:
        kind = type(value)
        if kind is list:
            if len(value) == 4 and value[0] == "pickle" and isinstance(value[3], torch.Tensor):
                self.pickled.add(str(value[2]))
            return [part if type(part) in _SCALARS else self.plain(part, at) for part in value]
        if kind in _SCALARS:
            return value
        if isinstance(value, dict) and all(type(key) is str and key != _MARK for key in value):
            return {
                key: part if type(part) in _SCALARS else self.plain(part, f"{at}[{key!r}]")
                for key, part in value.items()
            }
        return {_MARK: self._marked(value, at)}

    def _marked(self, value: Any, at: str) -> list[Any]:
        if type(value) is tuple:
            return ["tuple", self.plain(list(value), at)]
        if isinstance(value, dict):
            pairs = value.items()
            return ["dict", [[self.plain(k, at), self.plain(v, f"{at}[{k!r}]")] for k, v in pairs]]
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return ["tensor", self._add(value)]
        return ["object", self.plain(save_state(value, at=at), at)]

    def _add(self, tensor: torch.Tensor) -> int:
        if (added := self._added.get(id(tensor))) is not None:
            return added[0]
        number = len(self.entries)
        self._added[id(tensor)] = number, tensor
        data = tensor.detach().cpu().contiguous()
        raw = raw_bytes(data) if data.numel() else memoryview(b"")
        self.entries.append([tensor_files.dtype_name(data.dtype), list(data.shape)])
        self.parts += [raw, memoryview(bytes(-raw.nbytes % _ALIGNMENT))]
        return number


def _read_file(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the description and the state in a file of `_write_file`."""
    with _explained(path), tensor_files.open_regular(path) as file:
        size, checksum, text = _read_text(path, file)
        data = bytearray(size - len(text))
        file.readinto(data)
        if (found := zlib.crc32(data, zlib.crc32(text))) != checksum:
            why = f"its checksum is {found}, and was {checksum} when saved"
            raise ConfigError(_damaged(path, why))
        described = json.loads(text)
        version, library = described["version"], described["library"]
        if version != _VERSION:
            raise ConfigError(
                f"{path} has version {version!r} of the format, this is GleanRL {__version__} with "
                f"version {_VERSION}: load it with GleanRL {library!r:.40}"
            )
        state = _Reader(described["tensors"], data).value(described["state"])
        if not isinstance(state, dict):
            raise TypeError("its state has no entries")
        return {name: described[name] for name in _FACTS}, state


def _read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that `_write_file` was given, without a check of more."""
    with _explained(path), tensor_files.open_regular(path) as file:
        described = json.loads(_read_text(path, file)[2])
        return {name: described[name] for name in _FACTS}


def _read_text(path: Path, file: BufferedReader) -> tuple[int, int, bytes]:
    """Read as far as the description; return the bytes to check, their checksum and its text."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ConfigError(f"{path} is no state of a collector: save() did not write it")
    head = file.read(_HEAD.size)
    found = os.fstat(file.fileno()).st_size - file.tell()
    size, checksum, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (-1, 0, 0)
    if size != found or not 0 <= length <= size:
        raise ConfigError(_damaged(path, f"{found:,} of {size:,} bytes"))
    return size, checksum, file.read(length)


def _damaged(path: Path, what: str) -> str:
    older = path.with_name(f"{path.name}.1")
    instead = f"; {older} is the one before" if older.exists() else ""
    return f"{path} is damaged ({what}){instead}"


def _explained(path: Path) -> AbstractContextManager[None]:
    return explained(f"{path} holds no state of a collector", (OSError,))


class _Reader:
    """Puts a state together again."""

    def __init__(self, entries: list[Any], data: bytearray) -> None:
        self._tensors, start = [], 0
        for dtype, shape in entries:
            field = tensor_files.checked_field("a tensor", ["state"], shape, dtype)
            count = math.prod(field.shape)
            size = count * field.dtype.itemsize
            if start + size > len(data):
                raise ConfigError("it lists more tensors than it has")
            flat = torch.empty(0, dtype=field.dtype)
            if count:
                flat = torch.frombuffer(data, dtype=field.dtype, count=count, offset=start)
            self._tensors.append(flat.reshape(field.shape))
            start += size + -size % _ALIGNMENT

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _MARK not in node:
            return {key: self.value(item) for key, item in node.items()}
        kind, part = node[_MARK]
        if kind == "tuple":
            return tuple(self.value(item) for item in part)
        if kind == "dict":
            return {self.value(key): self.value(item) for key, item in part}
        if kind == "tensor":
            return self._tensors[part]
        return load_state(None, self.value(part))
