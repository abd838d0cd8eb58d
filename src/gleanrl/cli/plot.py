"""Returns over frames, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gleanrl.cli.episodes import Array, EpisodeStats
from gleanrl.core.errors import GleanError

_WINDOW = 100
_POINTS = 20_000


class PlotError(GleanError, RuntimeError):
    """A picture cannot be drawn."""


def plot_returns(path: Path, title: str, stats: EpisodeStats) -> None:
    """Draw the return of every episode and their running mean to ``path``, as PNG.

    Raises:
        PlotError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise PlotError(
            "drawing needs matplotlib; install it with: pip install 'gleanrl[plot]'"
        ) from err
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # Beyond some number, points only take time: every k-th one shows the same cloud.
    step = -(-stats.episodes // _POINTS)
    axes.plot(
        stats.ends[::step],
        stats.returns[::step],
        ".",
        color="#9db4c0",
        markersize=4,
        label="episode",
        rasterized=True,
    )
    window = min(_WINDOW, stats.episodes)
    axes.plot(
        stats.ends[window - 1 :],
        running_mean(stats.returns, window),
        color="#c8553d",
        label=f"mean of {window}",
    )
    axes.set(xlabel="frames", ylabel="return", title=title.replace("$", r"\$"))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as err:
        raise PlotError(f"{path} cannot be written: {err.strerror or err}") from err


def running_mean(values: Array, window: int) -> Array:
    """Return the mean of every ``window`` neighbouring values, ``[N - window + 1]``.

    >>> running_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [2.0, 4.0]
    """
    total = np.cumsum(np.insert(np.asarray(values, np.float64), 0, 0.0))
    means: Array = (total[window:] - total[:-window]) / window
    return means
