"""Replay buffers on disk: raw tensors and JSON, no pickle."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gleanrl.core.errors import ConfigError
from gleanrl.memory import tensor_files
from gleanrl.memory.replay.row_visibility import check_snapshot
from gleanrl.memory.replay.rows import RowLayout
from gleanrl.memory.replay.storages import LazyTensorStorage, Storage
from gleanrl.memory.tensor_files import TensorFile, TensorFileError

_FORMAT = "gleanrl replay buffer"
_VERSION = 4


_SAMPLERS: dict[str, tuple[torch.dtype, int, float]] = {
    "order": (torch.int64, 1, 0),
    "segments": (torch.int64, 2, 0),
    "priorities": (torch.float64, 1, math.inf),
}
"""Tensors of samplers: dtype, dimensions and the end of their values, 0 for places."""
_PRIORITY = ("alpha", "max_priority")
META = "meta.json"
FOLDER = re.compile(r"data-[0-9a-f]{32}")


def write(
    path: str | os.PathLike[str], storage: Storage, sampling: Callable[[], dict[str, Any]]
) -> None:
    """Write a buffer to the directory ``path``, which is made if it is not there.

    A dump is a folder of files, and a description that names the folder. The folder of an earlier
    call stays valid until this one is complete and on the disk; then it is removed, like the
    folders of processes that ended while they wrote. Several processes write one after another. The
    states of sampler and generator, which ``sampling`` returns, are taken after rows were written.
    """
    if not isinstance(storage, LazyTensorStorage):
        raise ConfigError("ListStorage holds any object, and files hold tensors: use state_dict()")
    root = Path(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as err:
        raise ConfigError(f"{root} cannot be made: {err.strerror or err}") from err
    with locked(root) as alone:
        if (root / META).exists() and _current_folder(root) is None:
            raise ConfigError(f"{root / META} is none of dumps(): choose another directory")
        folder = root / f"data-{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            text = _write_state(folder, storage, sampling)
            tensor_files.write_new(folder / META, tensor_files.sealed(text.encode()))
            tensor_files.sync_tree(folder)
            tensor_files.publish(folder / META, root / META)
        except BaseException:
            if _current_folder(root) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        for other in list(root.iterdir()) if alone else ():
            if FOLDER.fullmatch(other.name) and other.name != folder.name:
                shutil.rmtree(other, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; yields False if its file system has no locks.

    The lock is the kernel's, and ends with the process.
    """
    fd, locked = os.open(folder, os.O_RDONLY | os.O_CLOEXEC), False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            locked = True
        yield locked
    finally:
        if locked:  # a forked child has the descriptor as well: closing it is not enough
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _write_state(
    folder: Path, storage: LazyTensorStorage, sampling: Callable[[], dict[str, Any]]
) -> str:
    """Write all tensors; return the description with one entry of a file for each."""
    copied, count = storage.copied_at_once, itertools.count()
    state = storage.state_dict(copied)

    def save(tensor: torch.Tensor) -> dict[str, Any]:
        name = f"{next(count)}.bin"
        return tensor_files.save(folder, (name,), tensor, name).to_json()

    if "tensors" in state:
        state["tensors"] = [save(tensor) for tensor in state["tensors"]]
        if not copied:
            storage.drop_overwritten(state)
    meta = {"format": _FORMAT, "version": _VERSION, "folder": folder.name}
    return json.dumps({**meta, "storage": state, **sampling()}, indent=1, default=save)


def _current_folder(root: Path) -> str | None:
    """Return the folder that the description names, ``None`` without a description."""
    try:
        folder = tensor_files.read_description(root / META).get("folder")
    except TensorFileError:
        return None
    return folder if isinstance(folder, str) and FOLDER.fullmatch(folder) else None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the states of storage, sampler and generator; the tensors are mapped files.

    Nothing is unpickled, and no file outside ``path`` is opened.
    """
    root = Path(path)
    while True:
        folder = _current_folder(root)
        try:
            return _read(root)
        except ConfigError:
            if _current_folder(root) == folder:  # else another dump replaced this one meanwhile
                raise


def _read(root: Path) -> dict[str, Any]:
    try:
        meta = tensor_files.read_description(root / META)
        if meta["format"] != _FORMAT or meta["version"] != _VERSION:
            raise ConfigError(f"{root} holds {meta['format']!r}, version {meta['version']!r}")
        meta = tensor_files.read_description(root / META, is_sealed=True)
        if not FOLDER.fullmatch(meta["folder"]) or (root / meta["folder"]).is_symlink():
            raise ConfigError(f"{root} names {meta['folder']!r} as its data")
        folder = root / meta["folder"]
        parts: dict[str, Any] = {name: dict(meta[name]) for name in ("storage", "sampler")}
        parts["generator"] = meta.get("generator")
        state = {name: _loaded(part, folder) for name, part in parts.items()}
        _check(**state)
    except (OSError, LookupError, TypeError, AttributeError, ValueError, RuntimeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"{root} holds no replay buffer that dumps() wrote: {err}") from err
    return state


def _loaded(value: Any, folder: Path) -> Any:
    """Return a part of a description with tensors in place of the entries of their files."""
    if isinstance(value, list):
        return [_loaded(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if "file" in value:
        file = TensorFile.from_json(value, folder)
        return file.load(file.locate(folder))
    return {name: _loaded(item, folder) for name, item in value.items()}


def _check(
    storage: Mapping[str, Any], sampler: Mapping[str, Any], generator: torch.Tensor | None
) -> None:
    """Raise any error if parts of a state from files contradict each other."""
    if generator is not None:
        torch.Generator().set_state(generator)
    if storage["layout"] is None:
        return
    layout, slots = RowLayout.from_json(storage["layout"].encode()), storage["slots"]
    check_snapshot(storage, slots)
    frames, numbers, tensors = slots * (layout.envs or 1), storage["stamps"], storage["tensors"]
    lead = (len(numbers),) if layout.envs is None else (len(numbers), layout.envs)
    expected = [((*lead, *field.shape), field.dtype) for field in layout.stored]
    sizes = [len(tensor) for tensor in tensors[len(layout.stored) :]]
    frames_of = zip(sizes, (stack.frame for stack in layout.stacks), strict=True)
    expected += [((size, *shape), dtype) for size, (shape, dtype) in frames_of]
    if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != expected:
        raise ConfigError("the tensors are not of the layout that the description has")
    # Rows that were written meanwhile may point to places that were not saved.
    complete = {f.key: t[numbers > 0] for f, t in zip(layout.stored, tensors, strict=False)}
    for stack, size in zip(layout.stacks, sizes, strict=True):
        for field in stack.fields:
            _check_range("places of frames", complete[field.key], size)
    for name, (dtype, ndim, most) in _SAMPLERS.items():
        if name in sampler:
            if sampler[name].dtype != dtype or sampler[name].ndim != ndim:
                raise ConfigError(f"{name!r} of the sampler has another dtype or shape")
            _check_range(name, sampler[name], most or frames + ndim - 1)
    _check_range("priorities", torch.tensor([sampler.get(n, 0.0) for n in _PRIORITY]), math.inf)


def _check_range(name: str, values: torch.Tensor, end: float) -> None:
    if values.numel() and not 0 <= float(values.min()) <= float(values.max()) < end:
        raise ConfigError(f"{name!r} are not from 0 to {end}: {values}")
