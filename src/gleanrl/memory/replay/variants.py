"""Replay buffers under the names TorchRL has for common combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import NestedKey, as_key, format_key
from gleanrl.memory.replay.buffer import ReplayBuffer, made_storage
from gleanrl.memory.replay.prioritized import PrioritizedSampler
from gleanrl.memory.replay.storages import Storage


class TensorDictReplayBuffer(ReplayBuffer):
    """A replay buffer whose samples say where they come from, under ``"index"``.

    Arguments as in `ReplayBuffer`, and:

    Args:
        priority_key: Entry that `update_tensordict_priority` takes priorities from, and `extend`
            if the data has it.
    """

    def __init__(self, *, priority_key: NestedKey = "td_error", **arguments: Any) -> None:
        super().__init__(**arguments)
        self._priority_key = as_key(priority_key)
        self._with_index = True

    def extend(self, data: Any) -> torch.Tensor:
        """Store many rows; their priorities are those in the data, if there are any."""
        places = super().extend(data)
        self._take_priorities(data, places)
        return places

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the rows of a sample the priorities it holds under ``priority_key``."""
        priority = data.get(self._priority_key, None)
        if priority is None:
            raise ConfigError(
                f"no {format_key(self._priority_key)} in the data: set it, or priority_key"
            )
        self.update_priority(data.get("index"), priority.reshape(data.shape[0], -1))

    def _take_priorities(self, data: Any, places: torch.Tensor) -> None:
        if not isinstance(self._sampler, PrioritizedSampler) or self._storage.ndim != 1:
            return
        priority = data.get(self._priority_key, None) if isinstance(data, TensorDictBase) else None
        if priority is not None and len(places):
            self.update_priority(places, priority[-len(places) :].reshape(len(places), -1))


class PrioritizedReplayBuffer(ReplayBuffer):
    """A replay buffer with a `PrioritizedSampler`; ``alpha``, ``beta``, ``eps`` are its."""

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        **arguments: Any,
    ) -> None:
        storage = made_storage(storage)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps)
        super().__init__(storage=storage, sampler=sampler, **arguments)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`."""

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        **arguments: Any,
    ) -> None:
        storage = made_storage(storage)
        sampler = PrioritizedSampler(storage.max_size, alpha, beta, eps)
        super().__init__(storage=storage, sampler=sampler, **arguments)
