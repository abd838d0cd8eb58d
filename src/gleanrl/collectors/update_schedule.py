"""When a collector sends its policy's weights by itself, and a warning if nothing sends them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int, warn
from gleanrl.operations.change_watch import writes_so_far


@dataclass(frozen=True, slots=True)
class EachBatch:
    """Sends to all workers with each batch: before synchronous ones, after asynchronous ones."""

    workers: int
    sync: bool

    def before(self) -> Collection[int]:
        """Return the workers that get weights before the next batch."""
        return range(self.workers if self.sync else 0)

    def after(self, delivered: Collection[int]) -> Collection[int]:
        """Return the workers that get weights after a batch of the workers ``delivered``."""
        return range(0 if self.sync else self.workers)

    def sent(self, workers: Sequence[int]) -> None:
        """Ignore weights sent for another reason."""

    restored = sent


class WeightSchedule:
    """Sends to a worker every ``interval`` batches, or ``after_each`` of its own batches."""

    def __init__(self, workers: int, interval: int | None, after_each: bool) -> None:
        self._waiting = dict.fromkeys(range(workers), 0)
        self._interval, self._after_each = interval, after_each
        self._due: set[int] = set()
        """Workers that get weights before the next batch."""

    def before(self) -> Collection[int]:
        return self._due

    def after(self, delivered: Collection[int]) -> Collection[int]:
        """Count a batch; workers that have waited for long enough are due."""
        for worker in self._waiting:
            self._waiting[worker] += 1
            if self._interval is not None and self._waiting[worker] >= self._interval:
                self._due.add(worker)
        if self._after_each:
            self._due.update(delivered)
        return ()

    def sent(self, workers: Sequence[int]) -> None:
        """Note that ``workers`` have new weights, and must wait again."""
        for worker in workers:
            self._waiting[worker] = 0
            self._due.discard(worker)

    restored = sent

    def state(self) -> dict[str, Any]:
        """Return which workers are due, and how long others have waited."""
        return {"waiting": dict(self._waiting), "due": sorted(self._due)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._waiting, self._due = dict(state["waiting"]), set(state["due"])


class NothingSent:
    """Warns if the learner trains while the workers keep their first weights.

    The learner and its workers share no memory, as they do in TorchRL on one machine.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the versions of the learner's ``parameters``, which in-place changes count."""
        self._parameters = parameters
        self._versions = list(map(writes_so_far, self._parameters))
        self._late = 0
        """Batches that began after the learner had changed its parameters."""

    def before(self) -> Collection[int]:
        """Check for changed parameters; warn before the second batch after a change."""
        if list(map(writes_so_far, self._parameters)) == self._versions:
            return ()
        self._late += 1
        if self._late == 2:
            self.sent(())
            warn(
                "the policy's parameters have changed, but its weights were never sent: the "
                "workers have copies and act with the first weights. Call "
                "collector.update_policy_weights_() after each optimizer step, or build the "
                "collector with update_at_each_batch=True (nodes: update_after_each_batch=True)"
            )
        return ()

    def after(self, delivered: Collection[int]) -> Collection[int]:
        return ()

    def sent(self, workers: Sequence[int]) -> None:
        """Stop checking, because the user knows how to send weights."""
        self._parameters, self._versions = (), []

    def restored(self, workers: Sequence[int]) -> None:
        """Look only at later changes, because the workers have got the weights of a state."""
        self._versions = list(map(writes_so_far, self._parameters))
        self._late = 0


Sending: TypeAlias = EachBatch | WeightSchedule | NothingSent
"""Says around each batch which workers get the policy's weights without a call."""


def read_sending(arguments: Mapping[str, Any], workers: int, sync: bool) -> Sending | None:
    """Return the schedule by which ``workers`` workers get weights, as the arguments say."""
    after_each, interval = (
        arguments[name] for name in ("update_after_each_batch", "max_weight_update_interval")
    )
    scheduled = arguments["update_at_each_batch"] or after_each or interval not in (None, -1)
    no_source = all(arguments[name] is None for name in ("policy", "weight_updater"))
    made = arguments["policy_factory"] is not None
    if no_source and (after_each or (scheduled and made)):
        raise ConfigError(
            "update_at_each_batch, update_after_each_batch and max_weight_update_interval take "
            "weights from the policy, and there is none: give policy= beside policy_factory="
        )
    if arguments["update_at_each_batch"]:
        return EachBatch(workers, sync)
    if interval in (None, -1):
        return WeightSchedule(workers, None, after_each) if after_each else None
    interval = check_int("max_weight_update_interval", interval, least=1)
    return WeightSchedule(workers, interval, after_each)
