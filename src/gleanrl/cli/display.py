"""What a user sees: progress on standard error, facts on standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """Shows progress while it is entered: a live bar on a terminal, lines of text elsewhere."""

    def __init__(
        self,
        title: str,
        total: int,
        every_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to show ``total`` things; lines come at least ``every_s`` seconds apart."""
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                expand=True,
                refresh_per_second=5,
            )
            self._bar.add_task(escape(plain(title)), total=total, text="")
        self._title, self._every_s, self._clock = plain(title), every_s, clock
        self._due = clock() + every_s

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: float, text: str, line: str | None = None) -> None:
        """Move the bar to ``done`` and say ``text``, or write ``line`` if there is one."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, text=escape(text))
        elif line is not None and (now := self._clock()) >= self._due:
            self._due = now + self._every_s
            sys.stderr.write(f"{self._title}{line}\n")
            sys.stderr.flush()


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


def plain(text: str) -> str:
    """Replace what a terminal might act on; text may come from a file written by anyone."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def plural(number: int, noun: str) -> str:
    """Spell a count.

    >>> plural(1, "episode"), plural(2_000, "episode")
    ('1 episode', '2,000 episodes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
