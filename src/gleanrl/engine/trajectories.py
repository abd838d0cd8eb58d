"""Trajectories out of batches: cut them apart, or gather whole ones over several batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK, NEXT, TIME, TRAJ_IDS, Key, NestedKey, as_key, format_key
from gleanrl.engine.padding import Padding, any_over_features, changes, end_flags, restack

_INVALID = -1
_MAX_CHUNKS = 64


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDict:
    """Put every trajectory of a batch into a row of its own.

    A trajectory is a run of neighbouring frames with the same id, along the batch read row by
    row (time is its last dimension). An id that appears again after another one starts a new row.
    Without ids, the end flags tell the runs apart, and the ids ``0, 1, ...`` are added. Frames
    whose id is -1 or whose mask is False were never collected and are left out.

    Args:
        rollout_tensordict: ``[..., T]``; not changed. The result may share its memory when no
            trajectory needs padding.
        prefix: Entry with ``"traj_ids"`` and ``"mask"``; by default ``"collector"`` if the batch
            has it, the root otherwise.
        trajectory_key: Where the ids are, instead of ``prefix``; the mask goes beside them.
        done_key: The flag under ``"next"`` to use if there are no ids; by default all end flags.
        as_nested: Return nested tensors instead of padded ones: ``True`` for strided ones or a
            ``torch.layout``. There is no mask then, as nothing is padded.

    Returns:
        ``[N, T_max]``: one row per trajectory in order of appearance, zeros beyond its end, and a
        bool mask. Entries that are not tensors repeat their last value there.

    Raises:
        ConfigError: neither ids nor end flags are there, or an entry's shape changes from frame to
            frame, or is not a tensor and ``as_nested`` is set.
    """
    ids_key, mask_key = _meta_keys(rollout_tensordict, prefix, trajectory_key)
    ids = rollout_tensordict.get(ids_key, None)
    frames = _dense(rollout_tensordict).reshape(-1)
    if ids is None:
        starts = _starts_after_ends(rollout_tensordict, done_key)
        frames = frames.copy()
        frames.set(ids_key, starts.cumsum(0) - 1)
        valid = torch.ones_like(starts)
    else:
        ids = ids.reshape(-1)
        starts = changes(ids)
        valid = ids != _INVALID
    mask = rollout_tensordict.get(mask_key, None)
    if mask is not None:
        valid = valid & mask.reshape(-1)
    if not bool(valid.all()):
        kept = valid.nonzero().squeeze(-1)
        frames = frames[kept]
        starts = changes(starts.cumsum(0)[kept])
    first = starts.nonzero().squeeze(-1)
    lengths = torch.diff(first, append=first.new_full((1,), starts.shape[0]))
    if as_nested:
        return _nested(frames, lengths, as_nested)
    padding = Padding(lengths, starts.shape[0])
    out = padding.batch(frames)
    out.set(mask_key, padding.mask())
    name = rollout_tensordict.names[-1]
    if name is not None:
        out.names = [None, name]
    return out


def _meta_keys(
    batch: TensorDictBase, prefix: NestedKey | None, trajectory_key: NestedKey | None
) -> tuple[Key, Key]:
    if trajectory_key is not None:
        ids = as_key(trajectory_key)
        return ids, (*ids[:-1], "mask")
    if prefix is None and "collector" in batch.keys():
        prefix = "collector"
    root = () if prefix is None else as_key(prefix)
    return (*root, "traj_ids"), (*root, "mask")


def _dense(batch: TensorDictBase) -> TensorDictBase:
    if isinstance(batch, TensorDict):
        return batch
    try:
        return batch.contiguous()
    except RuntimeError as err:
        raise ConfigError(
            "the batch has entries whose shape changes from frame to frame, which rows of equal "
            f"length cannot hold: {err}"
        ) from err


def _starts_after_ends(batch: TensorDictBase, done_key: NestedKey | None) -> torch.Tensor:
    if done_key is None:
        ended = end_flags(batch)
    else:
        flag = batch.get((NEXT, *as_key(done_key)), None)
        if flag is None:
            where = format_key((NEXT, *as_key(done_key)))
            raise ConfigError(
                f"the batch has neither trajectory ids nor {where} to tell them apart"
            )
        ended = any_over_features(flag, batch.ndim)
    starts = torch.ones_like(ended)
    starts[..., 1:] = ended[..., :-1]
    return starts.reshape(-1)


def _nested(
    frames: TensorDictBase, lengths: torch.Tensor, layout: bool | torch.layout
) -> TensorDict:
    def refuse(_: Any) -> Any:
        raise ConfigError("the batch has entries that are not tensors, so as_nested cannot be set")

    if layout is torch.jagged:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

        def jagged(leaf: torch.Tensor) -> torch.Tensor:
            return torch.nested.nested_tensor_from_jagged(leaf, offsets)

        shape = jagged(torch.empty(frames.shape[0], device=lengths.device)).shape
        return restack(frames, shape, jagged, refuse)
    sizes = lengths.tolist()

    def strided(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(torch.split(leaf, sizes)), layout=torch.strided)

    return restack(frames, (len(sizes), -1), strided, refuse)


_Piece: TypeAlias = tuple[int, int, int]
"""Chunk, first frame and one past the last frame within it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """What a `WholeTrajectories` holds at the moment."""

    complete: int
    """Trajectories that ended and were not popped yet."""
    partial: int
    """Trajectories still running."""
    frames: int
    """Frames of both."""


