"""Single Gymnasium environments, stepped one after the other into one window."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from gleanrl.core.errors import ConfigError, EnvError, note
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import GymOptions
from gleanrl.core.protocols import Spec
from gleanrl.core.window import Window
from gleanrl.envs.base import EnvBase, close_all
from gleanrl.envs.result_checks import (
    check_flag,
    check_reset,
    check_rewards,
    not_five,
    write_rewards,
)
from gleanrl.envs.result_writers import FieldWriter, InfoWriter, LeafWriter, info_fields
from gleanrl.envs.row_env import EnvRows, refuse_seed
from gleanrl.envs.spaces import Actions, leaf_field, observation_leaves, space_spec
from gleanrl.envs.specs import Unbounded
from gleanrl.envs.state_kinds import Node
from gleanrl.operations.proofs import remembered, unmodified

_FLAGS = (TERMINATED, TRUNCATED, DONE)
_NOTHING: tuple[int, ...] = ()
_EMPTY: frozenset[Any] = frozenset()


class WindowEnv(EnvRows):
    """The common part of single and of vectorised Gymnasium environments: fields and actions."""

    _leaf_writer = LeafWriter
    _info_writer = InfoWriter
    _batched = False
    """Whether one call steps all environments."""
    _casts = ""
    """Kinds of dtypes that are cast whatever the user wants."""

    def __init__(
        self,
        observed: gym.Space[Any],
        acted: gym.Space[Any],
        batch_shape: tuple[int, ...],
        options: GymOptions,
    ) -> None:
        self.options = options
        leaves = observation_leaves(observed)
        fields = [leaf_field(leaf, options.observation_dtype) for leaf in leaves]
        infos = info_fields(options.info_keys, fields)
        casts = self._casts if options.observation_dtype is None else "f"
        info_writers = [self._info_writer(name, field) for name, field in infos.items()]
        leaf_writers = [
            self._leaf_writer(leaf, field, casts)
            for leaf, field in zip(leaves, fields, strict=True)
        ]
        self._writers: list[FieldWriter] = [*leaf_writers, *info_writers]
        self._step_writers = [writer.step_writer() for writer in self._writers]
        self._unsettled = info_writers
        shown = [*fields, *infos.values()]
        specs: dict[Key, Spec] = {f.key: Unbounded(f.shape, dtype=f.dtype) for f in shown}
        declared = ((leaf.key, space_spec(leaf.space)) for leaf in leaves)
        specs |= {key: spec for key, spec in declared if spec.dtype == specs[key].dtype}
        self.observation_specs = specs
        envs = math.prod(batch_shape)
        self._actions = Actions(acted, envs, options.categorical_action_encoding, self._batched)
        self.action_specs = self._actions.specs
        self.layout = EnvLayout(
            batch_shape=batch_shape,
            observations=tuple(shown),
            actions=self._actions.fields,
            rewards=(Field(REWARD, (1,), torch.float32),),
            infos=[field.key for field in infos.values()],
        )

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        for writer in self._writers:
            writer.begin(window, carry)
        self._actions.begin(window)

    def _settle(self) -> None:
        """Warn about ``info`` entries that never came, after the first rollout."""
        for writer in self._unsettled:
            writer.settle()
        self._unsettled = []


class GymnasiumEnv(WindowEnv):
    """``P`` single environments of one kind; each is stepped once per step.

    An environment that ends is reset in the same step, after the final observations of all of them
    were copied (an environment may reuse its observation buffer).
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        batch_shape: tuple[int, ...],
        options: GymOptions,
        *,
        seeds: Sequence[int | None] = (),
        face: EnvBase | None = None,
    ) -> None:
        """Take over ``envs``, which have the same spaces.

        ``batch_shape`` is ``()`` for a single one, else ``(P,)`` or nested batches of ``P``.
        ``seeds``: of the next resets. ``face``: the user's environment, if these were taken out.
        """
        self.envs = self.stateful = list(envs)
        first = self.envs[0]
        super().__init__(first.observation_space, first.action_space, batch_shape, options)
        self.face = face
        self._calls = _StepCalls(self.envs, self._writers)
        self._steps: list[Callable[[Any], Any]] = []
        self._seeds = list(seeds or [None] * len(self.envs))
        self.rewards: list[Sequence[Any]] = []
        """Of every step since `begin`, or since they were taken. Internal to the package."""
        self._open = self.envs
        """Those that `close` closes."""

    @property
    def inner(self) -> Any:
        own = self.envs if self.layout.batch_shape else self.envs[0]
        return own if self.face is None else self.face

    def joined(
        self, others: Sequence[Any], face: EnvBase, options: GymOptions | None, fresh: bool
    ) -> GymnasiumEnv | None:
        parts, own = [self, *others], self.options
        if options is not None:
            categorical = options.categorical_action_encoding and own.categorical_action_encoding
            own = GymOptions(
                categorical_action_encoding=categorical,
                observation_dtype=options.observation_dtype or own.observation_dtype,
                info_keys=options.info_keys or own.info_keys,
            )
        envs = [env for part in parts for env in part.envs]
        try:
            check_spaces(envs)
        except ConfigError:
            if options is None:
                return None
            raise
        return GymnasiumEnv(
            [without_call_checks(env) for env in envs] if fresh else envs,
            tuple(face.batch_size),
            own,
            seeds=[seed for part in parts for seed in part._seeds],
            face=face,
        )

    # -- steps -----------------------------------------------------------------------------------

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        self._steps = self._calls.look_up()
        self._flag_rows = [window.rows(next_key(key)) for key in _FLAGS]
        self.rewards = []

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        actions = self._actions.read(t)
        moves = zip(self._steps, actions, strict=True)
        try:
            results = [step(action) for step, action in moves]
        except Exception as err:
            env = len(actions) - 1 - len(list(moves))
            alone = self._window.steps == 1
            when = " in its step" if alone else f" at step {t} of the rollout"
            action = actions[env]
            note(err, f"environment {env} raised this{when}; its action was {action!r:.200}")
            self._actions.check(t, t + 1, err)
            raise
        try:
            observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
            ended = any(terminated) or any(truncated)
        except (TypeError, ValueError) as err:
            for env, result in enumerate(results):
                _check_result(env, result)
            raise EnvError("environments returned results of different lengths") from err
        for write in self._step_writers:
            write(t, observations, infos)
        try:
            rewards in _EMPTY  # noqa: B015  # hashes them, in half the time of a call
        except Exception:  # arrays, which an environment may use again, have no hash
            rewards = owned(rewards)
        self.rewards.append(rewards)
        if cut or ended:
            return self._end(t, terminated, truncated, cut, resets)
        return _NOTHING

    def _end(
        self,
        t: int,
        terminated: Sequence[Any],
        truncated: Sequence[Any],
        cut: Sequence[int],
        resets: bool,
    ) -> Sequence[int]:
        dead_row, late_row, done_row = (rows[t] for rows in self._flag_rows)
        ended: list[int] = []
        for env, (dead, late) in enumerate(zip(terminated, truncated, strict=True)):
            if dead or late or env in cut:
                ended.append(env)
                done_row[env] = True
                dead_row[env] = check_flag(dead, env, "terminated")
                late_row[env] = check_flag(late, env, "truncated") or not dead
        began = monotonic()
        for env in ended if resets else ():
            returned = self._reset_one(env, {})
            for writer in self._writers:
                writer.write_root(t, env, returned)
        self.reset_s += monotonic() - began
        return ended

    def keep(self, t: int) -> None:
        """Write the rewards of step ``t``, which `finish` checks."""
        row = self._window.rows(next_key(REWARD))[t][:, 0]
        try:
            row[...] = self.rewards[-1]
        except (TypeError, ValueError):  # arrays or tensors, or no numbers
            when = f" at step {t}"
            checked = check_rewards(self.rewards[-1:], when, self._calls.copies)
            write_rewards(row[:, None], checked, when=when)

    def finish(self, steps: int) -> None:
        """Write the rewards of all steps; refuse bad rewards and actions out of range."""
        if self._unsettled and self._window.steps > 1:  # one step says little about `info`
            self._settle()
        when = "" if self._window.steps == 1 else " at step {}"
        self._actions.check(0, steps)
        target = self._window.array(next_key(REWARD))[:, :steps, 0]
        write_rewards(target, check_rewards(self.rewards, when, self._calls.copies), when=when)

    # -- resets ----------------------------------------------------------------------------------

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        refuse_seed(options)
        for env in range(len(self.envs)) if envs is None else envs:
            returned = self._reset_one(env, options)
            for writer in self._writers:
                writer.write_carry(carry, env, returned)

    def _reset_one(self, env: int, given: Mapping[str, Any]) -> tuple[Any, Any]:
        arguments = {"seed": self._seeds[env], "options": None, **given}
        self._seeds[env] = None
        try:
            result = self.envs[env].reset(**arguments)
        except Exception as err:
            shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
            note(err, f"environment {env} raised this in its reset({shown})")
            raise
        if isinstance(result, tuple) and len(result) == 2:
            return result
        return check_reset(result, f"environment {env}: reset")

    def seed(self, seed: int, static: bool = False) -> None:
        """Seed environment ``i`` and its action space with ``seed + i`` from the next reset on."""
        self._seeds = [seed if static else seed + i for i in range(len(self.envs))]
        for env, own in zip(self.envs, self._seeds, strict=True):
            env.action_space.seed(own)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        super().resume(snapshot, allow_pickle)
        self._seeds = [None] * len(self.envs)

    def close(self) -> None:
        """Close every environment; an error is raised after all were closed."""
        envs, self._open, self._steps = self._open, [], []
        close_all(envs)


