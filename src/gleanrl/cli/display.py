"""Facts on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gleanrl.watch.progress import plain


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
