"""Single Gymnasium environments, several of them stepped one after the other into one window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch

from gleanrl.core.errors import ConfigError, EnvError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import InfoKeys, check_int
from gleanrl.core.protocols import Array, Spec, Window
from gleanrl.envs.gym_batch import GymSource
from gleanrl.envs.returned import check_flag, check_reset, check_rewards, not_five, write_rewards
from gleanrl.envs.spaces import (
    action_decoder,
    action_leaves,
    assemble,
    leaf_field,
    observation_leaves,
    space_spec,
)
from gleanrl.envs.step_calls import StepCalls, owned
from gleanrl.envs.stock import is_stock
from gleanrl.envs.writers import InfoWriter, Writer, info_fields, make_writer

_NOTHING: tuple[int, ...] = ()
_EMPTY: frozenset[Any] = frozenset()


class GymnasiumEnv:
    """``P`` single environments of one kind as one `Env`.

    Each is stepped once per step; an environment that ends is reset in the same step, after the
    final observations of all of them were copied (an environment may reuse its observation buffer).
    """

    can_cut = True

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        batch_shape: tuple[int, ...],
        *,
        inner: Any = None,
        categorical: bool = True,
        observation_dtype: torch.dtype | None = None,
        info_keys: InfoKeys = (),
        seeds: Sequence[int | None] | None = None,
        around: Sequence[Any] = (),
    ) -> None:
        """Take over ``envs``.

        Args:
            envs: Built, not yet reset. Closed by `close`.
            batch_shape: ``()`` for a single environment, else ``(P,)``.
            inner: What the user gave; the environments themselves by default.
            categorical: Discrete actions as indices (else one-hot vectors).
            observation_dtype: Cast floating observations to this dtype on the way in.
            info_keys: Numeric ``info`` entries to deliver beside the observation. One that no
                ``info`` of the first rollout has is warned about; what resets return is no guide.
            seeds: What to seed the next reset of each environment with, ``None`` for nothing.
            around: What ``envs`` were taken out of: no method of theirs may be replaced later on.

        Raises:
            ConfigError: spaces that differ between environments, have no fixed shape or hold
                nothing to choose; ``info_keys`` that cannot be.
        """
        self._envs = list(envs)
        self._source = GymSource((), batch_shape, categorical, observation_dtype, info_keys)
        _check_same_spaces(self._envs)
        self._inner = inner if inner is not None else (envs[0] if batch_shape == () else list(envs))
        observed = observation_leaves(envs[0].observation_space)
        fields = [leaf_field(leaf, observation_dtype) for leaf in observed]
        infos = info_fields(info_keys, fields)
        info_writers = [InfoWriter(name, item) for name, item in infos.items()]
        self._writers: list[Writer] = [
            *(make_writer(leaf, item) for leaf, item in zip(observed, fields, strict=True)),
            *info_writers,
        ]
        self._unsettled = [writer.watch for writer in info_writers]
        self._action_leaves = action_leaves(envs[0].action_space)
        specs = [space_spec(leaf.space, categorical) for leaf in self._action_leaves]
        keys = [leaf.key for leaf in self._action_leaves]
        self.action_specs: Mapping[tuple[str, ...], Spec] = dict(zip(keys, specs, strict=True))
        self._decoders = [action_decoder(leaf.space, categorical) for leaf in self._action_leaves]
        self.layout = EnvLayout(
            batch_shape=batch_shape,
            observations=(*fields, *infos.values()),
            actions=tuple(
                Field(key, tuple(spec.shape), spec.dtype)
                for key, spec in zip(keys, specs, strict=True)
            ),
            rewards=(Field(REWARD, (1,), torch.float32),),
        )
        single = len(keys) == 1 and not self._action_leaves[0].path
        self._actions: Callable[[int], Sequence[Any]] = (
            self._plain_actions if single else self._nested_actions
        )
        self._decode = self._decoders[0]
        self._draws_at_once = len(specs) == 1 and specs[0].stepwise
        self._around = tuple(around)
        self._calls = StepCalls(self._envs, self._check)
        self._steps: list[Callable[[Any], Any]] = []
        self._seeds: list[int | None] = list(seeds or [None] * len(self._envs))
        self._rewards: list[Sequence[Any]] = []
        self._action_rows: list[list[Array]] = []
        self._window: Window

    @property
    def inner(self) -> Any:
        """What the user gave us."""
        return self._inner

    def source(self) -> GymSource:
        """Return the environments inside, for stepping them by other means."""
        return replace(self._source, envs=tuple(self._envs), seeds=tuple(self._seeds))

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``.

        Raises:
            ConfigError: a method was replaced where this environment would not notice.
        """
        if not is_stock(*self._around):
            raise ConfigError(
                f"a method of {self._inner!r:.100} was replaced after the collector was built, "
                "which had found none replaced and steps its Gymnasium environments directly; "
                "replace methods before, or pass fast=False"
            )
        self._window = window
        self._steps = self._calls.look_up()
        for writer in self._writers:
            writer.begin(window, carry)
        self._action_rows = [window.rows(leaf.key) for leaf in self._action_leaves]
        self._rows = self._action_rows[0]
        self._flag_rows = [window.rows(next_key(key)) for key in (TERMINATED, TRUNCATED, DONE)]
        self._rewards = []

    def step(self, t: int, cut: Sequence[int]) -> Sequence[int]:
        """Step every environment with the actions in row ``t``."""
        moves = zip(self._steps, self._actions(t), strict=True)
        results = [step(action) for step, action in moves]
        try:
            observations, rewards, terminated, truncated, infos = zip(*results, strict=True)
            ended = any(terminated) or any(truncated)
        except (TypeError, ValueError) as err:
            raise _odd_result(results) from err
        for writer in self._writers:
            writer.write(t, observations, infos)
        try:
            rewards in _EMPTY  # noqa: B015  # hashes them, in half the time of a call
        except Exception:  # arrays, which an environment may use again, have no hash
            rewards = owned(rewards)
        self._rewards.append(rewards)
        if cut or ended:
            return self._end(t, terminated, truncated, cut)
        return _NOTHING

    def _check(self, env: int, observation: Any, info: Any) -> None:
        for writer in self._writers:
            writer.check(env, observation, info)

    def _end(
        self, t: int, terminated: Sequence[Any], truncated: Sequence[Any], cut: Sequence[int]
    ) -> Sequence[int]:
        dead_rows, late_rows, done_rows = self._flag_rows
        dead_row, late_row, done_row = dead_rows[t], late_rows[t], done_rows[t]
        ended = []
        for env, (dead, late) in enumerate(zip(terminated, truncated, strict=True)):
            if dead or late or env in cut:
                ended.append(env)
                done_row[env] = True
                dead_row[env] = dead
                late_row[env] = late or not dead
        for env in ended:
            observation, info = self._reset_one(env, None)
            for writer in self._writers:
                writer.write_root(t, env, observation, info)
        return ended

    def random(self, t: int) -> None:
        """Write random actions into row ``t``."""
        if self._draws_at_once:
            # One call for the whole rollout draws the same numbers in the same order.
            if t == 0:
                ((key, spec),) = self.action_specs.items()
                field = self._window.tensor(key)
                field.copy_(spec.rand((self._window.steps, len(self._envs))).transpose(0, 1))
            return
        for key, spec in self.action_specs.items():
            self._window.tensor_rows(key)[t].copy_(spec.rand((len(self._envs),)))

    def finish(self, steps: int) -> None:
        """Write the rewards of all steps.

        Raises:
            EnvError: a reward that is not a number, or a finite one that overflows float32.
        """
        for watch in self._unsettled:
            watch.settle()
        self._unsettled = []
        rewards = check_rewards(self._rewards)
        write_rewards(self._window.array(next_key(REWARD))[:, :steps, 0], rewards)

    def reset(self, carry: Window, envs: Sequence[int] | None = None, **options: Any) -> None:
        """Reset ``envs`` (all by default) and write their observations into ``carry``."""
        for env in range(len(self._envs)) if envs is None else envs:
            observation, info = self._reset_one(env, options or None)
            for writer in self._writers:
                writer.write_carry(carry, env, observation, info)

    def _reset_one(self, env: int, options: dict[str, Any] | None) -> tuple[Any, Any]:
        seed, self._seeds[env] = self._seeds[env], None
        result = self._envs[env].reset(seed=seed, options=options)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        return check_reset(result, f"environment {env}: reset")

    def seed(self, seed: int, static: bool = False) -> int:
        """Seed environment ``i`` and its action space with ``seed + i`` from the next reset on.

        Raises:
            ConfigError: ``seed`` is no whole number of 0 or more.
        """
        seed = check_int("seed", seed, least=0)
        own = [seed if static else seed + i for i in range(len(self._envs))]
        for env, value in zip(self._envs, own, strict=True):
            env.action_space.seed(value)
        self._seeds = list(own)
        return own[-1]

    def state(self) -> dict[str, Any]:
        """Return nothing: Gymnasium environments have no state to read."""
        return {}

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Accept what `state` returned."""
        if state and strict:
            raise ConfigError(f"Gymnasium environments take no state, got {sorted(state)}")

    def close(self) -> None:
        """Close every environment; the first error is raised after all were closed."""
        errors: list[Exception] = []
        envs, self._steps = list(self._envs), []
        self._envs.clear()
        for env in envs:
            try:
                env.close()
            except Exception as err:
                errors.append(err)
        if errors:
            raise errors[0]

    def _plain_actions(self, t: int) -> Sequence[Any]:
        return self._decode(self._rows[t])

    def _nested_actions(self, t: int) -> Sequence[Any]:
        parts = [
            decode(rows[t]) for decode, rows in zip(self._decoders, self._action_rows, strict=True)
        ]
        space = self._envs[0].action_space
        return [assemble(self._action_leaves, values, space) for values in zip(*parts, strict=True)]


def _check_same_spaces(envs: Sequence[gym.Env[Any, Any]]) -> None:
    if not envs:
        raise ConfigError("no environments were given")
    for env, other in enumerate(envs):
        for name in ("observation_space", "action_space"):
            first, mine = getattr(envs[0], name), getattr(other, name)
            if mine != first:
                raise ConfigError(
                    f"environment {env} has {name} {mine}, environment 0 has {first}; environments "
                    "collected in one batch must agree"
                )


def _odd_result(results: Sequence[Any]) -> EnvError:
    for env, result in enumerate(results):
        if not isinstance(result, tuple) or len(result) != 5:
            return not_five(result, f"environment {env}: step")
        for name, flag in zip(("terminated", "truncated"), result[2:4], strict=True):
            check_flag(flag, env, name)
    return EnvError("environments returned results of different lengths")
