"""What every collector does: iterate, hooks, weights, remote access, shutting down."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset

from gleanrl.collectors.legacy import WeightUpdaterBase
from gleanrl.core.errors import ConfigError
from gleanrl.engine.profiling import ProfileConfig, RolloutProfiler

PreHook = Callable[[], None]
PostHook = Callable[[Any], None]


class BaseCollector(IterableDataset[Any], abc.ABC):
    """Base of all collectors. Iterate over it, or call `next`; use it as a context manager.

    A ``for`` loop that is left early can be entered again and continues; once ``total_frames`` were
    delivered, iteration yields nothing more, but everything else still works until `shutdown`.
    """

    def __init__(
        self, pre_collect_hook: PreHook | None = None, post_collect_hook: PostHook | None = None
    ) -> None:
        """Remember the hooks.

        Args:
            pre_collect_hook: Called without argument before each batch is collected.
            post_collect_hook: Called with each batch as it will be delivered.
        """
        super().__init__()
        self.pre_collect_hook = pre_collect_hook
        self.post_collect_hook = post_collect_hook
        self._iterating = False
        self._profiler: RolloutProfiler | None = None
        self._profile_config: ProfileConfig | None = None

    # -- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Continue iteration; if collecting fails, shut down and raise what it raised."""
        self._iterating = True
        iterator = self.iterator()
        while True:
            self._check_not_started()  # a mistake, which ends nothing
            try:
                held = [next(iterator)]
            except StopIteration:
                return
            except BaseException:
                self._abandon()
                raise
            # Popped, so that this frame does not keep the batch's memory while the user works.
            yield held.pop()

    def _check_not_started(self) -> None:
        """Raise `RuntimeError` if it collects in the background."""

    def _abandon(self) -> None:
        """Shut down after a failure."""
        self.shutdown(raise_on_error=False)

    @abc.abstractmethod
    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are reached."""

    def next(self) -> TensorDictBase | None:
        """Return the next batch, or ``None`` once ``total_frames`` are reached."""
        # No iterator is kept: it would keep this collector alive in turn. Its place is in us.
        batch: TensorDictBase | None = next(iter(self), None)
        return batch

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of a full iteration.

        Raises:
            TypeError: the collector is endless.
        """

    # -- life ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Close environments and workers. Idempotent; batches that were handed out stay valid."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started with `start`."""
        self.shutdown(timeout=timeout, close_env=close_env)

    def start(self) -> None:
        """Collect in the background into a replay buffer.

        Raises:
            NotImplementedError: this collector cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot collect in the background")

    def pause(self) -> Any:
        """Suspend background collection for the length of a ``with`` block.

        Raises:
            NotImplementedError: this collector cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot collect in the background")

    def explain(self) -> str:
        """Say which parts are called as they are, and why.

        Raises:
            NotImplementedError: this collector does not know.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it collects")

    def __enter__(self) -> BaseCollector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(raise_on_error=exc[0] is None)

    # -- hooks -----------------------------------------------------------------------------------

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set the hook that sees each batch (a method, for handles without properties)."""
        self.post_collect_hook = hook

    # -- profiling -------------------------------------------------------------------------------

    def enable_profile(self, **config: Any) -> None:
        """Profile the first rollouts with `torch.profiler`; call before iterating.

        Args:
            **config: The fields of `ProfileConfig`.

        Raises:
            RuntimeError: iteration has started.
            ConfigError: counts or names that make no sense.
        """
        if self._iterating:
            raise RuntimeError("enable_profile must be called before the collector is iterated")
        self.disable_profile()
        self._profile_config = ProfileConfig(**config)
        index = self._worker_idx or 0
        if self._profile_config.should_profile_worker(index):
            self._profiler = RolloutProfiler(self._profile_config, index, self.post_collect_hook)
            self.post_collect_hook = self._profiler

    def disable_profile(self) -> None:
        """Stop profiling and put the user's hook back."""
        if self._profiler is not None:
            self.post_collect_hook = self._profiler.close()
        self._profiler, self._profile_config = None, None

    @property
    def profile_config(self) -> ProfileConfig | None:
        """What is being profiled, ``None`` if nothing."""
        return self._profile_config

    # -- weights ---------------------------------------------------------------------------------

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
        """Update the weights of the policy that collects; the next batch is made with them.

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
        given = [x for x in (policy_or_weights, weights, policy, policy_weights) if x is not None]
        if len(given) > 1:
            raise ConfigError("give weights once: positionally, as weights= or as policy=")
        if self._updater is not None and (model_id is not None or weights_dict is not None):
            raise ConfigError(
                "model_id and weights_dict need weight sync schemes; a weight updater knows the "
                "policy only"
            )
        if weights_dict is not None:
            if given or model_id is not None or not weights_dict:
                raise ConfigError(
                    "weights_dict excludes model_id and others, and must not be empty"
                )
            self._update_weights(dict(weights_dict), worker_ids, kwargs)
            return
        self._update_weights(
            {model_id or "policy": given[0] if given else None}, worker_ids, kwargs
        )

    @abc.abstractmethod
    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Publish weights by model id; ``None`` means those of the collector's own policy."""

    # -- state -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, action spaces and random streams, and reset all environments.

        Args:
            seed: Environment ``i`` (over all workers) gets ``seed + i``.
            static_seed: Give every environment ``seed`` itself.

        Returns:
            The last seed used: ``seed + n_envs - 1``, or ``seed`` if static.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state, with ``policy_state_dict`` and ``env_state_dict``."""

    @abc.abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned; environments restart on fresh resets."""

    @abc.abstractmethod
    def stats(self) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars; costs no round trip."""

    # -- remote access ---------------------------------------------------------------------------

    @abc.abstractmethod
    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a path such as ``"env.transform[0]"`` and call it, or return it."""

    def get_distant_attr(self, attr: str) -> Any:
        """Return what a path such as ``"policy.module"`` names."""
        return self.cascade_execute(attr)

    def map_fn(
        self,
        method: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call ``method`` once per entry of the argument lists and return the results.

        Raises:
            ConfigError: the lists differ in length.
            AttributeError: ``method`` does not exist or is not callable.
        """
        args = list(list_of_args or [])
        kwargs = list(list_of_kwargs or [])
        if args and kwargs and len(args) != len(kwargs):
            raise ConfigError(
                f"list_of_args has {len(args)} entries, list_of_kwargs {len(kwargs)}: "
                "one each per call"
            )
        count = max(len(args), len(kwargs))
        args, kwargs = args or [()] * count, kwargs or [{}] * count
        return [self._call_method(method, a, k) for a, k in zip(args, kwargs, strict=True)]

    @abc.abstractmethod
    def _call_method(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call one method by path."""

    @property
    def worker_idx(self) -> int:
        """This collector's index among its parent's workers.

        Raises:
            RuntimeError: it was never told.
        """
        if self._worker_idx is None:
            raise RuntimeError("worker_idx was not given to this collector")
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, value: int | None) -> None:
        self._worker_idx = value

    _worker_idx: int | None = None
    _updater: WeightUpdaterBase | None = None
