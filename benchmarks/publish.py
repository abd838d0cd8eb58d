"""Publish figures: ``python -m benchmarks.publish [--take NAME=RESULTS.json ...] [--check]``.

Published results lie in ``benchmarks/published``: one file per suite, and ``scripts.json`` of
``tools.torchrl_scripts``. The tables in README.md and docs are written from them, between
``<!-- figures: ... -->`` marks, and edited by nobody. ``--check`` only says whether they are what
the files hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.torchrl_scripts import Result, rate

from benchmarks.harness import OURS, summary

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = Path(__file__).with_name("published")
PAGES = ("README.md", "docs/benchmarks.md", "docs/migrating.md")
_MARKED = re.compile(r"(<!-- figures: (\S+)(?: only ([^>]*?))? -->\n)(.*?)(<!-- end -->)", re.S)


def take(name: str, results: Path) -> None:
    """Publish the results of a suite; cases that were not run again stay as they are."""
    found = json.loads(results.read_text())
    path = PUBLISHED / f"{name}.json"
    if "scripts" in found:
        path.write_text(json.dumps(found, indent=1) + "\n")
        return
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    here = {"created": found["created"], "versions": found["versions"], "machine": found["machine"]}
    for case, entry in found["cases"].items():
        cases[case] = {
            "title": entry["title"],
            **here,
            "load_average": entry["load_average"],
            "agreement": entry["agreement"],
            "skipped": entry["skipped"],
            "frames_per_second": {
                system: round(rates["median"]) for system, rates in entry["systems"].items()
            },
            "quartiles": {
                system: [round(summary(rates["rates"])[q]) for q in ("q1", "q3")]
                for system, rates in entry["systems"].items()
            },
            "ratios": entry["ratios"],
            "cpu_ratios": entry["cpu_ratios"],
        }
    document = {"settings": found["settings"], "cases": cases, "memory": found.get("memory")}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(name: str, only: str = "") -> str:
    """Return the rows of a published suite as Markdown; ``only`` some cases, by commas."""
    document = json.loads((PUBLISHED / f"{name}.json").read_text())
    if "scripts" in document:
        return _scripts(document)
    chosen = [case.strip() for case in only.split(",")] if only else list(document["cases"])
    head, lines = _TABLES.get(name, (_AGAINST, _rows))
    rows = [*head]
    for case in chosen:
        rows += lines(document["cases"][case])
    entries = [document["cases"][case] for case in chosen]
    return "\n".join([*rows, "", *sorted({_origin(entry) for entry in entries}), ""])


def _rows(entry: dict[str, Any]) -> Iterator[str]:
    title = entry["title"]
    for other, ratio in entry["ratios"].items():
        asked = "" if ratio["target"] is None else f"{ratio['target']:g}"
        if ratio["met"] is False:
            asked += ", **missed**"
        spread = f"{_times(ratio['q1'])} to {_times(ratio['q3'])}"
        yield f"| {title} | {other} | {_times(ratio['median'])} ({spread}) | {asked} |"
        title = ""


def _systems(entry: dict[str, Any]) -> Iterator[str]:
    """Yield a row per system, with its rate."""
    title = entry["title"]
    for system, rate_of in entry["frames_per_second"].items():
        low, high = entry["quartiles"][system]
        ratio = entry["ratios"].get(system)
        share = "" if ratio is None else _times(ratio["median"])
        spread = "" if ratio is None else f" ({_times(ratio['q1'])} to {_times(ratio['q3'])})"
        name = "GleanRL" if system == OURS else system
        yield f"| {title} | {name} | {rate_of:,} ({low:,} to {high:,}) | {share}{spread} |"
        title = ""


_AGAINST = "| work | against | ratio (quartiles) | asked for |", "|---|---|---|---|"
_RATES = "| work | loop | frames/s (quartiles) | GleanRL is faster by |", "|---|---|---|---|"
_TABLES = {"training_rates": (_RATES, _systems)}
"""Head and rows of suites whose rates are shown, not only ratios."""


def _scripts(document: dict[str, Any]) -> str:
    """Return a row per script that ran on GleanRL."""
    rows = ["| script | GleanRL, frames/s | TorchRL, frames/s |", "|---|---|---|"]
    for entry in document["scripts"]:
        ours, theirs = (
            Result(**entry[name]) if name in entry else None for name in ("gleanrl", "torchrl")
        )
        if ours is not None and ours.ran:
            rows.append(f"| `{entry['script']}` | {rate(ours)} | {rate(theirs)} |")
    return "\n".join([*rows, "", _origin({"created": document["date"], **document}), ""])


def _times(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _origin(entry: dict[str, Any]) -> str:
    machine, versions = entry["machine"], entry["versions"]
    parts = (f"{name} {versions[name]}" for name in ("torch", "tensordict", "gymnasium", "torchrl"))
    return (
        f"{entry['created'][:10]}, {machine['usable_cores']} cores of {machine['cpu']}, "
        f"Python {versions['python']}, {', '.join(parts)}."
    )


def rewritten(page: str) -> str:
    """Return ``page`` with every marked table written anew."""
    return _MARKED.sub(lambda m: f"{m[1]}{table(m[2], m[3] or '')}{m[5]}", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish and rewrite, or check.

    Returns:
        1 if ``--check`` found a page that differs from the published figures, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--take", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--check", action="store_true", help="change nothing")
    given = parser.parse_args(arguments)
    for name, _, file in (item.partition("=") for item in given.take):
        take(name, Path(file))
    stale = []
    for path in (ROOT / page for page in PAGES):
        text = path.read_text()
        new = rewritten(text)
        if new != text:
            stale.append(path.name)
            if not given.check:
                path.write_text(new)
    if given.check and stale:
        print(f"{', '.join(stale)}: run python -m benchmarks.publish", file=sys.stderr)
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
