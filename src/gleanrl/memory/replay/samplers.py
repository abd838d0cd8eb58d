"""Which rows a sample holds: uniform, or each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.memory.replay.storages import Storage

_TRIES = 8


@dataclass(slots=True)
class Draw:
    """Frames to be copied."""

    index: torch.Tensor
    """Flat places (slot times environments plus environment), int64 ``[n]``."""
    seen: torch.Tensor | None
    """Sequence numbers of their slots when chosen; ``None`` where no other can write meanwhile."""
    info: dict[str, torch.Tensor] = field(default_factory=dict)
    """More entries of the sample, ``[n]``."""
    ends: torch.Tensor | None = None
    """Which frames end a slice, bool ``[n]``."""
    first: bool = False
    """Whether an epoch began with these."""
    last: bool = False
    """Whether an epoch ended with these."""


class Sampler:
    """Chooses complete rows. One per buffer and process: it has state of its own."""

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose ``count`` frames.

        Raises:
            ReplayError: nothing is there to choose from.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""

    def position(self) -> Any:
        """Return where the epoch is, for `seek`; later draws must not change what is returned."""
        return None

    def seek(self, position: Any) -> None:
        """Go back to a `position`: what was drawn since then was not delivered."""

    def update_priority(
        self, storage: Storage, index: torch.Tensor, priority: torch.Tensor
    ) -> None:
        """Take note of priorities; samplers without any ignore them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state."""
        return {}

    def check_state_dict(self, state: dict[str, Any], frames: int) -> None:
        """Check a state before anything is loaded.

        Args:
            state: What `load_state_dict` will be given.
            frames: Places of the ring.

        Raises:
            ConfigError: it is not of such a sampler.
        """

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        """Put a checked state back, after the rows it belongs to."""
        self.restart()


class RandomSampler(Sampler):
    """Every complete row with the same probability, with replacement."""

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose uniformly."""
        ring = storage.ring
        top = ring.top
        if top == 0:
            raise empty_error(storage)
        frames = top * storage.envs

        def propose(number: int) -> torch.Tensor:
            return torch.randint(frames, (number,), generator=generator)

        if not storage.shared and ring.live == top:
            return Draw(propose(count), None)
        draw = draw_complete(storage, propose, count)
        return _exact(storage, count, generator) if draw is None else draw


class SamplerWithoutReplacement(Sampler):
    """Every row once per epoch. Rows that come during an epoch belong to the next.

    Args:
        drop_last: Leave out the last batch of an epoch if it would be smaller.
        shuffle: In random order; in the order of their places otherwise.
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.restart()

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""
        self._order = self._numbers = torch.empty(0, dtype=torch.int64)
        self._next = 0

    def position(self) -> Any:
        """Return what the epoch holds and how far it is."""
        return self._order, self._numbers, self._next

    def seek(self, position: Any) -> None:
        """Deliver again what was drawn since ``position``."""
        self._order, self._numbers, self._next = position

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Take the next ``count`` rows of the epoch, or what is left of it."""
        first = self._next == 0
        chosen, seen = self._take(storage, count)
        if not len(chosen) or (self.drop_last and len(chosen) < count):
            # Nothing was begun, or the rest of the epoch was overwritten.
            first = True
            self._begin(storage, generator)
            chosen, seen = self._take(storage, count)
            if self.drop_last and len(chosen) < count:
                raise ReplayError(
                    f"an epoch over {len(self._order)} rows has no whole batch of {count}; lower "
                    "the batch size, or drop_last=False"
                )
            if not len(chosen):
                raise empty_error(storage)
        left = len(self._order) - self._next
        last = left == 0 or (self.drop_last and left < count)
        if last:
            self.restart()
        return Draw(chosen, seen, first=first, last=last)

    def _begin(self, storage: Storage, generator: torch.Generator | None) -> None:
        slots, numbers = _complete(storage)
        order = storage.frames_of(slots)
        if self.shuffle:
            order = order[torch.randperm(len(order), generator=generator)]
        self._order, self._next = order, 0
        envs = storage.envs
        self._numbers = numbers[order.div(envs, rounding_mode="floor") if envs > 1 else order]

    def _take(self, storage: Storage, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take rows that are still those with which the epoch began."""
        parts, numbers = [self._order[:0]], [self._order[:0]]
        while count > 0 and self._next < len(self._order):
            taken = slice(self._next, self._next + count)
            part, seen = self._order[taken], self._numbers[taken]
            self._next += len(part)
            same = storage.sequence_of(part) == seen
            parts.append(part[same])
            numbers.append(seen[same])
            count -= len(parts[-1])
        return torch.cat(parts), torch.cat(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch."""
        return {"order": self._order[self._next :].clone()}

    def check_state_dict(self, state: dict[str, Any], frames: int) -> None:
        """Refuse what names no places, or one twice."""
        order = saved_tensor(state, "order", torch.int64)
        inside = not len(order) or 0 <= int(order.min()) <= int(order.max()) < frames
        if not inside or len(torch.unique(order)) < len(order):
            raise ConfigError(f"an epoch over other places than those of {frames} frames: {order}")

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        """Continue the epoch."""
        order = state["order"]
        numbers = storage.sequence_of(order)
        complete = numbers > 0
        self._order, self._numbers, self._next = order[complete], numbers[complete], 0


def saved_tensor(state: dict[str, Any], name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a one-dimensional tensor of a sampler's state."""
    tensor = state.get(name)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.ndim != 1:
        raise ConfigError(f"this sampler's state has {name!r} ({dtype}); given: {sorted(state)}")
    return tensor


def draw_complete(
    storage: Storage, propose: Callable[[int], torch.Tensor], count: int
) -> Draw | None:
    """Draw from ``propose`` until all rows are complete; ``None`` if that seems to lead nowhere."""
    index = propose(count)
    seen = storage.sequence_of(index)
    for _ in range(_TRIES):
        if int(seen.min()) > 0:
            return Draw(index, seen)
        bad = (seen <= 0).nonzero().squeeze(1)
        again = propose(len(bad))
        index[bad] = again
        seen[bad] = storage.sequence_of(again)
    return Draw(index, seen) if int(seen.min()) > 0 else None


def _exact(storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
    slots, numbers = _complete(storage)
    chosen = slots[torch.randint(len(slots), (count,), generator=generator)]
    seen = numbers[chosen]
    if storage.envs > 1:
        envs = torch.randint(storage.envs, (count,), generator=generator)
        chosen = chosen * storage.envs + envs
    return Draw(chosen, seen)


def _complete(storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots that are complete, and the sequence numbers of all slots below the top."""
    numbers = torch.from_numpy(storage.ring.sequence[: storage.ring.top].copy())
    slots = (numbers > 0).nonzero().squeeze(1)
    if not len(slots):
        raise empty_error(storage)
    return slots, numbers


def empty_error(storage: Storage) -> ReplayError:
    """Say that there is nothing to sample."""
    return ReplayError(
        f"nothing to sample: the buffer holds {len(storage)} whole rows"
        + ("; it is being written for the first time" if storage.ring.top else "; extend() it")
    )
