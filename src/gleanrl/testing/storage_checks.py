"""Checks of a storage of replay buffers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.core.errors import ArgumentTypeError, CheckFailed, ConfigError, for_users
from gleanrl.core.keys import as_key, next_key
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.storages import LazyTensorStorage, ListStorage, Storage
from gleanrl.testing.comparing import failing, require_same


@for_users
def check_storage(storage: Storage) -> None:
    """Check that a storage returns the rows that it was given.

    Copies of it are filled in parts, read at random places, filled beyond their size, saved and
    loaded. Rows are consecutive steps of episodes, with nested entries of several dtypes, and those
    that ``compact`` and ``stacks`` of the storage name.

    Args:
        storage: An empty storage for at most 100,000 rows.

    Raises:
        CheckFailed: it says what is wrong, where, and what to do.
        ConfigError: it is no storage, or not empty, too large, or one of ``[env, time]`` rows.

    Example:
        >>> import gleanrl
        >>> from gleanrl.testing import check_storage
        >>> check_storage(gleanrl.LazyTensorStorage(100))
    """
    if not isinstance(storage, Storage):
        raise ArgumentTypeError(
            f"{storage!r:.100} is no storage: give LazyTensorStorage(100) or such"
        )
    size, rows = storage.max_size, partial(_rows, storage)
    if storage.ndim != 1 or len(storage) or size > 100_000:
        raise ConfigError(f"{storage!r:.100} must be empty, of ndim=1 and at most 100,000 rows")
    with failing("the storage fails"), tempfile.TemporaryDirectory() as folder:
        filled, *copies = (_buffer(storage) for _ in range(3))
        _fill(filled, size, rows)
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
                buffer.extend(rows(torch.arange(1)))


def _fill(buffer: ReplayBuffer, size: int, rows: Callable[[torch.Tensor], TensorDict]) -> None:
    """Write rows in parts that grow, until a part has more rows than there is room for."""
    stored, begin, part = torch.empty(size, dtype=torch.int64), 0, 1
    cursor = 0
    while part < 4 * size:
        numbers = torch.arange(begin, begin + part)
        given = rows(numbers)
        buffer.extend(given)
        _same(given, rows(numbers), f"given to extend() as rows {begin} to {begin + part}")
        kept = numbers[-size:]
        stored[(cursor + torch.arange(len(kept))) % size] = kept
        begin, part, cursor = begin + part, 2 * part, (cursor + len(kept)) % size
        held = stored[: min(begin, size)]
        places = torch.randperm(len(held))[:50]
        _same(buffer[:], rows(held), f"read after {begin} were written")
        _same(buffer[places], rows(held[places]), f"at places {places[:5].tolist()}...")


def _buffer(storage: Storage) -> ReplayBuffer:
    try:
        return ReplayBuffer(storage=copy.deepcopy(storage), batch_size=1)
    except Exception as error:
        raise CheckFailed(f"an empty storage cannot be copied: {error}") from error


def _rows(storage: Storage, numbers: torch.Tensor) -> TensorDict:
    """Return the step of each number, from which all entries follow; each fifth ends an episode."""
    compact = () if isinstance(storage.compact, bool) else storage.compact
    stacks = storage.stacks if isinstance(storage, LazyTensorStorage) else {}
    sizes = {**dict.fromkeys(("observation", *compact), 3), "pixels": 4, **stacks}
    rows = TensorDict({"action": numbers, "next": {"value": numbers.double() / 7}}, [len(numbers)])
    rows["next", "done"] = done = numbers.unsqueeze(1) % 5 == 4
    for name, size in sizes.items():
        key, dtype = as_key(name), torch.uint8 if name == "pixels" else torch.float32
        pixels = torch.arange(size).view(-1, 1, 1) + torch.arange(4).view(2, 2)
        for place, ahead in ((key, 0), (next_key(key), torch.where(done, 9, 1))):
            first = numbers.unsqueeze(1) + ahead
            rows[place] = (first.view(-1, 1, 1, 1) + pixels).to(dtype)
    return rows


def _same(found: Any, expected: Any, what: str) -> None:
    if isinstance(found, list):  # of a `ListStorage`
        found, expected = torch.stack(found), torch.stack(list(expected))
    message = f"the rows {what} are not those that were written (found / written): {{}}"
    require_same(found.select(*expected.keys(), strict=False), expected, "rows", message)
