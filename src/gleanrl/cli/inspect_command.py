"""``gleanrl inspect``: print the contents of a dataset and draw its returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size

from gleanrl.cli.command_options import InspectOptions
from gleanrl.cli.display import print_table
from gleanrl.core.errors import GleanError
from gleanrl.core.platforms import imported
from gleanrl.memory.tensor_files import dtype_name
from gleanrl.recording.dataset import Dataset, Metadata
from gleanrl.recording.episode_stats import EpisodeStats, describe_episodes, total
from gleanrl.watch.page import Page, Plot, Table, episode_plots, save
from gleanrl.watch.progress import plain

_SHOWN = ("env", "num_envs", "workers", "async", "policy", "seed", "command", "created", "versions")
_POINTS = 20_000


class PlotError(GleanError, RuntimeError):
    """A picture cannot be drawn."""


def run(options: InspectOptions) -> int:
    """Print card and summary, draw the returns and return the exit code."""
    dataset = Dataset(options.directory)
    stats = total(dataset)
    lines = _describe(dataset)
    if stats is None:
        lack = "no rewards or no end flags under 'next', or no trajectory ids"
        lines.append(("episodes", f"unknown: {lack}"))
    else:
        lines += describe_episodes(stats)
    try:
        lines.append(("plot", str(_draw(options, dataset, stats))))
    except PlotError as err:
        if options.plot is not None:
            raise
        lines.append(("plot", f"none: {err}"))
    if options.html is not None:
        try:
            save(options.html, page(dataset, stats))
        except OSError as err:
            raise PlotError(f"{options.html} cannot be written: {err.strerror or err}") from err
        lines.append(("page", str(options.html)))
    print_table(lines)
    return 0


def _facts(data: Metadata) -> list[tuple[str, str]]:
    return [(name, _spell(data.facts[name])) for name in _SHOWN if data.facts.get(name) is not None]


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spell(item)}" for name, item in value.items())
    return str(value)


def _entries(data: Metadata) -> list[tuple[str, str, str]]:
    return [(".".join(f.key), dtype_name(f.dtype), str(list(f.shape))) for f in data.files]


def _describe(dataset: Dataset) -> list[tuple[str, str]]:
    data = dataset.metadata
    lines = [*_facts(data), ("status", data.status)]
    if data.status == "collecting":
        lines.append(("note", "collection is running or was killed; what is counted here is whole"))
    lines.append(("frames", f"{data.frames:,}"))
    lines.append(("data", f"{dataset.directory} ({size(dataset.nbytes)})"))
    return lines + [("", f"{name}  {dtype} {shape}") for name, dtype, shape in _entries(data)]


def page(dataset: Dataset, stats: EpisodeStats | None) -> Page:
    """Return the page of a dataset."""
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
    return Page(
        title=_spell(data.facts.get("env", dataset.directory.name)),
        subtitle=f"Dataset {dataset.directory}, {data.status}",
        figures=figures,
        facts=_facts(data),
        parts=[*plots, Table("Entries of a frame", ("key", "type", "shape"), _entries(data))],
    )


def _draw(options: InspectOptions, dataset: Dataset, stats: EpisodeStats | None) -> Path:
    """Draw the return of every episode and their running mean as PNG; return its path."""
    if stats is None or stats.episodes == 0:
        raise PlotError("there is no complete episode to draw")
    path = options.plot or options.directory / "returns.png"
    if options.plot is None and (path.is_symlink() or (path.exists() and not path.is_file())):
        # The directory may come from anyone: a link in it must not choose what is overwritten.
        raise PlotError(f"{path} is not an ordinary file; choose another with --plot")
    drawn = imported("matplotlib.figure", "plot", "--plot", PlotError)
    figure = drawn.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    looks = (("#9db4c0", "."), ("#c8553d", "-"))
    for plot in episode_plots(stats.ends, stats.returns, stats.lengths)[:1]:
        # Beyond some number, points only take time: every k-th one shows the same cloud.
        step = -(-stats.episodes // _POINTS)
        for series, (color, style) in zip(plot.series, looks, strict=True):
            x, y = series.x[::step], series.y[::step]
            axes.plot(x, y, style, color=color, markersize=4, label=series.name, rasterized=True)
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