def check_spaces(envs: Sequence[gym.Env[Any, Any]]) -> None:
    """Raise an error for the first environment whose spaces are not those of environment 0."""
    for env, other in enumerate(envs):
        for name in ("observation_space", "action_space"):
            first, mine = getattr(envs[0], name), getattr(other, name)
            if mine != first:
                raise ConfigError(
                    f"environment {env} has {name} {mine}, environment 0 has {first}; environments "
                    "collected in one batch must agree"
                )


_CALL_CHECKS = (remembered(gym.wrappers.OrderEnforcing), remembered(gym.wrappers.PassiveEnvChecker))


def without_call_checks(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Remove the two wrappers that only check the calls of an environment.

    They cost a tenth of a cheap step. This library resets before it steps, and checks itself what
    comes back. All other wrappers stay, and so does an environment that the user made and kept.
    """
    while _only_checks(env):
        env = env.env  # type: ignore[attr-defined]  # both are wrappers
    outer = env
    while isinstance(outer, gym.Wrapper):
        while _only_checks(outer.env):
            outer.env = outer.env.env  # type: ignore[attr-defined]
        outer = outer.env
    return env


def _only_checks(env: gym.Env[Any, Any]) -> bool:
    return type(env) in _CALL_CHECKS and unmodified(env)


def _check_result(env: int, result: Any) -> None:
    if not isinstance(result, tuple) or len(result) != 5:
        raise not_five(result, f"environment {env}: step")
    check_flag(result[2], env, "terminated")
    check_flag(result[3], env, "truncated")


# -- the `step` methods ----------------------------------------------------------------------------

Call: TypeAlias = Callable[[Any], Any]


class _StepCalls:
    """The `step` methods of ``P`` environments at the start of a rollout.

    The first result of every environment is checked. It also tells whether results have to be
    copied at once: those of environments that return memory of one another, or rewards that are
    tensors, which may be used again. Observations need no copy otherwise, because they are written
    before any environment is called again.
    """

    def __init__(self, envs: Sequence[Any], writers: Sequence[FieldWriter]) -> None:
        """Look nothing up yet; ``writers`` check observation and ``info`` of each once."""
        self.envs, self._writers = envs, writers
        self._first_results: dict[int, Any] = {}
        """Kept until all have returned, because released memory would look like shared memory."""
        self._seen_all = False
        self.copies = False
        """Whether results are copied at once."""
        self._calls: list[Call] = []

    def look_up(self) -> list[Call]:
        """Return one callable per environment; entries are replaced after their first call."""
        plain = self._seen_all and not self.copies
        indices = range(len(self.envs))
        self._calls = [env.step for env in self.envs] if plain else list(map(self._call, indices))
        return self._calls

    def renew(self, index: int) -> None:
        """Look up the method of environment ``index``, which is another one now."""
        if self._calls:
            self._calls[index] = self._call(index)

    def _call(self, index: int) -> Call:
        if not (self._seen_all or index in self._first_results):
            # Bound to a proxy, as a cycle would keep the memory of rollouts.
            return functools.partial(_StepCalls._first, weakref.proxy(self), index)
        step: Call = self.envs[index].step
        return (lambda action: owned(step(action))) if self.copies else step

    def _first(self, index: int, action: Any) -> Any:
        result = self.envs[index].step(action)
        _check_result(index, result)
        for writer in self._writers:
            writer.read(index, (result[0], result[4]))
        self.copies |= isinstance(result[1], torch.Tensor)
        self._first_results[index] = result
        if len(self._first_results) == len(self.envs):
            self.copies |= share_memory(self._first_results)
            self._seen_all = True
            self._first_results.clear()
        for env in range(len(self.envs)) if self._seen_all else (index,):
            self._calls[env] = self._call(env)
        return owned(result)


def owned(value: Any) -> Any:
    """Return ``value`` with every array and tensor in it copied."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(owned, value))
    return value


def _memory(value: Any) -> Iterator[int]:
    """Yield the addresses of arrays, dicts and lists in ``value``, which may be filled again."""
    if isinstance(value, (dict, list)):
        yield id(value)
    if isinstance(value, np.ndarray) and value.size:
        yield value.ctypes.data
    elif isinstance(value, torch.Tensor) and value.numel():
        yield value.data_ptr()
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _memory(item)


def share_memory(results: Mapping[int, Any]) -> bool:
    """Tell whether results of two environments lie at the same address."""
    owners: dict[int, int] = {}
    found = ((at, env) for env, result in results.items() for at in _memory(result))
    return any(owners.setdefault(at, env) != env for at, env in found)
