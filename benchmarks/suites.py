"""Runs the cases of a suite, each in an interpreter of its own; shows and saves the results."""

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
from typing import Any, NamedTuple

import gymnasium as gym
import torch

from benchmarks import publish
from benchmarks.harness import OURS, WRONG, Case, run_case
from benchmarks.machine import origin
from benchmarks.processes import in_fresh_process


class Suite(NamedTuple):
    """Where a suite is, below `benchmarks`, and how long it measures by default."""

    module: str
    function: str
    """Returns the cases of rates; or measures rounds of some seconds, and returns the results."""
    rounds: int
    seconds: float


SUITES = {
    "single": Suite("cases.single", "all_cases", 7, 1.0),
    "multi": Suite("cases.workers", "multi", 7, 1.0),
    "distributed": Suite("cases.workers", "distributed", 7, 1.0),
    "ray": Suite("cases.workers", "ray", 7, 1.0),
    "central": Suite("cases.central", "all_cases", 7, 3.0),
    "gpu": Suite("cases.gpu", "all_cases", 7, 1.0),
    "training_rates": Suite("cases.training_rates", "all_cases", 7, 3.0),
    "training": Suite("training", "measure", 5, 120.0),
    "scaling": Suite("scaling", "measure", 1, 0.0),
}
MINUTES = 15
"""Longest that one case may take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases, print and save the results.

    Returns:
        1 if ``--strict`` was given and a target was missed, else 0.
    """
    options = _parse(arguments)
    # Exiting ends the processes of a case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    doc = {**origin(), "settings": {"rounds": options.rounds, "seconds": options.seconds}}
    if SUITES[options.suite].function == "measure":
        doc |= _function(options.suite)(options.rounds, options.seconds)
    else:
        names = [case.name for case in _function(options.suite)()]
        if options.list:
            print("\n".join(names))
            return 0
        if not (names := chosen(names, options.only)):
            print(f"no case is named {options.only}; --list shows them", file=sys.stderr)
            return 2
        doc["cases"] = {name: _in_process(name, options) for name in names}
    print("\n".join(publish.measured(options.suite, doc)))
    path = (options.out or Path("benchmarks/results", options.suite)) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(doc, indent=1) + "\n")
    print(f"wrote {path}")
    for line in (lines := remarks(doc)):
        print(line)
    return int(any(line.startswith("missed") or WRONG in line for line in lines) and options.strict)


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
    add("--list", action="store_true", help="print the names of all cases of rates")
    options = parser.parse_args(arguments)
    rounds, seconds = (2, 0.2) if options.quick else SUITES[options.suite][2:]
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


def _function(suite: str) -> Any:
    return getattr(import_module(f"benchmarks.{SUITES[suite].module}"), SUITES[suite].function)


def run_named(suite: str, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Run a case silently, with one thread and without argument checks in distributions."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
    warnings.filterwarnings("ignore")
    gym.logger.min_level = gym.logger.ERROR
    cases: list[Case] = _function(suite)()
    (case,) = (case for case in cases if case.name == name)

    def tick(text: str) -> None:
        print(f"\r{name}: {text:60}", end="", file=sys.stderr)

    return run_case(case, rounds, seconds, tick)


def _in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in a fresh interpreter."""
    given = options.suite, name, options.rounds, options.seconds
    try:
        how: dict[str, Any] = {"timeout_s": 60 * MINUTES, "shown": True}
        return dict(in_fresh_process(__name__, "run_named", *given, **how))
    except RuntimeError as err:
        nothing: dict[str, Any] = {"frames_per_second": {}, "ratios": {}, "agreement": []}
        return {"title": name, **nothing, "skipped": {OURS: f"{WRONG} {err}"}}


def remarks(doc: dict[str, Any]) -> list[str]:
    """Return a line per comparison of batches, skipped system and missed target."""
    lines = []
    for case, entry in doc.get("cases", {}).items():
        lines += [f"{case}: {line}" for line in entry.get("agreement", ())]
        lines += [
            f"{case}: {name} skipped: {why}" for name, why in entry.get("skipped", {}).items()
        ]
        lines += [
            f"missed {case} against {name}: {ratio['median']:.3f} < {ratio['target']}"
            for name, ratio in entry.get("ratios", {}).items()
            if ratio["met"] is False
        ]
    return lines
