"""The weights of a collector: updates, their versions, who sends them and who may receive them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.collectors.arguments import check_schemes
from gleanrl.collectors.controls import one_of
from gleanrl.collectors.update_schedule import NothingSent, WeightSchedule
from gleanrl.collectors.weight_update import WeightUpdaterBase
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import messages as m
from gleanrl.core.errors import ArgumentTypeError, ConfigError, UnknownModelError
from gleanrl.engine.engine import Engine
from gleanrl.engine.weight_delivery import Models, WeightDelivery
from gleanrl.watch.watching import Watching
from gleanrl.weights.module_weights import PolicyVersion, Shapes, weights_of
from gleanrl.weights.sync_schemes import WeightSyncScheme


class PolicyUpdates:
    """Updates the weights of the policies that collect, and counts their versions."""

    def __init__(self, engine: Engine, plan: WorkerPlan, watching: Watching) -> None:
        """Begin with version 0 in the workers of ``engine``, which were started by ``plan``."""
        self._engine, self._watching = engine, watching
        self._single = plan.in_process
        """Whether there is one worker only, which needs no ``worker_ids``."""
        self._tracker = plan.version
        self._version = PolicyVersion() if plan.version is None else plan.version
        self.updater: WeightUpdaterBase | None = None
        self._receivers: dict[str, WeightSyncScheme] = {}
        """Which models a parent may update, by model id; all if there are none."""
        self._update: tuple[int, bool] | None = None
        """The version of the update under way, and whether a weight updater makes it."""
        self.schedule = plan.sending
        self.serve(plan)
        self.register_scheme_receiver(plan.arguments["weight_recv_schemes"] or {})

    def serve(self, plan: WorkerPlan) -> None:
        """Send weights to the workers that were started by ``plan``."""
        schemes = plan.arguments["weight_sync_schemes"]
        self.models = (
            Models(self._engine, plan.policy, schemes)
            if plan.in_process
            else WeightDelivery(
                self._engine,
                plan.policy,
                made_by_factory=plan.arguments["policy_factory"] is not None,
                schemes=schemes,
                devices=plan.policy_device,
                keep=plan.relaunches is not None,
            )
        )
        if plan.starts_with_learners and (weights := weights_of(plan.policy)):
            self._engine.ask(m.Load(m.Snapshot(0, {"policy": weights})))
        for model_id in schemes or ():
            if model_id != "policy":  # a name that is not found would be ignored
                self.models.shapes(model_id)

    def warn_if_never_sent(self) -> None:
        """Warn of trained weights that are never sent, if no schedule and no updater sends them."""
        if self.schedule is None and self.updater is None:
            copied = self.models.copied_parameters()
            self.schedule = NothingSent(copied) if copied else None

    # -- updates ---------------------------------------------------------------------------------

    def update(
        self,
        models: Mapping[str, Any],
        worker_ids: Any = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Publish weights by model id, or have the weight updater do so, which gets ``kwargs``.

        ``None`` means the weights of the learner's policy; see `update_policy_weights_`.
        """
        requested_at = time.monotonic()
        with self._engine.turn(None):
            if self.updater is not None and not (self._update and self._update[1]):
                self._update_by(self.updater, models, worker_ids, kwargs or {})
            elif kwargs:
                raise ArgumentTypeError(
                    f"unexpected arguments {sorted(kwargs)}: no weight updater takes them"
                )
            elif self._single and worker_ids is not None and self.updater is None:
                raise ArgumentTypeError(
                    "worker_ids needs a collector with several workers; this one has none"
                )
            else:
                self._publish(models, worker_ids)
        self._watching.published(requested_at, self.number)

    def _update_by(
        self,
        updater: WeightUpdaterBase,
        models: Mapping[str, Any],
        worker_ids: Any,
        kwargs: Mapping[str, Any],
    ) -> None:
        if set(models) != {"policy"}:
            raise ConfigError(
                "model_id and weights_dict need weight sync schemes; a weight updater knows the "
                "policy only"
            )
        self.models.chosen(worker_ids)  # refuses those that do not exist
        with self._one_version(by_updater=True) as number:
            updater(policy_or_weights=models["policy"], worker_ids=worker_ids, **kwargs)
            if self.number != number:  # weights went another way: only the version is ours
                self._publish({}, worker_ids)

    @property
    def _next(self) -> int:
        """The version of the update under way, or else of the next one."""
        return self.number + 1 if self._update is None else self._update[0]

    def _publish(self, models: Mapping[str, Any], worker_ids: Any = None) -> None:
        """Publish weights by model id, as a piece of the update under way or as the next one."""
        workers = self.models.deliver(models, worker_ids, number := self._next)
        self._version.set_number(number)
        if self.schedule is not None:
            self.schedule.sent(workers)

    @contextmanager
    def _one_version(self, number: int | None = None, by_updater: bool = False) -> Iterator[int]:
        """Make all updates in a ``with`` block one, of version ``number`` if there is one."""
        outer, number = self._update, self._next if number is None else number
        self._update = number, by_updater
        try:
            yield number
        finally:
            self._update = outer

    def send(self, due: Collection[int]) -> None:
        """Send weights to the workers that are ``due``, by the schedule."""
        everybody = len(due) == self._engine.workers
        if due and self._engine.tolerant:
            self._engine.check_alive()  # workers that were lost meanwhile need no weights
            due = set(due).intersection(self._engine.alive)
        if due:
            self.update({"policy": None}, None if everybody else sorted(due))

    def deliver_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Publish weights of the policy without the weight updater; updaters call this.

        Args:
            weights: A module, a `TensorDict`, a state dict, or ``None`` for the learner's policy.
            worker_ids: Which workers; see `update_policy_weights_`.

        Raises:
            WeightsError: weights that do not fit; nothing was changed.
        """
        with self._engine.turn(None):
            self._publish({"policy": weights}, worker_ids)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass the arguments to the legacy updater's ``init``; without one, do nothing."""
        if self.updater is not None:
            self.updater.init(*args, **kwargs)

    # -- weights from a parent -------------------------------------------------------------------

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Set the models that the collector around this one may update.

        The weights of a parent arrive by themselves: for all models, unless some were named here.

        Args:
            weight_recv_schemes: By model id; those registered before under other ids stay. A
                `NoWeightSyncScheme` ignores arriving weights.
            synchronize_weights: Accepted for compatibility: there is nothing to wait for.

        Raises:
            ConfigError: a value is not a scheme.
        """
        check_schemes(weight_recv_schemes)
        self._receivers.update(weight_recv_schemes)

    def receive_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Apply weights of the policy and pass them on to the workers.

        Without weights the call does nothing, because the weights of a parent arrive by themselves.

        Raises:
            ConfigError: there are weights, and `register_scheme_receiver` has named their sender.
        """
        source = one_of(policy_or_weights, weights, policy)
        if source is None:
            return
        if self._receivers:
            raise ConfigError(
                f"weights of {sorted(self._receivers)} come from a parent "
                "(weight_recv_schemes); use update_policy_weights_ for your own"
            )
        self.update({"policy": source})

    def receive_models(self, models: Mapping[str, Any], version: int | None = None) -> None:
        """Apply the weights that a parent sent, by model id: all of them or none.

        Args:
            models: Per model id a dictionary of weights; may be empty.
            version: The parent's number for them, which batches made with them carry from here on,
                and which counting continues from. By default it is the next one.

        Raises:
            UnknownModelError: a model that `register_scheme_receiver` did not name.
        """
        for name in models:
            self._check_receiver(name)
        known = self._receivers
        wanted = {name: w for name, w in models.items() if not known or known[name].applies}
        with self._engine.turn(None), self._one_version(version):
            if wanted:
                self.update(wanted)
            elif version is not None:  # only the version moves
                self._publish({})

    def _check_receiver(self, model_id: str) -> None:
        if self._receivers and model_id not in self._receivers:
            raise UnknownModelError(
                f"no model {model_id!r} is received by this collector: its weight_recv_schemes "
                f"name {sorted(self._receivers)}"
            )

    def shapes(self, model_id: str) -> Shapes:
        """Return shape and kind (``True``: parameter) of a model's weights by dotted name.

        Raises:
            UnknownModelError: there is none, or a parent may not update it.
        """
        self._check_receiver(model_id)
        return self.models.shapes(model_id)

    # -- models and versions ---------------------------------------------------------------------

    @property
    def learner_policy(self) -> Any:
        """The learner's policy, ``None`` if workers made theirs or act at random."""
        return self.models.policy

    @property
    def policy_weights(self) -> TensorDictBase:
        """The weights of the learner's policy; empty if it has none."""
        policy = self.models.policy
        if not isinstance(policy, nn.Module):
            return TensorDict()
        weights: TensorDictBase = TensorDict.from_module(policy).data
        return weights

    def get_model(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``.

        Raises:
            KeyError: there is none.
        """
        return self.models.running(model_id)

    @property
    def policy(self) -> Any:
        """The policy that runs; with several workers the learner's, which they copy."""
        return self.models.running("policy")

    @property
    def number(self) -> int:
        """The policy version of the next batch, as a number."""
        return self._version.number

    @property
    def policy_version_tracker(self) -> PolicyVersion | None:
        """The counter of policy versions, ``None`` if they are not tracked."""
        return self._tracker

    @property
    def policy_version(self) -> int | str | None:
        """The policy version of the next batch, ``None`` if versions are not tracked."""
        return None if self._tracker is None else self._tracker.version

    def get_policy_version(self) -> int | str | None:
        """Return `policy_version` (a method, for handles without properties)."""
        return self.policy_version

    def increment_version(self) -> None:
        """Move to the next policy version without touching the weights."""
        with self._engine.turn(None):
            self.models.deliver({}, None, number := self._next)
            self._version.set_number(number)

    def schedule_state(self) -> Any:
        """Return which workers are due to get weights, and how long others have waited."""
        return self.schedule.state() if isinstance(self.schedule, WeightSchedule) else None

    def load_schedule(self, state: Any) -> None:
        """Continue from a `schedule_state`."""
        if state is not None and isinstance(self.schedule, WeightSchedule):
            self.schedule.load_state(state)

    def restore(self, policies: Mapping[int, tuple[Mapping[str, Any], int]]) -> None:
        """Load each worker's policy state and version; continue from the newest version."""
        self.models.restore(policies)
        if self.schedule is not None:
            self.schedule.restored(range(self._engine.workers))
        self._version.set_number(max(version for _, version in policies.values()))
