"""Already-vectorised Gymnasium environments: one call steps all of them.

Which adapter fits follows from how the environment resets itself: in the same step or not at all is
one real transition per environment and step; in the next step is a `NextStepPool`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from gleanrl.core.errors import ConfigError, EnvError, note
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, next_key
from gleanrl.core.options import GymOptions, OwnOptions
from gleanrl.core.window import Array, Window
from gleanrl.envs.envpool_steps import direct_step
from gleanrl.envs.gymnasium import WindowEnv, owned, share_memory
from gleanrl.envs.result_checks import NUMBERS, check_reset, not_five, write_rewards
from gleanrl.envs.result_writers import VectorInfoWriter, VectorLeafWriter, VectorReset
from gleanrl.envs.row_env import refuse_seed
from gleanrl.envs.state_kinds import Node

_FLAGS = (TERMINATED, TRUNCATED, DONE)
_ALL = slice(None)
_NOTHING: tuple[int, ...] = ()
_RETURNING = {"reset": 1, "step": 3}
"""Methods that return observations, and the number that suffices after one has returned.

A reset and two steps show what memory an environment returns.
"""


class VectorAdapter(WindowEnv):
    """``P`` environments in one vectorised object; batch shape ``(P,)``.

    Everything the object returns is copied at once, so it may reuse its arrays.
    """

    _leaf_writer = VectorLeafWriter
    _info_writer = VectorInfoWriter
    _batched = True

    def __init__(self, resets: VectorResets, options: GymOptions) -> None:
        """Take over the environment of ``resets``, built and not yet reset."""
        self._resets, env = resets, vectorised(resets.env)
        self.num_envs, self.all_envs = resets.rows, int(env.num_envs)
        super().__init__(
            env.single_observation_space, env.single_action_space, (self.num_envs,), options
        )
        self.can_cut, self.checks_actions = resets.singly, False
        self._closed = False
        self._step: Callable[..., Any]
        self._rewards = np.zeros((0, self.num_envs))
        """Rows, narrowed when the rollout ends."""
        self._reward_dtype: np.dtype[Any] | None = None
        """The dtype of rewards that were checked to be numbers."""

    @property
    def inner(self) -> Any:
        return self._resets.env

    def explain(self) -> str:
        return f"{type(self.inner).__name__} of {self.num_envs}, {self._resets.explain()}"

    # -- steps -----------------------------------------------------------------------------------

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        self._step = self._resets.step
        if len(self._rewards) < window.steps:
            self._rewards = np.zeros((window.steps, self.num_envs))
        self._dead, self._late, self._done = (
            window.array(next_key(key))[:, :, 0].T for key in _FLAGS
        )

    def _advance(self, t: int) -> Mapping[str, Any]:
        """Step with the actions in row ``t``, keep the results, and return ``infos``."""
        try:
            result = self._step(self._actions.read(t))
        except Exception as err:
            note(err, f"the vector environment raised this at step {t} of the rollout")
            self._actions.check(t, t + 1, err)
            raise
        infos: Mapping[str, Any]
        try:
            observation, reward, terminated, truncated, infos = result
        except (TypeError, ValueError) as err:
            who = "the vector environment's step"
            raise not_five(result, who, "terminated, truncated, infos") from err
        if t == 0 or getattr(reward, "dtype", None) is not self._reward_dtype:
            self._check(reward, terminated, truncated, t)
        self._rewards[t] = reward
        self._dead[t] = terminated
        self._late[t] = truncated
        np.logical_or(terminated, truncated, self._done[t])
        for write in self._step_writers:
            write(t, observation, infos)
        return infos

    def _check(self, reward: Any, terminated: Any, truncated: Any, t: int) -> None:
        """Check the results once per rollout, and at each change of the rewards' dtype."""
        shapes = [np.shape(value) for value in (reward, terminated, truncated)]
        if any(shape != (self.num_envs,) for shape in shapes):
            raise EnvError(
                "the vector environment returned rewards, terminated and truncated of shapes "
                f"{shapes}; each must be ({self.num_envs},)"
            )
        self._reward_dtype = np.asarray(reward).dtype
        named = {"rewards": reward, "terminated": terminated, "truncated": truncated}
        for name, values in named.items():
            dtype = np.asarray(values).dtype
            if dtype.kind not in NUMBERS:
                raise EnvError(
                    f"the vector environment returned {name} of dtype {dtype} at step {t}: "
                    f"{list(values)[:4]}; they must be numbers or bools"
                )

    def restart(self, t: int, envs: Array) -> None:
        """Reset ``envs`` now, after step ``t``, not in the next; needs `can_cut`.

        Overwrites their root row ``t + 1``. Those that had not ended count as truncated.
        """
        self._late[t, envs] |= ~self._dead[t, envs]
        self._done[t, envs] = True
        returned = self._resets.some(envs, {})
        for writer in self._writers:
            writer.write_root(t, envs, returned)

    def finish(self, steps: int) -> None:
        """Write the rewards of ``steps`` steps; refuse overflows and actions out of range."""
        if self._unsettled:
            self._settle()
        if self._resets.members is not None and self._resets.members.settle():
            self._resets.members = None
        self._actions.check(0, steps)
        target = self._window.array(next_key(REWARD))[:, :steps, 0]
        write_rewards(target, self._rewards[:steps], wrapper="vector.TransformReward")

    # -- resets ----------------------------------------------------------------------------------

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        refuse_seed(options)
        where: Array | slice = _ALL
        if envs is None or len(set(envs)) == self.all_envs:
            returned = self._resets.all(options)
        elif self.can_cut:
            where = np.array(sorted(set(envs)), np.int64)
            returned = self._resets.some(where, options)
        else:
            raise ConfigError(
                f"environments {list(envs)[:5]} cannot be reset alone: {type(self.inner).__name__} "
                "resets all of its environments or none; reset all of them"
            )
        for writer in self._writers:
            writer.write_carry(carry, where, returned)

    def seed(self, seed: int, static: bool = False) -> None:
        """Seed environment ``i`` with ``seed + i`` from the next full reset on.

        Those that share one generator (natively vectorised ones) are seeded by ``seed`` as a whole.
        """
        self._resets.seed(seed, static)

    @property
    def stateful(self) -> Any:  # a seed may make another one
        return self._resets.env

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        super().resume(snapshot, allow_pickle)
        self._resets.forget_seed()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.inner.close()


