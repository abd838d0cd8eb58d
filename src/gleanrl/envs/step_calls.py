"""The `step` methods of single environments: when they are looked up, checked and copied from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.envs.returned import check_flag, not_five

Call: TypeAlias = Callable[[Any], Any]


class StepCalls:
    """The `step` methods of ``P`` environments, as they are when a rollout begins.

    The first result of every environment is checked. It also tells which environments have all
    their results copied at once: those that return memory of one another, and those whose rewards
    are tensors, which they may use again. Observations need no copy otherwise, because they are
    written before any environment is called again.
    """

    def __init__(self, envs: Sequence[Any], check: Callable[[int, Any, Any], None]) -> None:
        """Look nothing up yet.

        Args:
            envs: The environments.
            check: Called once per environment with its index, observation and ``info``.
        """
        self._envs = envs
        self._check = check
        self._memory: dict[int, list[tuple[int, int]]] = {}
        """By environment called at least once: where the arrays of its first result lie."""
        self._held: list[Any] = []
        """Those first results: memory that was given back would be taken for shared."""
        self._copied: set[int] = set()
        self._calls: list[Call] = []

    def look_up(self) -> list[Call]:
        """Return one callable per environment; entries are replaced after their first call."""
        plain = not self._copied and len(self._memory) == len(self._envs)
        self._calls = (
            [env.step for env in self._envs]
            if plain
            else [self._call(index) for index in range(len(self._envs))]
        )
        return self._calls

    def _call(self, index: int) -> Call:
        if index not in self._memory:
            return functools.partial(self._first, index)
        step: Call = self._envs[index].step
        return functools.partial(_copying, step) if index in self._copied else step

    def _first(self, index: int, action: Any) -> Any:
        result = self._envs[index].step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise not_five(result, f"environment {index}: step")
        self._check(index, result[0], result[4])
        check_flag(result[2], index, "terminated")
        check_flag(result[3], index, "truncated")
        if isinstance(result[1], torch.Tensor):
            self._copied.add(index)
        self._memory[index] = list(_memory(result))
        self._held.append(result)
        changed = {index}
        if len(self._memory) == len(self._envs):
            changed |= (sharing := _sharing(self._memory))
            self._copied |= sharing
            self._memory = {env: [] for env in self._memory}
            self._held.clear()
        for env in changed:
            self._calls[env] = self._call(env)
        return owned(result)


def _copying(step: Call, action: Any) -> Any:
    return owned(step(action))


def owned(value: Any) -> Any:
    """Return ``value`` with every array and tensor in it copied."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(owned, value))
    return value


def _memory(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the first address of every array in ``value``, and the first one beyond it."""
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True)
    if isinstance(value, np.ndarray):
        reach = [
            (size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True)
        ]
        start = value.__array_interface__["data"][0]
        if value.size:
            yield (
                start + sum(step for step in reach if step < 0),
                start + sum(step for step in reach if step > 0) + value.itemsize,
            )
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _memory(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _memory(item)


def _sharing(memory: Mapping[int, Sequence[tuple[int, int]]]) -> set[int]:
    """Return the environments whose memory overlaps with another one's."""
    found: set[int] = set()
    cluster: set[int] = set()
    beyond = 0
    for start, end, env in sorted((*span, env) for env, spans in memory.items() for span in spans):
        cluster = cluster if start < beyond else set()
        cluster.add(env)
        beyond = max(beyond, end)
        if len(cluster) > 1:
            found |= cluster
    return found
