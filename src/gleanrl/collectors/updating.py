"""How weights get in: updates of the learner's, of a parent's, and those of a legacy updater."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors import checks
from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.legacy import WeightUpdaterBase, read_updater
from gleanrl.core.errors import ConfigError, UnknownModelError
from gleanrl.engine.engine import Engine
from gleanrl.engine.models import Models
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion, Shapes

_POLICY = "policy"


class UpdatingCollector(BaseCollector):
    """The part of a collector with an engine that has to do with weights and versions."""

    _engine: Engine
    _models: Models
    _version: PolicyVersion | None
    _receivers: Mapping[str, WeightSyncScheme] = {}
    _push: int | None = None
    """The version under way while the updater runs."""
    _parents: int | None = None
    """The version of what a parent sent, while it is applied."""
    _delivered = False

    # -- the learner's updates -------------------------------------------------------------------

    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if self._updater is None:
            self._check_update(worker_ids, kwargs)
            self._publish(models, worker_ids, self._parents)
            return
        with self._engine.turn(None):
            if self._push is not None:  # the updater itself asks for it
                self.deliver_weights(models[_POLICY], worker_ids)
            else:
                self._check_workers(worker_ids)
                self._run_updater(models[_POLICY], worker_ids, kwargs)

    def _run_updater(self, weights: Any, worker_ids: Any, kwargs: Mapping[str, Any]) -> None:
        """Have the updater push; whatever it sends, and in how many pieces, is one version."""
        number = self._models.number + 1 if self._parents is None else self._parents
        self._push, self._delivered = number, False
        try:
            assert self._updater is not None
            self._updater(policy_or_weights=weights, worker_ids=worker_ids, **kwargs)
            if not self._delivered:  # it went another way: only the version is ours to tell
                self._publish({}, worker_ids, number)
                self._delivered = True
        finally:
            self._push = None
            if self._delivered:
                self._models.continue_from(number)

    def deliver_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Publish weights of the policy, past the weight updater: what updaters call.

        Args:
            weights: A module, a `TensorDict`, a state dict, or ``None`` for the learner's policy.
            worker_ids: Which workers; see `update_policy_weights_`.

        Raises:
            WeightsError: weights that do not fit; nothing was changed.
        """
        self._publish({_POLICY: weights}, worker_ids, self._push)
        self._delivered = True

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        """Publish weights by model id, under ``version`` or the next one."""
        with self._engine.turn(None):
            self._models.update(models, version)

    def _check_update(self, worker_ids: Any, kwargs: Mapping[str, Any]) -> None:
        """Refuse what only an updater understands."""
        checks.check_update(worker_ids, kwargs)

    def _check_workers(self, worker_ids: Any) -> None:
        """Refuse workers that do not exist."""

    # -- the legacy updater ----------------------------------------------------------------------

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The legacy weight updater, ``None`` (as a rule) if there is none.

        Set it to an updater or to something that returns one; to ``None`` to be without.
        """
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        updater = read_updater(value)
        if updater is not None:
            updater.register_collector(self)
        self._updater = updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass the arguments to the legacy updater's ``init``; without one, do nothing."""
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    @property
    def learner_policy(self) -> Any:
        """The policy the collector was given, ``None`` if workers made theirs or act at random."""
        return self._models.given

    # -- a parent's updates ----------------------------------------------------------------------

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Say which models may be updated by a collector that this one is a worker of.

        What a parent publishes arrives by itself, for all models unless some were named here.

        Args:
            weight_recv_schemes: By model id; those registered before under other ids stay. A
                `NoWeightSyncScheme` ignores what arrives.
            synchronize_weights: Accepted for compatibility: there is nothing to wait for.

        Raises:
            ConfigError: one that is no scheme.
        """
        checks.check_schemes(weight_recv_schemes)
        self._receivers = {**self._receivers, **weight_recv_schemes}

    def receive_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Apply weights of the policy and pass them on to workers, if there are any.

        Without weights nothing is to be done: what a parent publishes arrives by itself.

        Raises:
            ConfigError: weights, where `register_scheme_receiver` has said who sends them.
        """
        given = [x for x in (policy_or_weights, weights, policy) if x is not None]
        if len(given) > 1:
            raise ConfigError("give weights once: positionally, as weights= or as policy=")
        if not given:
            return
        if self._receivers:
            raise ConfigError(
                f"weights of {sorted(self._receivers)} come from a parent (weight_recv_schemes); "
                "use update_policy_weights_ for your own"
            )
        self.update_policy_weights_(given[0])

    def receive_models(self, models: Mapping[str, Any], version: int | None = None) -> None:
        """Apply what a parent sent, by model id: all of it or nothing.

        Args:
            models: Per model id a dictionary of weights; may be empty.
            version: The parent's number for them, which batches made with them carry from here on,
                and which counting goes on from. By default it is the next one.

        Raises:
            UnknownModelError: a model that `register_scheme_receiver` did not name.
        """
        known = self._receivers
        for name in models if known else ():
            self._check_receiver(name)
        wanted = {name: w for name, w in models.items() if not known or known[name].applies}
        with self._engine.turn(None):
            self._parents = version
            try:
                self._apply(wanted)
            finally:
                self._parents = None
            if version is not None:
                self._models.continue_from(version)

    def _apply(self, models: Mapping[str, Any]) -> None:
        if self._updater is not None and set(models) == {_POLICY}:
            self.update_policy_weights_(models[_POLICY])
        elif models:
            self.update_policy_weights_(weights_dict=models)
        elif self._parents is not None:  # only the version moves
            self._publish({}, None, self._parents)

    def describe_weights(self, model_id: str) -> Shapes:
        """Return shape and kind (``True``: parameter) of a model's weights by dotted name.

        Raises:
            UnknownModelError: there is none, or a parent may not update it.
        """
        if self._receivers:
            self._check_receiver(model_id)
        return self._models.shapes(model_id)

    def _check_receiver(self, model_id: str) -> None:
        if model_id not in self._receivers:
            raise UnknownModelError(
                f"no model {model_id!r} is received by this collector: its weight_recv_schemes "
                f"name {sorted(self._receivers)}"
            )

    # -- versions and models ---------------------------------------------------------------------

    @property
    def policy_version(self) -> int | str | None:
        """The version the next batch is made with, ``None`` if versions are not tracked."""
        return None if self._version is None else self._version.version

    def get_policy_version(self) -> int | str | None:
        """Return `policy_version` (a method, for handles without properties)."""
        return self.policy_version

    def increment_version(self) -> None:
        """Move to the next policy version without touching the weights."""
        self._models.update({})

    def get_model(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``.

        Raises:
            KeyError: there is none.
        """
        return self._models.running(model_id)
