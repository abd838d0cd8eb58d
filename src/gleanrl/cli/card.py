"""``card.json``: what a directory of collected frames holds and where it came from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from gleanrl.core.errors import GleanError
from gleanrl.core.keys import Key

CARD = "card.json"
FORMAT = "gleanrl-dataset"
VERSION = 1
STATUSES = ("collecting", "complete", "interrupted", "failed")
_MAX_CARD_BYTES = 16 * 2**20
_MAX_DIMS = 32


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES: dict[str, torch.dtype] = {
    _spell(dtype): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}


class DatasetError(GleanError, ValueError):
    """A dataset's files are damaged, or are not what its card says."""


@dataclass(frozen=True, slots=True)
class Column:
    """One entry of the frames: a raw file of ``rows`` values."""

    key: Key
    shape: tuple[int, ...]
    """Shape of one frame."""
    dtype: torch.dtype
    file: str
    """Path within the dataset, parts separated by ``/``."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The dtype as the card spells it."""
        return _spell(self.dtype)

    def as_json(self) -> dict[str, Any]:
        """Return the column as the card spells it."""
        return {
            "key": list(self.key),
            "shape": list(self.shape),
            "dtype": self.dtype_name,
            "file": self.file,
        }


@dataclass(frozen=True, slots=True)
class Card:
    """A card that was read: what matters for reading the data is checked, the rest is as found."""

    status: str
    frames: int
    """Frames collected."""
    rows: int
    """Frames the files have room for; more than ``frames`` if collection was cut short."""
    columns: tuple[Column, ...]
    facts: Mapping[str, Any]
    """The whole card. Nothing in it may be trusted."""


def card_text(content: Mapping[str, Any]) -> str:
    """Return a card as it is written."""
    return json.dumps({"format": FORMAT, "format_version": VERSION, **content}, indent=2) + "\n"


def read_card(directory: Path) -> Card:
    """Read and check the card of ``directory``.

    Raises:
        DatasetError: it is missing, is not a card, or contradicts itself.
    """
    path = directory / CARD
    if not path.is_file():
        raise DatasetError(
            f"{directory} has no {CARD}, so it was not written by 'gleanrl collect --out'"
        )
    size = path.stat().st_size
    if size > _MAX_CARD_BYTES:
        raise DatasetError(f"{path} has {size:,} bytes, more than any card (at most 16 MiB)")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as err:
        raise DatasetError(f"{path} cannot be read as JSON: {err}") from err
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise DatasetError(f"{path} is not the card of a dataset (its 'format' is not {FORMAT!r})")
    if facts.get("format_version") != VERSION:
        found = facts.get("format_version")
        raise DatasetError(f"{path} has format version {found!r}; this release reads {VERSION}")
    return _checked(path, facts)


def _checked(path: Path, facts: Mapping[str, Any]) -> Card:
    frames = _count(path, facts, "frames")
    rows = _count(path, facts, "rows")
    if frames > rows:
        raise DatasetError(f"{path}: {frames:,} frames cannot be in files of {rows:,} rows")
    status = facts.get("status")
    if status not in STATUSES:
        raise DatasetError(f"{path}: 'status' ({status!r}) is none of {STATUSES}")
    entries = facts.get("keys")
    if not isinstance(entries, list):
        raise DatasetError(f"{path}: 'keys' must be a list")
    return Card(status, frames, rows, tuple(_column(path, entry) for entry in entries), facts)


def _count(path: Path, facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if not _is_count(value):
        raise DatasetError(f"{path}: {name!r} ({value!r:.50}) must be a whole number, 0 or more")
    return value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _column(path: Path, entry: Any) -> Column:
    if not isinstance(entry, dict):
        raise DatasetError(f"{path}: an entry of 'keys' is not an object")
    key, shape, dtype, file = (entry.get(name) for name in ("key", "shape", "dtype", "file"))
    if not isinstance(key, list) or not key or not all(isinstance(part, str) for part in key):
        raise DatasetError(f"{path}: a key ({key!r:.50}) must be a list of strings")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise DatasetError(f"{path}: the shape of {key} ({shape!r:.50}) must list whole numbers")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise DatasetError(f"{path}: the dtype of {key} ({dtype!r:.50}) is not known")
    if not isinstance(file, str) or not _stays_inside(file):
        raise DatasetError(f"{path}: the file of {key} ({file!r:.100}) must be within the dataset")
    return Column(tuple(key), tuple(shape), _DTYPES[dtype], file)


def _stays_inside(file: str) -> bool:
    parts = file.split("/")
    tame = file.isprintable() and not set(file) & set("\\:")
    return tame and all(part not in ("", ".", "..") for part in parts)
