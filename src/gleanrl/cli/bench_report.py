"""What ``gleanrl bench`` shows: progress, a table, what to use, a file of figures."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.table import Table

from gleanrl.cli.collect import versions
from gleanrl.cli.progress import plain, print_facts
from gleanrl.cli.settings import Setting
from gleanrl.memory import tensor_files

_HEADERS = ("", "setting", "frames/s", "of best", "start")


@dataclass(frozen=True, slots=True)
class Result:
    """How fast one setting was."""

    setting: Setting
    frames_per_batch: int
    frames: int = 0
    seconds: float = 0.0
    start_s: float = 0.0
    """Seconds from the call to the first batch."""
    error: str | None = None
    """Why there is no figure."""

    @property
    def rate(self) -> float:
        """Frames per second."""
        return self.frames / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Results:
    """All that was measured."""

    env: str
    policy: str
    seconds: float
    cores: int
    rows: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Take in a result."""
        self.rows.append(result)

    @property
    def best(self) -> Result | None:
        """The fastest, ``None`` if nothing could be measured."""
        return max((row for row in self.rows if row.rate), key=lambda row: row.rate, default=None)

    def asynchronous_twin(self) -> Setting | None:
        """Return the fastest setting with workers, made asynchronous."""
        found = [row for row in self.rows if row.rate and row.setting.workers]
        if not found:
            return None
        best = max(found, key=lambda row: row.rate).setting
        return Setting(best.workers, best.num_envs, asynchronous=True)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table row by row, as text."""
        best = self.best
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            if row.error is not None or best is None:
                rows.append(("", str(row.setting), "failed", "", ""))
                continue
            mark = "best" if row is best else ""
            share = f"{100 * row.rate / best.rate:.0f} %"
            start = f"{row.start_s:.2f} s"
            rows.append((mark, str(row.setting), f"{row.rate:,.0f}", share, start))
        return rows

    def advice(self) -> list[tuple[str, str]]:
        """Return what to use, and what failed."""
        lines = [("failed", f"{row.setting}: {row.error}") for row in self.rows if row.error]
        best = self.best
        if best is not None:
            setting = best.setting
            lines.append(("command", setting.command(self.env, self.policy)))
            call = setting.call(self.env, self.policy, best.frames_per_batch)
            lines.append(("in Python", call))
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        best = self.best
        return {
            "format": "gleanrl-bench",
            "env": self.env,
            "policy": self.policy,
            "seconds_per_setting": self.seconds,
            "cores": self.cores,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "settings": [_row_json(row, best) for row in self.rows],
            **dict(line for line in self.advice() if line[0] == "command"),
            "best": None if best is None else self.rows.index(best),
        }


def _row_json(row: Result, best: Result | None) -> dict[str, Any]:
    failed = row.error is not None or best is None
    return {
        "workers": row.setting.workers,
        "num_envs": row.setting.num_envs,
        "async": row.setting.asynchronous,
        "frames_per_batch": row.frames_per_batch,
        "frames": row.frames,
        "seconds": round(row.seconds, 3),
        "frames_per_second": None if failed else round(row.rate, 1),
        "relative": None if failed or best is None else round(row.rate / best.rate, 4),
        "start_seconds": None if failed else round(row.start_s, 3),
        "error": row.error,
    }


def print_results(results: Results) -> None:
    """Print table and advice to standard output."""
    console = Console()
    cells = results.cells()
    if console.is_terminal:
        table = Table(box=None, pad_edge=False)
        for name in _HEADERS:
            right = name in ("frames/s", "of best", "start")
            table.add_column(name, justify="right" if right else "left", header_style="dim")
        for row in cells:
            table.add_row(*map(escape, row), style="bold green" if row[0] else None)
        console.print(table)
    else:
        widths = [max(map(len, column)) for column in zip(_HEADERS, *cells, strict=True)]
        for row in (_HEADERS, *cells):
            aligned = [
                text.ljust(width) if i < 2 else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            sys.stdout.write("  ".join(aligned).rstrip() + "\n")
    print_facts([("cores", str(results.cores)), *results.advice()])


def write_results(path: Path, results: Results) -> None:
    """Write the figures to ``path``, whole or not at all."""
    tensor_files.replace(path, json.dumps(results.as_json(), indent=2) + "\n")


# -- progress --------------------------------------------------------------------------------------


class BenchProgress(Protocol):
    """Shows which setting is being measured, while it is entered."""

    def __enter__(self) -> BenchProgress:
        """Begin to show."""

    def __exit__(self, *exc: object) -> None:
        """Stop showing."""

    def begin(self, setting: Setting) -> None:
        """Show that ``setting`` is next."""

    def show(self, share: float, rate: float) -> None:
        """Show how much of its time has passed, and its frames per second."""

    def end(self, result: Result) -> None:
        """Show what came out."""


class BenchBar:
    """A live progress bar, for terminals."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        """Prepare to show ``total`` settings."""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(escape(plain(title)), total=total, facts="")
        self._done = 0
        self._setting = ""

    def __enter__(self) -> BenchBar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def begin(self, setting: Setting) -> None:
        """Name the setting."""
        self._setting = str(setting)
        self._progress.update(self._task, facts=f"{self._setting}: starting")

    def show(self, share: float, rate: float) -> None:
        """Move the bar."""
        facts = f"{self._setting}: {rate:,.0f} frames/s"
        self._progress.update(self._task, completed=self._done + share, facts=facts)

    def end(self, result: Result) -> None:
        """Count the setting."""
        self._done += 1
        self._progress.update(self._task, completed=self._done)


class BenchLines:
    """A line of text per setting, for logs and pipes."""

    def __init__(self, stream: TextIO, title: str, total: int) -> None:
        """Write to ``stream``."""
        self._stream = stream
        self._title = plain(title)
        self._total = total
        self._done = 0

    def __enter__(self) -> BenchLines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def begin(self, setting: Setting) -> None:
        """Wait for the result."""

    def show(self, share: float, rate: float) -> None:
        """Wait for the result."""

    def end(self, result: Result) -> None:
        """Write a line."""
        self._done += 1
        outcome = f"{result.rate:,.0f} frames/s" if result.error is None else "failed"
        self._stream.write(
            f"{self._title} {self._done}/{self._total}: {result.setting}: {outcome}\n"
        )
        self._stream.flush()


def make_progress(title: str, total: int) -> BenchProgress:
    """Return what fits standard error: a bar on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if console.is_terminal:
        return BenchBar(console, title, total)
    return BenchLines(sys.stderr, title, total)
