"""What a user sees while frames come in, and the facts at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where collection stands."""

    frames: int
    total: int
    seconds: float
    episodes: int
    recent: tuple[float, float] | None
    """Mean return and length of the latest episodes."""

    def __str__(self) -> str:
        """Spell it in one line, without the number of frames still to come."""
        rate = self.frames / self.seconds if self.seconds > 0 else 0.0
        parts = [f"{rate:,.0f} frames/s", plural(self.episodes, "episode")]
        if self.recent is not None:
            parts += [f"return {self.recent[0]:,.1f}", f"length {self.recent[1]:,.1f}"]
        return ", ".join(parts)


class Display(Protocol):
    """Shows moments while it is entered."""

    def __enter__(self) -> Display:
        """Begin to show."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop showing."""

    def show(self, moment: Moment) -> None:
        """Show ``moment``."""


class Bar:
    """A live progress bar, for terminals."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        """Prepare a bar of ``total`` frames."""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[frames]} frames"),
            TextColumn("[dim]{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(
            escape(plain(title)), total=total, frames="0", facts=""
        )

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, moment: Moment) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=moment.frames,
            total=moment.total,
            frames=f"{moment.frames:,}/{moment.total:,}",
            facts=str(moment),
        )


class Lines:
    """A line of text every few seconds, for logs and pipes."""

    def __init__(
        self, stream: TextIO, title: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to ``stream``."""
        self._stream = stream
        self._title = plain(title)
        self._clock = clock
        self._due = clock() + _LINE_EVERY_S

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, moment: Moment) -> None:
        """Write a line if the last one is a while ago."""
        now = self._clock()
        if now >= self._due:
            self._due = now + _LINE_EVERY_S
            percent = 100 * moment.frames // max(moment.total, 1)
            count = f"{moment.frames:,}/{moment.total:,} frames ({percent}%)"
            self._stream.write(f"{self._title}: {count}, {moment}\n")
            self._stream.flush()


def make_display(title: str, total: int) -> Display:
    """Return what fits standard error: a bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        return Bar(console, title, total)
    return Lines(sys.stderr, title)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values to standard output: a table on a terminal, lines elsewhere."""
    console = Console()
    if not console.is_terminal:
        width = max(len(name) for name, _ in facts) + 2
        sys.stdout.writelines(f"{name:<{width}}{plain(value)}\n" for name, value in facts)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, escape(plain(value)))
    console.print(table)


def plain(text: str) -> str:
    """Replace what a terminal might act on; text may come from a file written by anyone."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def plural(number: int, noun: str) -> str:
    """Spell a count.

    >>> plural(1, "episode"), plural(2_000, "episode")
    ('1 episode', '2,000 episodes')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
