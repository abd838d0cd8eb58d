"""When a collector sends its policy's weights by itself, and a warning if nothing sends them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int, warn

if TYPE_CHECKING:
    from gleanrl.collectors.base_collector import BaseCollector


@dataclass(frozen=True, slots=True)
class EachBatch:
    """Sends to all workers with each batch: before synchronous ones, after asynchronous ones."""

    sync: bool

    def before(self, collector: BaseCollector) -> None:
        if self.sync:
            collector.update_policy_weights_()

    def after(self, collector: BaseCollector, delivered: Collection[int]) -> None:
        if not self.sync:
            collector.update_policy_weights_()

    def sent(self, workers: Sequence[int]) -> None:
        """Ignore weights sent for another reason."""

    restored = sent


class WeightSchedule:
    """Sends to a worker every ``interval`` batches, or ``after_each`` of its own batches."""

    def __init__(self, workers: int, interval: int | None, after_each: bool) -> None:
        """Nothing is due at first."""
        self._waiting = dict.fromkeys(range(workers), 0)
        self._interval, self._after_each = interval, after_each
        self._due: set[int] = set()
        """Workers that get weights before the next batch."""

    def before(self, collector: BaseCollector) -> None:
        """Send the learner's newest weights to the workers that are due."""
        if self._due and collector._engine.tolerant:
            collector._engine.check()  # workers that were lost meanwhile need no weights
            self._due &= set(collector._engine.alive)
        if self._due and collector.learner_policy is not None:
            everybody = len(self._due) == len(self._waiting)
            collector.update_policy_weights_(worker_ids=None if everybody else sorted(self._due))

    def after(self, collector: BaseCollector, delivered: Collection[int]) -> None:
        """Count a batch; workers that have waited for long enough are due."""
        for worker in self._waiting:
            self._waiting[worker] += 1
            if self._interval is not None and self._waiting[worker] >= self._interval:
                self._due.add(worker)
        if self._after_each:
            self._due.update(delivered)

    def sent(self, workers: Sequence[int]) -> None:
        """Note that ``workers`` have new weights, and must wait again."""
        for worker in workers:
            self._waiting[worker] = 0
            self._due.discard(worker)

    restored = sent


class NothingSent:
    """Warns if the learner trains while the workers keep their first weights.

    The learner and its workers share no memory, as they do in TorchRL on one machine.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the versions of the learner's ``parameters``, which in-place changes count."""
        self._parameters = parameters
        self._versions = [parameter._version for parameter in self._parameters]
        self._late = 0
        """Batches that began after the learner had changed its parameters."""

    def before(self, collector: BaseCollector) -> None:
        """Check for changed parameters; warn before the second batch after a change."""
        if [parameter._version for parameter in self._parameters] == self._versions:
            return
        self._late += 1
        if self._late == 2:
            self.sent(())
            warn(
                "the policy's parameters have changed, but its weights were never sent: the "
                "workers have copies and act with the first weights. Call "
                "collector.update_policy_weights_() after each optimizer step, or build the "
                "collector with update_at_each_batch=True (nodes: update_after_each_batch=True)"
            )

    def after(self, collector: BaseCollector, delivered: Collection[int]) -> None:
        """Do nothing, because nothing is sent."""

    def sent(self, workers: Sequence[int]) -> None:
        """Stop checking, because the user knows how to send weights."""
        self._parameters, self._versions = (), []

    def restored(self, workers: Sequence[int]) -> None:
        """Expect the weights of a loaded state, which the workers have got with the state."""
        self._versions = [parameter._version for parameter in self._parameters]


Sending: TypeAlias = EachBatch | WeightSchedule | NothingSent
"""Sends the policy's weights without a call, around each batch."""


def read_sending(arguments: Mapping[str, Any], workers: int, sync: bool) -> Sending | None:
    """Return the object that sends weights to ``workers`` workers as the arguments say."""
    if arguments["update_at_each_batch"]:
        return EachBatch(sync)
    after_each, interval = (
        arguments[name] for name in ("update_after_each_batch", "max_weight_update_interval")
    )
    if after_each and arguments["policy"] is None:
        raise ConfigError(
            "update_after_each_batch=True takes weights from the policy, and there is none: "
            "give policy= (beside policy_factory=, if nodes are to make their own)"
        )
    if interval in (None, -1):
        return WeightSchedule(workers, None, after_each) if after_each else None
    interval = check_int("max_weight_update_interval", interval, least=1)
    return WeightSchedule(workers, interval, after_each)
