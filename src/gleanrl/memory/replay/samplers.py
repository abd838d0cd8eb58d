"""Samplers: uniform, each row once, or in proportion to priorities."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.memory.replay.row_visibility import Version
from gleanrl.memory.replay.storages import Storage

_TRIES = 8
_FANOUT = 32
_SHIFT = 5
_TINY = 1e-300
_SAMPLES_KNOWN = 64
_TOP = 2048
"""The largest count of numbers that is searched at once."""
_MANY = 2048
"""The count from which a search for repeated nodes is cheaper than visiting them twice."""


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
    """True for frames that end a slice, bool ``[n]``."""
    first: bool = False
    """Whether an epoch began with these."""
    last: bool = False
    """Whether an epoch ended with these."""


class Sampler:
    """Chooses complete rows. Each buffer and process has its own, because it has state."""

    STATE: tuple[str, ...] = ()
    """Entries of `state_dict`."""

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose ``count`` frames.

        Raises:
            ReplayError: nothing is there to choose from.
        """
        raise NotImplementedError

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""

    def position(self) -> Any:
        """Return the position in the epoch, for `seek`; later draws must not change the result."""
        return None

    def seek(self, position: Any) -> None:
        """Return to a `position`, because later draws were not delivered."""

    def update_priority(
        self, storage: Storage, index: torch.Tensor, priority: torch.Tensor
    ) -> None:
        """Store priorities; samplers without priorities ignore them."""

    def state_dict(self, storage: Storage) -> dict[str, Any]:
        """Return the sampler's state, for the rows that ``storage`` has now."""
        return {}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of another sampler, before anything is changed."""
        if lack := sorted(set(self.STATE) - set(state)):
            raise ConfigError(
                f"{type(self).__name__} needs a state with {lack}; given: {sorted(state)}, the "
                "state of another sampler"
            )

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        """Restore a state, after the rows of this state."""
        self.restart()


class RandomSampler(Sampler):
    """Every complete row with the same probability, with replacement."""

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        frames = storage.ring.top * storage.envs
        if frames == 0:
            raise empty_error(storage)

        def propose(number: int) -> torch.Tensor:
            return torch.randint(frames, (number,), generator=generator)

        draw = draw_complete(storage, propose, count)
        return _exact(storage, count, generator) if draw is None else draw


class SamplerWithoutReplacement(Sampler):
    """Every row once per epoch. Rows that come during an epoch belong to the next.

    Args:
        drop_last: Leave out the last batch of an epoch if it would be smaller.
        shuffle: In random order; in the order of their places otherwise.
    """

    STATE = ("order",)
    _UNITS = "rows"
    _SHAPE: tuple[int, ...] = (0,)

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.restart()

    def restart(self) -> None:
        self._order = torch.empty(self._SHAPE, dtype=torch.int64)
        """The units of the epoch, along the last dimension."""
        self._numbers = torch.empty(0, dtype=torch.int64)
        """Sequence numbers of all slots when it began."""
        self._next = 0

    def position(self) -> Any:
        """Return the units of the epoch and the progress in it."""
        return self._order, self._numbers, self._next

    def seek(self, position: Any) -> None:
        """Deliver the draws since ``position`` again."""
        self._order, self._numbers, self._next = position

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Take the next ``count`` frames of the epoch, or its remaining frames."""
        units, length = self._sizes(count)
        first, chosen = self._next == 0, self._take(storage, units, length)
        if chosen is None:  # nothing was begun, or the rest of the epoch was overwritten
            order, self._numbers = self._begin(storage, length)
            if self.shuffle:
                order = order[..., torch.randperm(order.shape[-1], generator=generator)]
            first, self._order, self._next = True, order, 0
            chosen = self._take(storage, units, length)
        total = self._order.shape[-1]
        if chosen is None:
            raise ReplayError(
                f"an epoch over {total} {self._UNITS} has no whole batch of {units}; lower the "
                "batch size, or drop_last=False"
            )
        draw = self._draw_of(storage, chosen, length, generator)
        left = total - self._next
        draw.first, draw.last = first, left == 0 or (self.drop_last and left < units)
        if draw.last:
            self.restart()
        return draw

    def _take(self, storage: Storage, units: int, length: int) -> torch.Tensor | None:
        """Take the next units; ``None`` if none remain, or too few for a batch."""
        parts, have = [], 0
        while have < units and self._next < self._order.shape[-1]:
            part = self._order[..., self._next : self._next + units - have]
            self._next += part.shape[-1]
            parts.append(self._still_stored(storage, part, length))
            have += parts[-1].shape[-1]
        if not have or (self.drop_last and have < units):
            return None
        return torch.cat(parts, -1)

    def _sizes(self, count: int) -> tuple[int, int]:
        """Return the number of units for ``count`` frames, and the frames of each unit."""
        return count, 1

    def _begin(self, storage: Storage, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the units of a new epoch, and the sequence numbers of all slots."""
        slots, numbers = _complete(storage)
        return storage.frames_of(slots), numbers

    def _still_stored(self, storage: Storage, order: torch.Tensor, length: int) -> torch.Tensor:
        """Return the units that have not been overwritten since the epoch began."""
        return order[storage.sequence_of(order) == self._numbers[storage.slots_of(order)]]

    def _draw_of(
        self, storage: Storage, chosen: torch.Tensor, length: int, generator: torch.Generator | None
    ) -> Draw:
        return Draw(chosen, self._numbers[storage.slots_of(chosen)])

    def state_dict(self, storage: Storage) -> dict[str, Any]:
        """Return the rest of the epoch, without rows that were overwritten."""
        return {self.STATE[0]: self._still_stored(storage, self._order[..., self._next :], 1)}

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        numbers = storage.ring.sequence_tensor[: storage.ring.slots]
        # No row ever has the number 1: those that are not complete are none of the epoch's.
        self._numbers = numbers.where(numbers > 0, 1)
        self._order, self._next = state[self.STATE[0]], 0


def draw_complete(
    storage: Storage, propose: Callable[[int], torch.Tensor], count: int
) -> Draw | None:
    """Draw from ``propose`` until all rows are complete; ``None`` if that seems to lead nowhere."""
    index = propose(count)
    if not storage.shared and storage.ring.live == storage.ring.top:
        return Draw(index, None)
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
    """Return the error for a buffer without rows to sample."""
    begun = "it is being written for the first time, so" if storage.ring.top else "extend() it, or"
    return ReplayError(
        f"nothing to sample: the buffer holds {len(storage)} whole rows; {begun} have sample() "
        "wait for a collector: limiter=RateLimiter(min_size_to_sample=...)"
    )


class PrioritizedSampler(Sampler):
    """Prioritized experience replay: rows in proportion to ``(priority + eps) ** alpha``.

    New rows get the largest priority seen so far. Samples carry ``"index"`` and the importance
    weights ``(p_min / p) ** beta``, at most 1, under ``"priority_weight"`` and ``"_weight"`` (the
    name it has in older code), float32.

    Each process that samples has its own priorities. In a shared buffer, rows written by other
    processes get the default priority at the next sample of this process.

    `update_priority` with the whole ``"index"`` of one of the last 64 samples leaves out places
    that were overwritten since, so a new row keeps its own priority.

    Args:
        max_capacity: Frames the storage can hold, its ``max_size``.
        alpha: The exponent of priorities; 0 is uniform. You may change it at any time, but from 0
            only while no row has a priority.
        beta: The exponent of the importance weights; 1 corrects fully. You may change it at any
            time.
        eps: A number that is added to every priority.
    """

    STATE = ("priorities", "alpha", "max_priority")

    def __init__(self, max_capacity: int, alpha: float, beta: float, eps: float = 1e-8) -> None:
        if not all(0 <= value < math.inf for value in (alpha, beta, eps)):
            raise ConfigError(
                f"alpha, beta and eps are finite and not negative: {alpha}, {beta}, {eps}"
            )
        self.max_capacity = max_capacity
        self._alpha = alpha
        self.beta = beta
        self.eps = eps
        self._tree = SumTree(max_capacity)
        self._max = 1.0
        self._version: Version | None = None
        self._known = np.zeros(max_capacity, np.int64)
        self._drawn: deque[tuple[torch.Tensor, int]] = deque(maxlen=_SAMPLES_KNOWN)
        """Places of the latest samples, and the least sequence number of later rows."""

    @property
    def alpha(self) -> float:
        """The exponent of priorities, of past and of future ones."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        raised = self._with_alpha(self._tree.leaves, self._alpha, alpha)
        self._tree.set(torch.arange(self.max_capacity), raised)
        self._alpha = alpha

    def _with_alpha(self, raised: torch.Tensor, before: float, alpha: float) -> torch.Tensor:
        """Return numbers raised to ``before`` as numbers raised to ``alpha``."""
        same = before == alpha or not raised.any()
        if not (0 <= alpha < math.inf and (same or before > 0)):
            raise ConfigError(
                f"priorities raised to alpha={before} cannot be raised to alpha={alpha}: it must "
                "be finite and not negative, and 0 makes all priorities equal for good"
            )
        changed = raised if same else raised.pow(alpha / before).mul_(raised > 0)
        if not float(changed.max()) * self.max_capacity < math.inf:
            raise ConfigError(f"priorities overflow if raised to alpha={alpha}: {raised}")
        return changed

    @property
    def default_priority(self) -> float:
        """The priority of new rows: the largest priority seen so far, 1 at first."""
        return self._max

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        self._follow(storage)

        def propose(number: int) -> torch.Tensor:
            places = self._tree.draw(number, generator)
            if places is not None:
                return places
            if storage.ring.live:
                raise ReplayError("nothing to sample: the priorities of all rows are zero")
            raise empty_error(storage)

        for _ in range(_TRIES // 2):
            if (draw := draw_complete(storage, propose, count)) is not None:
                chosen = self._tree.leaves.index_select(0, draw.index)
                weight = chosen.div_(self._tree.smallest()).float().pow_(-self.beta)
                draw.info = {"priority_weight": weight, "_weight": weight}
                self._drawn.append((draw.index, storage.ring.next_number))
                return draw
            self._drop(storage)
        raise empty_error(storage)

    def _drop(self, storage: Storage) -> None:
        """Remove the priorities of incomplete rows (mostly of writers that died)."""
        places = torch.arange(storage.ring.top * storage.envs)
        gone = places[storage.sequence_of(places) <= 0]
        self._tree.set(gone, torch.zeros(len(gone), dtype=torch.float64))

    def update_priority(
        self, storage: Storage, index: torch.Tensor, priority: torch.Tensor
    ) -> None:
        """Set the priorities of flat places; leave out places without a complete row.

        Of the places of a sample, those that were overwritten since are left out as well.

        Raises:
            ConfigError: as `raised`.
        """
        self._follow(storage)
        raised = self.raised(priority)
        if len(priority):
            self._max = max(self._max, float(priority.max()))
        numbers = storage.sequence_of(index)
        for places, later in reversed(self._drawn):
            if torch.equal(places, index):
                same = (numbers > 0) & (numbers < later)
                index, raised, numbers = index[same], raised[same], numbers[same]
                break
        self._tree.set(index, raised.mul_(numbers > 0))

    def raised(self, priority: torch.Tensor) -> torch.Tensor:
        """Return ``(priority + eps) ** alpha``, float64.

        Raises:
            ConfigError: one is negative, not a number, or so large that their sum might overflow.
        """
        raised = priority.to(torch.float64).add(self.eps).pow_(self.alpha)
        if len(raised):
            least, most = float(priority.min()), float(raised.max()) * self.max_capacity
            if not (least >= 0 and most < math.inf):  # NaN fails this too
                raise ConfigError(
                    f"priorities are finite and not negative, and so is their sum: {priority}, to "
                    f"the power of {self.alpha}"
                )
        return raised

    def _follow(self, storage: Storage) -> None:
        """Set the first priority of rows that were completed since the last call.

        The version is taken first, so later changes are looked at again.
        """
        ring = storage.ring
        if ring.is_at(self._version):
            return
        if storage.max_size > self.max_capacity:
            raise ConfigError(
                f"max_capacity ({self.max_capacity}) is less than the storage's max_size "
                f"({storage.max_size})"
            )
        version, recent = ring.changes(self._version)
        if recent is None:
            recent = np.flatnonzero(ring.sequence != self._known[: len(ring.sequence)])
        else:
            recent = recent[ring.sequence[recent] != self._known[recent]]
        if len(recent):
            self._fresh(storage, recent)
        self._version = version

    def _fresh(self, storage: Storage, slots: Any) -> None:
        numbers, envs = storage.ring.sequence[slots], storage.envs
        self._known[slots] = numbers
        default = (self._max + self.eps) ** self.alpha
        values = torch.from_numpy(np.where(numbers > 0, default, 0.0))
        if envs > 1:
            values = values.repeat_interleave(envs)
        places = storage.frames_of(torch.from_numpy(slots))
        inside = places < self.max_capacity
        self._tree.set(places[inside], values[inside])

    def state_dict(self, storage: Storage) -> dict[str, Any]:
        """Return all priorities (raised to alpha), alpha, and the largest priority seen."""
        self._follow(storage)
        priorities = self._tree.leaves.clone()
        return {"priorities": priorities, "alpha": self._alpha, "max_priority": self._max}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        self._with_alpha(state["priorities"], state["alpha"], self._alpha)

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        self._follow(storage)
        raised = self._with_alpha(state["priorities"], state["alpha"], self._alpha)
        self._tree.set(torch.arange(min(len(raised), self.max_capacity)), raised)
        self._max = state["max_priority"]


class SumTree:
    """Non-negative numbers with random draws in proportion to their size.

    A node has 32 children side by side, so that one level costs one gathering of rows
    for all draws together. Sums are recomputed from the children, never adjusted: they do not
    drift. Double precision throughout.
    """

    def __init__(self, size: int) -> None:
        """Hold ``size`` numbers, all zero."""
        self.size = size
        self._rows: list[torch.Tensor] = []
        nodes = size
        while nodes > _TOP:
            nodes = -(-nodes // _FANOUT)
            self._rows.append(torch.zeros(nodes, _FANOUT, dtype=torch.float64))
        self._top = torch.zeros(nodes, dtype=torch.float64)
        self._flat = [rows.view(-1) for rows in self._rows]
        leaves = self._flat[0] if self._flat else self._top
        self.leaves = leaves[:size]
        """The numbers; read only."""
        blocks = self._rows[0].shape[0] if self._rows else len(self._top)
        self._least = torch.full((blocks,), torch.inf, dtype=torch.float64)

    def smallest(self) -> float:
        """Return the smallest number above zero, infinity if there is none."""
        return float(self._least.min())

    def set(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Replace numbers; a repeated place gets any of them. Up to 1e-300 counts as zero."""
        # So small that a share of it may not be smaller than itself.
        values = torch.threshold(values, _TINY, 0.0)
        for level, (flat, rows) in enumerate(zip(self._flat, self._rows, strict=True)):
            flat.index_copy_(0, index, values)
            index = index >> _SHIFT
            if len(index) > _MANY:
                index = torch.unique(index)
            below = rows.index_select(0, index)
            if level == 0:
                least = torch.where(below > 0, below, torch.inf).amin(1)
                self._least.index_copy_(0, index, least)
            values = below.sum(1)
        self._top.index_copy_(0, index, values)
        if not self._rows:
            self._least.copy_(torch.where(self._top > 0, self._top, torch.inf))

    def draw(self, count: int, generator: torch.Generator | None = None) -> torch.Tensor | None:
        """Draw ``count`` places, each in proportion to its number; ``None`` if all are zero."""
        sums = self._top.cumsum(0)
        total = float(sums[-1])
        if total <= 0:
            return None
        # A fresh uniform number per level: the remainder of one after subtracting loses precision.
        uniform = torch.rand((len(self._rows) + 1, count), dtype=torch.float64, generator=generator)
        # Strictly below one even after rounding, or a draw could land behind the last number.
        first, *shares = uniform.mul_(1 - 2**-52).unbind(0)
        index = torch.searchsorted(sums, first.mul_(total), right=True)
        for rows, share in zip(reversed(self._rows), shares, strict=True):
            sums = rows.index_select(0, index).cumsum(1)
            target = share.mul_(sums.select(1, _FANOUT - 1)).unsqueeze(1)
            index = torch.add((sums <= target).sum(1), index, alpha=_FANOUT)
        return index
