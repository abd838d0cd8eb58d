"""Which rows of a dataset are which episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.keys import END_FLAGS, NEXT, TRAJ_IDS, Key, outermost
from gleanrl.memory.tensor_files import TensorFileError
from gleanrl.recording.dataset import Dataset, Part

Array: TypeAlias = np.ndarray[Any, Any]
_CHUNK_FRAMES = 1 << 20


@dataclass(slots=True)
class Episode:
    """The rows of one episode."""

    id: int
    """Its trajectory id."""
    part: Part
    """Where its rows are."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Rows, from the first up to the one beyond the last, in order."""
    ended: bool = False
    """Whether its last row is its end; else it was cut."""

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry of its frames, ``[T, ...]``."""
        entry = self.part.read(key)
        return torch.cat([entry[start:stop] for start, stop in self.runs])


def episodes_of(dataset: Dataset) -> list[Episode]:
    """Return the episodes of a dataset by trajectory id, also those that were cut.

    So an episode has the same number whatever workers were faster: first come the first episodes of
    all environments, then the second ones.

    Raises:
        TensorFileError: there are no trajectory ids or no end flags.
    """
    keys = dataset.keys()
    flags = end_keys(keys)
    if TRAJ_IDS not in keys or not flags:
        raise TensorFileError(
            f"{dataset.directory} has no trajectory ids or no end flags, so its episodes are not "
            "known"
        )
    episodes: list[Episode] = []
    for part in dataset.parts:
        episodes += _of_part(part, flags)
    return sorted(episodes, key=lambda episode: episode.id)


def end_keys(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return the keys of the flags that end episodes."""
    after = [key for key in keys if key[0] == NEXT and len(key) > 1]
    return outermost(key for key in after if key[-1] in END_FLAGS)


def _of_part(part: Part, flags: tuple[Key, ...]) -> list[Episode]:
    open_: dict[int, Episode] = {}
    done: list[Episode] = []
    ids, ends = part.read(TRAJ_IDS).reshape(part.frames), [part.read(key) for key in flags]
    for offset in range(0, part.frames, _CHUNK_FRAMES):
        rows = slice(offset, offset + _CHUNK_FRAMES)
        here = ids[rows].numpy()
        ended = torch.cat([flag[rows].reshape(len(here), -1) for flag in ends], 1).any(1).numpy()
        starts = np.flatnonzero(np.append(True, (here[1:] != here[:-1]) | ended[:-1]))
        stops = np.append(starts[1:], len(here))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            number = int(here[start])
            episode = open_.setdefault(number, Episode(number, part))
            episode.runs.append((offset + start, offset + stop))
            if ended[stop - 1]:
                episode.ended = True
                done.append(open_.pop(number))
    return [*done, *open_.values()]
