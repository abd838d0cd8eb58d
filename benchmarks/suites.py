"""Runs the cases and measurements of a suite: options, progress, one interpreter each."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import report
from benchmarks.harness import WRONG, Case, Figure, Measurement, Result, Skip, run_case
from benchmarks.processes import in_fresh_process

MINUTES = 15
"""Longest that one case or measurement may take in an interpreter of its own."""


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are run by one command."""

    module: str
    """What ``python -m`` runs."""
    cases: Callable[[], list[Case]]
    measurements: Callable[[], list[Measurement]] = list
    alone: bool = False
    """Each runs in an interpreter of its own: threads and processes that one library leaves behind
    have made another one hang when it forked."""
    memory: bool = False
    """Whether the resident size over many batches is measured, too."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds all cases."""
    rounds: int = 7
    seconds: float = 1.0
    """Defaults of the options."""


def main(suite: Suite, arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases and measurements, print and save the results.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(suite, arguments)
    cases, measurements = suite.cases(), suite.measurements()
    if options.list:
        lines = [f"{item.name:24} {item.title}" for item in (*cases, *measurements)]
        print("\n".join([*lines, *["memory"] * suite.memory]))
        return 0
    names = [item.name for item in (*cases, *measurements)] + ["memory"] * suite.memory
    names = chosen(names, options.only)
    if not names:
        print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=130)
    _quiet()
    if options.part is not None:
        options.part.write_text(json.dumps(_run_one(suite, names[0], options, console)))
        return 0
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    if suite.alone:
        doc: dict[str, Any] = {**report.document([], settings, None), "figures": {}}
        for name in names:
            for kind, entries in _elsewhere(suite, name, options).items():
                doc[kind].update(entries)
    else:
        with suite.around():
            found = _run_cases([case for case in cases if case.name in names], options, console)
        resident = _memory(options.batches, console) if "memory" in names else None
        doc = report.document(found, settings, resident)
    report.show(doc, console)
    for path in report.save(doc, options.out):
        console.print(f"wrote {path}")
    missed = report.missed(doc)
    for line in missed:
        console.print(f"[red]missed[/red] {line}", highlight=False)
    return int(bool(missed) and options.strict)


def _parse(suite: Suite, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {suite.module}")
    out = Path("benchmarks/results") / suite.module.partition(".")[2]
    add = parser.add_argument
    add("--only", nargs="+", metavar="CASE", help="names, patterns or parts (see --list)")
    rounds, seconds = suite.rounds, suite.seconds
    add("--rounds", type=int, default=rounds, help=f"windows per system ({rounds})")
    add("--seconds", type=float, default=seconds, help=f"length of a window ({seconds})")
    if suite.memory:
        add("--batches", type=int, default=1000, help="for the memory case (1000)")
    add("--out", type=Path, default=out, metavar="DIR")
    add("--quick", action="store_true", help="2 short windows per system: does it run at all?")
    add("--strict", action="store_true", help="exit with 1 if a target is missed")
    add("--part", type=Path, help=argparse.SUPPRESS)
    add("--list", action="store_true", help="print the names of everything")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.batches = 2, 0.2, 50
    return options


def chosen(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that each pattern fits, or that contain it if it fits none."""
    if patterns is None:
        return list(names)
    found: set[str] = set()
    for text in patterns:
        found.update(fnmatch.filter(names, text) or [name for name in names if text in name])
    return [name for name in names if name in found]


def _quiet() -> None:
    """Set one thread, no argument checks in distributions (for everybody), no chatter."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
    warnings.filterwarnings("ignore")
    gym.logger.min_level = gym.logger.ERROR


def _run_cases(
    cases: Sequence[Case], options: argparse.Namespace, console: Console
) -> list[Result]:
    """Run each case, with a progress bar."""
    results = []
    windows = [options.rounds * (1 + len(case.references)) for case in cases]
    columns: tuple[Any, ...] = (
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    # Redrawing takes time from what is measured: the bar moves between windows only.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=sum(windows))
        for case, count in zip(cases, windows, strict=True):

            def tick(text: str) -> None:
                progress.update(task, advance=1, description=text, refresh=True)

            start = progress.tasks[0].completed
            result = run_case(case, options.rounds, options.seconds, tick)
            result.load = list(os.getloadavg())
            progress.update(task, completed=start + count, refresh=True)
            results.append(result)
    return results


def _memory(batches: int, console: Console) -> Any:
    """Measure it where no case has stretched the heap."""
    if not batches:
        return None
    with console.status("memory"):
        try:
            return in_fresh_process("benchmarks.measurements", "memory", batches)
        except RuntimeError as err:
            return {"skipped": str(err)}


def _elsewhere(suite: Suite, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case or measurement in a fresh interpreter; return its part of the document."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, "-W", "ignore", "-m", suite.module, "--only", name]
        command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        process = subprocess.Popen([*command, "--part", str(part)], start_new_session=True)
        try:
            code = process.wait(60 * MINUTES)
            why = f"{WRONG} ended with code {code}"
        except subprocess.TimeoutExpired:
            why = f"{WRONG} took longer than {MINUTES} minutes"
        finally:
            # Whatever it left behind goes with it, sleeping or not.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if part.exists():
            return dict(json.loads(part.read_text()))
    return {"figures": {name: {"title": name, "figures": {}, "skipped": why}}}


def _run_one(
    suite: Suite, name: str, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    cases = [case for case in suite.cases() if case.name == name]
    if cases:
        return {"cases": report.document(_run_cases(cases, options, console), {}, None)["cases"]}
    (item,) = (item for item in suite.measurements() if item.name == name)
    skipped = ""
    found: list[Figure] = []
    with console.status(name) as status:
        try:
            found = list(item.run(options.rounds, options.seconds, status.update))
        except (Skip, ImportError) as err:
            skipped = str(err)
        except Exception as err:
            skipped = f"{WRONG} {type(err).__name__}: {err}"
    entry = {
        "title": item.title,
        "figures": {figure.name: figure.summary() for figure in found},
        "skipped": skipped,
        "load_average": list(os.getloadavg()),
    }
    return {"figures": {name: entry}}
