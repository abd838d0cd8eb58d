"""Results as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLORS = {True: "#2a9d5c", False: "#d1495b", None: "#8d99ae"}
_TICKS = [0.01, 0.03, 0.1, 0.25, 0.5, 0.9, 1.5, 3, 6, 15, 30, 60]


def draw(doc: dict[str, Any], path: Path) -> bool:
    """Draw ratios, and below them figures as shares of their limits; says whether it could."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in (_ratios(doc), _figures(doc)) if panel[1]]
    if not panels:
        return False
    counts = [len(bars) for _, bars in panels]
    figure, grid = plt.subplots(
        len(panels),
        squeeze=False,
        figsize=(9, 1.2 * len(panels) + 0.42 * sum(counts)),
        height_ratios=[1.5 + count for count in counts],
        layout="constrained",
    )
    for axes, (label, bars) in zip(grid[:, 0], panels, strict=True):
        _bars(axes, bars)
        axes.set_xlabel(label)
    found = doc["versions"]
    grid[0, 0].set_title(
        f"{doc['machine']['cpu']}, one thread per process, torch {found['torch']}, "
        f"tensordict {found['tensordict']}, gymnasium {found['gymnasium']}",
        fontsize=8,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _ratios(doc: dict[str, Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    bars = [
        (f"{case}\nvs {name}", ratio)
        for case, entry in doc["cases"].items()
        for name, ratio in entry["ratios"].items()
    ]
    return "rate, ours / theirs (black: target; whiskers: quartiles)", bars


def _figures(doc: dict[str, Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the figures that have a limit to be a share of; a share of 1 is the limit."""
    bars = []
    for case, entry in doc.get("figures", {}).items():
        for name, figure in entry["figures"].items():
            limit = figure["limit"]
            if not limit:
                continue
            shares = {key: max(figure[key] / limit, 1e-3) for key in ("median", "q1", "q3")}
            bars.append((f"{case}\n{name}", {**shares, "target": 1.0, "met": figure["met"]}))
    return "measured / limit (left of the black line is met)", bars


def _bars(axes: Any, bars: list[tuple[str, dict[str, Any]]]) -> None:
    import matplotlib.ticker as ticks

    for place, (_, bar) in enumerate(bars):
        middle = bar["median"]
        spread = [[middle - bar["q1"]], [bar["q3"] - middle]]
        color = _COLORS[bar["met"]]
        axes.barh(place, middle, color=color, xerr=spread, error_kw={"lw": 1, "ecolor": "#333"})
        edge = max(bar["q3"], bar["target"] or 0)
        axes.text(edge * 1.03, place, f" {middle:.2f}", va="center", fontsize=8)
        if bar["target"] is not None:
            axes.plot([bar["target"]] * 2, [place - 0.45, place + 0.45], color="black", lw=2)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="#aaa", lw=0.8, zorder=0)
    lowest = min(bar["median"] for _, bar in bars)
    highest = max(max(bar["q3"], bar["target"] or 0) for _, bar in bars)
    axes.set_xlim(max(0.005, min(0.5, 0.9 * lowest)), highest * 1.6)
    axes.xaxis.set_major_locator(ticks.FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(ticks.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(ticks.NullLocator())
