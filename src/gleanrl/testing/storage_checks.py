"""Checks of a storage of replay buffers."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.core.errors import CheckFailed, ConfigError, for_users
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.storages import ListStorage, Storage
from gleanrl.testing.comparing import failing, require_same


@for_users
def check_storage(storage: Storage) -> None:
    """Check that a storage returns the rows that it was given.

    Copies of it are filled in parts, read at random places, filled beyond their size, saved and
    loaded. Rows have nested entries of several dtypes.

    Args:
        storage: An empty storage for at most 100,000 rows.

    Raises:
        CheckFailed: it says what is wrong, where, and what to do.
        ConfigError: the storage is not empty, too large, or one of ``[env, time]`` rows.

    Example:
        >>> import gleanrl
        >>> from gleanrl.testing import check_storage
        >>> check_storage(gleanrl.LazyTensorStorage(100))
    """
    size = storage.max_size
    if storage.ndim != 1 or len(storage) or size > 100_000:
        raise ConfigError(f"{storage!r:.100} must be empty, of ndim=1 and at most 100,000 rows")
    with failing("the storage fails"), tempfile.TemporaryDirectory() as folder:
        filled, *copies = (_buffer(storage) for _ in range(3))
        _fill(filled, size)
        copies[0].load_state_dict(filled.state_dict())
        if isinstance(storage, ListStorage):  # it holds any objects, which no file takes
            del copies[1]
        else:
            filled.dumps(folder)
            copies[1].loads(folder)
        for written in (0, 1):
            for buffer in copies:
                _same(buffer[:], filled[:], f"after loading, and writing {written} rows more")
            for buffer in (filled, *copies):  # all go on at the same place
                buffer.extend(_rows(torch.arange(1)))


def _fill(buffer: ReplayBuffer, size: int) -> None:
    """Write rows in parts that grow, until a part has more rows than there is room for."""
    stored, begin, part = torch.empty(size, dtype=torch.int64), 0, 1
    cursor = 0
    while part < 4 * size:
        numbers = torch.arange(begin, begin + part)
        rows = _rows(numbers)
        buffer.extend(rows)
        _same(rows, _rows(numbers), f"given to extend() as rows {begin} to {begin + part}")
        kept = numbers[-size:]
        stored[(cursor + torch.arange(len(kept))) % size] = kept
        begin, part, cursor = begin + part, 2 * part, (cursor + len(kept)) % size
        held = stored[: min(begin, size)]
        places = torch.randperm(len(held))[:50]
        _same(buffer[:], _rows(held), f"read after {begin} were written")
        _same(buffer[places], _rows(held[places]), f"at places {places[:5].tolist()}...")


def _buffer(storage: Storage) -> ReplayBuffer:
    try:
        return ReplayBuffer(storage=copy.deepcopy(storage), batch_size=1)
    except Exception as error:
        raise CheckFailed(f"an empty storage cannot be copied: {error}") from error


def _rows(numbers: torch.Tensor) -> TensorDict:
    """Return one row for each number, from which all entries follow."""
    n = numbers.unsqueeze(1)
    rows = {
        "observation": (3 * n + torch.arange(3)).float(),
        "pixels": (n + torch.arange(4)).to(torch.uint8).view(-1, 2, 2),
        "action": numbers,
        "next": {"value": n.double() / 7, "done": n % 5 == 4},
    }
    return TensorDict(rows, [len(numbers)])


def _same(found: Any, expected: Any, what: str) -> None:
    if isinstance(found, list):  # of a `ListStorage`
        found, expected = torch.stack(found), torch.stack(list(expected))
    found = found.select(*_rows(torch.arange(1)).keys())
    message = f"the rows {what} are not those that were written (found / written): {{}}"
    require_same(found, expected.select(*found.keys()), "rows", message)
