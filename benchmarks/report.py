"""Results as JSON, as a table and as a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.harness import OURS, WRONG, Result
from benchmarks.machine import machine, versions


def document(results: Sequence[Result], settings: dict[str, Any], memory: Any) -> dict[str, Any]:
    """Return everything as one JSON-ready dictionary."""
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "settings": settings,
        "cases": {result.name: _case(result) for result in results},
        "memory": memory,
    }


def _case(result: Result) -> dict[str, Any]:
    return {
        "title": result.title,
        "systems": {
            name: {
                "median": statistics.median(rates),
                "rates": rates,
                "cpu_rates": result.cpu_rates[name],
            }
            for name, rates in result.rates.items()
        },
        "ratios": {name: ratio.summary() for name, ratio in result.ratios().items()},
        "cpu_ratios": {name: ratio.summary() for name, ratio in result.ratios(cpu=True).items()},
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
    return lines


def show(doc: dict[str, Any], console: Console) -> None:
    """Print one row per case and reference."""
    table = Table("case", "against", "ours /s", "theirs /s", "ratio", "IQR", "target", "")
    for name, entry in doc["cases"].items():
        systems = entry["systems"]
        ours = systems.get(OURS)
        for other, rates in systems.items():
            if other == OURS:
                continue
            ratio = entry["ratios"].get(other)
            row = [name, other, _rate(ours), _rate(rates), *_ratio_cells(ratio)]
            table.add_row(*row)
    console.print(table)
    for line in _remarks(doc):
        console.print(line, highlight=False, soft_wrap=True)


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


def _rate(system: dict[str, Any] | None) -> str:
    return "-" if system is None else f"{system['median']:,.0f}"


def _ratio_cells(ratio: dict[str, Any] | None) -> list[str]:
    if ratio is None:
        return ["-", "-", "-", ""]
    target = "-" if ratio["target"] is None else f"{ratio['target']:g}"
    verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[ratio["met"]]
    spread = f"{ratio['q1']:.2f}-{ratio['q3']:.2f}"
    return [f"{ratio['median']:.3f}", spread, target, verdict]


def save(doc: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``results.json`` and, where matplotlib is installed, ``results.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(doc, indent=1) + "\n")
    picture = folder / "results.png"
    return [path, picture] if _draw(doc, picture) else [path]


def _draw(doc: dict[str, Any], path: Path) -> bool:
    """Draw the ratios as bars on a logarithmic axis, each with its target and quartiles."""
    try:
        import matplotlib as mpl
        import matplotlib.ticker
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    bars = [
        (f"{case}\nvs {name}", ratio)
        for case, entry in doc["cases"].items()
        for name, ratio in entry["ratios"].items()
    ]
    if not bars:
        return False
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.42 * len(bars)), layout="constrained")
    for place, (_, ratio) in enumerate(bars):
        middle = ratio["median"]
        color = {True: "#2a9d5c", False: "#d1495b", None: "#8d99ae"}[ratio["met"]]
        spread = [[middle - ratio["q1"]], [ratio["q3"] - middle]]
        axes.barh(place, middle, color=color, xerr=spread, error_kw={"lw": 1, "ecolor": "#333"})
        edge = max(ratio["q3"], ratio["target"] or 0)
        axes.text(edge * 1.03, place, f" {middle:.2f}", va="center", fontsize=8)
        if ratio["target"] is not None:
            axes.plot([ratio["target"]] * 2, [place - 0.45, place + 0.45], color="black", lw=2)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="#aaa", lw=0.8, zorder=0)
    middles = [ratio["median"] for _, ratio in bars]
    highest = max(max(ratio["q3"], ratio["target"] or 0) for _, ratio in bars)
    axes.set_xlim(min(0.5, 0.9 * min(middles)), highest * 1.6)
    axes.xaxis.set_major_locator(mpl.ticker.FixedLocator([0.25, 0.5, 0.9, 1.5, 3, 6, 15, 30]))
    axes.xaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xlabel("agent steps per second, ours / theirs (black: target; whiskers: quartiles)")
    found = doc["versions"]
    axes.set_title(
        f"{doc['machine']['cpu']}, one thread, torch {found['torch']}, "
        f"tensordict {found['tensordict']}, gymnasium {found['gymnasium']}",
        fontsize=8,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
