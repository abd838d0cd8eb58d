"""Runs a suite: ``python -m benchmarks [SUITE] [--only CASE ...] [--rounds N] [--seconds S]``.

Each case of rates runs in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import warnings
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym

from benchmarks import publish
from benchmarks.harness import OURS, WRONG, Case, run_case
from benchmarks.machine import origin
from benchmarks.processes import in_fresh_process
from benchmarks.systems.ours import quiet_worker


class Suite(NamedTuple):
    """Where a suite is, below `benchmarks.cases`, and how long it measures by default."""

    module: str
    function: str
    """Returns its cases."""
    rounds: int
    seconds: float

    def all_cases(self) -> list[Case]:
        """Return its cases."""
        found = getattr(import_module(f"benchmarks.cases.{self.module}"), self.function)()
        return list(found)


SUITES = {
    "single": Suite("single", "all_cases", 7, 1.0),
    "multi": Suite("workers", "multi", 7, 1.0),
    "distributed": Suite("workers", "distributed", 7, 1.0),
    "ray": Suite("workers", "ray", 7, 1.0),
    "central": Suite("central", "all_cases", 7, 3.0),
    "gpu": Suite("gpu", "all_cases", 7, 1.0),
    "training_rates": Suite("training_rates", "all_cases", 7, 3.0),
}
MINUTES = 15
"""Longest that one case may take."""


def main() -> None:
    """Run the chosen cases, print and save the results."""
    options = _parse()
    # Exiting ends the processes of a case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    doc = {**origin(), "settings": {"rounds": options.rounds, "seconds": options.seconds}}
    names = [case.name for case in SUITES[options.suite].all_cases()]
    chosen = [name for name in names if any(fnmatch(name, only) for only in options.only)]
    if options.list or not chosen:
        print("\n".join(names))
        return
    doc["cases"] = {name: _in_process(name, options) for name in chosen}
    print("\n".join(publish.rates(doc["cases"].values())))
    path = (options.out or Path("benchmarks/results", options.suite)) / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(doc, indent=1) + "\n")
    print("\n".join([f"wrote {path}", *remarks(doc)]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    add = parser.add_argument
    add("suite", nargs="?", choices=SUITES, default="single")
    add("--only", nargs="+", default=["*"], metavar="CASE", help="names or patterns (see --list)")
    add("--rounds", type=int, help="windows per system")
    add("--seconds", type=float, help="length of a window")
    add("--out", type=Path, metavar="DIR", help="where results go (benchmarks/results/SUITE)")
    add("--quick", action="store_true", help="2 short windows per system: does it run at all?")
    add("--list", action="store_true", help="print the names of all cases of rates")
    options = parser.parse_args()
    rounds, seconds = (2, 0.2) if options.quick else SUITES[options.suite][2:]
    options.rounds, options.seconds = options.rounds or rounds, options.seconds or seconds
    return options


def run_named(suite: str, name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Run a case silently, with one thread and without argument checks in distributions."""
    quiet_worker()
    warnings.filterwarnings("ignore")
    gym.logger.min_level = gym.logger.ERROR
    (case,) = (case for case in SUITES[suite].all_cases() if case.name == name)

    def tick(text: str) -> None:
        print(f"\r{name}: {text:60}", end="", file=sys.stderr)

    return run_case(case, rounds, seconds, tick)


def _in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in a fresh interpreter."""
    given = options.suite, name, options.rounds, options.seconds
    try:
        run = in_fresh_process("benchmarks.__main__", "run_named", *given, timeout_s=60 * MINUTES)
        return dict(run)
    except RuntimeError as err:
        nothing: dict[str, Any] = {"frames_per_second": {}, "ratios": {}, "agreement": []}
        return {"title": name, **nothing, "skipped": {OURS: f"{WRONG} {err}"}}


def remarks(doc: dict[str, Any]) -> list[str]:
    """Return a line per comparison of batches, skipped system and missed target."""
    lines = []
    for case, entry in doc["cases"].items():
        lines += [f"{case}: {line}" for line in entry["agreement"]]
        lines += [f"{case}: {name} skipped: {why}" for name, why in entry["skipped"].items()]
        lines += [
            f"missed {case} against {name}: {ratio['median']:.3f} < {ratio['target']}"
            for name, ratio in entry["ratios"].items()
            if ratio["met"] is False
        ]
    return lines


if __name__ == "__main__":
    main()
