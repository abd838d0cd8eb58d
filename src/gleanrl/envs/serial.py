"""Several TensorDict environments as one batch, stepped one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, for_users
from gleanrl.core.keys import NEXT, Key, as_key, format_key
from gleanrl.core.options import GymOptions, check_int
from gleanrl.envs.base import EnvBase, close_all
from gleanrl.envs.factory import EnvFactory, check_ignored, closed_on_error, per_env
from gleanrl.envs.libs.gym import make_tensordict_env
from gleanrl.envs.row_env import EnvRows, RowEnv
from gleanrl.envs.specs import masked_specs
from gleanrl.envs.tensordict_envs import EndFlags, check_alike, load_env_state, spec_trees, widened
from gleanrl.operations.proofs import remembered


@remembered
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
            num_workers: Number of environments.
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
        self._masked = masked_specs(self._env_specs.action)

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
        found = self._stack(roots)
        if lost := set(self.observation_spec.keys(True, True)) - set(found.keys(True, True)):
            names = ", ".join(sorted(format_key(as_key(key)) for key in lost))
            raise ConfigError(
                "reset() of some environments keeps the data of the others, and was given no "
                f"{names}: give it the data of the last step"
            )
        return found

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        parts = tensordict.unbind(0)
        steps = [env.step(part.copy()) for env, part in zip(self._envs, parts, strict=True)]
        return self._stack([step.get(NEXT) for step in steps])

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw actions of all environments at once, unless one of them has its own method."""
        for key, spec in self._masked.items():
            spec.update_mask(_mask(self, key))
        if not any(map(draws_itself, self._envs)):
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

    def is_face(self) -> bool:
        faces = all(isinstance(env, EnvBase) and env.is_face() for env in self._envs)
        return faces and super().is_face()

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


def _mask(env: Any, key: Key) -> torch.Tensor:
    """Return what environments allow now for the action ``key``."""
    if isinstance(env, SerialEnv):
        return torch.stack([_mask(member, key) for member in env.members])
    mask: torch.Tensor = env.full_action_spec[key].mask
    return mask


def draws_itself(env: Any) -> bool:
    """Tell whether an environment of GleanRL's, or one in it, overrides `rand_action`."""
    draws = getattr(env.rand_action, "__func__", None)
    if isinstance(env, SerialEnv) and draws is SerialEnv.rand_action:
        return any(map(draws_itself, env.members))
    return isinstance(env, EnvBase) and draws is not EnvBase.rand_action


def rows_of(env: Any, options: GymOptions | None = None, fresh: bool = False) -> EnvRows | None:
    """Return the rows inside ``env`` as one batch, if ``env`` only shows them as TensorDicts.

    That is so for a `RowEnv` such as `GymEnv`, and for a `SerialEnv` of such that are alike, on the
    CPU, if no method was replaced. For the other arguments see `EnvRows.joined`.
    """
    if not (isinstance(env, EnvBase) and env.is_face()):
        return None
    first, *others = (part.rows for part in _row_envs(env))
    if any((type(rows), rows.options) != (type(first), first.options) for rows in others):
        return None
    return first.joined(others, env, options, fresh) or (None if others else first)


def _row_envs(env: EnvBase) -> list[RowEnv]:
    """Return the environments of rows in a face, to any depth."""
    if isinstance(env, RowEnv):
        return [env]
    members = env.members if isinstance(env, SerialEnv) else ()
    return [part for member in members for part in _row_envs(member)]
