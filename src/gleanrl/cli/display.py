"""Facts and histograms on standard output."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gleanrl.watch.progress import number, plain

_MOST_ROWS, _MOST_COLUMNS = 10, 80
"""Size of a histogram."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_UNBOUNDED = 10_000
"""Columns without a terminal, so that no line is folded."""


def print_table(
    rows: Sequence[Sequence[str]], headers: Sequence[str] = (), numbers_from: int = 99
) -> None:
    """Print rows to standard output: a table on a terminal, aligned text elsewhere.

    Columns from ``numbers_from`` on are aligned to the right. On a terminal, rows that have text in
    a first column without header are marked.
    """
    console, marks = Console(), bool(headers) and not headers[0]
    if not console.is_terminal:
        console.width = _UNBOUNDED
    table = Table(show_header=bool(headers), box=None, pad_edge=False)
    for i, name in enumerate(headers or rows[0]):
        table.add_column(
            name,
            justify="right" if i >= numbers_from else "left",
            header_style="dim",
            style="" if i or headers else "dim",
            overflow="fold",
        )
    for row in rows:
        cells = [escape(plain(cell)) for cell in row]
        table.add_row(*cells, style="bold green" if marks and row[0] else None)
    with console.capture() as text:
        console.print(table)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.get().splitlines())


def plural(number: int, noun: str) -> str:
    """Spell a count.

    >>> plural(1, "episode"), plural(2_000, "episode")
    ('1 episode', '2,000 episodes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_histogram(title: str, values: Any) -> None:
    """Print how ``values`` are distributed, at most 80 columns wide; nothing about none."""
    width = min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns)
    try:
        blocks = bool(_EIGHTHS.encode(sys.stdout.encoding or "ascii"))
    except (UnicodeEncodeError, LookupError):
        blocks = False
    sys.stdout.writelines(f"{line}\n" for line in histogram(title, values, width, blocks))


def histogram(title: str, values: Any, width: int, blocks: bool = True) -> list[str]:
    r"""Return the lines of a histogram of an array; infinite and missing values are left out.

    >>> import numpy as np
    >>> print("\n".join(histogram("lengths", np.array([1, 1, 1, 2, 4]), 30, blocks=False)))
    lengths
    1  ######################### 3
    2  ######### 1
    3   0
    4  ######### 1
    """
    from gleanrl.watch.page import histogram as find_bins  # pages need torch, tables do not

    values = values[abs(values) < math.inf]
    edges, counts = find_bins(values, _MOST_ROWS)
    if not len(edges):
        return []
    step = edges[1] - edges[0] if len(edges) > 1 else 0.0
    names = [f"{number(low)} to {number(low + step)}" for low in edges]
    if step == 0 or (step == 1 and not (values % 1).any()):
        names = [number(low) for low in edges]
    numbers = [f"{count:,}" for count in counts]
    left = max(map(len, names))
    room = max(1, width - left - 3 - max(map(len, numbers)))
    bars = [_bar(room * count / counts.max(), blocks) for count in counts]
    rows = zip(names, bars, numbers, strict=True)
    return [title, *(f"{name.rjust(left)}  {bar} {count}" for name, bar, count in rows)]


def _bar(length: float, blocks: bool) -> str:
    eighths = max(round(length * 8), int(length > 0))
    if not blocks:
        return "#" * -(-eighths // 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
