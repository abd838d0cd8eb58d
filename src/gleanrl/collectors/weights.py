"""How weights get into a collector: the learner's updates, a parent's, and a legacy updater's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gleanrl.collectors.arguments import check_schemes
from gleanrl.collectors.weight_update import WeightUpdaterBase, read_updater
from gleanrl.core.errors import ArgumentTypeError, UnknownModelError
from gleanrl.weights.scheme import WeightSyncScheme

if TYPE_CHECKING:
    from gleanrl.collectors.base import BaseCollector

_POLICY = "policy"


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
        """Ignore what was sent for another reason."""


class WeightSchedule:
    """Sends to a worker every ``interval`` batches, or ``after_each`` that it delivered."""

    def __init__(self, workers: int, interval: int | None, after_each: bool) -> None:
        """Nothing is due at first."""
        self._waiting = dict.fromkeys(range(workers), 0)
        self._interval, self._after_each = interval, after_each
        self._due: set[int] = set()
        """Workers that get weights before the next batch."""

    def before(self, collector: BaseCollector) -> None:
        """Send the learner's newest weights to the workers that are due."""
        if self._due and collector._plan.tolerant:
            collector._engine.check()  # workers that were lost meanwhile need no weights
            self._due &= set(collector._engine.dispatcher.alive)
        if self._due and collector._models.policy is not None:
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
        """Note that ``workers`` have new weights, and have to wait again."""
        for worker in workers:
            self._waiting[worker] = 0
            self._due.discard(worker)


Sending: TypeAlias = EachBatch | WeightSchedule
"""Sends the policy's weights without being asked for, around each batch."""


class WeightUpdates:
    """Decides which weights a collector publishes, and under which version.

    Whatever one update sends, and in how many pieces, is one version. The version of what a parent
    sends is the parent's.
    """

    def __init__(self) -> None:
        """Start without a legacy updater; a parent may update all models."""
        self._updater: WeightUpdaterBase | None = None
        self._receivers: Mapping[str, WeightSyncScheme] = {}
        self._pushing: int | None = None
        """The version under way while the updater runs."""
        self._parents: int | None = None
        """The version of what a parent sent, while it is applied."""
        self._delivered = False

    # -- the learner's updates, and the legacy updater -------------------------------------------

    @property
    def updater(self) -> WeightUpdaterBase | None:
        return self._updater

    def use(self, updater: Any, collector: BaseCollector) -> None:
        """Have ``updater`` (or what it returns) send the weights of ``collector`` from now on."""
        chosen = read_updater(updater)
        if chosen is not None:
            chosen.register_collector(collector)
        self._updater = chosen

    def update(
        self,
        collector: BaseCollector,
        models: Mapping[str, Any],
        worker_ids: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Carry out an ``update_policy_weights_``."""
        if self._updater is None:
            if kwargs:
                raise ArgumentTypeError(
                    f"unexpected arguments {sorted(kwargs)}: there is no weight updater to take "
                    "them"
                )
            collector._publish(models, worker_ids, self._parents)
            return
        with collector._engine.turn(None):
            if self._pushing is not None:  # the updater itself asks for it
                self.deliver(collector, models[_POLICY], worker_ids)
            else:
                collector._models.chosen(worker_ids)  # refuses those that do not exist
                self._run_updater(self._updater, collector, models[_POLICY], worker_ids, kwargs)

    def _run_updater(
        self,
        updater: WeightUpdaterBase,
        collector: BaseCollector,
        weights: Any,
        worker_ids: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        number = collector._models.number + 1 if self._parents is None else self._parents
        self._pushing, self._delivered = number, False
        try:
            updater(policy_or_weights=weights, worker_ids=worker_ids, **kwargs)
            if not self._delivered:  # it went another way: only the version is ours to tell
                collector._publish({}, worker_ids, number)
                self._delivered = True
        finally:
            self._pushing = None
            if self._delivered:
                collector._models.continue_from(number)

    def deliver(self, collector: BaseCollector, weights: Any, worker_ids: Any) -> None:
        """Publish weights of the policy, past the updater."""
        collector._publish({_POLICY: weights}, worker_ids, self._pushing)
        self._delivered = True

    # -- a parent's updates ----------------------------------------------------------------------

    @property
    def receivers(self) -> Mapping[str, WeightSyncScheme]:
        """Which models a parent may update, by model id; all if there are none."""
        return self._receivers

    def register(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Let a parent update further models."""
        check_schemes(schemes)
        self._receivers = {**self._receivers, **schemes}

    def check_receiver(self, model_id: str) -> None:
        """Raise `UnknownModelError` if a parent may not update ``model_id``."""
        if self._receivers and model_id not in self._receivers:
            raise UnknownModelError(
                f"no model {model_id!r} is received by this collector: its weight_recv_schemes "
                f"name {sorted(self._receivers)}"
            )

    def receive(
        self, collector: BaseCollector, models: Mapping[str, Any], version: int | None
    ) -> None:
        """Apply what a parent sent, by model id: all of it or nothing."""
        for name in models:
            self.check_receiver(name)
        known = self._receivers
        wanted = {name: w for name, w in models.items() if not known or known[name].applies}
        with collector._engine.turn(None):
            self._parents = version
            try:
                if self._updater is not None and set(wanted) == {_POLICY}:
                    collector.update_policy_weights_(wanted[_POLICY])
                elif wanted:
                    collector.update_policy_weights_(weights_dict=wanted)
                elif version is not None:  # only the version moves
                    collector._publish({}, None, version)
            finally:
                self._parents = None
            if version is not None:
                collector._models.continue_from(version)
