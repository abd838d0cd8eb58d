"""``gleanrl inspect``: say what a dataset holds and draw its returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gleanrl.cli.display import print_table
from gleanrl.cli.options import InspectOptions
from gleanrl.cli.replay import play
from gleanrl.core.errors import GleanError
from gleanrl.memory.tensor_files import dtype_name
from gleanrl.recording.dataset import Dataset, size
from gleanrl.recording.episodes import EpisodeStats, describe_episodes, total
from gleanrl.watch.page import Page, Plot, Table, episode_plots, save
from gleanrl.watch.progress import plain

_SHOWN = ("env", "num_envs", "workers", "async", "policy", "seed", "command", "created", "versions")
_WINDOW = 100
_POINTS = 20_000


class PlotError(GleanError, RuntimeError):
    """A picture cannot be drawn."""


def run(options: InspectOptions) -> int:
    """Print card and summary, draw the returns and return the exit code.

    Raises:
        ConfigError: there is no such directory.
        TensorFileError: its files are damaged.
        PlotError: the picture that was asked for cannot be drawn.
        ReplayError: the episode that was asked for cannot be shown.
        OSError: the page that was asked for cannot be written.
    """
    dataset = Dataset(options.directory)
    stats = total(dataset)
    lines = _describe(dataset)
    if stats is None:
        lines.append(("episodes", "unknown: no rewards or no end flags under 'next'"))
    else:
        lines += describe_episodes(stats)
    try:
        lines.append(("plot", str(_draw(options, dataset, stats))))
    except PlotError as err:
        if options.plot is not None:
            raise
        lines.append(("plot", f"none: {err}"))
    if options.play is not None:
        lines += play(dataset, options.play, options.video)
    if options.html is not None:
        save(options.html, page(dataset, stats))
        lines.append(("page", str(options.html)))
    print_table(lines)
    return 0


def _describe(dataset: Dataset) -> list[tuple[str, str]]:
    data = dataset.metadata
    lines = [
        (name, _spell(data.facts[name])) for name in _SHOWN if data.facts.get(name) is not None
    ]
    lines.append(("status", data.status))
    if data.status == "collecting":
        lines.append(("note", "collection is running or was killed; what is counted here is whole"))
    lines.append(("frames", f"{data.frames:,}"))
    lines.append(("data", f"{dataset.directory} ({size(dataset.nbytes)})"))
    lines += [
        ("", f"{'.'.join(file.key)}  {dtype_name(file.dtype)} {list(file.shape)}")
        for file in data.files
    ]
    return lines


def page(dataset: Dataset, stats: EpisodeStats | None) -> Page:
    """Return what a page says of a dataset."""
    data = dataset.metadata
    figures = [("frames", f"{data.frames:,}"), ("data", size(dataset.nbytes))]
    plots: list[Plot] = []
    if stats is not None and stats.episodes:
        figures += [
            ("episodes", f"{stats.episodes:,}"),
            ("mean return", f"{stats.returns.mean():,.1f}"),
            ("mean length", f"{stats.lengths.mean():,.1f}"),
        ]
        plots = episode_plots(stats.ends, stats.returns, stats.lengths)
    entries = [
        (".".join(file.key), dtype_name(file.dtype), str(list(file.shape))) for file in data.files
    ]
    facts = [(name, _spell(data.facts[name])) for name in _SHOWN if name in data.facts]
    return Page(
        title=_spell(data.facts.get("env", dataset.directory.name)),
        subtitle=f"Dataset {dataset.directory}, {data.status}",
        figures=figures,
        facts=facts,
        parts=[*plots, Table("Entries of a frame", ("key", "type", "shape"), entries)],
    )


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spell(item)}" for name, item in value.items())
    return str(value)


def _draw(options: InspectOptions, dataset: Dataset, stats: EpisodeStats | None) -> Path:
    """Draw the return of every episode and their running mean as PNG; return where."""
    if stats is None or stats.episodes == 0:
        raise PlotError("there is no complete episode to draw")
    path = options.plot or options.directory / "returns.png"
    if options.plot is None and (path.is_symlink() or (path.exists() and not path.is_file())):
        # The directory may come from anyone: a link in it must not choose what is overwritten.
        raise PlotError(f"{path} is not an ordinary file; choose another with --plot")
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
    total = np.cumsum(np.insert(stats.returns, 0, 0.0))
    means = (total[window:] - total[:-window]) / window
    axes.plot(stats.ends[window - 1 :], means, color="#c8553d", label=f"mean of {window}")
    title = plain(str(dataset.metadata.facts.get("env", "")))
    axes.set(xlabel="frames", ylabel="return", title=title.replace("$", r"\$"))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as err:
        raise PlotError(f"{path} cannot be written: {err.strerror or err}") from err
    return path
