"""Run the benchmarks of collection over processes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.cli import chosen, quiet, run_cases
from benchmarks.harness import Skip
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases and measurements, print and save the results.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(arguments)
    everything = [*all_cases(), *MEASUREMENTS]
    if options.list:
        print("\n".join(f"{item.name:24} {item.title}" for item in everything))
        return 0
    cases = [case for case in all_cases() if chosen(case.name, options.only)]
    wanted = [item for item in MEASUREMENTS if chosen(item.name, options.only)]
    if not cases and not wanted:
        print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
        return 2
    quiet()
    console = Console() if sys.stdout.isatty() else Console(width=130)
    results = run_cases(cases, options.rounds, options.seconds, console) if cases else []
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    found = {item.name: _measure(item, options, console) for item in wanted}
    doc = report.document(results, settings, None)
    doc["figures"] = found
    report.show(doc, console)
    figures.show(found, console)
    for path in report.save(doc, options.out):
        console.print(f"wrote {path}")
    lines = [*report.missed(doc), *figures.missed(found)]
    for line in lines:
        console.print(f"[red]missed[/red] {line}", highlight=False)
    return int(bool(lines) and options.strict)


def _measure(item: Measurement, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    skipped = ""
    found: list[figures.Figure] = []
    with console.status(item.name) as status:
        try:
            found = item.run(options.rounds, options.seconds, status.update)
        except (Skip, ImportError) as err:
            skipped = str(err)
        except Exception as err:
            skipped = f"WRONG {type(err).__name__}: {err}"
    return {
        "title": item.title,
        "figures": {figure.name: figure.summary() for figure in found},
        "skipped": skipped,
        "load_average": list(os.getloadavg()),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.multi", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names or patterns (see --list)")
    parser.add_argument("--rounds", type=int, default=7, help="windows per system (7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a window (1.0)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/multi"), metavar="DIR")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--list", action="store_true", help="print the names of everything")
    return parser.parse_args(arguments)
