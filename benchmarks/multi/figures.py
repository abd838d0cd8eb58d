"""Numbers that are no rate against a rate: times, counts, shares, each with its limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import quartiles

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One number, measured several times."""

    name: str
    unit: str
    values: list[float]
    limit: float | None = None
    """Greatest acceptable median; ``None`` only informs."""

    def summary(self) -> dict[str, Any]:
        """Return median, quartiles, extremes and whether the limit was kept."""
        low, middle, high = quartiles(self.values)
        return {
            "unit": self.unit,
            "limit": self.limit,
            "median": middle,
            "q1": low,
            "q3": high,
            "min": min(self.values),
            "max": max(self.values),
            "met": None if self.limit is None else middle <= self.limit,
            "rounds": self.values,
        }


@dataclass(frozen=True)
class Measurement:
    """Something that gives `Figure` objects."""

    name: str
    title: str
    run: Callable[[int, float, Tick], list[Figure]]
    """Called with rounds, seconds per round and the tick of a progress display."""


def show(found: dict[str, Any], console: Console) -> None:
    """Print one row per figure; ``found`` is by measurement, then by figure."""
    table = Table("measurement", "figure", "median", "IQR", "limit", "")
    for case, entry in found.items():
        for name, figure in entry["figures"].items():
            limit = "-" if figure["limit"] is None else f"{figure['limit']:g}"
            verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}
            table.add_row(
                case,
                name,
                f"{figure['median']:,.4g} {figure['unit']}",
                f"{figure['q1']:,.4g}-{figure['q3']:,.4g}",
                limit,
                verdict[figure["met"]],
            )
    if table.row_count:
        console.print(table)
    for case, entry in found.items():
        if entry["skipped"]:
            console.print(f"[yellow]{case} skipped:[/yellow] {json.dumps(entry['skipped'])}")


def missed(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line per limit that was not kept."""
    for case, entry in found.items():
        for name, figure in entry["figures"].items():
            if figure["met"] is False:
                yield f"{case}, {name}: {figure['median']:.4g} > {figure['limit']} {figure['unit']}"
        if entry["skipped"].startswith("WRONG"):
            yield f"{case}: {entry['skipped']}"
