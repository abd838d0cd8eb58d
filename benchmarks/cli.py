"""Run the benchmarks: ``python -m benchmarks [--only CASE ...] [--rounds N] [--seconds S]``."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import memory, report
from benchmarks.cases import all_cases
from benchmarks.harness import Case, Result, run_case


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases, print and save the results.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(arguments)
    cases = [case for case in all_cases() if chosen(case.name, options.only)]
    if options.list:
        print("\n".join([*(f"{case.name:24} {case.title}" for case in all_cases()), "memory"]))
        return 0
    if not cases and not chosen("memory", options.only):
        print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
        return 2
    quiet()
    console = Console() if sys.stdout.isatty() else Console(width=130)
    results = run_cases(cases, options.rounds, options.seconds, console)
    resident = None
    if options.batches and chosen("memory", options.only):
        with console.status("memory"):
            resident = memory.measure_elsewhere(options.batches)
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    doc = report.document(results, settings, resident)
    report.show(doc, console)
    for path in report.save(doc, options.out):
        console.print(f"wrote {path}")
    lines = report.missed(doc)
    for line in lines:
        console.print(f"[red]missed[/red] {line}", highlight=False)
    return int(bool(lines) and options.strict)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names or patterns (see --list)")
    parser.add_argument("--rounds", type=int, default=7, help="windows per system (7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window (1.0)")
    parser.add_argument("--batches", type=int, default=1000, help="for the memory case (1000)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    return parser.parse_args(arguments)


def chosen(name: str, patterns: Sequence[str] | None) -> bool:
    """Say whether ``name`` fits one of the patterns; without any, everything does."""
    return patterns is None or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def quiet() -> None:
    """Set one thread, no argument checks in distributions (for everybody), no chatter."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
    warnings.filterwarnings("ignore")
    gym.logger.min_level = gym.logger.ERROR


def run_cases(cases: Sequence[Case], rounds: int, seconds: float, console: Console) -> list[Result]:
    """Run each case, with a progress bar."""
    results = []
    windows = [rounds * (1 + len(case.references)) for case in cases]
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
            result = run_case(case, rounds, seconds, tick)
            result.load = list(os.getloadavg())
            progress.update(task, completed=start + count, refresh=True)
            results.append(result)
    return results
