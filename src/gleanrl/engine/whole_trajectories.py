"""Trajectories: their ends, cut out of batches, gathered over several, summed over n steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import nn

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import (
    END_FLAGS,
    MASK,
    NEXT,
    TIME,
    TRAJ_IDS,
    Key,
    NestedKey,
    as_key,
    as_keys,
    format_key,
    outermost,
)
from gleanrl.core.options import check_int
from gleanrl.core.window import Array
from gleanrl.envs.saved_state import load_batch, save_state
from gleanrl.memory.tensordicts import indexable

_INVALID = -1
_MAX_CHUNKS = 64


def end_flags(batch: TensorDictBase) -> torch.Tensor:
    """Return the ends of trajectories: OR over the topmost end flags under ``"next"``.

    Where the root has flags, those of nested groups (single agents, say) end nothing.

    Args:
        batch: ``[..., T]``, with leaves named ``done``, ``terminated`` or ``truncated`` anywhere
            under ``"next"``.

    Returns:
        A fresh bool tensor of the batch's shape.
    """
    after = batch.get(NEXT, None)
    if not isinstance(after, TensorDictBase):
        raise ConfigError(
            "the batch has no 'next' entry, so the ends of its episodes are not known"
        )
    ended: torch.Tensor | None = None
    found = map(as_key, after.keys(True, True))
    for key in outermost(key for key in found if key[-1] in END_FLAGS):
        flag = _any_over_features(after.get(key), batch.ndim)
        ended = flag.clone() if ended is None else ended.logical_or_(flag)
    if ended is None:
        raise ConfigError(
            "the batch has none of 'done', 'terminated' and 'truncated' under 'next', so the ends "
            "of its episodes are not known"
        )
    return ended


def _any_over_features(flag: torch.Tensor, ndim: int) -> torch.Tensor:
    """Reduce a flag ``[*batch, ...]`` to its ``ndim`` batch dimensions by OR."""
    flag = flag.bool()
    return flag if flag.ndim == ndim else flag.flatten(ndim).any(-1)


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
        trajectory_key: Entry of the ids, instead of ``prefix``; the mask is next to it.
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
        ids = starts.cumsum(0) - 1
        frames.set(ids_key, ids)
    else:
        ids = ids.reshape(-1)
        starts = _changes(ids)
    valid = _valid(rollout_tensordict, ids, mask_key)
    if not bool(valid.all()):
        kept = valid.nonzero().squeeze(-1)
        frames = frames[kept]
        starts = _changes(starts.cumsum(0)[kept])
    first = starts.nonzero().squeeze(-1)
    lengths = torch.diff(first, append=first.new_full((1,), starts.shape[0]))
    if as_nested:
        return _nested(frames, lengths, as_nested)
    out = _in_rows(frames, lengths, mask_key)
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


def _valid(batch: TensorDictBase, ids: torch.Tensor, mask_key: Key) -> torch.Tensor:
    """Return a mask of collected frames, for trajectory ``ids`` ``[K]``."""
    valid, mask = ids != _INVALID, batch.get(mask_key, None)
    return valid if mask is None else valid & mask.reshape(-1)


def _dense(batch: TensorDictBase) -> TensorDictBase:
    if isinstance(batch, TensorDict):
        return batch
    try:
        return batch.contiguous()
    except RuntimeError as err:
        raise ConfigError(
            f"rows of equal length cannot hold {', '.join(_changing(batch))}: its shape changes "
            "from frame to frame"
        ) from err


def _changing(batch: TensorDictBase) -> Iterable[str]:
    for key in sorted(batch.keys(True, True), key=str):
        try:
            batch.get(key)
        except RuntimeError:
            yield format_key(as_key(key))


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
        ended = _any_over_features(flag, batch.ndim)
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
        return _restack(frames, shape, jagged, refuse)
    sizes = lengths.tolist()

    def strided(leaf: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(torch.split(leaf, sizes)), layout=torch.strided)

    return _restack(frames, (len(sizes), -1), strided, refuse)


_Piece: TypeAlias = tuple[TensorDictBase, int, int]
"""Stored frames, and the first one and one past the last one of a trajectory within these."""


class WholeTrajectories:
    """Collects batches and returns whole trajectories, a fixed number at a time.

    Trajectories leave in the order in which they ended: by batch, then by the time index of their
    last frame, then by id (`belong_to` may change that). Memory is proportional to the frames held:
    those of a batch are copied once when it comes in, and once more if most of their batch has left
    before them.
    """

    def __init__(self, num_trajectories: int, traj_format: str = "padded") -> None:
        """Return ``num_trajectories`` at a time, as ``"padded"`` rows or end to end (``"cat"``)."""
        self.num_trajectories = num_trajectories
        self.frames_discarded = 0
        """Frames dropped by `flush` and `reset` so far, and of trajectories that were left."""
        self._padded = traj_format == "padded"
        self._running: dict[int, list[_Piece] | None] = {}
        """What there is of each trajectory that has not ended; ``None`` if its beginning was
        dropped, and the rest will be."""
        self._num_envs = 0
        self._latest: dict[int, int] = {}
        """By environment: its newest trajectory."""
        self._ready: list[deque[list[_Piece]]] = [deque()]
        """One line, or one for every environment; a batch takes equally many from each."""

    def belong_to(self, num_envs: int, equally: bool = False) -> None:
        """Set the number of environments; environment ``id % num_envs`` made trajectory ``id``.

        To be called before any batch came. An environment makes one trajectory at a time: one that
        had not ended when it began another (a worker was lost, and replaced) never will, and is
        dropped.

        With ``equally``, as many trajectories are taken from each environment. They leave in the
        order in which it made them, and a batch holds them environment by environment. What
        environments with short ones make beyond their share waits for later batches.
        """
        self._num_envs = num_envs
        if equally:
            share = -(-self.num_trajectories // num_envs)
            self.num_trajectories = share * num_envs
            self._ready = [deque() for _ in range(num_envs)]

    def push(self, td: TensorDictBase) -> None:
        """Add one batch ``[..., T]``; kept frames are copied."""
        ids = td.get(TRAJ_IDS, None)
        if ids is None:
            raise ConfigError(
                f"whole trajectories need {format_key(TRAJ_IDS)} in every batch; leave "
                "track_traj_ids on"
            )
        ids = ids.reshape(-1)
        kept = _valid(td, ids, MASK).nonzero().squeeze(-1)
        if kept.shape[0] == 0:
            return
        frames = td.reshape(-1)
        copy = frames.clone() if kept.shape[0] == ids.shape[0] else frames[kept]
        ended = end_flags(td).reshape(-1)[kept].cpu().numpy()
        time = (kept % td.shape[-1]).cpu().numpy()
        self._take(copy, ids[kept].cpu().numpy(), ended, time)
        self._compact()

    def _take(self, frames: TensorDictBase, ids: Array, ended: Array, time: Array) -> None:
        # A new run starts where the id changes, and after an end even if the id stays.
        last = np.flatnonzero(np.append((ids[1:] != ids[:-1]) | ended[:-1], True))
        finished: list[tuple[int, int, list[_Piece]]] = []
        start = 0
        ends = np.stack((ids[last], last + 1, ended[last], time[last]), 1)
        for traj, stop, done, when in ends.tolist():
            if traj not in self._running:
                self._begin(traj)
            pieces = self._running[traj]
            if pieces is None:
                self.frames_discarded += stop - start
            else:
                pieces.append((frames, start, stop))
            start = stop
            if done:
                del self._running[traj]
                if pieces is not None:
                    finished.append((when, traj, pieces))
        finished.sort(key=lambda item: item[:2])
        for _, traj, pieces in finished:
            self._ready[traj % len(self._ready)].append(pieces)

    def _begin(self, traj: int) -> None:
        if self._num_envs:
            env = traj % self._num_envs
            left = self._running.pop(self._latest.get(env, _INVALID), None)
            self._latest[env] = traj
            if left is not None:
                self.frames_discarded += _length(left)
        self._running[traj] = []

    def pop(self, fewer: bool = False) -> TensorDict | None:
        """Return ``num_trajectories`` whole trajectories, or ``None`` if there are fewer.

        Args:
            fewer: Return those that there are, if there are fewer.

        Returns:
            Fresh memory, time the last dimension. Padded: ``[N, T_max]`` with zeros and a mask at
            ``("collector", "mask")``; entries that are not tensors repeat their last value. Cat:
            the trajectories end to end, ``[T_1 + ... + T_N]``.
        """
        share = self.num_trajectories // len(self._ready)
        if fewer:
            share = min(share, *map(len, self._ready))
        if not share or any(len(line) < share for line in self._ready):
            return None
        chosen = [line.popleft() for line in self._ready for _ in range(share)]
        frames, lengths = _gather(chosen), list(map(_length, chosen))
        del chosen  # and what was stored of them, before they are padded
        if not self._padded:
            frames.names = [TIME]
            return frames
        out = _in_rows(_dense(frames), torch.tensor(lengths, device=frames.device), MASK)
        out.names = [None, TIME]
        return out

    def _held(self) -> list[list[_Piece]]:
        """Return all trajectories, whole and running."""
        return [*(pieces for line in self._ready for pieces in line), *self._whole_so_far()]

    def _compact(self) -> None:
        """Copy the needed frames into one chunk, if most stored frames are not needed."""
        held = self._held()
        chunks, needed = _chunks(held), sum(map(_length, held))
        if len(chunks) > _MAX_CHUNKS or sum(one.shape[0] for one in chunks) > 2 * needed:
            _place(held, _gather(held), map(_length, held))

    def state(self) -> dict[str, Any]:
        """Return all that is held, as plain data."""
        held, running = self._held(), self._running.items()
        return {
            "frames": [save_state(_gather(held))] if held else [],
            "running": [(traj, None if ps is None else _length(ps)) for traj, ps in running],
            "latest": list(self._latest.items()),
            "ready": [list(map(_length, line)) for line in self._ready],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state`, with the same number of environments."""
        if len(state["ready"]) != len(self._ready):
            raise ConfigError(
                "the state holds trajectories that were dealt out by another traj_quota, or to "
                "another number of environments"
            )
        running = dict(state["running"])
        self._running = {traj: None if n is None else [] for traj, n in running.items()}
        self._latest = dict(state["latest"])
        self._ready = [deque([] for _ in line) for line in state["ready"]]
        lengths = [*chain(*state["ready"]), *(n for n in running.values() if n is not None)]
        for frames in map(load_batch, state["frames"]):
            _place(self._held(), frames, lengths)

    def _whole_so_far(self) -> list[list[_Piece]]:
        """Return the frames so far of trajectories that have not ended."""
        return [pieces for pieces in self._running.values() if pieces is not None]

    def flush(self) -> None:
        """Drop the trajectories that are still running.

        What may come of them is taken for trajectories of its own.
        """
        self.frames_discarded += sum(map(_length, self._whole_so_far()))
        self._running.clear()

    def reset(self, passed: TensorDictBase | None = None) -> None:
        """Drop all frames, including complete trajectories.

        What is still to come of running trajectories is dropped, too. ``passed`` is the next batch
        if it was delivered in another way: its frames are not counted.
        """
        discarded = self.frames_discarded + sum(map(_length, self._held()))
        if passed is not None:
            self.push(passed)
        self._running = dict.fromkeys(self._running)
        for line in self._ready:
            line.clear()
        self.frames_discarded = discarded


