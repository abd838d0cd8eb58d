"""Run benchmarks of collection over processes or nodes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.cli import chosen, quiet, run_cases
from benchmarks.harness import WRONG, Case, Skip
from benchmarks.multi import faults, figures, flat, latency, start, stragglers, weights
from benchmarks.multi.cases import all_cases
from benchmarks.multi.figures import Measurement

MEASUREMENTS = (
    Measurement("one-frame", "time per batch of one frame, async", latency.one_frame),
    Measurement(
        "faults", "page faults and copies with large observations", faults.page_faults_per_batch
    ),
    Measurement("weights", "publishing weights against memcpy", weights.publishing),
    Measurement("freshness", "publishing to the first frame", weights.freshness),
    Measurement("stragglers", "exponential step times", stragglers.lost),
    Measurement("start", "start to first batch", start.starting),
    Measurement("flat", f"{flat.BATCHES:,} batches: memory and descriptors", flat.growth),
)


MINUTES = 15
"""Longest that one case or measurement may take."""


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are run by one command."""

    module: str
    """What ``python -m`` runs."""
    cases: Callable[[], list[Case]]
    measurements: Sequence[Measurement]

    @property
    def out(self) -> Path:
        """Where results are saved by default."""
        return Path("benchmarks/results") / self.module.rpartition(".")[2]


MULTI = Suite("benchmarks.multi", all_cases, MEASUREMENTS)


def main(arguments: Sequence[str] | None = None, suite: Suite = MULTI) -> int:
    """Run the chosen cases and measurements, print and save the results.

    Each runs in an interpreter of its own: threads and processes that one library leaves behind
    have made another one hang when it forked.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(arguments, suite)
    everything = [*suite.cases(), *suite.measurements]
    if options.list:
        print("\n".join(f"{item.name:24} {item.title}" for item in everything))
        return 0
    names = [item.name for item in everything if chosen(item.name, options.only)]
    if not names:
        print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=130)
    if options.part is not None:
        options.part.write_text(json.dumps(_run(names[0], options, console, suite)))
        return 0
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    doc: dict[str, Any] = {**report.document([], settings, None), "figures": {}}
    for name in names:
        for kind, entries in _elsewhere(name, options, suite).items():
            doc[kind].update(entries)
    report.show(doc, console)
    figures.show(doc["figures"], console)
    for path in report.save(doc, options.out):
        console.print(f"wrote {path}")
    lines = [*report.missed(doc), *figures.missed(doc["figures"])]
    for line in lines:
        console.print(f"[red]missed[/red] {line}", highlight=False)
    return int(bool(lines) and options.strict)


def _elsewhere(name: str, options: argparse.Namespace, suite: Suite) -> dict[str, Any]:
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


def _run(name: str, options: argparse.Namespace, console: Console, suite: Suite) -> dict[str, Any]:
    quiet()
    cases = [case for case in suite.cases() if case.name == name]
    if cases:
        results = run_cases(cases, options.rounds, options.seconds, console)
        return {"cases": report.document(results, {}, None)["cases"]}
    (item,) = (item for item in suite.measurements if item.name == name)
    return {"figures": {name: _measure(item, options, console)}}


def _measure(item: Measurement, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    skipped = ""
    found: list[figures.Figure] = []
    with console.status(item.name) as status:
        try:
            found = item.run(options.rounds, options.seconds, status.update)
        except (Skip, ImportError) as err:
            skipped = str(err)
        except Exception as err:
            skipped = f"{WRONG} {type(err).__name__}: {err}"
    return {
        "title": item.title,
        "figures": {figure.name: figure.summary() for figure in found},
        "skipped": skipped,
        "load_average": list(os.getloadavg()),
    }


def _parse(arguments: Sequence[str] | None, suite: Suite) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {suite.module}", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names or patterns (see --list)")
    parser.add_argument("--rounds", type=int, default=7, help="windows per system (7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window (1.0)")
    parser.add_argument("--out", type=Path, default=suite.out, metavar="DIR")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the names of everything")
    return parser.parse_args(arguments)
