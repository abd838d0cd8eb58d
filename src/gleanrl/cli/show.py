"""``gleanrl inspect``: say what a dataset holds and draw its returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.cli.card import Card
from gleanrl.cli.collect import describe_episodes
from gleanrl.cli.dataset import Dataset, size
from gleanrl.cli.episodes import Array, EpisodeStats
from gleanrl.cli.plot import PlotError, plot_returns
from gleanrl.cli.progress import plain, print_facts
from gleanrl.core.keys import END_FLAGS, NEXT, TRAJ_IDS, outermost

_CHUNK_FRAMES = 2**16
_SHOWN = ("env", "num_envs", "workers", "async", "policy", "seed", "command", "created", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions:
    """What the command line asked for."""

    directory: Path
    plot: Path | None = None
    """Where to draw; ``None`` for ``returns.png`` in the directory, if that is possible."""


def run(options: InspectOptions) -> int:
    """Print card and summary, draw the returns and return the exit code.

    Raises:
        ConfigError: there is no such directory.
        DatasetError: its files are damaged.
        PlotError: the picture that was asked for cannot be drawn.
    """
    dataset = Dataset(options.directory)
    stats = episodes(dataset)
    facts = [*_card_lines(dataset.card), *_column_lines(dataset)]
    if stats is None:
        facts.append(("episodes", "unknown: no rewards or no end flags under 'next'"))
    else:
        facts += describe_episodes(stats)
    facts.append(_draw(options, dataset.card, stats))
    print_facts(facts)
    return 0


def episodes(dataset: Dataset) -> EpisodeStats | None:
    """Add up the episodes of a dataset, a bounded number of frames at a time.

    Returns:
        ``None`` if the data have no rewards or no end flags.
    """
    keys = dataset.keys()
    after = [key for key in keys if key[0] == NEXT and len(key) > 1]
    ends = outermost(key for key in after if key[-1] in END_FLAGS)
    flags = [dataset.read(key) for key in ends]
    rewards = [dataset.read(key) for key in after if key[-1] == "reward"]
    # Without elements there are no files whose size would confirm the number of frames.
    if not flags or not rewards or any(item.numel() == 0 for item in (*flags, *rewards)):
        return None
    ids = dataset.read(TRAJ_IDS) if TRAJ_IDS in keys else None
    stats = EpisodeStats()
    for start in range(0, dataset.card.frames, _CHUNK_FRAMES):
        rows = slice(start, start + _CHUNK_FRAMES)
        stats.add(
            _combine(rewards, rows, torch.float64).sum(-1, keepdims=True).T,
            _combine(flags, rows, torch.bool).max(-1, keepdims=True).T,
            None if ids is None else ids[rows].reshape(1, -1).numpy(),
        )
    return stats


def _combine(columns: list[torch.Tensor], rows: slice, dtype: torch.dtype) -> Array:
    """Return the features of several columns side by side, ``[rows, features]``."""
    parts = [column[rows].to(dtype) for column in columns]
    return np.concatenate([part.reshape(len(part), -1).numpy() for part in parts], 1)


def _card_lines(card: Card) -> list[tuple[str, str]]:
    lines = [(name, _spell(card.facts[name])) for name in _SHOWN if name in card.facts]
    lines.append(("status", card.status))
    if card.status == "collecting":
        lines.append(("note", "collection is running or was killed; what is counted here is whole"))
    lines.append(("frames", f"{card.frames:,}"))
    return lines


def _column_lines(dataset: Dataset) -> list[tuple[str, str]]:
    lines = [("data", f"{dataset.directory} ({size(dataset.nbytes)})")]
    lines += [
        ("", f"{'.'.join(column.key)}  {column.dtype_name} {list(column.shape)}")
        for column in dataset.card.columns
    ]
    return lines


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_spell(item)}" for name, item in value.items())
    return str(value)


def _draw(options: InspectOptions, card: Card, stats: EpisodeStats | None) -> tuple[str, str]:
    path = options.plot or options.directory / "returns.png"
    title = plain(str(card.facts.get("env", "")))
    problem: PlotError | None = None
    if stats is None or stats.episodes == 0:
        problem = PlotError("there is no complete episode to draw")
    elif options.plot is None and (path.is_symlink() or (path.exists() and not path.is_file())):
        # The directory may come from anyone: a link in it must not choose what is overwritten.
        problem = PlotError(f"{path} is not an ordinary file; choose another with --plot")
    else:
        try:
            plot_returns(path, title, stats)
        except PlotError as err:
            problem = err
    if problem is not None and options.plot is not None:
        raise problem
    if problem is not None:
        return "plot", f"none: {problem}"
    return "plot", str(path)
