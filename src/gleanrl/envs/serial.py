"""Several TensorDict environments as one batch, stepped one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, for_users
from gleanrl.core.keys import NEXT
from gleanrl.core.options import check_int
from gleanrl.envs.base import EnvBase, close_all
from gleanrl.envs.factory import EnvFactory, check_ignored, closed_on_error, per_env
from gleanrl.envs.gymnasium import GymSource
from gleanrl.envs.libs.gym import GymEnv, make_tensordict_env
from gleanrl.envs.stock import is_stock, stock
from gleanrl.envs.tensordict import (
    EndFlags,
    check_alike,
    load_env_state,
    spec_trees,
    widened,
)


@stock
class SerialEnv(EnvBase):
    """``num_workers`` environments of one kind, batch size ``[num_workers, *theirs]``.

    The environments may be of any class with TensorDict methods, also TorchRL's.

    Example:
        >>> from gleanrl.envs import GymEnv
        >>> env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
        >>> env.rollout(3)["observation"].shape
        torch.Size([2, 3, 4])
    """

    _returns_all = True

    @for_users
    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | None = None,
        **torchrl: Any,
    ) -> None:
        """Make the environments.

        Args:
            num_workers: How many.
            create_env_fn: An id, or a callable that makes one per call; or one of these for each.
            create_env_kwargs: Arguments of the callable, or of each of them.
            device: Where data are returned; the environments' own device by default.
            torchrl: TorchRL's other arguments; data are the same whatever they say.

        Raises:
            ConfigError: the wrong number of callables, or environments that do not fit together.
        """
        check_ignored(SerialEnv, torchrl)
        num_workers = check_int("num_workers", num_workers, least=1)
        factories = per_env("create_env_fn", create_env_fn, num_workers)
        kwargs = per_env("create_env_kwargs", create_env_kwargs or {}, num_workers)
        made: list[Any] = []
        with closed_on_error(made):
            for factory, own in zip(factories, kwargs, strict=True):
                made.append(make_tensordict_env(factory, own))
            self._join(made, device)

    @classmethod
    def of(cls, envs: Sequence[Any]) -> SerialEnv:
        """Return a batch of built environments, taken over if they fit together.

        Raises:
            ConfigError: environments that do not fit together; they are left open.
        """
        batch = cls.__new__(cls)
        batch._join(list(envs), None)
        return batch

    def _join(self, envs: list[Any], device: torch.device | str | None) -> None:
        if len({id(env) for env in envs}) < len(envs):
            raise ConfigError(
                "create_env_fn returned the same environment more than once; it must make a new one"
            )
        check_alike({i: (env.batch_size, spec_trees(env)) for i, env in enumerate(envs)})
        self._envs, first = envs, envs[0]
        self._inner = tuple(first.batch_size)
        self.info_entries = first.info_entries if isinstance(first, EnvBase) else ()
        batch = (len(envs), *self._inner)
        self._inner_ends = EndFlags(first.full_done_spec, self._inner)
        super().__init__(device=device if device is not None else first.device, batch_size=batch)
        self._declare(*(widened(tree, (len(envs),)) for tree in spec_trees(first)))

    # -- stepping --------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        data = {} if tensordict is None else tensordict
        masks = [key for key in self._inner_ends.reset_keys if data.get(key, None) is not None]
        if tensordict is None or not masks:
            return self._stack([env.reset(**options) for env in self._envs])
        roots = []
        for env, part in zip(self._envs, tensordict.unbind(0), strict=True):
            if any(bool(part.get(key).any()) for key in masks):
                roots.append(env.reset(part.copy(), **options))
            else:
                roots.append(part.exclude(*masks))
        return self._stack(roots)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        parts = tensordict.unbind(0)
        steps = [env.step(part.copy()) for env, part in zip(self._envs, parts, strict=True)]
        return self._stack([step.get(NEXT) for step in steps])

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions of all environments at once, unless one of them has its own method."""
        if not any(_draws_itself(env) for env in self._envs):
            return super().rand_action(tensordict)
        roots = [None] * len(self._envs) if tensordict is None else tensordict.unbind(0)
        drawn = [
            env.rand_action(root if root is None else root.copy())
            for env, root in zip(self._envs, roots, strict=True)
        ]
        actions = self._stack([part.select(*self.action_keys) for part in drawn])
        return actions if tensordict is None else tensordict.update(actions)

    def _stack(self, parts: Sequence[TensorDictBase]) -> TensorDictBase:
        stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(list(parts), 0)
        return stacked if self.device is None else stacked.to(self.device)

    @property
    def members(self) -> tuple[Any, ...]:
        """The environments themselves."""
        return tuple(self._envs)

    # -- access ----------------------------------------------------------------------------------

    def get_attr(self, path: str) -> list[Any]:
        """Return the object at ``path`` in every environment: ``"members[0].unwrapped.gravity"``.

        Raises:
            AttributeError: there is nothing of that name.
        """
        return [paths.resolve(env, path) for env in self._envs]

    def call(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method at ``path`` in every environment; return one result for each."""
        return [paths.call(env, path, args, kwargs) for env in self._envs]

    # -- life ------------------------------------------------------------------------------------

    def _set_seed(self, seed: Any, static: bool = False) -> None:
        sizes = [env.batch_size.numel() for env in self._envs]
        for env, offset in zip(self._envs, accumulate(sizes, initial=0), strict=False):
            env.set_seed(seed if static else seed + offset, static_seed=static)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # of environments
        return {f"worker{i}": env.state_dict() for i, env in enumerate(self._envs)}

    def load_state_dict(  # type: ignore[override]  # of environments
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Restore what `state_dict` returned; not strict, the environments it has a state for.

        Raises:
            ConfigError: the state of another number of environments, and ``strict`` is true.
        """
        if strict and len(state_dict) != len(self._envs):
            raise ConfigError(
                f"the state is that of {len(state_dict)} environments, there are {len(self._envs)}"
            )
        for i, env in enumerate(self._envs):
            if f"worker{i}" in state_dict:
                load_env_state(env, state_dict[f"worker{i}"], strict)

    def _close(self) -> None:
        close_all(self._envs)

    def __repr__(self) -> str:
        return f"SerialEnv({len(self._envs)} x {self._envs[0]!r})"


def _draws_itself(env: Any) -> bool:
    """Tell whether an environment of GleanRL's, or one in it, overrides `rand_action`."""
    draws = getattr(env.rand_action, "__func__", None)
    if isinstance(env, SerialEnv) and draws is SerialEnv.rand_action:
        return any(map(_draws_itself, env.members))
    return isinstance(env, EnvBase) and draws is not EnvBase.rand_action


def gym_source(env: Any) -> GymSource | None:
    """Return the Gymnasium environments inside ``env``, if ``env`` only steps them.

    That is so for a `GymEnv`, and a `SerialEnv` of such that are alike, on the CPU, if no method
    was replaced.
    """
    parts = gym_parts(env)
    if not parts or any(part.device is not None and part.device.type != "cpu" for part in parts):
        return None
    found = [part.batch.source() for part in parts if isinstance(part, GymEnv)]
    first = found[0]
    if any(source.options != first.options for source in found):
        return None
    return GymSource(
        tuple(single for source in found for single in source.envs),
        tuple(env.batch_size),
        first.options,
        tuple(seed for source in found for seed in source.seeds),
    )


def gym_parts(env: Any) -> list[EnvBase]:
    """Return ``env`` and the environments in it, to any depth; empty if not all are stock."""
    if not isinstance(env, (GymEnv, SerialEnv)) or not is_stock(env) or env.specs_assigned:
        return []
    parts: list[EnvBase] = [env]
    for member in env.members if isinstance(env, SerialEnv) else ():
        inner = gym_parts(member)
        if not inner:
            return []
        parts += inner
    return parts