class DenseVectorEnv(VectorAdapter):
    """A vectorised environment in SAME_STEP or DISABLED mode: every step is a real transition."""

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        infos = self._advance(t)
        ended = np.flatnonzero(self._done[t])
        if not len(ended) and not cut:
            return _NOTHING
        if self._resets.in_step:  # what `ended` ended with comes in `infos`
            for writer in self._writers if len(ended) else ():
                writer.write_final(t, ended, infos)
            left = np.setdiff1d(cut, ended) if cut else ended[:0]
            over = np.concatenate((ended, left)) if cut else ended
        else:
            over = left = np.union1d(ended, cut).astype(np.int64) if cut else ended
        if len(left):
            began = monotonic()
            self.restart(t, left)
            self.reset_s += monotonic() - began
        indices: list[int] = over.tolist()
        return indices


class NextStepPool(VectorAdapter):
    """A vectorised environment in NEXT_STEP mode: a reset takes a step of its own.

    Its window is a log of raw steps: the step after an end is no transition, the environment only
    moves on to its reset observation. Rows of such steps are not delivered.
    """

    def step(self, t: int) -> None:  # type: ignore[override]  # as pools do
        """Step all with the actions in row ``t``; write the row and root row ``t + 1``.

        Flags are there at once, rewards after `finish`; ``"next"`` observations are not written: in
        a log they are the root row that follows.
        """
        self._advance(t)


def taken_apart(result: Any, count: int, rows: Array | slice = _ALL) -> VectorReset:
    """Return the results of a reset of ``rows``, which are ``count`` environments."""
    who = "the vector environment's reset"
    return VectorReset(*check_reset(result, who, "(observation, infos)"), count, rows)


class _Members:
    """The environments of a `SyncVectorEnv`, whose results must be read in time.

    It keeps references until all have stepped, and in SAME_STEP mode to final observations while
    environments are reset. So members return copies of observations: at first, and for good if they
    return memory of one another, or in SAME_STEP mode their own again.
    """

    def __init__(self, envs: Sequence[Any], in_step: bool) -> None:
        """Make ``envs`` return copies; ``in_step``: whether they are reset in their last step.

        Their methods are replaced on the instances.
        """
        self._envs, self._in_step = envs, in_step
        self._seen: list[list[Any]] = [[] for _ in envs]
        """The first observations of each; while they exist, no others get their memory."""
        self._own = [{name: vars(env).get(name) for name in _RETURNING} for env in envs]
        for env, seen in zip(envs, self._seen, strict=True):
            for name, enough in _RETURNING.items():
                method = getattr(env, name)
                setattr(env, name, functools.partial(_copying, method, seen, enough))

    def settle(self) -> bool:
        """Stop copying if it is not needed; return ``False`` until that is known."""
        if any(len(seen) < _RETURNING["step"] for seen in self._seen):
            return False
        parts = [one for seen in self._seen for one in seen] if self._in_step else self._seen
        if not share_memory(dict(enumerate(parts))):
            for env, own in zip(self._envs, self._own, strict=True):
                for name, method in own.items():
                    delattr(env, name) if method is None else setattr(env, name, method)
        for seen in self._seen:
            seen[:] = [None] * len(seen)
        return True


def _copying(
    call: Callable[..., Any], seen: list[Any], enough: int, *args: Any, **kwargs: Any
) -> Any:
    result = call(*args, **kwargs)
    if not (isinstance(result, tuple) and result):
        return result
    if len(seen) < enough:
        seen.append(result[0])
    return (owned(result[0]), *result[1:])


