"""What a collector with an engine is started with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import InteractionType

from gleanrl.collectors.compat import WeightUpdaterBase
from gleanrl.collectors.weights import Sending
from gleanrl.core.options import FrameBudget, check_int
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.pipeline import Pipeline
from gleanrl.engine.sink import Sink
from gleanrl.weights.snapshot import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What the workers of a collector are, and how their rollouts become batches."""

    create_env_fn: Any
    """What workers collect from, as it was given."""
    functions: Sequence[Any]
    """What each worker collects from."""
    policy: Any
    sync: bool = True
    """Whether a batch holds a rollout of every worker."""
    collector_class: Any = None
    """What runs in each worker."""
    whole: bool = False
    """Whether each worker runs a whole collector of its class, and not what serves ours alone."""
    here: bool = False
    """Whether the only worker is this very process: it has the user's own objects and streams."""
    remote: bool = False
    """Whether workers share no memory with this process."""
    kwargs: Sequence[Mapping[str, Any]] = ()
    """Remote workers: further arguments of each worker's collector."""
    workers_each: int = 1
    """Remote workers: the workers of each worker's collector, if it has any."""
    sending: Sending | None = None
    """Weights that are sent without being asked for."""
    tolerant: bool = False
    """Whether collection continues without workers that were lost."""
    relaunches: int | None = None
    """How often a lost worker is replaced; ``None`` if none is."""
    enough: int | None = None
    """How many workers have to finish before the others are stopped; ``None`` for all."""
    interruptor: Any = None
    num_threads: int | None = None
    """torch threads of this process while workers run."""

    @property
    def stops(self) -> bool:
        """Whether rollouts may be stopped early."""
        return self.enough is not None or self.interruptor is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A plan, and what was made of it and the arguments before anything is started."""

    plan: WorkerPlan
    exploration: InteractionType
    version: PolicyVersion | None
    """The version counter to show."""
    updater: WeightUpdaterBase | None
    factories: Sequence[SourceFactory]
    """Build the source of each worker, there."""
    limits: FrameBudget
    asked: Sequence[int]
    """Per worker, the frames of its rollouts."""
    batches: BatchOptions
    pipeline: Pipeline
    """What batches go through."""
    sink: Sink | None
    """What takes batches in place of the user."""
    fills: bool = False
    """Whether workers store there what they collect."""
    policy_device: Any
    env_device: Any
    stream: int = 0
    """What random streams of workers are made from: the first one's."""


class Threads:
    """The learner's torch threads: fewer while workers run, as before afterwards."""

    def __init__(self, wanted: int | None, workers: int) -> None:
        """Leave the cores of ``workers`` workers alone, unless a number is ``wanted``."""
        self._before = torch.get_num_threads()
        default = max(1, self._before - workers)
        self._set = default if wanted is None else check_int("num_threads", wanted, least=1)
        torch.set_num_threads(self._set)

    def restore(self) -> None:
        """Put the number back, unless somebody has changed it since. Idempotent."""
        if torch.get_num_threads() == self._set:
            torch.set_num_threads(self._before)
        self._set = self._before
