"""The learner's side of weights: which models there are, and their versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError, UnknownModelError
from gleanrl.engine.engine import Engine
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import Shapes, check_weights, cloned, load_weights, weights_of
from gleanrl.weights.version import PolicyVersion


class Models:
    """Publishes weights to the worker of an in-process engine.

    A model that runs as the user's own object has nothing to copy: optimizer steps show at the next
    rollout. Only the version moves.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Any,
        schemes: Mapping[str, WeightSyncScheme] | None,
        version: PolicyVersion | None,
    ) -> None:
        """Remember the learner's policy.

        Args:
            engine: Whose worker runs the models.
            policy: The policy the user gave, ``None`` if a factory made it.
            schemes: Per model id; says which models are never updated.
            version: The counter to show, if versions are tracked.
        """
        self._engine = engine
        self._policy = policy
        self._version = version if version is not None else PolicyVersion()
        self._schemes = dict(schemes or {})

    @property
    def number(self) -> int:
        """The policy version the next batch is made with."""
        return self._version.number

    def running(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``.

        Raises:
            UnknownModelError: there is none.
        """
        try:
            return self._engine.request(0, m.Get(model_id))
        except (AttributeError, LookupError, ValueError) as err:
            raise UnknownModelError(f"no model {model_id!r} in this collector: {err}") from err

    @property
    def given(self) -> Any:
        """The learner's policy, ``None`` if a factory made it."""
        return self._policy

    def shapes(self, model_id: str) -> Shapes:
        """Return shape and kind (``True``: parameter) of a model's weights by dotted name.

        Raises:
            UnknownModelError: there is no model of that id.
        """
        shapes: Shapes = self._engine.request(0, m.Call("describe_weights", (model_id,)))
        return shapes

    def update(self, given: Mapping[str, Any], version: int | None = None) -> None:
        """Publish weights by model id, all or none; ``None`` takes the learner's policy's.

        Args:
            given: Per model id a module, a `TensorDict`, a state dict or ``None``.
            version: The version they get, which is not counted then; the next one by default.

        Raises:
            UnknownModelError: no model of that id.
            WeightsError: weights that do not fit; nothing was changed.
        """
        models: dict[str, Any] = {}
        for model_id, source in given.items():
            if source is None and model_id != "policy":
                raise ConfigError(f"no weights were given for model {model_id!r}")
            scheme = self._schemes.get(model_id)
            if scheme is not None and not scheme.applies:
                continue
            running = self.running(model_id)
            if source is None:
                source = self._policy if model_id == "policy" else None
            if source is None or source is running:
                continue
            if isinstance(source, nn.Module) or not callable(source):
                models[model_id] = weights_of(source)
        number = self._version.number + 1 if version is None else version
        self._engine.request(0, m.Load(m.Snapshot(number, models)))
        if version is None:
            self._version.increment_version()

    def policy_state(self) -> dict[str, Any]:
        """Return the running policy's state dict, cloned; empty if it has none."""
        policy = self.running("policy")
        if not isinstance(policy, nn.Module):
            return {}
        return cloned(policy.state_dict())

    def check_policy_state(self, state: Mapping[str, Any]) -> None:
        """Raise `WeightsError` if ``state`` does not fit the running policy."""
        policy = self.running("policy")
        if state and isinstance(policy, nn.Module):
            check_weights(policy, weights_of(state))

    def load_policy_state(self, state: Mapping[str, Any]) -> None:
        """Load a state dict into the running policy (and the learner's, which it may be)."""
        for policy in (self._policy, self.running("policy")):
            if isinstance(policy, nn.Module):
                load_weights(policy, weights_of(state))

    def continue_from(self, number: int) -> None:
        """Go on counting from a restored version."""
        self._version.set_number(number)
