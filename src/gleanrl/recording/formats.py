"""What a dataset can be written as, once its frames are all there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import ACTION, END_FLAGS, NEXT, TRAJ_IDS, Key, as_key, format_key
from gleanrl.memory.tensor_files import TensorFileError
from gleanrl.recording.dataset import Dataset, require
from gleanrl.recording.episodes import summary as summary_of
from gleanrl.recording.episodes import total
from gleanrl.recording.shard import join


def check(format: str, path: Path) -> None:
    """Check that a dataset of this format can be written to ``path``.

    Raises:
        ConfigError: a package is missing, or the path names no Minari dataset.
    """
    require(format)
    if format == "minari" and not re.fullmatch(r"[-\w]+-v\d+", path.name):
        raise ConfigError(
            f"Minari names a dataset NAME-vNUMBER, so {path.name!r} has to end like "
            f"'{re.sub(r'[^-0-9A-Za-z_]', '-', path.name)}-v0'"
        )


def check_frames(format: str, frames: TensorDictBase) -> None:
    """Check that frames have what the format needs.

    Raises:
        TensorFileError: names what is missing.
    """
    if format != "minari":
        return
    after: list[Key] = []
    if (found := frames.get(NEXT, None)) is not None:
        after = [as_key(key) for key in found.keys(True, True)]
    has = {
        format_key(TRAJ_IDS): frames.get(TRAJ_IDS, None) is not None,
        format_key(ACTION): frames.get(ACTION, None) is not None,
        "a reward under 'next'": any(key[-1] == "reward" for key in after),
        "end flags under 'next'": any(key[-1] in END_FLAGS for key in after),
    }
    if missing := [name for name, there in has.items() if not there]:
        raise TensorFileError(f"Minari's episodes need {', '.join(missing)}; the frames have none")


def write(format: str, dataset: Dataset, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write what the parts of ``dataset`` hold into its directory, in ``format``.

    Returns:
        More for the card.

    Raises:
        OSError: the disk is full; what was made is removed again.
        TensorFileError: the data do not suit the format.
    """
    if format == "parquet":
        from gleanrl.recording import in_parquet

        return in_parquet.write(dataset, facts)
    if format == "minari":
        from gleanrl.recording import in_minari

        return in_minari.write(dataset, facts)
    join(dataset.raw, dataset.directory)
    return {}


def summary(dataset: Dataset) -> dict[str, Any]:
    """Return what a card says of the episodes."""
    stats = total(dataset)
    if stats is None:
        return {}
    return {
        "episodes": stats.episodes,
        "returns": summary_of(stats.returns),
        "lengths": summary_of(stats.lengths),
    }
