"""Hooks, profiles, weights and paths of a collector, in this process and in workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors.hooks import Hooks, PostHook, PreHook
from gleanrl.collectors.remote_attributes import AttributeAccess
from gleanrl.core.errors import ConfigError, for_users
from gleanrl.core.options import warn
from gleanrl.engine.profiling import ProfileConfig

Update: TypeAlias = Callable[[Mapping[str, Any], Any, Mapping[str, Any]], None]
"""Publishes weights by model id (``None``: those of the collector's own policy) to workers."""
P = ParamSpec("P")
R = TypeVar("R")


def method_of(
    part: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return a method with signature and docstring of ``method``, which calls that of a part."""
    find, name = attrgetter(part), method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(find(self), name)(*args, **kwargs)
        return result

    return call


def property_of(part: str, shown: Any) -> Any:
    """Return a read-only property with the docstring of the property ``shown`` of a part."""
    find = attrgetter(f"{part}.{shown.fget.__name__}")
    return property(lambda self: find(self), doc=shown.__doc__)


class Controls:
    """The common methods of a collector and of the collector inside a worker, over their parts."""

    _hooks: Hooks
    _attributes: AttributeAccess
    _update: Update
    _worker_idx: int | None = None

    # -- hooks -----------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """A function called without argument before each rollout, in the process that makes it."""
        return self._hooks.pre

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._hooks.set_pre_collect_hook(hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """A function called with each rollout, in the process that makes it."""
        return self._hooks.post

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._hooks.set_post_collect_hook(hook)

    set_pre_collect_hook = method_of("_hooks", Hooks.set_pre_collect_hook)
    set_post_collect_hook = method_of("_hooks", Hooks.set_post_collect_hook)

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts of worker 0 with `torch.profiler`, in its process.

        Call it before iterating. ``workers=[0, 1]`` profiles these workers; each of them writes a
        trace of its own.

        Args:
            **config: The fields of `ProfileConfig`.

        Raises:
            RuntimeError: iteration has started.
            ConfigError: counts or names that make no sense, or a worker that does not exist.
        """
        self._hooks.begin_profile(config, self._worker_idx)

    disable_profile = method_of("_hooks", Hooks.disable_profile)

    @property
    def profile_config(self) -> ProfileConfig | None:
        """The settings of the running profile, ``None`` without one."""
        return self._hooks.profile

    # -- weights ---------------------------------------------------------------------------------

    @for_users
    def update_policy_weights_(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
        worker_ids: int | torch.device | Sequence[int | torch.device] | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        policy_weights: Any = None,
        **kwargs: Any,
    ) -> None:
        """Update the weights of the policy that collects, for the next batch.

        Args:
            policy_or_weights: A module, a `TensorDict` of weights or a state dict. With nothing
                given, weights are read from the policy the collector was built with.
            weights: The same, by name.
            policy: A module whose weights are used.
            worker_ids: Which workers to update; collectors with several workers only.
            model_id: Which model: ``"policy"`` (default) or a path such as ``"env.transform[0]"``.
            weights_dict: Weights by model id, for several models at once; excludes the others.
            policy_weights: Retired spelling of ``weights``.
            **kwargs: Handed to the weight updater, if there is one.

        Raises:
            ConfigError: arguments that exclude each other, or no such worker.
            TypeError: nothing was given, and there is no policy to take weights from.
            WeightsError: weights that do not fit; nothing was changed.
            KeyError: no model of that id.
        """
        if policy_weights is not None:
            warn("policy_weights= is retired; pass weights=", DeprecationWarning)
        source = one_of(policy_or_weights, weights, policy, policy_weights)
        further = source is not None or model_id is not None
        if weights_dict is not None and (further or not weights_dict):
            raise ConfigError("weights_dict excludes model_id and others, and must not be empty")
        models = {model_id or "policy": source} if weights_dict is None else dict(weights_dict)
        self._update(models, worker_ids, kwargs)

    # -- paths -----------------------------------------------------------------------------------

    cascade_execute = method_of("_attributes", AttributeAccess.cascade_execute)
    get_distant_attr = method_of("_attributes", AttributeAccess.get_distant_attr)
    getattr_policy = method_of("_attributes", AttributeAccess.getattr_policy)
    getattr_env = method_of("_attributes", AttributeAccess.getattr_env)
    getattr_rb = method_of("_attributes", AttributeAccess.getattr_rb)
    map_fn = method_of("_attributes", AttributeAccess.map_fn)

    @property
    def worker_idx(self) -> int:
        """This collector's index among its parent's workers.

        Raises:
            RuntimeError: no index was set.
        """
        if self._worker_idx is None:
            raise RuntimeError("worker_idx was not given to this collector")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        self._worker_idx = value


def one_of(*given: Any) -> Any:
    """Return the weights among ``given``; ``None`` if there are none."""
    sources = [value for value in given if value is not None]
    if len(sources) > 1:
        raise ConfigError("give weights once: positionally, as weights= or as policy=")
    return sources[0] if sources else None
