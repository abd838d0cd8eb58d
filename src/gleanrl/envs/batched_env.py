"""The common trunk of the adapters over vectorised environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import REWARD, Key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import InfoKeys, check_int
from gleanrl.core.protocols import Array, Spec, Window
from gleanrl.envs.batched import (
    BatchedActions,
    FieldRows,
    InfoReader,
    LeafReader,
    Outcomes,
    Reader,
    ResetResult,
    Rows,
)
from gleanrl.envs.returned import not_five
from gleanrl.envs.spaces import leaf_field, observation_leaves
from gleanrl.envs.writers import info_fields

_ALL = slice(None)


class BatchedEnv:
    """``P`` environments behind one vectorised object; batch shape ``(P,)``.

    Everything the object returns is copied at once, so it may reuse its arrays.
    """

    costs_reset_step = False
    """Whether the automatic reset takes a step of its own."""
    _draws_ahead: int | None = None
    """Rows of random actions to draw at once; ``None`` for all of a window."""

    def __init__(
        self,
        env: Any,
        *,
        categorical: bool = True,
        observation_dtype: torch.dtype | None = None,
        info_keys: InfoKeys = (),
    ) -> None:
        """Take over ``env``.

        Args:
            env: Built, not yet reset. Closed by `close`.
            categorical: Discrete actions as indices (else one-hot vectors).
            observation_dtype: Cast floating observations to this dtype on the way in.
            info_keys: Numeric ``info`` entries to deliver beside the observation: names of scalars
                (float32), or a mapping from names to shape and dtype.

        Raises:
            ConfigError: a space without fixed shape, or with nothing to choose; ``info_keys`` that
                cannot be; an environment that cannot be stepped so that no data are lost.
        """
        self._prepare(env)
        self._env = env
        self.num_envs = int(env.num_envs)
        leaves = observation_leaves(env.single_observation_space)
        fields = [leaf_field(leaf, observation_dtype) for leaf in leaves]
        infos = info_fields(info_keys, fields)
        casts = observation_dtype is not None
        readers: list[Reader] = [
            *(LeafReader(leaf, item, casts) for leaf, item in zip(leaves, fields, strict=True)),
            *(info_readers := [InfoReader(name, item) for name, item in infos.items()]),
        ]
        self._unsettled = [reader.watch for reader in info_readers]
        self._fields = [FieldRows(reader, self.num_envs) for reader in readers]
        self._actions = BatchedActions(env.single_action_space, self.num_envs, categorical)
        self._outcomes = Outcomes(self.num_envs, in_place=self.costs_reset_step)
        self.action_specs: Mapping[Key, Spec] = self._actions.specs
        self.layout = EnvLayout(
            batch_shape=(self.num_envs,),
            observations=(*fields, *infos.values()),
            actions=self._actions.fields,
            rewards=(Field(REWARD, (1,), torch.float32),),
        )
        self.can_cut = self._resets_singly()
        """Whether environments can be truncated and reset one by one."""
        self._seed: int | list[int] | None = None
        self._closed = False
        self._step: Callable[[Any], Any]
        self._window: Window

    def _prepare(self, env: Any) -> None:
        """Refuse environments that would lose data; subclasses know which."""

    @property
    def inner(self) -> Any:
        """What the user gave us."""
        return self._env

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; ``carry`` (one step long) receives root row ``T``."""
        self._window = window
        self._step = self._env.step
        for field in self._fields:
            field.begin(window, carry)
        self._actions.begin(window)
        self._outcomes.begin(window)

    def _advance(self, t: int) -> Mapping[str, Any]:
        """Step with the actions in row ``t``, keep what comes back, and return ``infos``."""
        result = self._step(self._actions.read(t))
        infos: Mapping[str, Any]
        try:
            observation, reward, terminated, truncated, infos = result
        except (TypeError, ValueError) as err:
            who = "the vector environment's step"
            raise not_five(result, who, "terminated, truncated, infos") from err
        self._outcomes.keep(t, reward, terminated, truncated)
        for field in self._fields:
            field.write(t, observation, infos)
        return infos

    def restart(self, t: int, envs: Array) -> None:
        """Reset ``envs`` after step ``t``; those that had not ended there count as truncated."""
        self._outcomes.truncate(t, envs)
        back, rows = self._reset_some(envs, {})
        for field in self._fields:
            field.write_reset(t, envs, rows, back)

    def random(self, t: int) -> None:
        """Write random actions into row ``t``."""
        self._actions.random(t, self._draws_ahead or self._window.steps)

    def finish(self, steps: int) -> None:
        """Write the rewards and flags of ``steps`` steps.

        Raises:
            EnvError: a finite reward that overflows float32.
        """
        for watch in self._unsettled:
            watch.settle()
        self._unsettled = []
        self._outcomes.finish(self._window, steps)

    def reset(self, carry: Window, envs: Sequence[int] | None = None, **options: Any) -> None:
        """Reset ``envs`` (all by default) and write their observations into ``carry``.

        Raises:
            ConfigError: only some are asked for, and this environment cannot do that.
        """
        where: Rows = _ALL
        rows: Rows = _ALL
        if envs is None or len(set(envs)) == self.num_envs:
            back = self._reset_all(options)
        else:
            self._check_can_reset(envs)
            where = np.array(sorted(set(envs)), np.int64)
            back, rows = self._reset_some(where, options)
        for field in self._fields:
            field.write_carry(carry, where, rows, back)

    def _check_can_reset(self, envs: Sequence[int]) -> None:
        if not self.can_cut:
            raise ConfigError(
                f"environments {list(envs)[:5]} cannot be reset alone: {type(self._env).__name__} "
                "resets all of its environments or none; reset all of them"
            )

    def _reset_all(self, options: Mapping[str, Any]) -> ResetResult:
        seed, self._seed = self._seed, None
        return ResetResult(self._env.reset(seed=seed, options=dict(options) or None), self.num_envs)

    def _reset_some(self, envs: Array, options: Mapping[str, Any]) -> tuple[ResetResult, Rows]:
        mask = np.zeros(self.num_envs, bool)
        mask[envs] = True
        result = self._env.reset(options={**options, "reset_mask": mask})
        return ResetResult(result, self.num_envs), envs

    def _resets_singly(self) -> bool:
        # Only these two are known to honour a reset mask in every mode. Wrappers around them are
        # not: some of Gymnasium's own refuse the mask or lose it on the way.
        return isinstance(self._env, (SyncVectorEnv, AsyncVectorEnv))

    def seed(self, seed: int, static: bool = False) -> int:
        """Seed environment ``i`` with ``seed + i`` from the next full reset on.

        Environments that share one generator (natively vectorised ones) are seeded by ``seed`` as a
        whole, also if ``static``.

        Raises:
            ConfigError: ``seed`` is no whole number of 0 or more.
        """
        seed = check_int("seed", seed, least=0)
        last = seed if static else seed + self.num_envs - 1
        listable = isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._env.action_space.seed(seed)
        self._env.single_action_space.seed(seed)
        self._seed = [seed] * self.num_envs if static and listable else seed
        return last

    def state(self) -> dict[str, Any]:
        """Return nothing: vectorised environments have no state to read."""
        return {}

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Accept what `state` returned.

        Raises:
            ConfigError: there is something in it.
        """
        if state and strict:
            raise ConfigError(f"vectorised environments take no state, got {sorted(state)}")

    def close(self) -> None:
        """Close the environment. Idempotent."""
        if not self._closed:
            self._closed = True
            self._env.close()
