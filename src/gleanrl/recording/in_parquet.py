"""Frames in Parquet: one row per frame, one file per writer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gleanrl.core.keys import DONE, END_FLAGS, NEXT, TRAJ_IDS, Key, format_key
from gleanrl.core.window import Array
from gleanrl.memory.tensor_files import TensorFile, TensorFileError, inside
from gleanrl.recording.dataset import DATA, Dataset, Metadata, Part
from gleanrl.recording.episode_stats import Episode, episodes_of

_NUMBERS = ("episode", "step", "env")


def write(dataset: Dataset, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``data/part-*.parquet`` in the directory of ``dataset``.

    Columns are entries, the parts of their keys joined by dots; rewards and end flags lose the
    ``next``. Entries of one element are scalars, all others lists of a fixed size in row-major
    order, whose shapes are in the schema's metadata (``gleanrl.shapes``).
    """
    columns = _columns(dataset)
    shapes = {name: list(file.shape) for name, file in columns.items()}
    fields = [pa.field(name, _type(file)) for name, file in columns.items()]
    numbered = TRAJ_IDS in dataset.keys()
    episodes = episodes_of(dataset) if numbered else []
    num_envs = facts.get("num_envs")
    numbers = _NUMBERS[: (3 if num_envs else 2) if numbered else 0]
    fields += [pa.field(name, pa.int64()) for name in numbers]
    schema = pa.schema(fields, metadata={"gleanrl.shapes": json.dumps(shapes)})
    folder = dataset.directory / DATA
    folder.mkdir()
    for number, part in enumerate(dataset.parts):
        path = folder / f"part-{number:05d}.parquet"
        extra = _numbers(part, episodes, num_envs or 1) if numbered else None
        with pq.ParquetWriter(path, schema) as out:
            for rows in part.chunks():
                values = [_values(part.read(file.key)[rows]) for file in columns.values()]
                values += [] if extra is None else [pa.array(extra[n][rows]) for n in numbers]
                out.write_table(pa.Table.from_arrays(values, schema=schema))
    return {"columns": schema.names}


def parts(directory: Path, metadata: Metadata) -> list[ParquetPart]:
    """Open the files of a dataset."""
    names = sorted(path.name for path in (directory / DATA).glob("part-*.parquet"))
    return [ParquetPart(inside(directory, f"{DATA}/{name}"), metadata) for name in names]


class ParquetPart(Part):
    """One file, read column by column."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """Read the file's number of rows and its entries."""
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowInvalid, OSError) as err:
            raise TensorFileError(f"{path} cannot be read: {err}") from err
        self.frames = self._file.metadata.num_rows
        there = set(self._file.schema_arrow.names)
        self.files = [
            file
            for file in metadata.files
            if _name(file.key) in there and not _is_root_flag(file.key)
        ]

    def _values(self, file: TensorFile) -> torch.Tensor:
        column = self._file.read([_name(file.key)]).column(0).combine_chunks()
        flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
        return torch.from_numpy(flat.to_numpy(zero_copy_only=False).copy())


def _columns(dataset: Dataset) -> dict[str, TensorFile]:
    """Return the entries to write by the name of their column."""
    keys = set(dataset.keys())
    columns: dict[str, TensorFile] = {}
    for file in dataset.metadata.files:
        if _is_root_flag(file.key):  # environments are reset
            if dataset.read(file.key).any():
                raise TensorFileError(
                    f"{format_key(file.key)} is True in some frames, and tables have columns for "
                    "the flags under 'next' only: rename the entry, or leave it out"
                )
            continue
        if file.key == (NEXT, *DONE) and {(NEXT, "terminated"), (NEXT, "truncated")} <= keys:
            continue  # either of these two
        if not file.nbytes:
            continue
        name = _name(file.key)
        if name in columns or name in _NUMBERS:
            raise TensorFileError(f"two entries would have the column {name!r}; rename one")
        if file.dtype.is_complex:
            raise TensorFileError(f"{name!r} is complex, which Parquet does not have")
        columns[name] = file
    return columns


def _is_root_flag(key: Key) -> bool:
    return key[-1] in END_FLAGS and key[0] != NEXT


def _name(key: Key) -> str:
    plain = key[0] == NEXT and (key[-1] in END_FLAGS or key[-1] == "reward")
    return ".".join(key[1:] if plain else key)


def _type(file: TensorFile) -> pa.DataType:
    dtype = torch.float32 if file.dtype is torch.bfloat16 else file.dtype
    scalar = pa.from_numpy_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    count = math.prod(file.shape)
    return scalar if count == 1 else pa.list_(scalar, count)


def _values(rows: torch.Tensor) -> pa.Array:
    if rows.dtype is torch.bfloat16:  # Arrow has no such type
        rows = rows.float()
    flat = pa.array(rows.reshape(-1).numpy())
    count = math.prod(rows.shape[1:])
    return flat if count == 1 else pa.FixedSizeListArray.from_arrays(flat, count)


def _numbers(part: Part, episodes: list[Episode], num_envs: int) -> dict[str, Array]:
    """Return number, step and environment of every row of ``part``."""
    found = {name: np.empty(part.frames, np.int64) for name in _NUMBERS}
    for number, episode in enumerate(episodes):
        if episode.part is not part:
            continue
        step = 0
        for start, stop in episode.runs:
            found["episode"][start:stop] = number
            found["step"][start:stop] = np.arange(step, step + stop - start)
            found["env"][start:stop] = episode.id % num_envs
            step += stop - start
    return found
