"""Weight updaters, which weight sync schemes replace, under TorchRL's path."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.core.options import warn

WorkerId: TypeAlias = int | torch.device | str
WorkerIds: TypeAlias = WorkerId | Sequence[WorkerId] | None
Hook = Callable[[], None]


class WeightUpdaterBase:
    """Decides, step by step, how ``update_policy_weights_`` of its collectors sends weights.

    A retired extension point; weight sync schemes replace it. `push_weights` takes its argument or
    the result of ``_get_server_weights``, passes it through ``_maybe_map_weights`` and calls
    ``_sync_weights_with_worker`` once for all workers, or once per worker id. Each of these may be
    overridden. By default they take the weights of the learner's policy, and the collectors publish
    these as they do without an updater.
    """

    _collectors: tuple[weakref.ref[Any], ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn that new code should use schemes instead of updaters."""
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            warn(
                f"{cls.__name__} is a weight updater, which is retired; pass "
                "weight_sync_schemes= to the collector, or weights to update_policy_weights_",
                DeprecationWarning,
            )

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """Return an updater for ``policy``, ``None`` if the class needs more than that."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of the collector's ``init_updater``; does nothing here."""

    # -- collectors ------------------------------------------------------------------------------

    def register_collector(self, collector: Any) -> None:
        """Serve ``collector``, which is not kept alive. Once is enough."""
        if all(known() is not collector for known in self._collectors):
            self._collectors = (*self._collectors, weakref.ref(collector))

    @property
    def collectors(self) -> list[Any] | None:
        """The collectors of this updater, ``None`` without collectors."""
        alive = [collector for known in self._collectors if (collector := known()) is not None]
        return alive or None

    @property
    def collector(self) -> Any | None:
        """The collector of this updater, ``None`` without one.

        Raises:
            ValueError: there are several.
        """
        served = self.collectors or [None]
        if len(served) > 1:
            raise ValueError(f"this updater serves {len(served)} collectors; use collectors")
        return served[0]

    def increment_version(self) -> None:
        """Move all its collectors to their next policy version."""
        for collector in self.collectors or ():
            collector.increment_version()

    # -- hooks -----------------------------------------------------------------------------------

    @cached_property
    def post_hooks(self) -> list[Hook]:
        """The functions called after each push."""
        return []

    def register_post_hook(self, hook: Hook) -> None:
        """Call ``hook`` after each push."""
        self.post_hooks.append(hook)

    # -- pushing ---------------------------------------------------------------------------------

    def __call__(self, policy_or_weights: Any = None, worker_ids: WorkerIds = None) -> None:
        """Push weights; see `push_weights`."""
        self.push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: WorkerIds = None) -> None:
        """Send weights to workers and call the post hooks.

        Args:
            policy_or_weights: A module, a `TensorDict` or a state dict; by default the result of
                ``_get_server_weights``.
            worker_ids: The workers; by default the result of `all_worker_ids`.

        Raises:
            TypeError: there are no weights.
            WeightsError: weights that do not fit.
        """
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        chosen: Sequence[Any] | None
        if worker_ids is None:
            chosen = self.all_worker_ids()
        else:
            chosen = [worker_ids] if isinstance(worker_ids, WorkerId) else worker_ids
        if chosen is None:
            self._sync_weights_with_worker(server_weights=weights)
        else:
            for worker in chosen:
                if not self._skip_update(worker):
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        for hook in self.post_hooks:
            hook()

    def all_worker_ids(self) -> Sequence[Any] | None:
        """Return the workers to update one by one, ``None`` to update all at once."""
        return None

    def _skip_update(self, worker_id: Any) -> bool:
        """Return whether a worker is left out."""
        return False

    def _get_server_weights(self) -> Any:
        """Return the weights to send if the caller passes none, ``None`` if there are none."""
        for collector in self.collectors or ():
            if isinstance(collector.learner_policy, nn.Module):
                return TensorDict.from_module(collector.learner_policy).data
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Convert the passed weights into weights that workers load."""
        if isinstance(policy_or_weights, nn.Module):
            return TensorDict.from_module(policy_or_weights).data
        if isinstance(policy_or_weights, TensorDictBase | Mapping):
            return policy_or_weights
        hint = ": none were given, and there is no policy to take them from"
        raise TypeError(
            "weights must be a module, a TensorDict or a state dict, not "
            f"{type(policy_or_weights).__name__}{hint if policy_or_weights is None else ''}"
        )

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        """Send weights to one worker, or to all if ``worker_id`` is ``None``."""
        for collector in self.collectors or ():
            collector.deliver_weights(server_weights, worker_id)


class VanillaWeightUpdater(WeightUpdaterBase):
    """Sends the weights of a getter, kept weights, or those of the learner's policy.

    TorchRL has a class for each kind of worker. The collectors send the weights here, so this class
    serves all of them, and the other names are its aliases.
    """

    def __init__(
        self,
        policy_weights: Any = None,
        *_: Any,
        weight_getter: Callable[[], Any] | None = None,
        get_server_weights: Callable[[], Any] | None = None,
        **__: Any,
    ) -> None:
        """Remember the source of the weights that are sent when the caller passes none.

        Args:
            policy_weights: A `TensorDict` of weights. Anything else has no effect.
            *_: TorchRL's further arguments have no effect.
            weight_getter: Returns the weights; takes precedence over ``policy_weights``.
            get_server_weights: Another name of ``weight_getter``.
            **__: TorchRL's further arguments have no effect.
        """
        self.weight_getter = weight_getter or get_server_weights
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> VanillaWeightUpdater:
        """Return an updater that sends the weights of ``policy``."""
        return cls(TensorDict.from_module(policy).lock_())

    def _get_server_weights(self) -> Any:
        if self.weight_getter is not None:
            return self.weight_getter()
        kept = self.policy_weights
        return kept.data if isinstance(kept, TensorDictBase) else super()._get_server_weights()


MultiProcessedWeightUpdater = RemoteModuleWeightUpdater = VanillaWeightUpdater
DistributedWeightUpdater = RPCWeightUpdater = RayWeightUpdater = VanillaWeightUpdater


def read_updater(given: Any) -> WeightUpdaterBase | None:
    """Return the updater that ``weight_updater=`` is or returns when called, or ``None``."""
    if given is None or isinstance(given, WeightUpdaterBase):
        return given
    # An updater of TorchRL's is no factory: calling it would update weights.
    theirs = any(kind.__module__.startswith("torchrl.") for kind in type(given).__mro__)
    made = given() if callable(given) and not theirs else given
    if isinstance(made, WeightUpdaterBase):
        return made
    raise TypeError(
        f"weight_updater ({given!r:.100}) must be a WeightUpdaterBase or return one when called; "
        "import the class, or its base, from gleanrl.collectors"
    )


__all__ = [
    "MultiProcessedWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