def _chunks(trajectories: Iterable[list[_Piece]]) -> list[TensorDictBase]:
    """Return the stored frames that ``trajectories`` are parts of, each once."""
    return list({id(piece[0]): piece[0] for pieces in trajectories for piece in pieces}.values())


def _gather(trajectories: Sequence[list[_Piece]]) -> Any:
    """Return the frames of ``trajectories``, end to end in fresh memory."""
    chunks = _chunks(trajectories)
    number = {id(chunk): n for n, chunk in enumerate(chunks)}
    rows = [(number[id(chunk)], a, b) for pieces in trajectories for chunk, a, b in pieces]
    chunk, start, stop = np.array(rows, np.int64).T
    sizes = stop - start
    source = np.arange(sizes.sum()) + np.repeat(start - (sizes.cumsum() - sizes), sizes)
    owner = np.repeat(chunk, sizes)
    parts = [frames[torch.from_numpy(source[owner == n])] for n, frames in enumerate(chunks)]
    if len(parts) == 1:
        return parts[0]
    joined = torch.cat(parts)
    place = np.argsort(owner, kind="stable")
    if np.array_equal(place, np.arange(len(place))):
        return joined
    return joined[torch.from_numpy(np.argsort(place))]


def _place(
    trajectories: Iterable[list[_Piece]], frames: TensorDictBase, lengths: Iterable[int]
) -> None:
    """Have ``trajectories`` of ``lengths`` lie end to end in ``frames``."""
    start = 0
    for pieces, length in zip(trajectories, list(lengths), strict=True):
        pieces[:] = [(frames, start, start + length)]
        start += length


