"""``gleanrl top``: watch a collection that runs in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gleanrl.cli.command_options import TopOptions
from gleanrl.cli.display import plural, print_table
from gleanrl.core.deadline import Deadline
from gleanrl.watch.page import SHARES
from gleanrl.watch.progress import clock_time, number, plain
from gleanrl.watch.status import OFF, StatusError, collections

_COLUMNS = (
    *("worker", "pid", "frames", "fps", "env", "policy", "transfer", "wait"),
    *("lag", "ended", "return", "length"),
)
_LIST_COLUMNS = ("PID", "collector", "command", "frames", "frames/s")
_WIDE, _PIPE_COLUMNS = 100, 120
_OLD_S = 2
"""Seconds after which a status is old; collectors renew it with each batch."""
_OTHER_VERSION = "Its GleanRL is another version: 'gleanrl top' of that one shows its workers."
_QUIT = {b"q", b"Q", b"\x1b", b"\x04"}
Status = Mapping[str, Any]


def run(options: TopOptions) -> int:
    """Show collections, once or until the user or the collection ends, and return the exit code."""
    found = _of(options.pid)
    if not found:
        where = "on this machine" if options.pid is None else f"in process {options.pid}"
        raise StatusError(
            f"no collector of yours is running {where}; collectors in a container, of another user "
            f"or started with {OFF}=0 are not seen"
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_COLUMNS)
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    pids = sorted({int(status["pid"]) for status in found})
    if len(pids) > 1 and not options.once:
        rows = [
            (
                str(status["pid"]),
                _name(status),
                status.get("command", ""),
                *(_spell(status.get("stats", {}).get(name)) for name in ("frames", "fps")),
            )
            for status in found
        ]
        print_table(rows, _LIST_COLUMNS, numbers_from=3)
        sys.stdout.write("\n'gleanrl top PID' watches one of them.\n")
        return 0
    if options.once or not console.is_terminal:
        console.print(_shown(found))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _watch(console, pids[0], found, options.every_s)
    return 0


def _of(pid: int | None) -> list[dict[str, Any]]:
    found = collections()
    return [status for status in found if pid is None or status["pid"] == pid]


def _watch(console: Console, pid: int, found: list[dict[str, Any]], every_s: float) -> None:
    """Show the collection in process ``pid`` until it ends or the user quits."""
    hint = Text("q quits", style="dim")
    with _keys() as quits, Live(console=console, auto_refresh=False, screen=False) as live:
        while found:
            live.update(Group(_shown(found), hint), refresh=True)
            if quits(every_s):
                return
            last, found = found, _of(pid)
        live.update(_shown(last), refresh=True)
    sys.stdout.write(f"The collection in process {pid} has ended.\n")


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Give a function that waits so many seconds for the user to quit."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    before = termios.tcgetattr(sys.stdin)

    def quits(seconds: float) -> bool:
        deadline = Deadline(seconds)
        while not deadline.expired:
            if select.select([sys.stdin], [], [], deadline.left)[0]:
                key = os.read(sys.stdin.fileno(), 1)
                if not key or key in _QUIT:
                    return True
        return False

    try:
        tty.setcbreak(sys.stdin)
        yield quits
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# -- rendering -------------------------------------------------------------------------------------


def _shown(found: Sequence[Status]) -> RenderableType:
    parts: list[RenderableType] = []
    for status in found:
        parts += [*_one(status), ""]
    return Group(*parts[:-1])


def _one(status: Status) -> list[RenderableType]:
    """Return a headline and a table of workers."""
    stats = status.get("stats", {})
    head = Text(plain(_name(status)), style="bold")
    age = max(0.0, time.time() - float(status.get("started", time.time())))
    head.append(f"  process {status['pid']}, for {clock_time(age)}", style="not bold dim")
    if (seconds := int(status["age"])) >= _OLD_S:
        head.append(f", as it was {plural(seconds, 'second')} ago", style="not bold yellow")
    lines: list[RenderableType] = [head]
    if command := status.get("command"):
        lines.append(Text(plain(command), style="dim", overflow="ellipsis", no_wrap=True))
    if error := status.get("error"):
        return [*lines, Text(plain(error), style="red")]
    lines.append(Text(_progress(stats)))
    hosts = status.get("hosts", {})
    if not isinstance(hosts, dict):
        return [*lines, Text(_OTHER_VERSION, style="yellow")]
    wide = shutil.get_terminal_size().columns >= _WIDE
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1 + wide, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    for name, host in hosts.items():
        prefix, worker = f"{name}/", name.removeprefix("worker_")
        own = {k.removeprefix(prefix): v for k, v in stats.items() if k.startswith(prefix)}
        lost = own.get("alive") is False
        pid = f"{own.get('pid')}{f' on {escape(plain(host))}' * (host != platform.node())}"
        table.add_row(*_cells(f"{worker}{' lost' * lost}", pid, own), style="red" * lost)
    table.add_row(*_cells("all", "", stats), style="bold")
    return [*lines, table]


def _cells(name: str, pid: str, stats: Mapping[str, Any]) -> list[str]:
    shares = (stats.get(key) for key in SHARES)
    return [
        name,
        pid,
        _short(stats.get("frames")),
        _spell(stats.get("fps")),
        *("-" if share is None else f"{100 * share:.0f} %" for share in shares),
        _spell(stats.get("lag")),
        _short(stats.get("episodes")),
        _spell(stats.get("return_mean"), 1),
        _spell(stats.get("length_mean"), 1),
    ]


def _progress(stats: Mapping[str, Any]) -> str:
    done, total = stats.get("frames", 0), stats.get("total_frames")
    parts = [plural(int(done), "frame")]
    if total:
        parts = [f"{int(done):,} of {int(total):,} frames ({100 * done / total:.0f} %)"]
    if lost := int(stats.get("workers", 0)) - int(stats.get("workers_alive", 0)):
        parts.append(f"{plural(lost, 'worker')} lost")
    parts += [word for word in ("completed", "closed", "failed") if stats.get(word)]
    return ", ".join(parts)


def _name(status: Status) -> str:
    return str(status.get("collector", "a collector"))


def _spell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _short(value: float | None) -> str:
    return "-" if value is None else number(value)
