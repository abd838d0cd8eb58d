"""States of collectors on disk: a file, or a directory with the replay buffer of the same moment.

A directory has the file ``state``, which names one of the folders ``buffer-…`` in it. The file is
written last, so it and the folder belong together whatever ends the program. Earlier files
(``state.1``, …) name folders of their own.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gleanrl.collectors import state_files
from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.saving import locked
from gleanrl.memory.replay.storages import LazyTensorStorage

STATE = "state"
_FOLDER = re.compile(r"buffer-[0-9a-f]{32}")


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
        state_files.write(path, {**facts, "buffer": None}, state, keep)
        return
    if path.is_file():
        raise ConfigError(f"{path} is a file: save(..., replay_buffer=True) writes a directory")
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"buffer-{uuid.uuid4().hex}"
    with locked(path):
        try:
            buffer.dumps(folder)
            state_files.write(path / STATE, {**facts, "buffer": folder.name}, state, keep)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _remove_unnamed(path)


def _remove_unnamed(root: Path) -> None:
    """Remove folders of buffers that no state names, such as those of a process that was killed."""
    try:
        named = [state_files.read_facts(path)["buffer"] for path in root.glob(f"{STATE}*")]
    except ConfigError:  # a damaged state may name any of them
        return
    for other in root.iterdir():
        if _FOLDER.fullmatch(other.name) and other.name not in named:
            shutil.rmtree(other, ignore_errors=True)


def read(path: Path) -> tuple[dict[str, Any], Any, Path | None]:
    """Return the facts and the state that `write` has written, and the folder of the buffer."""
    file = path / STATE if path.is_dir() else path
    facts, state = state_files.read(file)
    name = facts["buffer"]
    if name is None:
        return facts, state, None
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise ConfigError(f"{file} names {name!r:.80} as its replay buffer")
    return facts, state, file.parent / name
