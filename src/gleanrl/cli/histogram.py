"""A histogram in text: bars of block characters, or of ``#`` where the output cannot show those."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

import numpy as np

from gleanrl.core.window import Array

_ROWS = 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_COLUMNS = 80


def print_histogram(
    title: str, values: Array | Sequence[float], stream: TextIO | None = None
) -> None:
    """Print how ``values`` are distributed, at most 80 columns wide; nothing about none."""
    stream = stream or sys.stdout
    width = min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)
    blocks = _shows_blocks(stream)
    for line in histogram(title, values, width=width, blocks=blocks):
        stream.write(line + "\n")


def histogram(
    title: str, values: Array | Sequence[float], *, width: int = _MOST_COLUMNS, blocks: bool = True
) -> list[str]:
    r"""Return the lines of a histogram; infinite and missing values are left out.

    >>> print("\n".join(histogram("lengths", [1, 1, 1, 2, 4], width=30, blocks=False)))
    lengths
    1  ######################### 3
    2  ######### 1
    3   0
    4  ######### 1
    """
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return []
    counts, names = _bins(finite)
    numbers = [f"{count:,}" for count in counts]
    left = max(map(len, names))
    room = max(1, width - left - 3 - max(map(len, numbers)))
    bars = (_bar(room * count / counts.max(), blocks) for count in counts)
    rows = zip(names, bars, numbers, strict=True)
    return [title, *(f"{name.rjust(left)}  {bar} {number}" for name, bar, number in rows)]


def _bins(values: Array) -> tuple[Array, list[str]]:
    """Return how many values are in each row, and what the rows are called."""
    low, high = float(values.min()), float(values.max())
    whole = bool((values == np.round(values)).all())
    if low == high:
        return np.array([len(values)]), [_number(low, whole)]
    if whole and high - low < _ROWS:
        edges = np.arange(low, high + 2)
        names = [_number(float(edge), whole) for edge in edges[:-1]]
        return np.histogram(values, edges)[0], names
    step = (high - low) / _ROWS
    step = math.ceil(step) if whole else step
    edges = low + step * np.arange(_ROWS + 1)
    edges[-1] = max(edges[-1], high)
    last = edges[1:] - whole  # of whole numbers, the last one in the row
    ends = zip(map(float, edges), map(float, last), strict=False)
    names = [f"{_number(first, whole)} to {_number(final, whole)}" for first, final in ends]
    return np.histogram(values, edges)[0], names


def _number(value: float, whole: bool) -> str:
    return f"{value:,.0f}" if whole else f"{value:,.4g}"


def _bar(length: float, blocks: bool) -> str:
    if not blocks:
        return "#" * (math.ceil(length) if length else 0)
    eighths = max(round(length * 8), int(length > 0))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _shows_blocks(stream: TextIO) -> bool:
    try:
        _EIGHTHS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
