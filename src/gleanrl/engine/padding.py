"""The arithmetic of trajectories: where they end, and how unequal ones become rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import END_FLAGS, NEXT, as_key, outermost


def end_flags(batch: TensorDictBase) -> torch.Tensor:
    """Return where trajectories end: OR over the topmost end flags under ``"next"``.

    Where the root has flags, those of nested groups (single agents, say) end nothing.

    Args:
        batch: ``[..., T]``, with leaves named ``done``, ``terminated`` or ``truncated`` anywhere
            under ``"next"``.

    Returns:
        A fresh bool tensor of the batch's shape.

    Raises:
        ConfigError: there is no such leaf.
    """
    after = batch.get(NEXT, None)
    if not isinstance(after, TensorDictBase):
        raise ConfigError(
            "the batch has no 'next' entry, so the ends of its episodes are not known"
        )
    ended: torch.Tensor | None = None
    found = map(as_key, after.keys(True, True))
    for key in outermost(key for key in found if key[-1] in END_FLAGS):
        flag = any_over_features(after.get(key), batch.ndim)
        ended = flag.clone() if ended is None else ended.logical_or_(flag)
    if ended is None:
        raise ConfigError(
            "the batch has none of 'done', 'terminated' and 'truncated' under 'next', so the ends "
            "of its episodes are not known"
        )
    return ended


def any_over_features(flag: torch.Tensor, ndim: int) -> torch.Tensor:
    """Reduce a flag ``[*batch, ...]`` to its ``ndim`` batch dimensions by OR."""
    flag = flag.bool()
    return flag if flag.ndim == ndim else flag.flatten(ndim).any(-1)


class Padding:
    """Where the frames of ``N`` trajectories, laid end to end, stand in ``[N, longest]``."""

    def __init__(self, lengths: torch.Tensor, frames: int) -> None:
        """Place trajectories of ``lengths`` ``[N]`` (int64, all positive), ``frames`` in total."""
        self.lengths = lengths
        self.rows = lengths.shape[0]
        self.longest = int(lengths.max()) if self.rows else 0
        self._even = self.rows * self.longest == frames
        if not self._even:
            rows = torch.arange(self.rows, device=lengths.device)
            self._first = lengths.cumsum(0) - lengths
            shift = (rows * self.longest - self._first).repeat_interleave(
                lengths, output_size=frames
            )
            self._place = torch.arange(frames, device=lengths.device) + shift

    def mask(self) -> torch.Tensor:
        """Return ``[N, longest]`` bool, True on frames."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    def tensor(self, frames: torch.Tensor) -> torch.Tensor:
        """Pad one leaf ``[K, ...]`` with zeros; a view if there is nothing to pad."""
        shape = (self.rows, self.longest, *frames.shape[1:])
        if self._even:
            return frames.reshape(shape)
        padded = frames.new_zeros((self.rows * self.longest, *frames.shape[1:]))
        return padded.index_copy_(0, self._place.to(frames.device), frames).view(shape)

    def objects(self, frames: Any) -> Any:
        """Pad an entry that holds no tensor by repeating each trajectory's last value."""
        if self._even:
            return frames.reshape(self.rows, self.longest)
        steps = torch.arange(self.longest, device=self.lengths.device)
        last = (self.lengths - 1).unsqueeze(-1)
        index = self._first.unsqueeze(-1) + torch.minimum(steps, last)
        # Indexing with a matrix would give both dimensions the name of the one they replace.
        return frames[index.reshape(-1)].reshape(self.rows, self.longest)

    def batch(self, frames: TensorDictBase) -> TensorDict:
        """Pad every entry of ``frames`` ``[K]``."""
        return restack(frames, (self.rows, self.longest), self.tensor, self.objects)


def restack(
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
            out[key] = restack(value, shape, tensor, objects)
        elif is_tensor_collection(value):
            inner = (*shape, *value.batch_size[1:])
            out[key] = value.apply(tensor, batch_size=inner)
        else:
            out[key] = tensor(value)
    return TensorDict(out, batch_size=(*shape, *frames.batch_size[1:]), device=frames.device)


def changes(values: torch.Tensor) -> torch.Tensor:
    """Tell for each element of ``[K]`` whether it differs from the one before (the first does)."""
    changed = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=changed[1:])
    return changed