def _length(pieces: Iterable[_Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def _in_rows(frames: TensorDictBase, lengths: torch.Tensor, mask_key: Key) -> TensorDictBase:
    """Put trajectories of ``lengths``, end to end in ``frames`` ``[K]``, into rows with a mask.

    Tensors are zero beyond a trajectory's end, views if there is nothing to pad; entries that are
    no tensors repeat the trajectory's last value.
    """
    rows, longest = lengths.shape[0], int(lengths.max()) if lengths.numel() else 0
    steps = torch.arange(longest, device=lengths.device)
    mask = steps < lengths.unsqueeze(-1)
    if rows * longest == frames.shape[0]:
        out = frames.reshape(rows, longest)
    else:
        place = mask.reshape(-1).nonzero().squeeze(-1)
        ends = lengths.cumsum(0).unsqueeze(-1)
        repeated = torch.minimum(ends - lengths.unsqueeze(-1) + steps, ends - 1).reshape(-1)

        def pad(leaf: torch.Tensor) -> torch.Tensor:
            padded = leaf.new_zeros((rows * longest, *leaf.shape[1:]))
            indexable(padded).index_copy_(0, place.to(leaf.device), indexable(leaf))
            return padded.view(rows, longest, *leaf.shape[1:])

        def repeat(objects: Any) -> Any:
            return objects[repeated].reshape(rows, longest)

        out = _restack(frames, (rows, longest), pad, repeat)
    out.set(mask_key, mask)
    return out


def _restack(
    frames: TensorDictBase,
    shape: Sequence[int],
    tensor: Callable[[torch.Tensor], torch.Tensor],
    objects: Callable[[Any], Any],
) -> TensorDict:
    """Rebuild ``frames`` ``[K, ...]`` with its first dimension replaced by ``shape``."""
    out: dict[str, Any] = {}
    for key, value in frames.items():
        if is_non_tensor(value):
            out[key] = objects(value)
        elif isinstance(value, TensorDictBase):
            out[key] = _restack(value, shape, tensor, objects)
        elif is_tensor_collection(value):
            inner = (*shape, *value.batch_size[1:])
            out[key] = value.apply(tensor, batch_size=inner)
        else:
            out[key] = tensor(value)
    return TensorDict(out, batch_size=(*shape, *frames.batch_size[1:]), device=frames.device)


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Tell for each element of ``[K]`` whether it differs from the one before (the first does)."""
    changed = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=changed[1:])
    return changed


class MultiStep(nn.Module):
    """Turns one-step transitions into ``n_steps``-step ones, for a collector's ``postproc``.

    Every frame's reward becomes the discounted sum of the next ``n_steps`` rewards. All other
    entries under ``"next"`` come from the last of these steps: the observation, and the end flags
    that decide about bootstrapping. Sums stop at the end of a trajectory, at the end of the batch
    and at invalid frames, so the last frames of a batch sum fewer rewards;
    ``"steps_to_next_obs"`` is their number.
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey = MASK,
        ids_key: NestedKey = TRAJ_IDS,
    ) -> None:
        """Look ahead up to ``n_steps`` steps.

        Args:
            gamma: Discount per step, in (0, 1].
            n_steps: Largest number of summed rewards; 1 changes no transition.
            reward_keys: Rewards under ``"next"`` to sum; by default all leaves named ``"reward"``.
            mask_key: Entry of the batch that marks valid frames, if it has one.
            ids_key: Entry of trajectory ids, if there is one; end flags are always used.

        Raises:
            ConfigError: a number is out of range.
        """
        super().__init__()
        if not 0 < gamma <= 1:
            raise ConfigError(f"gamma ({gamma}) must be above 0 and at most 1")
        self.gamma = gamma
        self.n_steps = check_int("n_steps", n_steps, least=1)
        self.reward_keys = None if reward_keys is None else as_keys(reward_keys)
        self.mask_key, self.ids_key = as_key(mask_key), as_key(ids_key)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch with n-step transitions.

        Args:
            tensordict: ``[..., T]`` with observations, rewards and end flags under ``"next"``; not
                changed. Rewards start with the batch's shape.

        Returns:
            The same entries in a new container, those under ``"next"`` replaced, and in addition
            ``("next", "original_reward")`` (next to each reward, its old value), and in the batch's
            shape ``"steps_to_next_obs"`` (int64, ``1 .. n_steps``), ``"gamma"`` (float32, the
            discount of the next observation's value) and ``"nonterminal"`` (bool, False on the last
            frame of every trajectory of the batch and on frames never collected).

        Raises:
            ConfigError: there are no end flags or no rewards.
        """
        rewards = self._rewards(tensordict)
        last = self._last_frames(tensordict)
        ahead = _look_ahead(last, self.n_steps - 1)
        out = tensordict.copy()
        after = out.get(NEXT)
        originals: dict[Key, torch.Tensor] = {key: after.get(key) for key in rewards}
        moved = after.exclude(*rewards)
        if self.n_steps > 1:
            moved = _take_ahead(moved, ahead)
        for key, reward in originals.items():
            moved.set((*key[:-1], "original_" + key[-1]), reward)
            moved.set(key, _discounted_sum(reward, ahead, self.gamma, self.n_steps))
        out.set(NEXT, moved)
        nonterminal = ~last
        mask = tensordict.get(self.mask_key, None)
        if mask is not None:
            nonterminal &= mask
        out.set("steps_to_next_obs", ahead + 1)
        out.set("gamma", self.gamma ** (ahead + 1).float())  # whatever the default dtype is
        out.set("nonterminal", nonterminal)
        return out

    def _rewards(self, batch: TensorDictBase) -> tuple[Key, ...]:
        after: Any = batch.get(NEXT, None)
        found = () if after is None else as_keys(after.keys(include_nested=True, leaves_only=True))
        if self.reward_keys is None:
            chosen = tuple(key for key in found if key[-1] == "reward")
            if not chosen:
                raise ConfigError(
                    "no entry under 'next' is called 'reward'; name it with reward_keys"
                )
            return chosen
        missing = [format_key((NEXT, *key)) for key in self.reward_keys if key not in found]
        if missing:
            raise ConfigError(f"the batch has no {', '.join(missing)}, named in reward_keys")
        return self.reward_keys

    def _last_frames(self, batch: TensorDictBase) -> torch.Tensor:
        last = end_flags(batch)
        last[..., -1:] = True
        for key in (self.ids_key, self.mask_key):
            marks = batch.get(key, None)
            if marks is not None:
                last[..., :-1] |= marks[..., 1:] != marks[..., :-1]
        return last


def _look_ahead(last: torch.Tensor, most: int) -> torch.Tensor:
    """Return the further steps, at most ``most``, that each frame ``[..., T]`` can look ahead."""
    steps = last.shape[-1]
    time = torch.arange(steps, device=last.device)
    end = torch.where(last, time, steps).flip(-1).cummin(-1).values.flip(-1)
    return (end - time).clamp_max_(most)


def _discounted_sum(
    reward: torch.Tensor, ahead: torch.Tensor, gamma: float, n_steps: int
) -> torch.Tensor:
    """Sum ``reward`` ``[..., T, *]`` over each frame and the ``ahead`` ``[..., T]`` after it."""
    dim = ahead.ndim - 1
    steps = ahead.shape[-1]
    total = reward.clone() if reward.is_floating_point() else reward.to(torch.get_default_dtype())
    within = ahead.reshape(*ahead.shape, *[1] * (reward.ndim - ahead.ndim))
    for k in range(1, min(n_steps, steps)):
        reached = within.narrow(dim, 0, steps - k) >= k
        # Selecting rather than multiplying keeps a NaN or infinity in its own trajectory.
        term = torch.where(reached, reward.narrow(dim, k, steps - k) * gamma**k, 0)
        total.narrow(dim, 0, steps - k).add_(term)
    return total


def _take_ahead(after: TensorDictBase, ahead: torch.Tensor) -> TensorDictBase:
    """Replace every frame of ``after`` ``[..., T]`` by the one ``ahead`` steps later."""
    frames = ahead.numel()
    index = torch.arange(frames, device=ahead.device) + ahead.reshape(-1)
    return after.reshape(-1)[index].reshape(ahead.shape)
