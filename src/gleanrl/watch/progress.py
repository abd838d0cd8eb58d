"""Progress of long work: one line that moves on a terminal, lines of text elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

_REFRESH_S = 0.1
_TICK_S = 1.0
"""Seconds between two looks at a collection; one takes a millisecond."""
_LINE_EVERY_S = 2.0
"""Seconds between two lines without a terminal, the longest silence."""
_SHORTEST_BAR = 8


@dataclass(frozen=True, slots=True)
class _Line:
    """Label, bar, percentage, text and remaining time in one line.

    If there is not room for everything, the bar shrinks first, then the label; then the time goes.
    """

    label: str
    share: float | None
    text: str
    left: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        percent = "" if self.share is None else f"{self.share:4.0%}  "
        tail, left = f"  {percent}{self.text}", f"  ETA {self.left}" if self.left else ""
        if cell_len(tail + left) <= options.max_width:
            tail += left
        room = max(0, options.max_width - cell_len(tail))
        label, bar = self.label, 0 if self.share is None else _SHORTEST_BAR
        if cell_len(label) > room - bar - 1:
            kept = max(0, room - bar - 2)
            label = set_cell_size(label, kept) + ("…" if kept else "")
        line = Text(label, style="bold", no_wrap=True, overflow="crop", end="")
        if self.share is not None:
            width = max(0, room - cell_len(label) - 1)
            full = round(width * min(1.0, self.share))
            on, off = ("#", "-") if options.ascii_only else ("━", "─")
            line.append(" " + on * full, style="green").append(off * (width - full), style="dim")
        yield line.append(tail, style="not bold")


class Display:
    """Shows the progress of a task during a ``with`` block."""

    def __init__(
        self,
        label: str,
        total: float | None,
        every_s: float = 0.0,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to show ``total`` things (``None``: not known) on standard error by default.

        Without a terminal, lines come at least ``every_s`` seconds apart.
        """
        console = Console(stderr=True) if console is None else console
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                vertical_overflow="crop",
            )
        self.total = total
        self.look_every_s = _TICK_S if self._live is not None else max(_TICK_S, every_s)
        """Seconds after which there may be something to show."""
        self._label, self._every_s, self._clock = plain(label), every_s, clock
        self._began = clock()
        self._due = self._began + (every_s if self._live is None else 0.0)
        self._not_drawn: tuple[float, str, float] | None = None
        """The last values and their time, if they came too soon to be drawn."""

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            if self._not_drawn is not None:
                self._draw(self._live, *self._not_drawn)
            self._live.stop()

    @property
    def due(self) -> bool:
        """Whether a call of `show` now would draw or write at once."""
        return self._clock() >= self._due

    def show(self, done: float, text: str, line: str | None = None, *, last: bool = False) -> None:
        """Show ``text`` next to the bar; without a terminal ``line``, after the label.

        If nothing will follow (``last``), it is shown in any case.
        """
        if self._live is None and line is None:
            return
        now = self._clock()
        if now < self._due and not last:
            self._not_drawn = done, text, now
            return
        if self._live is None:
            self._due = now + self._every_s
            sys.stderr.write(f"{self._label}{line}\n")
            sys.stderr.flush()
            return
        self._due = now + _REFRESH_S
        self._draw(self._live, done, text, now)

    def _draw(self, live: Live, done: float, text: str, now: float) -> None:
        self._not_drawn = None
        share = done / self.total if self.total else None
        left = "" if share is None else "-:--"
        if self.total and done:
            left = clock_time((now - self._began) * (self.total - done) / done)
        live.update(_Line(self._label, share, plain(text), left), refresh=True)


def _forked() -> None:
    """Give a child its own output: only the parent's threads would let go of a display's lock."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, FileProxy):
            setattr(sys, name, stream.rich_proxied_file)


os.register_at_fork(after_in_child=_forked)


class Progress:
    """Shows the progress of a collection, in a thread of its own, until its end or `close`.

    It holds no reference to the collector: that can be collected, which closes it.
    """

    def __init__(self, label: str, display: Display | None = None) -> None:
        """Begin to show that ``label`` is being started."""
        self._label = label
        self._display = Display(label, None, _LINE_EVERY_S) if display is None else display
        self._began = time.monotonic()
        self._facts: Callable[[bool], Mapping[str, Any]] | None = None
        self._shown = -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gleanrl-progress", daemon=True)
        self._thread.start()

    def follow(self, facts: Callable[[bool], Mapping[str, Any]], total: int | None) -> None:
        """Show the results of ``facts`` from now on, of a collection of ``total`` frames.

        They are entries of ``stats()`` and ``"busy"``, whether a batch is awaited. The argument
        tells whether they are the last; others may be a little old.
        """
        self._display.total, self._facts = total, facts

    def close(self) -> None:
        """Show the final state. Idempotent."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        # Standard error may be closed: then there is nothing to show, and no error to report.
        with contextlib.suppress(OSError, ValueError), self._display:
            while not self._over.wait(self._display.look_every_s):
                facts = self._facts
                if facts is None:
                    text = f"starting workers and environments, {self._elapsed}"
                    self._display.show(0, text, f": {text}")
                elif self._tell(facts(False), last=False):
                    return
            if self._facts is not None:
                self._tell({**self._facts(True), "completed": True}, last=True)

    @property
    def _elapsed(self) -> str:
        return clock_time(time.monotonic() - self._began)

    def _tell(self, facts: Mapping[str, Any], *, last: bool) -> bool:
        """Show ``facts``; return whether nothing will follow."""
        last = last or bool(facts["completed"] or facts["failed"])
        text, said = describe(facts, self._display.total, last=last)
        news = last or facts["busy"] or facts["frames"] != self._shown
        self._shown = facts["frames"]
        line = f": {said}, {self._elapsed}" if news else None
        self._display.show(self._shown, text, line, last=last)
        return last


def describe(
    facts: Mapping[str, Any], total: float | None, *, last: bool = False
) -> tuple[str, str]:
    """Describe progress: for use next to a bar if there is a ``total``, and as a line of text.

    The ``last`` rate is that of the whole collection, others are current ones.
    """
    frames = facts["frames"]
    many = f"{frames:,}" + (f"/{total:,} frames ({frames / total:.0%})" if total else " frames")
    parts = [f"{facts['fps_mean' if last else 'fps']:,.0f} frames/s"]
    if facts["episodes"]:
        parts.append(f"return {facts['return_mean']:,.1f}")
    return "  ".join(parts if total else [many, *parts]), ", ".join([many, *parts])


def clock_time(seconds: float) -> str:
    """Spell a duration.

    >>> clock_time(75.4), clock_time(3600)
    ('1:15', '1:00:00')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Spell a number in a few characters.

    >>> [number(x) for x in (0, 0.25, 12.5, 475, 20_000, 1_250_000, -3e9)]
    ['0', '0.25', '12.5', '475', '20k', '1.25M', '-3G']
    """
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if suffix == 'k' else unit):.4g}{suffix}"
    return f"{value:.4g}"


def plain(text: str) -> str:
    """Replace control characters of terminals, because text may come from anyone's file."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
