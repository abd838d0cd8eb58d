"""Results as JSON, as a table and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import picture
from benchmarks.harness import OURS, WRONG, Result, summary
from benchmarks.machine import machine, versions

_VERDICT = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}


def document(results: Sequence[Result], settings: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Return everything as one JSON-ready dictionary."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "settings": settings,
        "cases": {result.name: _case(result) for result in results},
        "memory": memory,
    }


def _case(result: Result) -> dict[str, Any]:
    rates = {name: summary(found) for name, found in result.rates.items()}
    return {
        "title": result.title,
        "frames_per_second": {name: round(found["median"]) for name, found in rates.items()},
        "quartiles": {name: [round(r["q1"]), round(r["q3"])] for name, r in rates.items()},
        "rates": result.rates,
        "cpu_rates": result.cpu_rates,
        "ratios": result.ratios(),
        "cpu_ratios": result.ratios(cpu=True),
        "agreement": result.agreement,
        "skipped": result.skipped,
        "extra": result.extra,
        "load_average": result.load,
    }


def missed(doc: dict[str, Any]) -> list[str]:
    """Return a line per target that was not met and per disagreement."""
    lines = [
        f"{case} against {name}: {ratio['median']:.3f} < {ratio['target']}"
        for case, entry in doc["cases"].items()
        for name, ratio in entry["ratios"].items()
        if ratio["met"] is False
    ]
    lines += [
        f"{case}: {line}"
        for case, entry in doc["cases"].items()
        for line in (*entry["agreement"], *entry["skipped"].values())
        if line.startswith(WRONG)
    ]
    memory = doc["memory"]
    if memory and memory.get("met") is False:
        lines.append(f"memory grew by {memory['growth_mib']:.1f} MiB")
    for case, entry in doc.get("figures", {}).items():
        lines += [
            f"{case}, {name}: {figure['median']:.4g} > {figure['limit']} {figure['unit']}"
            for name, figure in entry["figures"].items()
            if figure["met"] is False
        ]
        lines += [f"{case}: {entry['skipped']}"] * entry["skipped"].startswith(WRONG)
    return lines


def show(doc: dict[str, Any], console: Console) -> None:
    """Print one row per case and reference."""
    table = Table("case", "against", "ours /s", "theirs /s", "ratio", "IQR", "target", "")
    for name, entry in doc["cases"].items():
        rates = entry["frames_per_second"]
        for other in [name for name in rates if name != OURS]:
            ours, ratio = rates.get(OURS), entry["ratios"].get(other)
            table.add_row(name, other, _rate(ours), _rate(rates[other]), *_ratio_cells(ratio))
    console.print(table)
    for line in _remarks(doc):
        console.print(line, highlight=False, soft_wrap=True)
    _show_figures(doc.get("figures", {}), console)


def _show_figures(found: dict[str, Any], console: Console) -> None:
    """Print one row per figure; ``found`` is by measurement, then by figure."""
    table = Table("measurement", "figure", "median", "IQR", "limit", "")
    for case, entry in found.items():
        for name, figure in entry["figures"].items():
            limit = "-" if figure["limit"] is None else f"{figure['limit']:g}"
            table.add_row(
                case,
                name,
                f"{figure['median']:,.4g} {figure['unit']}",
                f"{figure['q1']:,.4g}-{figure['q3']:,.4g}",
                limit,
                _VERDICT[figure["met"]],
            )
    if table.row_count:
        console.print(table)
    for case, entry in found.items():
        if entry["skipped"]:
            console.print(f"[yellow]{case} skipped:[/yellow] {json.dumps(entry['skipped'])}")


def _remarks(doc: dict[str, Any]) -> Iterator[str]:
    for name, entry in doc["cases"].items():
        for line in entry["agreement"]:
            yield f"[dim]{name}: {escape(line)}[/dim]"
        for other, why in entry["skipped"].items():
            yield f"[yellow]{name}: {other} skipped: {escape(why)}[/yellow]"
        if entry["extra"]:
            yield f"{name}: {escape(json.dumps(entry['extra']))}"
    memory = doc["memory"]
    if memory:
        yield f"memory: {escape(json.dumps(memory))}"


def _rate(rate: int | None) -> str:
    return "-" if rate is None else f"{rate:,}"


def _ratio_cells(ratio: dict[str, Any] | None) -> list[str]:
    if ratio is None:
        return ["-", "-", "-", ""]
    target = "-" if ratio["target"] is None else f"{ratio['target']:g}"
    verdict = _VERDICT[ratio["met"]]
    spread = f"{ratio['q1']:.2f}-{ratio['q3']:.2f}"
    return [f"{ratio['median']:.3f}", spread, target, verdict]


def save(doc: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``results.json`` and ``results.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.json", folder / "results.svg"]
    paths[0].write_text(json.dumps(doc, indent=1) + "\n")
    groups = [picture.group(entry) for entry in doc["cases"].values()]
    paths[1].write_text(picture.draw("Rates: GleanRL over others", groups, [doc["created"]]))
    return paths
