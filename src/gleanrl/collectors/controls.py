"""Hooks, paths and weights of a collector, in this process and in workers."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, for_users
from gleanrl.engine.profiling import ProfileConfig, RolloutProfiler

PreHook = Callable[[], None]
PostHook = Callable[[Any], None]


class Controls(abc.ABC):
    """The common part of a collector and of the collector inside a worker."""

    _iterating = False
    _profiler: RolloutProfiler | None = None
    _profile_config: ProfileConfig | None = None
    _worker_idx: int | None = None

    def __init__(
        self, pre_collect_hook: PreHook | None = None, post_collect_hook: PostHook | None = None
    ) -> None:
        """Remember the hooks."""
        super().__init__()
        self._pre_hook, self._post_hook = pre_collect_hook, post_collect_hook

    # -- hooks -----------------------------------------------------------------------------------

    @property
    def pre_collect_hook(self) -> PreHook | None:
        """A function called without argument before each rollout, in the process that makes it."""
        return self._pre_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self.set_pre_collect_hook(hook)

    @property
    def post_collect_hook(self) -> PostHook | None:
        """A function called with each rollout, in the process that makes it."""
        return self._post_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self.set_post_collect_hook(hook)

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        """Set `pre_collect_hook` (a method, for handles without properties)."""
        self._pre_hook = hook

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set `post_collect_hook` (a method, for handles without properties)."""
        self._post_hook = hook

    # -- profiling -------------------------------------------------------------------------------

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
        if self._iterating:
            raise RuntimeError("enable_profile must be called before the collector is iterated")
        self.disable_profile()
        self._profile_config = ProfileConfig(**config)
        self._begin_profile(config)

    def _begin_profile(self, config: Mapping[str, Any]) -> None:
        assert self._profile_config is not None
        index = self._worker_idx or 0
        if self._profile_config.should_profile_worker(index):
            self._profiler = RolloutProfiler(self._profile_config, index, self.post_collect_hook)
            self.post_collect_hook = self._profiler

    def disable_profile(self) -> None:
        """Stop profiling and restore the user's hook."""
        if self._profile_config is not None:
            self._end_profile()
        self._profiler, self._profile_config = None, None

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self.post_collect_hook = self._profiler.close()

    @property
    def profile_config(self) -> ProfileConfig | None:
        """The settings of the running profile, ``None`` without one."""
        return self._profile_config

    # -- weights ---------------------------------------------------------------------------------

    weight_updater: Any = None
    """The legacy weight updater, if there is one."""

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
            ConfigError: arguments that exclude each other.
            WeightsError: weights that do not fit; nothing was changed.
            KeyError: no model of that id.
        """
        if policy_weights is not None:
            warnings.warn(
                "policy_weights= is retired; pass weights=", DeprecationWarning, stacklevel=2
            )
        source = one_of(policy_or_weights, weights, policy, policy_weights)
        if self.weight_updater is not None and (model_id is not None or weights_dict is not None):
            raise ConfigError(
                "model_id and weights_dict need weight sync schemes; a weight updater knows the "
                "policy only"
            )
        further = source is not None or model_id is not None
        if weights_dict is not None and (further or not weights_dict):
            raise ConfigError("weights_dict excludes model_id and others, and must not be empty")
        models = {model_id or "policy": source} if weights_dict is None else dict(weights_dict)
        self._update_weights(models, worker_ids, kwargs)

    @abc.abstractmethod
    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Publish weights by model id; ``None`` means the weights of the collector's own policy."""

    # -- remote access ---------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a path such as ``"env.transform[0]"`` and call it; return it if not callable.

        With workers, in every worker: one result each, ``None`` for one that was lost (where that
        is tolerated).

        Raises:
            AttributeError: an attribute is missing.
            ValueError: arguments for something that is not callable.
        """
        with self._alone():
            return paths.call(self, attr_path, args, kwargs)

    def _alone(self) -> AbstractContextManager[Any]:
        """Suspend collection during a ``with`` block."""
        return nullcontext()

    def get_distant_attr(self, attr: str) -> Any:
        """Return the object at a path such as ``"policy.module"`` or ``"worker_idx"``.

        With workers, the path begins at a worker's collector, and there is one entry per worker,
        ``None`` for one that was lost. Of a replay buffer that the learner writes into, every
        worker has the learner's.
        """
        return paths.resolve(self, attr)

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy that runs; of the first worker's, if there are several.

        Raises:
            AttributeError: it has none of that name.
        """
        return self.get_distant_attr(f"policy.{attr}")

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment; of the first worker's, if there are several.

        Raises:
            AttributeError: it has none of that name.
        """
        return self.get_distant_attr(f"env.{attr}")

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer.

        Raises:
            AttributeError: it has none of that name.
        """
        return paths.resolve(self, f"replay_buffer.{attr}")

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once per entry of the argument lists and return the results.

        With workers, once in every worker, each with its own arguments; one that was lost (where
        that is tolerated) answers ``None``.

        Args:
            method_name: The method, or a path such as ``"policy.module.train"``; with workers it
                begins at the worker's collector.
            list_of_args: Positional arguments of each call.
            list_of_kwargs: Arguments by name of each call. Without either list there is one call,
                or one per worker.

        Raises:
            ConfigError: the lists differ in length, or from the number of workers.
            AttributeError: the method does not exist or is not callable.
        """
        args = None if list_of_args is None else list(list_of_args)
        kwargs = None if list_of_kwargs is None else list(list_of_kwargs)
        count = len(args if args is not None else kwargs if kwargs is not None else [()])
        args, kwargs = args or [()] * count, kwargs or [{}] * count
        if len(args) != len(kwargs):
            raise ConfigError(
                "list_of_args and list_of_kwargs must have the same length, one entry per call: "
                f"they have {len(args)} and {len(kwargs)}"
            )
        with self._alone():
            target = self._function(method_name)
            if not callable(target):  # the error callers of a missing method expect
                raise AttributeError(f"{method_name!r} is a {type(target).__name__}, not a method")
            return [target(*a, **k) for a, k in zip(args, kwargs, strict=True)]

    def _function(self, path: str) -> Any:
        """Return the callable at ``path``."""
        return self.get_distant_attr(path)

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
    """Return the weights among ``given``; ``None`` if there are none.

    Raises:
        ConfigError: there are several.
    """
    sources = [value for value in given if value is not None]
    if len(sources) > 1:
        raise ConfigError("give weights once: positionally, as weights= or as policy=")
    return sources[0] if sources else None