class WholeTrajectories:
    """Collects batches and gives back whole trajectories, a fixed number at a time.

    Trajectories leave in the order in which they ended: by batch, then by the time index of their
    last frame, then by id (`share_out` changes that). Memory is proportional to the frames held:
    those of a batch are copied once when it comes in, and once more if most of their batch has left
    before them.
    """

    def __init__(
        self,
        num_trajectories: int,
        traj_format: str = "padded",
        *,
        ids_key: NestedKey = TRAJ_IDS,
        mask_key: NestedKey = MASK,
    ) -> None:
        """Give ``num_trajectories`` at a time, as ``"padded"`` rows or end to end (``"cat"``).

        Raises:
            ConfigError: a number below 1 or an unknown format.
        """
        if num_trajectories < 1:
            raise ConfigError(f"trajs_per_batch ({num_trajectories}) must be at least 1")
        if traj_format not in ("padded", "cat"):
            raise ConfigError(f"traj_format ({traj_format!r}) must be 'padded' or 'cat'")
        self.num_trajectories = num_trajectories
        self.frames_discarded = 0
        """Frames dropped by `flush` and `reset` so far, and of trajectories that were left."""
        self._padded = traj_format == "padded"
        self._ids_key, self._mask_key = as_key(ids_key), as_key(mask_key)
        self._chunks: dict[int, TensorDictBase] = {}
        self._live: dict[int, int] = {}
        """Frames of each chunk that still belong to a trajectory held."""
        self._next_chunk = 0
        self._running: dict[int, list[_Piece]] = {}
        self._num_envs = 0
        self._latest: dict[int, int] = {}
        """By environment: the trajectory it began last."""
        self._ready: list[deque[list[_Piece]]] = [deque()]
        """One line, or one for every environment; a batch takes equally many from each."""

    def belong_to(self, num_envs: int) -> None:
        """Say that there are ``num_envs`` environments, which ``id % num_envs`` tells.

        To be called before any batch came. An environment makes one trajectory at a time: one that
        had not ended when it began another (a worker was lost, and replaced) never will, and is
        dropped.
        """
        self._num_envs = num_envs

    def share_out(self, num_envs: int) -> None:
        """Take as many trajectories from each environment, which ``id % num_envs`` tells.

        To be called before any batch came. An environment's trajectories leave in the order in
        which they were made, and a batch holds them environment by environment. What environments
        with short ones make beyond their share waits for later batches.
        """
        share = -(-self.num_trajectories // num_envs)
        self.num_trajectories = share * num_envs
        self._ready = [deque() for _ in range(num_envs)]

    @property
    def pending(self) -> Pending:
        """Return how much is held."""
        complete = sum(map(len, self._ready))
        return Pending(complete, len(self._running), sum(self._live.values()))

    def push(self, td: TensorDictBase) -> None:
        """Take in one batch ``[..., T]``; what is kept of it is copied.

        Raises:
            ConfigError: the batch has no trajectory ids or no end flags.
        """
        ids = td.get(self._ids_key, None)
        if ids is None:
            raise ConfigError(
                f"whole trajectories need {format_key(self._ids_key)} in every batch; leave "
                "track_traj_ids on"
            )
        ids = ids.reshape(-1)
        valid = ids != _INVALID
        mask = td.get(self._mask_key, None)
        if mask is not None:
            valid = valid & mask.reshape(-1)
        kept = valid.nonzero().squeeze(-1)
        if kept.shape[0] == 0:
            return
        frames = td.reshape(-1)
        copy = frames.clone() if kept.shape[0] == ids.shape[0] else frames[kept]
        ended = end_flags(td).reshape(-1)[kept].cpu().numpy()
        time = (kept % td.shape[-1]).cpu().numpy()
        self._take(self._store(copy), ids[kept].cpu().numpy(), ended, time)
        self._compact()

    def _store(self, frames: TensorDictBase) -> int:
        chunk = self._next_chunk
        self._next_chunk += 1
        self._chunks[chunk], self._live[chunk] = frames, frames.shape[0]
        return chunk

    def _take(
        self,
        chunk: int,
        ids: np.ndarray[Any, Any],
        ended: np.ndarray[Any, Any],
        time: np.ndarray[Any, Any],
    ) -> None:
        # A new run starts where the id changes, and after an end even if the id stays.
        last = np.flatnonzero(np.append((ids[1:] != ids[:-1]) | ended[:-1], True))
        finished: list[tuple[int, int, list[_Piece]]] = []
        start = 0
        ends = zip(
            ids[last].tolist(),
            (last + 1).tolist(),
            ended[last].tolist(),
            time[last].tolist(),
            strict=True,
        )
        for traj, stop, done, when in ends:
            if traj not in self._running:
                self._begin(traj)
            self._running[traj].append((chunk, start, stop))
            start = stop
            if done:
                finished.append((when, traj, self._running.pop(traj)))
        finished.sort(key=lambda item: item[:2])
        for _, traj, pieces in finished:
            self._ready[traj % len(self._ready)].append(pieces)

    def _begin(self, traj: int) -> None:
        self._running[traj] = []
        if self._num_envs:
            env = traj % self._num_envs
            left = self._running.pop(self._latest.get(env, _INVALID), None)
            self._latest[env] = traj
            if left is not None:
                self.frames_discarded += self._release([left])

    def pop(self) -> TensorDict | None:
        """Return ``num_trajectories`` whole trajectories, or ``None`` if there are not as many.

        Returns:
            Fresh memory, time the last dimension. Padded: ``[N, T_max]`` with zeros and a mask at
            ``("collector", "mask")``; entries that are not tensors repeat their last value. Cat:
            the trajectories end to end, ``[T_1 + ... + T_N]``.

        Raises:
            ConfigError: rows are to be padded and an entry's shape changes from frame to frame.
        """
        share = self.num_trajectories // len(self._ready)
        if any(len(line) < share for line in self._ready):
            return None
        chosen = [line.popleft() for line in self._ready for _ in range(share)]
        frames = self._gather(piece for pieces in chosen for piece in pieces)
        self._release(chosen)
        if not self._padded:
            frames.names = [TIME]
            return frames
        lengths = torch.tensor([_length(pieces) for pieces in chosen], device=frames.device)
        padding = Padding(lengths, frames.shape[0])
        out = padding.batch(_dense(frames))
        out.set(self._mask_key, padding.mask())
        out.names = [None, TIME]
        return out

    def _gather(self, pieces: Iterable[_Piece]) -> Any:
        """Copy ``pieces`` end to end."""
        chunk, start, stop = np.array(list(pieces), np.int64).T
        sizes = stop - start
        source = np.arange(sizes.sum()) + np.repeat(start - (sizes.cumsum() - sizes), sizes)
        owner = np.repeat(chunk, sizes)
        used = np.unique(chunk).tolist()
        parts = [self._chunks[c][torch.from_numpy(source[owner == c])] for c in used]
        if len(parts) == 1:
            return parts[0]
        joined = torch.cat(parts)
        place = np.argsort(owner, kind="stable")
        if np.array_equal(place, np.arange(len(place))):
            return joined
        return joined[torch.from_numpy(np.argsort(place))]

    def _release(self, trajectories: Iterable[list[_Piece]]) -> int:
        released = 0
        for pieces in trajectories:
            for chunk, start, stop in pieces:
                released += stop - start
                self._live[chunk] -= stop - start
                if self._live[chunk] == 0:
                    del self._live[chunk], self._chunks[chunk]
        return released

    def _compact(self) -> None:
        """Copy what is still needed into one chunk once most of what is stored is not."""
        stored = sum(chunk.shape[0] for chunk in self._chunks.values())
        live = sum(self._live.values())
        if stored <= 2 * live and len(self._chunks) <= _MAX_CHUNKS:
            return
        held = [*(pieces for line in self._ready for pieces in line), *self._running.values()]
        frames = self._gather(piece for pieces in held for piece in pieces)
        self._chunks.clear()
        self._live.clear()
        chunk, start = self._store(frames), 0
        for pieces in held:
            stop = start + _length(pieces)
            pieces[:] = [(chunk, start, stop)]
            start = stop

    def flush(self) -> int:
        """Drop the trajectories that are still running; return the number of frames dropped."""
        dropped = self._release(self._running.values())
        self._running.clear()
        self.frames_discarded += dropped
        return dropped

    def reset(self) -> int:
        """Drop everything held, complete trajectories too; return the number of frames dropped."""
        dropped = sum(self._live.values())
        self._running.clear()
        for line in self._ready:
            line.clear()
        self._chunks.clear()
        self._live.clear()
        self.frames_discarded += dropped
        return dropped


def _length(pieces: Iterable[_Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)