class VectorResets:
    """Resets and seeds a vectorised environment of Gymnasium's."""

    def __init__(self, env: Any, *, in_step: bool, singly: bool) -> None:
        self.env = env
        self.in_step = in_step
        """Whether it resets itself in the step that ends an episode."""
        self.singly = singly
        """Whether single environments can be truncated and reset."""
        self._seed: int | list[int] | None = None
        self._first: VectorReset | None = None
        base = env.unwrapped if isinstance(env, VectorEnv) else env
        self.members = _Members(base.envs, in_step) if isinstance(base, SyncVectorEnv) else None
        """The watched members, whose results are copied."""

    @property
    def rows(self) -> int:
        """Environments that a step answers for."""
        return int(vectorised(self.env).num_envs)

    def explain(self) -> str:
        return "called as it is by its own step"

    @property
    def step(self) -> Callable[..., Any]:
        """The function that steps all of them, in one rollout."""
        method: Callable[..., Any] = self.env.step
        return method

    def begin(self) -> Any:
        """Reset all for the first time, which `all` returns then; return their observation."""
        self._first = self.all({})
        return self._first.observation

    def all(self, options: Mapping[str, Any]) -> VectorReset:
        (seed, self._seed), (first, self._first) = (self._seed, None), (self._first, None)
        if first is not None and seed is None and not options:
            return first
        result = self.env.reset(**{"seed": seed, "options": None, **options})
        return taken_apart(result, self.rows)

    def some(self, envs: Array, options: Mapping[str, Any]) -> VectorReset:
        mask = np.zeros(self.env.num_envs, bool)
        mask[envs] = True
        masked = {**(options.get("options") or {}), "reset_mask": mask}
        result = self.env.reset(**{**options, "options": masked})
        return taken_apart(result, self.env.num_envs, envs)

    def forget_seed(self) -> None:
        """Reset without a seed, because random streams are to continue."""
        self._seed = self._first = None

    def seed(self, seed: int, static: bool) -> None:
        listable = isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self.env.action_space.seed(seed)
        vectorised(self.env).single_action_space.seed(seed)
        self._seed = [seed] * self.env.num_envs if static and listable else seed


class EnvPoolResets(VectorResets):
    """Resets and seeds an EnvPool with the Gymnasium interface; it must answer for all at once."""

    def __init__(self, env: Any, options: OwnOptions) -> None:
        if not isinstance(env, gym.Env):
            raise ConfigError(
                f"{type(env).__name__} has EnvPool's dm_env interface; make it with "
                "envpool.make_gymnasium"
            )
        _make_spaces(env)
        super().__init__(env, in_step=False, singly=True)
        # Entries of infos are as EnvPool makes them.
        self._may_be_direct = options.fast and not options.info_keys

    def explain(self) -> str:
        return "stepped by its C++ methods" if self._direct else super().explain()

    @property
    def step(self) -> Callable[..., Any]:
        return self._direct or super().step

    @property
    def _direct(self) -> Callable[..., Any] | None:
        return direct_step(self.env) if self._may_be_direct else None

    def all(self, options: Mapping[str, Any]) -> VectorReset:
        result = self.env.reset(**options)
        return taken_apart(result, self.rows)

    def some(self, envs: Array, options: Mapping[str, Any]) -> VectorReset:
        # An EnvPool answers for the environments it was asked about only, in the order asked.
        result = self.env.reset(envs.astype(np.int32), **options)
        return taken_apart(result, len(envs))

    def seed(self, seed: int, static: bool) -> None:
        """Make the pool again, because an EnvPool is seeded at its construction."""
        own = [(seed if static else seed + i) % 2**31 for i in range(self.env.num_envs)]
        spec = self.env.spec
        seeds: dict[str, Any] = {"seed": 0, "env_seed": own}
        if "env_seed" not in spec.config._fields:  # older ones count up from one seed
            seeds = {"seed": own[0]}
        fresh = type(self.env)(type(spec)(spec.config._replace(**seeds)))
        _make_spaces(fresh)
        self.env.close()
        self.env = fresh


def _make_spaces(env: Any) -> None:
    with warnings.catch_warnings():
        # Gymnasium warns that EnvPool's bounds lose precision; nobody can do anything about it.
        warnings.simplefilter("ignore", UserWarning)
        _ = env.observation_space, env.action_space


def is_envpool(given: Any) -> bool:
    """Tell whether ``given`` is an EnvPool, without importing it."""
    return any(
        base.__name__ == "EnvPoolMixin" and base.__module__.partition(".")[0] == "envpool"
        for base in type(given).__mro__
    )


@runtime_checkable
class _Vectorised(Protocol):
    """Several environments in one object."""

    num_envs: int
    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]


def vectorised(env: Any) -> Any:
    """Return the object with the spaces of ``env``; wrappers of a `gymnasium.Env` lack some."""
    return env if isinstance(env, VectorEnv) else env.unwrapped


def is_vector_env(given: Any) -> bool:
    """Tell whether ``given`` is a vectorised environment that `make_vector` can read.

    Simulators such as Isaac Lab derive theirs from `gymnasium.Env`.
    """
    if isinstance(given, VectorEnv) or is_envpool(given):
        return True
    return isinstance(given, gym.Env) and isinstance(given.unwrapped, _Vectorised)
