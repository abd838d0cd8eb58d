"""Facts and histograms on standard output."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from gleanrl.watch.progress import number, plain

_MOST_ROWS, _MOST_COLUMNS = 10, 80
"""Size of a histogram."""
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
    """Print how an array of values is distributed, at most 80 columns wide; nothing about none.

    Infinite and missing values are left out.
    """
    from gleanrl.watch.page import histogram  # pages need torch, tables do not

    values = values[abs(values) < math.inf]
    edges, counts = histogram(values, _MOST_ROWS)
    if not len(edges):
        return
    step = edges[1] - edges[0] if len(edges) > 1 else 0.0
    names = [f"{number(low)} to {number(low + step)}" for low in edges]
    if step == 0 or (step == 1 and not (values % 1).any()):
        names = [number(low) for low in edges]
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for justify in ("right", "left", "right"):
        table.add_column(justify=justify, ratio=1 if justify == "left" else None)
    console = Console(width=min(_MOST_COLUMNS, shutil.get_terminal_size().columns))
    most = float(counts.max())
    for name, count in zip(names, counts.tolist(), strict=True):
        blocks = not console.options.ascii_only
        table.add_row(
            name, Bar(most, 0, count) if blocks else ProgressBar(most, count), f"{count:,}"
        )
    console.print(title, table, sep="\n", highlight=False)
