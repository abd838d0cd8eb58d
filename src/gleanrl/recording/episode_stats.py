"""Episodes: returns and lengths, added up over batches, and which rows of a dataset are which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.episode_returns import mean_rewards
from gleanrl.core.keys import END_FLAGS, MASK, NEXT, TRAJ_IDS, Key, as_key, outermost
from gleanrl.core.window import Array
from gleanrl.engine.whole_trajectories import end_flags
from gleanrl.memory.tensor_files import TensorFileError, is_count
from gleanrl.memory.tensordicts import nest
from gleanrl.recording.dataset import Dataset, Part

_RUN = np.dtype(
    [
        ("id", np.int64),
        ("return", np.float64),
        ("length", np.int64),
        ("ended", bool),
        ("order", np.int64),
        ("frames", np.int64),
    ]
)
"""A run of frames of one episode. ``order`` sorts the ends of a batch, ``frames`` is how many had
been collected then."""


class EpisodeStats:
    """Return and length of every episode that ended, over any number of batches.

    Episodes are told apart by trajectory id if the batches have one and by environment (row)
    otherwise. Work is done in bulk: the cost per batch is that of sorting its runs of frames.
    """

    def __init__(self) -> None:
        self.frames = 0
        self._open = np.empty(0, _RUN)
        """Unfinished episodes, with their sums so far."""
        self._done: list[Array] = []

    def _ended(self, name: str) -> Array:
        if len(self._done) != 1:
            self._done = [np.concatenate([np.empty(0, _RUN), *self._done])]
        values: Array = self._done[0][name]
        return values

    @property
    def episodes(self) -> int:
        """Episodes that ended."""
        return sum(map(len, self._done))

    @property
    def returns(self) -> Array:
        """Undiscounted returns in the order in which episodes ended, float64 ``[N]``."""
        return self._ended("return")

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int64 ``[N]``."""
        return self._ended("length")

    @property
    def ends(self) -> Array:
        """How many frames had been collected when each episode ended, int64 ``[N]``."""
        return self._ended("frames")

    def in_turns(self, num_envs: int) -> None:
        """Order episodes by their turn in each of ``num_envs`` environments.

        For frames that lie writer after writer: `ends` are then about when episodes ended.
        """
        self._ended("id")
        done = self._done[0]
        done = done[np.argsort(done["id"] // num_envs, kind="stable")]
        done["frames"] = np.cumsum(done["length"])
        self._done = [done]

    def update(self, batch: TensorDictBase) -> None:
        """Add a batch ``[T]`` or ``[..., T]`` of a collector, which must have end flags.

        Without trajectory ids every row is one environment, the same in every batch.
        """
        steps = batch.shape[-1]
        rewards = _rewards(batch).reshape(-1, steps)
        ended = end_flags(batch).reshape(-1, steps).cpu().numpy()
        ids, mask = (
            None if found is None else found.reshape(-1, steps).cpu().numpy()
            for found in (batch.get(TRAJ_IDS, None), batch.get(MASK, None))
        )
        rows = len(rewards)
        if ids is None:
            ids = np.broadcast_to(np.arange(rows)[:, None], rewards.shape)
        valid = ids != -1  # a frame that was collected
        if mask is not None:
            valid &= mask
        env, time = np.nonzero(valid)
        if len(env) == 0:
            return
        first = _run_starts(ids[valid], ended[valid])
        last = np.append(first[1:], len(env)) - 1
        runs = np.empty(len(first), _RUN)
        runs["id"] = ids[valid][first]
        runs["return"] = np.add.reduceat(rewards[valid].astype(np.float64), first)
        runs["length"] = last - first + 1
        runs["ended"] = ended[valid][last]
        runs["order"] = time[last] * rows + env[last]
        runs["frames"] = self.frames + np.minimum((time[last] + 1) * rows, len(env))
        self._join(runs)
        self.frames += len(env)

    def _join(self, runs: Array) -> None:
        """Join runs of frames with the same id, after its open part, into episodes."""
        runs = np.concatenate([self._open, runs])
        runs = runs[np.argsort(runs["id"], kind="stable")]
        first = _run_starts(runs["id"], runs["ended"])
        found = runs[np.append(first[1:], len(runs)) - 1]
        for name in ("return", "length"):
            found[name] = np.add.reduceat(runs[name], first)
        self._open = found[~found["ended"]]
        done = found[found["ended"]]
        if len(done):
            self._done.append(done[np.argsort(done["order"], kind="stable")])


def _run_starts(ids: Array, ended: Array) -> Array:
    """Return the starts of runs of frames of one episode: at a new id, and after every end."""
    return np.flatnonzero(np.append(True, (ids[1:] != ids[:-1]) | ended[:-1]))


def _rewards(batch: TensorDictBase) -> Array:
    """Return one reward per frame, ``[..., T]``, of all entries ``"reward"`` under ``"next"``."""
    after = batch.get(NEXT)
    keys = after.keys(include_nested=True, leaves_only=True)
    return mean_rewards(
        [after.get(key) for key in keys if as_key(key)[-1] == "reward"], batch.shape
    )


def _figures(values: Array) -> dict[str, float]:
    """Return a few numbers about ``[N]`` values, none about none."""
    names = ("mean", "std", "min", "max") if len(values) else ()
    return {name: float(getattr(values, name)()) for name in names}


def summary(values: Array) -> dict[str, float | None] | None:
    """Summarise values for JSON, which has no NaN and no infinity: these become null."""
    found = _figures(values).items()
    return {name: x if math.isfinite(x) else None for name, x in found} if found else None


def describe_episodes(stats: EpisodeStats) -> list[tuple[str, str]]:
    """Return lines about the episodes that ended."""
    lines = [("episodes", f"{stats.episodes:,}")]
    for name, values in (("return", stats.returns), ("length", stats.lengths)):
        if found := _figures(values).items():
            lines.append((name, ", ".join(f"{what} {x:,.1f}" for what, x in found)))
    return lines


# -- of a dataset ----------------------------------------------------------------------------------


def total(dataset: Dataset) -> EpisodeStats | None:
    """Add up the episodes of a dataset, a bounded number of frames at a time.

    ``None`` if the data have no rewards or no end flags, or if rows of several environments have no
    trajectory ids.
    """
    keys = dataset.keys()
    ends = end_keys(keys)
    rewards = [key for key in keys if key[0] == NEXT and key[1:] and key[-1] == "reward"]
    count = dataset.metadata.facts.get("num_envs")
    if not ends or not rewards or not (TRAJ_IDS in keys or count == 1):
        return None
    stats = EpisodeStats()
    known = (TRAJ_IDS,) if TRAJ_IDS in keys else ()
    for part in dataset.parts:
        entries = {key: part.read(key) for key in (*ends, *rewards, *known)}
        # Without elements there are no files whose size would confirm the number of frames.
        if any(entries[key].numel() == 0 for key in (*ends, *rewards)):
            return None
        for rows in part.chunks():
            stats.update(_batch(entries, rows))
    if known and dataset.writers > 1 and is_count(count) and count:
        stats.in_turns(count)
    return stats


def _batch(entries: Mapping[Key, torch.Tensor], rows: slice) -> TensorDict:
    """Return some rows of ``entries`` like a collector's batch of one environment, ``[1, T]``."""
    data = {key: value[rows].unsqueeze(0) for key, value in entries.items()}
    return TensorDict(nest(data), next(iter(data.values())).shape[:2])


@dataclass(slots=True)
class Episode:
    """The rows of one episode."""

    id: int
    part: Part
    """Where its rows are."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Rows, from the first up to the one beyond the last, in order."""
    ended: bool = False
    """Whether the episode ended in its last row; otherwise it was cut."""

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def read(self, key: Key) -> torch.Tensor:
        """Return an entry of its frames, ``[T, ...]``."""
        entry = self.part.read(key)
        return torch.cat([entry[start:stop] for start, stop in self.runs])


def episodes_of(dataset: Dataset) -> list[Episode]:
    """Return the episodes of a dataset by trajectory id, also those that were cut.

    So the number of an episode does not depend on the speed of workers: first come the first
    episodes of all environments, then the second ones.
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
    ids, ends = part.read(TRAJ_IDS).reshape(part.frames), {key: part.read(key) for key in flags}
    for rows in part.chunks():
        own = ids[rows].numpy()
        ended = end_flags(_batch(ends, rows))[0].numpy()
        starts = _run_starts(own, ended)
        for start, stop in zip(starts, np.append(starts[1:], len(own)), strict=True):
            number = int(own[start])
            episode = open_.setdefault(number, Episode(number, part))
            episode.runs.append((rows.start + int(start), rows.start + int(stop)))
            if ended[stop - 1]:
                episode.ended = True
                done.append(open_.pop(number))
    return [*done, *open_.values()]
