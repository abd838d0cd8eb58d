"""Already-vectorised Gymnasium environments: one call steps all of them.

Which adapter fits follows from how the environment resets itself: in the same step or not at all is
one real transition per environment and step (an `Env`); in the next step is a `Pool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import InfoKeys
from gleanrl.core.protocols import Array, Env
from gleanrl.envs.batched_env import BatchedEnv
from gleanrl.envs.pool import EnvPoolAdapter, NextStepPool, is_envpool

_NOTHING: tuple[int, ...] = ()


class _DenseVectorEnv(BatchedEnv):
    """Environments that make a real transition in every step."""

    def step(self, t: int, cut: Sequence[int]) -> Sequence[int]:
        """Take one step with the actions in row ``t``; return the indices that ended."""
        infos = self._advance(t)
        ended = self._outcomes.ended(t)
        if len(ended) or cut:
            over: list[int] = self._end(t, ended, cut, infos).tolist()
            return over
        return _NOTHING

    def _end(self, t: int, ended: Array, cut: Sequence[int], infos: Mapping[str, Any]) -> Array:
        """Reset what has to be; return the indices of all that ended or were cut."""
        raise NotImplementedError


class SameStepVectorEnv(_DenseVectorEnv):
    """Resets ended environments within the step; final observations come in ``infos``."""

    def _end(self, t: int, ended: Array, cut: Sequence[int], infos: Mapping[str, Any]) -> Array:
        if len(ended):
            for field in self._fields:
                field.write_final(t, ended, infos)
        if not cut:
            return ended
        alive = np.setdiff1d(cut, ended)
        if len(alive):
            self.restart(t, alive)
        return np.concatenate((ended, alive))


class ManualVectorEnv(_DenseVectorEnv):
    """Never resets by itself (DISABLED): what ended is reset through a mask."""

    def _end(self, t: int, ended: Array, cut: Sequence[int], infos: Mapping[str, Any]) -> Array:
        over = np.union1d(ended, cut).astype(np.int64) if cut else ended
        self.restart(t, over)
        return over

    def _resets_singly(self) -> bool:
        return True


def is_vector_env(given: Any) -> bool:
    """Tell whether ``given`` is a vectorised environment `make_vector` knows how to read."""
    return isinstance(given, VectorEnv) or is_envpool(given)


def make_vector(
    env: Any,
    *,
    categorical: bool = True,
    observation_dtype: torch.dtype | None = None,
    info_keys: InfoKeys = (),
) -> Env | NextStepPool:
    """Return the adapter that fits how ``env`` resets itself.

    Args:
        env: A `gymnasium.vector.VectorEnv` or an EnvPool made with ``envpool.make_gymnasium``.
        categorical: Discrete actions as indices (else one-hot vectors).
        observation_dtype: Cast floating observations to this dtype on the way in.
        info_keys: Numeric ``info`` entries to deliver beside the observation: names of scalars
            (float32), or a mapping from names to shape and dtype.

    Returns:
        An `Env` in SAME_STEP and DISABLED mode, a pool in NEXT_STEP mode and for EnvPool.

    Raises:
        ConfigError: the environment does not say how it resets, or in a way that loses data.
    """
    kind = EnvPoolAdapter if is_envpool(env) else _ADAPTERS[_mode(env)]
    return kind(
        env, categorical=categorical, observation_dtype=observation_dtype, info_keys=info_keys
    )


_ADAPTERS: dict[AutoresetMode, type[SameStepVectorEnv | ManualVectorEnv | NextStepPool]] = {
    AutoresetMode.SAME_STEP: SameStepVectorEnv,
    AutoresetMode.DISABLED: ManualVectorEnv,
    AutoresetMode.NEXT_STEP: NextStepPool,
}


def _mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    said = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(said)
    except ValueError as err:
        raise ConfigError(
            f"{type(env).__name__}.metadata['autoreset_mode'] is {said!r}; it must be one of "
            f"{[str(mode) for mode in AutoresetMode]}: without it nobody can tell whether the step "
            "after an end is a transition"
        ) from err
