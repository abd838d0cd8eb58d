"""States of storages: in memory as dictionaries, on disk as raw tensors and JSON."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import CollectorTimeout, ConfigError
from gleanrl.core.keys import next_key
from gleanrl.memory import tensor_files
from gleanrl.memory.replay.ring import check_snapshot
from gleanrl.memory.replay.rows import RowLayout, follow
from gleanrl.memory.replay.storages import LazyTensorStorage, ListStorage, RoundRobinWriter, Storage
from gleanrl.memory.tensor_files import TensorFile

_FORMAT = "gleanrl replay buffer"
_VERSION = 2
_PART = 1024
"""Slots that are put together at a time for a storage of another size."""


def storage_state(storage: Storage, copied: bool = True) -> dict[str, Any]:
    """Return all complete rows and the counters.

    Args:
        storage: Whose.
        copied: Copy the tensors; otherwise they are views that later writes show in.
    """
    ring = storage.ring
    if isinstance(storage, ListStorage):
        with ring.section():
            return {**ring.snapshot(), "slots": storage.max_size, "items": [*storage.items]}
    assert isinstance(storage, LazyTensorStorage)
    rows = storage.rows
    if rows is None:
        return {"layout": None}
    state = ring.snapshot()
    top = len(state["stamps"])
    # Read after the sequence numbers: the overflow places of rows that they show lie below it.
    overflow = rows.overflow(ring.overflow)
    tensors = [*(tensor[:top] for tensor in rows.tensors), *overflow]
    if copied:
        tensors = [tensor.clone() for tensor in tensors]
        drop_overwritten(storage, state)
    layout = rows.layout.to_json().decode()
    return {**state, "slots": ring.slots, "layout": layout, "tensors": tensors}


def drop_overwritten(storage: Storage, state: dict[str, Any]) -> None:
    """Drop rows from ``state`` that were written while they were copied."""
    numbers = state["stamps"]
    with storage.ring.section():
        numbers[numbers != storage.ring.sequence_tensor[: len(numbers)]] = 0


def check_storage(storage: Storage, state: Any) -> None:
    """Check that a state can be loaded, before anything is changed."""
    try:
        if isinstance(storage, ListStorage):
            _check_items(state)
        else:
            _check_tensors(state)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"this is no state of a replay buffer: {err!r}") from err


def _check_items(state: Mapping[str, Any]) -> None:
    if state.get("items") is None:
        raise ConfigError("this state is of tensors, and this buffer's storage is a list")
    check_snapshot(state, state["slots"])
    if not isinstance(state["items"], list) or len(state["items"]) < len(state["stamps"]):
        raise ConfigError(f"this state lacks items: it has {len(state['stamps'])} rows")


def _check_tensors(state: Mapping[str, Any]) -> None:
    if "items" in state:
        raise ConfigError("this state is of a list, and this buffer's storage holds tensors")
    if state["layout"] is None:
        return
    check_snapshot(state, state["slots"])
    layout, top = RowLayout.from_json(state["layout"].encode()), len(state["stamps"])
    lead = (top,) if layout.envs is None else (top, layout.envs)
    expected = [((*lead, *field.shape), field.dtype) for field in layout.stored]
    tensors = state["tensors"]
    linked = [field for field in layout.fields if field.key in layout.dedup]
    expected += [((len(tensors[-1]), *field.shape), field.dtype) for field in linked]
    if [(tuple(t.shape), t.dtype) for t in tensors] != expected:
        raise ConfigError("the tensors of this state are not of the layout that it describes")
    if linked:
        # Rows that were written meanwhile may link to overflow places that were not saved.
        links = tensors[-1 - len(linked)][state["stamps"] > 0]
        frames = state["slots"] * (layout.envs or 1)
        places = frames + min(len(tensors[-1]), frames)
        if links.numel() and not 0 <= int(links.min()) <= int(links.max()) < places:
            raise ConfigError("this state links rows to successors that are not there")


def frames_in_place(storage: Storage, state: Mapping[str, Any]) -> int:
    """Return the frames of the ring if rows of a checked state keep their places, else 0."""
    layout = state.get("layout")
    envs = 1 if layout is None else RowLayout.from_json(layout.encode()).envs or 1
    ring = storage.ring
    slots = ring.slots if ring.ready else storage.max_size // envs
    return slots * envs if state.get("slots") == slots else 0


def load_storage(storage: Storage, state: dict[str, Any]) -> None:
    """Put rows back: at the same places if the sizes agree, else in the order of their age."""
    if isinstance(storage, ListStorage):
        _load_items(storage, state)
        return
    assert isinstance(storage, LazyTensorStorage)
    if state.get("layout") is None:
        storage.ring.empty()
        return
    rows = storage.initialise(RowLayout.from_json(state["layout"].encode()))
    with storage.ring.section():
        if storage.ring.slots == state["slots"]:
            number = len(rows.tensors)
            storage.put_back(state, state["tensors"][:number], state["tensors"][number:])
            return
        order = torch.from_numpy(_by_age(state["stamps"])[-storage.ring.slots :])
        storage.ring.clear_for(state)
        for start in range(0, len(order), _PART):
            data = _frames(rows.layout, state, order[start : start + _PART])
            RoundRobinWriter().extend(storage, data, 0)
        storage.ring.add_count(state["count"] - len(order))


def _frames(layout: RowLayout, state: dict[str, Any], slots: torch.Tensor) -> Any:
    """Return all fields of some slots of a state, by key."""
    stored, number = state["tensors"], len(layout.stored)
    data = {f.key: t[slots] for f, t in zip(layout.stored, stored[:number], strict=True)}
    if layout.dedup:
        link = data.popitem()[1]
        frames = state["slots"] * (layout.envs or 1)
        keys = [field.key for field in layout.stored]
        for key, overflow in zip(layout.dedup, stored[number:], strict=True):
            places = stored[keys.index(key)].flatten(0, link.ndim - 1)
            data[next_key(key)] = follow(places, overflow, link, frames)
    return data


def _load_items(storage: ListStorage, state: dict[str, Any]) -> None:
    with storage.ring.section():
        storage.ring.clear_for(state)
        if storage.ring.slots == state["slots"]:
            storage.items[:] = state["items"]
            storage.ring.restore(state)
            return
        items = [state["items"][place] for place in _by_age(state["stamps"])]
        storage.items.clear()
        if items:
            RoundRobinWriter().extend(storage, items, 0)
        storage.ring.add_count(state["count"] - min(len(items), storage.ring.slots))


def _by_age(sequence: torch.Tensor) -> Any:
    numbers = sequence.numpy()
    order = np.argsort(numbers, kind="stable")
    return order[numbers[order] > 0]


META = "meta.json"
FOLDER = re.compile(r"data-[0-9a-f]{32}")
_LOCK_TIMEOUT_S = 600.0
_POLL_INTERVAL_S = 0.01


def write(path: str | os.PathLike[str], storage: Storage, sampler: dict[str, Any]) -> None:
    """Write a buffer to the directory ``path``, one process at a time.

    A dump is a folder of files, and a description that names the folder. What an earlier call wrote
    stays valid until this one is complete and on the disk. Folders that no description names were
    left by processes that ended.

    Raises:
        ConfigError: the storage is a list of objects.
        CollectorTimeout: another process has been writing there for ten minutes.
        OSError: the disk is full; what an earlier call left there is still there.
    """
    if isinstance(storage, ListStorage):
        raise ConfigError("ListStorage holds any object, and files hold tensors: use state_dict()")
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    with _alone_in(root) as alone:
        folder = root / f"data-{uuid.uuid4().hex}"
        folder.mkdir()
        try:
            text = _write_state(folder, storage, sampler)
            tensor_files.write_new(folder / META, text.encode())
            tensor_files.sync_directory(folder)
            tensor_files.publish(folder / META, root / META)
        except BaseException:
            if _current_folder(root) != folder.name:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        for other in [path for path in root.iterdir() if FOLDER.fullmatch(path.name)]:
            if alone and other.name != folder.name:
                shutil.rmtree(other, ignore_errors=True)


def _write_state(folder: Path, storage: Storage, sampler: dict[str, Any]) -> str:
    """Write all tensors; return the description, which has the entry of a file for each."""
    state, count = storage_state(storage, copied=False), itertools.count()

    def save(tensor: torch.Tensor) -> dict[str, Any]:
        name = f"{next(count)}.bin"
        return tensor_files.save(folder, (name,), tensor, name).to_json()

    if "tensors" in state:
        state["tensors"] = [save(tensor) for tensor in state["tensors"]]
        drop_overwritten(storage, state)
    meta = {"format": _FORMAT, "version": _VERSION, "folder": folder.name}
    return json.dumps({**meta, "storage": state, "sampler": sampler}, indent=1, default=save)


def _current_folder(root: Path) -> str | None:
    """Return which folder the description names, ``None`` if there is no such description."""
    try:
        folder = json.loads((root / META).read_text())["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if isinstance(folder, str) and FOLDER.fullmatch(folder) else None


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[bool]:
    """Keep other dumps out of a directory; yields False on a file system that has no locks.

    The lock is the kernel's, and ends with the process.
    """
    fd, deadline = (
        os.open(directory, os.O_RDONLY | os.O_CLOEXEC),
        time.monotonic() + _LOCK_TIMEOUT_S,
    )
    locked: bool | None = None
    try:
        while locked is None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError as err:
                if time.monotonic() > deadline:
                    raise CollectorTimeout(
                        f"another process has been writing a replay buffer to {directory} for "
                        f"{_LOCK_TIMEOUT_S:g} s; end it, or write to another directory"
                    ) from err
                time.sleep(_POLL_INTERVAL_S)
            except OSError:
                locked = False
        yield locked
    finally:
        if locked:  # a forked child has the descriptor as well: closing it is not enough
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of storage and sampler; the tensors are mapped files.

    Nothing is unpickled, and no file outside ``path`` is opened.

    Raises:
        ConfigError: there is no such buffer, or its files are not what they are said to be.
    """
    root = Path(path)
    while True:
        folder = _current_folder(root)
        try:
            return _read(root)
        except ConfigError:
            if _current_folder(root) == folder:  # else another dump replaced this one meanwhile
                raise


def _read(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        meta = tensor_files.read_description(root / META)
        if meta["format"] != _FORMAT or meta["version"] != _VERSION:
            raise ConfigError(f"{root} holds {meta['format']!r}, version {meta['version']!r}")
        if not FOLDER.fullmatch(meta["folder"]) or (root / meta["folder"]).is_symlink():
            raise ConfigError(f"{root} names {meta['folder']!r} as its data")
        folder = root / meta["folder"]
        return _loaded(dict(meta["storage"]), folder), _loaded(dict(meta["sampler"]), folder)
    except (OSError, KeyError, TypeError, AttributeError, IndexError, ValueError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"{root} holds no replay buffer that dumps() wrote: {err}") from err


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
