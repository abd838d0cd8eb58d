"""The learner's side of weights: which tensors go to which workers, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError, PolicyTypeError, UnknownModelError
from gleanrl.core.options import check_int
from gleanrl.core.paths import is_within
from gleanrl.core.protocols import WeightPublisher
from gleanrl.engine.session import Session
from gleanrl.policies.random import RandomPolicy
from gleanrl.weights.module_weights import (
    Shapes,
    TrackedModule,
    Weights,
    by_worker,
    check_tensors,
    check_weights,
    cloned,
    load_weights,
    shapes_of,
    warn_of_no_weights,
    weights_of,
)
from gleanrl.weights.sync_schemes import SharedMemWeightSyncScheme, WeightSyncScheme

_POLICY = "policy"
_CPU = torch.device("cpu")
_USUAL_SCHEME = SharedMemWeightSyncScheme()


class Models:
    """Publishes weights to the workers of an in-process engine.

    A model that runs as the user's own object has nothing to copy: optimizer steps show at the next
    rollout. Only the version moves.
    """

    def __init__(
        self,
        session: Session,
        policy: Any,
        schemes: Mapping[str, WeightSyncScheme] | None,
    ) -> None:
        """Publish to ``session``; ``schemes`` say, per model id, which models are never updated."""
        self._session = session
        self.policy = policy
        """The learner's policy, ``None`` if a factory made it."""
        self._schemes = dict(schemes or {})

    def running(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``, or raise `UnknownModelError`."""
        try:
            return self._session.ask(m.Get(model_id))
        except (AttributeError, LookupError, TypeError, ValueError) as err:
            raise UnknownModelError(f"no model {model_id!r} in this collector: {err}") from err

    def copied_parameters(self) -> list[torch.Tensor]:
        """Return the learner's parameters whose copies in workers the learner must update.

        Empty where the user's own object runs, and where a scheme of the user's sends weights.
        """
        if not isinstance(self.policy, nn.Module) or _POLICY in self._schemes:
            return []
        return [] if self.running(_POLICY) is self.policy else list(self.policy.parameters())

    def shapes(self, model_id: str) -> Shapes:
        """Return the shapes of a model's weights, by dotted name."""
        shapes: Shapes = self._session.ask(m.Call("describe_weights", (model_id,)))
        return shapes

    def chosen(self, worker_ids: Any) -> list[int]:
        """Return all workers, whatever a weight updater calls them: one policy runs for all."""
        return list(range(self._session.workers))

    def deliver(self, sources: Mapping[str, Any], worker_ids: Any, number: int) -> list[int]:
        """Publish weights by model id, all or none; ``None`` takes the learner's policy's.

        Args:
            sources: Per model id a module, a `TensorDict`, a state dict or ``None``; with workers
                also, by worker index, a dictionary of these for each worker that is updated.
            worker_ids: Which workers: indices, devices, or a list of them; ``None`` for those that
                ``sources`` name by index, else all.
            number: The version of the weights.

        Returns:
            The workers that were updated; the others keep their weights and their version.
        """
        models: dict[str, Any] = {}
        for model_id, source in self._applied(sources).items():
            running = self.running(model_id)
            source = self.policy if source is None else source
            if source is None or source is running:
                continue
            if isinstance(source, nn.Module) or not callable(source):
                models[model_id] = weights_of(source)
                if not models[model_id] and source is self.policy:
                    warn_of_no_weights(source)
        workers = self._session.alive
        with self._session.turn(None):
            # All have one policy, and no version before its weights are known to fit.
            self._session.ask(m.Load(m.Snapshot(number, models)))
            others = dict.fromkeys(workers[1:], m.Load(m.Snapshot(number, {})))
            self._session.request_each(others)
        return workers

    def _applied(self, sources: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the weights in ``sources`` of models that are updated."""
        for model_id, source in sources.items():
            if source is None and model_id != _POLICY:
                raise ConfigError(f"no weights were given for model {model_id!r}")
        return {name: source for name, source in sources.items() if self._scheme(name).applies}

    def _scheme(self, name: str) -> WeightSyncScheme:
        return self._schemes.get(name, _USUAL_SCHEME)

    def policy_state(self) -> dict[str, Any]:
        """Return the running policy's state dict, cloned; empty if it has none."""
        policy = self.running(_POLICY)
        return cloned(policy.state_dict()) if isinstance(policy, nn.Module) else {}

    def check_restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise `WeightsError` unless all policy states fit; empty ones do."""
        policy = self.running(_POLICY)
        for state in states:
            if state and isinstance(policy, nn.Module):
                check_weights(policy, weights_of(state))

    def restore(self, states: Mapping[int, tuple[Mapping[str, Any], int]]) -> None:
        """Load policy states into the running policies (and the learner's), and their versions."""
        running = self.running(_POLICY)  # by all workers
        distinct = [running] if running is self.policy else [self.policy, running]
        for state, _ in states.values():
            for policy in distinct:
                if state and isinstance(policy, nn.Module):
                    load_weights(policy, weights_of(state))
        self._session.request_each(
            {worker: m.Load(m.Snapshot(number, {})) for worker, (_, number) in states.items()}
        )


class WeightDelivery(Models):
    """Publishes weights to workers: through one publisher for all of them, or by message to some.

    Everything is checked here, before anything is sent: weights that do not fit are the caller's
    error. A publisher holds one model for all workers. What concerns several models at once, some
    of the workers, or extra state goes by message, which is atomic over models. A serial number
    tells workers which of the two is newer.
    """

    def __init__(
        self,
        session: Session,
        policy: Any,
        *,
        made_by_factory: bool,
        schemes: Mapping[str, WeightSyncScheme] | None,
        devices: Sequence[torch.device | None],
        keep: bool = False,
    ) -> None:
        """Set up the publisher of ``policy``, which is sent when nothing else is given.

        ``devices`` are those of the workers' policies. With ``keep``, messages are kept for
        replacements of workers.
        """
        super().__init__(session, policy, schemes)
        self._factory = made_by_factory
        self._serial = 0
        self._kept = dict.fromkeys(range(session.workers), m.Snapshot(0, {})) if keep else {}
        """Per worker, the weights that were last sent to it by message, if they are kept."""
        self._shapes: dict[str, Shapes] = {}
        self._publisher: WeightPublisher | None = None
        self._fitting: list[torch.Tensor] | None = None
        self._tracked = TrackedModule(policy) if isinstance(policy, nn.Module) else None
        home = _CPU
        if self._tracked is not None:
            weights = dict(zip(self._tracked.names, self._tracked.tensors(), strict=True))
            if weights and not made_by_factory:
                home = next(iter(weights.values())).device
            if not made_by_factory:  # as the workers got it: the learner's may change its shape
                self._shapes[_POLICY] = shapes_of(policy)
            self._bind(weights)
            if made_by_factory and weights:
                # Workers start with these weights, also where a scheme never sends any.
                self._deliver({_POLICY: None}, None, 0)
        self._devices = [home if device is None else device for device in devices]

    def running(self, model_id: str) -> Any:
        """Return the learner's own object for ``model_id``."""
        if model_id == _POLICY and self.policy is not None:
            return self.policy
        raise UnknownModelError(f"no model {model_id!r} on the learner's side")

    def copied_parameters(self) -> list[torch.Tensor]:
        if self._tracked is None or _POLICY in self._schemes:
            return []
        return list(self._tracked.module.parameters())

    def shapes(self, model_id: str) -> Shapes:
        """Return the shapes of a model's weights; ask workers for them once."""
        if model_id not in self._shapes:
            self._shapes[model_id] = super().shapes(model_id)
        return self._shapes[model_id]

    def _bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish the policy's weights for all workers at once from now on, if possible."""
        scheme = self._scheme(_POLICY)
        if weights and scheme.shared and scheme.applies:
            self._publisher = self._session.backend.weight_publisher(weights)
        if self._publisher is not None:
            workers = range(self._session.workers)
            bind = m.Bind(_POLICY, self._publisher.ref)
            self._session.request_each(dict.fromkeys(workers, bind))

    # -- publishing ------------------------------------------------------------------------------

    def deliver(self, sources: Mapping[str, Any], worker_ids: Any, number: int) -> list[int]:
        return self._deliver(self._applied(sources), worker_ids, number)

    def _deliver(self, sources: Mapping[str, Any], worker_ids: Any, number: int) -> list[int]:
        self._session.check_alive()
        workers = self._recipients(sources, worker_ids)
        if len(workers) < self._session.workers or not self._published(sources, number):
            self._send(sources, workers, number)
        return workers

    def _send(self, sources: Mapping[str, Any], workers: Sequence[int], number: int) -> None:
        """Send a message to each of ``workers``, after receiving replies to earlier ones."""
        self._session.check()
        read = {
            name: {worker: self._read(name, source[worker]) for worker in workers}
            if by_worker(source)
            else dict.fromkeys(workers, self._read(name, source))
            for name, source in sources.items()
        }
        self._serial += 1
        loads: dict[int, m.Command] = {}
        for worker in workers:
            models = {name: weights[worker] for name, weights in read.items() if weights[worker]}
            loads[worker] = self._load(worker, number, models)
        alive = self._session.alive  # all of them, unless losses are tolerated
        self._session.post({worker: load for worker, load in loads.items() if worker in alive})

    def _read(self, name: str, source: Any) -> Weights:
        """Return copies of weights that fit the model; ``None`` takes the learner's policy's."""
        weights = cloned(self._learners() if source is None else weights_of(source))
        if weights or source is not None:  # the learner's policy may have none
            self._check(name, weights)
        return weights

    def _learners(self) -> Weights:
        if self._factory and self.policy is None:
            raise PolicyTypeError(
                "there is nothing to take weights from: the workers made their policies with "
                "policy_factory; pass weights, or give the collector a policy= as well"
            )
        weights = weights_of(self.policy) if isinstance(self.policy, nn.Module) else {}
        if not weights and not isinstance(self.policy, RandomPolicy | None):
            warn_of_no_weights(self.policy)
        return weights

    def _load(self, worker: int, number: int, models: Mapping[str, Weights]) -> m.Load:
        """Return the message by which ``worker`` loads ``models``; keep them if necessary."""
        if worker in self._kept:
            kept = self._kept[worker].models  # in the order of their updates
            kept = {name: w for name, w in kept.items() if name not in models}
            self._kept[worker] = m.Snapshot(number, {**kept, **models}, self._serial)
        return m.Load(m.Snapshot(number, models, self._serial))

    def catch_up(self, worker: int) -> list[m.Command]:
        """Return the command that loads the newest weights in a replacement of ``worker``."""
        kept = self._kept[worker]
        commands: list[m.Command] = []
        if self._publisher is not None:
            commands.append(m.Bind(_POLICY, self._publisher.ref))
        if kept.serial:
            commands.append(m.Load(kept))
        return commands

    def _published(self, sources: Mapping[str, Any], number: int) -> bool:
        """Publish to all workers at once if possible."""
        publisher = self._publisher
        if publisher is None or list(sources) != [_POLICY] or by_worker(sources[_POLICY]):
            return False
        tensors = self._tensors(sources[_POLICY], publisher.ref)
        if tensors is None:
            return False
        self._serial += 1
        publisher.publish(tensors, number, self._serial)
        for worker, kept in self._kept.items():  # what was published is newer
            models = {name: w for name, w in kept.models.items() if not is_within(name, _POLICY)}
            self._kept[worker] = replace(kept, models=models)
        return True

    def _tensors(self, source: Any, ref: m.WeightsRef) -> list[torch.Tensor] | None:
        """Return the policy's weights in the order of ``ref``; ``None`` unless exactly these.

        Buffers may be left out and extra state added; a publisher takes all of ``ref`` or nothing.
        """
        tracked = self._tracked
        assert tracked is not None  # `ref` is that of its tensors
        own = tracked.tensors() if source is None or source is self.policy else None
        if own is not None and own is self._fitting:  # only values can have changed
            return own
        weights = weights_of(self.policy if source is None else source)
        names = [entry[0] for entry in ref.entries]
        if set(weights) != set(names):
            return None
        self._check(_POLICY, weights)
        tensors = [torch.as_tensor(weights[name]) for name in names]
        alike = [tensor.dtype for tensor in tensors] == [entry[2] for entry in ref.entries]
        if own is not None and alike and tracked.names == names:
            self._fitting = own
        return tensors

    def _check(self, name: str, weights: Weights) -> None:
        check_tensors(repr(name), self.shapes(name), weights)

    # -- which workers ---------------------------------------------------------------------------

    def _recipients(self, sources: Mapping[str, Any], worker_ids: Any) -> list[int]:
        """Return the target workers of an update: a version never names weights not sent."""
        named = [set(source) for source in sources.values() if by_worker(source)]
        if worker_ids is None and named and len(named) == len(sources):
            worker_ids = set().union(*named)
        workers = self.chosen(worker_ids)
        for keys in named:
            if keys != set(workers):
                raise ConfigError(
                    f"there are weights for workers {sorted(keys)}, but the update is for workers "
                    f"{workers}: give each of these its weights, or name fewer in worker_ids"
                )
        return workers

    def chosen(self, worker_ids: Any) -> list[int]:
        """Return the workers meant by indices, devices or a list of them; ``None`` means all."""
        workers = range(self._session.workers)
        if worker_ids is None:
            return list(workers)
        if isinstance(worker_ids, torch.Tensor):
            worker_ids = worker_ids.tolist()
        chosen: set[int] = set()
        several = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str)
        for one in worker_ids if several else [worker_ids]:
            if isinstance(one, torch.device | str):
                device = torch.device(one)
                chosen |= {w for w in workers if _is_on(self._devices[w], device)}
            elif check_int("worker_ids", one) in workers:
                chosen.add(int(one))
            else:
                raise ConfigError(f"worker_ids ({one!r}) names no worker: there are {len(workers)}")
        if not chosen:
            raise ConfigError(f"worker_ids ({worker_ids!r}) names no worker")
        return sorted(chosen)

    # -- restoring -------------------------------------------------------------------------------

    def check_restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        for state in states:
            if state:
                self._check(_POLICY, weights_of(state))

    def restore(self, states: Mapping[int, tuple[Mapping[str, Any], int]]) -> None:
        """Load a policy state of its own, with its version, into each worker."""
        self._serial += 1
        loads: dict[int, m.Command] = {}
        for worker, (state, number) in states.items():
            models = {_POLICY: cloned(weights_of(state))} if state else {}
            loads[worker] = self._load(worker, number, models)
        self._session.request_each(loads)


def _is_on(device: torch.device, named: torch.device) -> bool:
    """Tell whether ``named`` means ``device``; without an index it means all of its type."""
    return device.type == named.type and named.index in (None, device.index or 0)
