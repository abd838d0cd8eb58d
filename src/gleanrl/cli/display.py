"""Facts and histograms on standard output."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gleanrl.core.window import Array
from gleanrl.watch.progress import plain

_ROWS = 8
"""Rows of a histogram, at most."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_COLUMNS = 80


def print_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str] = (), numbers_from: int = 99
) -> None:
    """Print rows to standard output: a table on a terminal, aligned text elsewhere.

    Columns from ``numbers_from`` on are aligned to the right. On a terminal, rows of a table with
    headers that have text in the first column are marked.
    """
    console = Console()
    cells = [[plain(cell) for cell in row] for row in rows]
    if console.is_terminal:
        table = Table(show_header=bool(headers), box=None, pad_edge=False)
        for i, name in enumerate(headers or cells[0]):
            table.add_column(
                name,
                justify="right" if i >= numbers_from else "left",
                header_style="dim",
                style="" if i or headers else "dim",
                overflow="fold",
            )
        for row in cells:
            table.add_row(*map(escape, row), style="bold green" if headers and row[0] else None)
        console.print(table)
        return
    lines = [list(headers), *cells] if headers else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        aligned = (
            text.rjust(width) if i >= numbers_from else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        sys.stdout.write("  ".join(aligned).rstrip() + "\n")


def plural(number: int, noun: str) -> str:
    """Spell a count.

    >>> plural(1, "episode"), plural(2_000, "episode")
    ('1 episode', '2,000 episodes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_histogram(title: str, values: Array) -> None:
    """Print how ``values`` are distributed, at most 80 columns wide; nothing about none."""
    width = min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)
    try:
        blocks = bool(_EIGHTHS.encode(sys.stdout.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        blocks = False
    for line in histogram(title, values, width=width, blocks=blocks):
        sys.stdout.write(line + "\n")


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
