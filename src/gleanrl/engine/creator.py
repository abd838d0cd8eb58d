"""A callable that makes environments and can say what they are like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError
from gleanrl.engine.engine import Engine
from gleanrl.envs.tensordict import EnvMetaData
from gleanrl.rollout.env_worker import EnvWorkerBuilder
from gleanrl.transport.process import ProcessBackend


class EnvCreator:
    """Makes environments by a callable of yours, which travels to other processes by value.

    Example:
        >>> from gleanrl.envs import GymEnv
        >>> make = EnvCreator(lambda: GymEnv("Pendulum-v1"))
        >>> make().action_spec.shape, make.meta_data.batch_size
        (torch.Size([1]), torch.Size([]))
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        share_memory: bool = True,
    ) -> None:
        """Remember the callable; nothing is made yet.

        Args:
            create_env_fn: Returns a new environment at every call.
            create_env_kwargs: Its arguments.
            share_memory: Accepted for compatibility: environments share no state here.

        Raises:
            ConfigError: ``create_env_fn`` cannot be called.
        """
        if not callable(create_env_fn):
            raise ConfigError(f"create_env_fn ({create_env_fn!r:.100}) must be callable")
        self._make = create_env_fn
        self._kwargs = dict(create_env_kwargs or {})
        self._meta_data: EnvMetaData | None = None

    def __call__(self, **kwargs: Any) -> Any:
        """Make an environment; ``kwargs`` add to those given at construction."""
        return self._make(**{**self._kwargs, **kwargs})

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """Return a creator with other arguments."""
        return EnvCreator(self._make, {**self._kwargs, **kwargs})

    @property
    def meta_data(self) -> EnvMetaData:
        """What the environments are like.

        One is made for that at the first access, in a process of its own, and closed.
        """
        if self._meta_data is None:
            # In a process of its own: making one may take over a display, a GPU or much memory.
            factory = EnvWorkerBuilder((self._make,), (self._kwargs,), torch.initial_seed())
            engine = Engine(lambda _: ProcessBackend(), [factory])
            try:
                self._meta_data = engine.request(0, m.Call("meta_data"))
            finally:
                engine.close(5.0)
        return self._meta_data

    def __getstate__(self) -> dict[str, Any]:
        # By value: lambdas and functions of a script must reach processes that cannot import them.
        return {"made_by": cloudpickle.dumps((self._make, self._kwargs))}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._make, self._kwargs = cloudpickle.loads(state["made_by"])
        self._meta_data = None
