"""Runs the cases of a suite, each in an interpreter of its own; shows and saves what they found."""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from benchmarks import picture, publish
from benchmarks.harness import OURS, WRONG, Case, run_case
from benchmarks.machine import origin
from benchmarks.processes import in_fresh_process

SUITES = {
    "single": ("single:all_cases", 7, 1.0),
    "multi": ("workers:multi", 7, 1.0),
    "distributed": ("workers:distributed", 7, 1.0),
    "ray": ("workers:ray", 7, 1.0),
    "replay": ("replay:all_cases", 9, 0.3),
    "training_rates": ("training_rates:all_cases", 7, 3.0),
}
"""Module and function of `benchmarks.cases`, windows per system and seconds of a window."""
MINUTES = 15
"""Longest that one case may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases, print and save the results.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(arguments)
    cases = _cases(options.suite)
    if options.list:
        print("\n".join(f"{case.name:24} {case.title}" for case in cases))
        return 0
    names = chosen([case.name for case in cases], options.only)
    if not names:
        print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with it end the processes of a case
    doc = {
        **origin(),
        "settings": {"rounds": options.rounds, "seconds": options.seconds},
        "cases": {name: _elsewhere(name, options) for name in names},
    }
    show(doc)
    print(f"wrote {save(doc, options.out or Path('benchmarks/results', options.suite))}")
    for line in (lines := missed(doc)):
        print(f"missed {line}")
    return int(bool(lines) and options.strict)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    add = parser.add_argument
    add("suite", nargs="?", choices=SUITES, default="single")
    add("--only", nargs="+", metavar="CASE", help="names, patterns or parts (see --list)")
    add("--rounds", type=int, help="windows per system")
    add("--seconds", type=float, help="length of a window")
    add("--out", type=Path, metavar="DIR", help="where results go (benchmarks/results/SUITE)")
    add("--quick", action="store_true", help="2 short windows per system: does it run at all?")
    add("--strict", action="store_true", help="exit with 1 if a target is missed")
    add("--list", action="store_true", help="print the names of everything")
    options = parser.parse_args(arguments)
    rounds, seconds = (2, 0.2) if options.quick else SUITES[options.suite][1:]
    options.rounds, options.seconds = options.rounds or rounds, options.seconds or seconds
    return options


def chosen(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that each pattern fits, or that contain it if it fits none."""
    if patterns is None:
        return list(names)
    found: set[str] = set()
    for text in patterns:
        found.update(fnmatch.filter(names, text) or [name for name in names if text in name])
    return [name for name in names if name in found]


def _cases(suite: str) -> list[Case]:
    module, _, function = SUITES[suite][0].partition(":")
    found: list[Case] = getattr(import_module(f"benchmarks.cases.{module}"), function)()
    return found


def run_named(suite: str, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Run a case with one thread, no argument checks in distributions (for everybody), silently."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
    warnings.filterwarnings("ignore")
    gym.logger.min_level = gym.logger.ERROR
    (case,) = (case for case in _cases(suite) if case.name == name)

    def tick(text: str) -> None:
        print(f"\r{name}: {text:60}", end="", file=sys.stderr)

    return run_case(case, rounds, seconds, tick)


def _elsewhere(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in a fresh interpreter."""
    given = options.suite, name, options.rounds, options.seconds
    try:
        options = {"timeout_s": 60 * MINUTES, "shown": True}
        return dict(in_fresh_process(__name__, "run_named", *given, **options))
    except RuntimeError as err:
        nothing: dict[str, Any] = {"frames_per_second": {}, "ratios": {}, "agreement": []}
        return {"title": name, **nothing, "skipped": {OURS: f"{WRONG} {err}"}}


def missed(doc: dict[str, Any]) -> list[str]:
    """Return a line per target that was not met and per disagreement."""
    lines = []
    for case, entry in doc["cases"].items():
        lines += [
            f"{case} against {name}: {ratio['median']:.3f} < {ratio['target']}"
            for name, ratio in entry["ratios"].items()
            if ratio["met"] is False
        ]
        remarks = (*entry["agreement"], *entry["skipped"].values())
        lines += [f"{case}: {line}" for line in remarks if line.startswith(WRONG)]
    return lines


def show(doc: dict[str, Any]) -> None:
    """Print a row per case and system, and what there is to say."""
    print("\n".join(publish.RATES))
    for entry in doc["cases"].values():
        print("\n".join(publish.systems(entry)))
    for name, entry in doc["cases"].items():
        skipped = (f"{other} skipped: {why}" for other, why in entry["skipped"].items())
        for remark in (*entry["agreement"], *skipped):
            print(f"{name}: {remark}")


def save(doc: dict[str, Any], folder: Path) -> Path:
    """Write ``results.json`` and ``results.svg``; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(doc, indent=1) + "\n")
    groups = [picture.group(entry) for entry in doc["cases"].values()]
    drawn = picture.draw("Rates: GleanRL over others", groups, [doc["created"]])
    path.with_suffix(".svg").write_text(drawn)
    return path
