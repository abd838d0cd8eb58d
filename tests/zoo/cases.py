"""What describes an environment and a policy of the zoo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.zoo.reference import Twin

SEED = 11
"""What environments are seeded with when they are made."""


@dataclass(frozen=True)
class Action:
    """What an environment wants as ``"action"``, without its batch shape."""

    kind: str
    """``continuous``, ``index``, ``onehot``, ``multi`` (some indices), ``binary`` or ``other``."""
    shape: tuple[int, ...] = ()
    n: int = 0
    """Choices of an index or a one-hot vector."""
    nvec: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    scale: float = 1.0

    @property
    def logits(self) -> int:
        """How many numbers decide on an action."""
        sizes = {"index": self.n, "onehot": self.n, "multi": sum(self.nvec)}
        return sizes.get(self.kind) or math.prod(self.shape)


@dataclass(frozen=True)
class Environment:
    """An environment: how to make it for a collector, and for the reference loop."""

    name: str
    make: Callable[[], Any]
    """Returns an environment that is seeded and was not reset since."""
    twin: Callable[[], Twin]
    action: Action
    obs: Any = "observation"
    shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32
    batch: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the collector."""

    @property
    def given(self) -> Any:
        """What a collector is given."""
        return self.make

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return math.prod(self.batch)


@dataclass(frozen=True)
class Policy:
    """A policy: how to make it for an environment, and how to call it by hand."""

    name: str
    make: Callable[[Environment], Any]
    fits: Callable[[Environment], bool]
    ins: tuple[Any, ...] | None = None
    """Keys of its inputs and outputs, if it takes tensors; ``None``: the observation."""
    outs: tuple[Any, ...] = ()
    changes: tuple[Callable[[Any], None], ...] = ()
    """Applied to every module of the policy, two before each batch but the first."""
    states: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    """Recurrent state that is provided to it, by key: its shape."""
    is_init: bool = False
    draws: bool = False
    """Whether its answer depends on a random stream."""
    mixes: bool = False
    """Whether the answer for one row of a batch depends on other rows or on earlier calls."""
    tags: frozenset[str] = frozenset()
