"""The delivered fields of a source, and all work on a rollout that is cheaper in bulk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from gleanrl.core.episode_returns import mean_rewards
from gleanrl.core.errors import ConfigError, EnvError, PolicyError
from gleanrl.core.keys import (
    IS_INIT,
    MASK,
    NEXT,
    POLICY_VERSION,
    STEP_COUNT,
    TRAJ_IDS,
    Key,
    format_key,
    is_private,
    next_key,
)
from gleanrl.core.layout import DoneGroup, EnvLayout, Field, Group, Layout, numpy_dtype
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Policy
from gleanrl.core.window import Array, Window
from gleanrl.rollout.episode_tracker import Tracker

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The arrays of one window that every rollout touches."""

    flags: list[Array]
    firsts: list[tuple[torch.Tensor, Key]]
    ids: Array | None
    rewards: Callable[[], Array]
    """Returns one reward per frame, ``[P, T]``."""


class DeliveredFields:
    """The fields of one source's rollouts, and their bulk work before and after the loop."""

    def __init__(
        self,
        env: EnvLayout,
        root: Iterable[Field],
        written: Iterable[Field],
        options: SourceOptions,
        *,
        root_fields: tuple[Field, ...] = (),
        groups: tuple[Group, ...] = (),
    ) -> None:
        """Compose the layout of ``root`` fields and of those of ``env``.

        ``written``: The policy's outputs under ``"next"``, keys without it. ``root_fields``: Root
        fields that pass from one rollout to the next in rows. ``groups``: Nested parts with a batch
        size of their own.
        """
        self._options, self._device = options, env.device
        # Windows come back rollout after rollout; what begin and finish touch is looked up once.
        self._bound: WeakKeyDictionary[Window, _Bound] = WeakKeyDictionary()
        self._groups = end_groups(options, env.dones)
        self._rewards = [next_key(field.key) for field in env.rewards]
        self.root_fields = root_fields
        self._flags = [
            Field(key, group.shape, torch.bool) for group in self._groups for key in group.keys()
        ]
        shown = () if options.compact_obs else env.observations
        fields = self._compose(root, (*env.rewards, *shown, *written))
        self.layout = Layout(env.batch_shape, fields, groups=groups)
        finite = {field.key for field in (*env.observations, *env.rewards)}
        floats = (
            field
            for field in fields
            if field.dtype.is_floating_point and field.key[field.key[0] == NEXT :] in finite
        )
        # "next" first: a bad value is named at the step that returned it.
        self._finite = sorted(floats, key=lambda field: field.key[0] != NEXT)

    @classmethod
    def of(cls, env: EnvLayout, policy: Policy, options: SourceOptions) -> DeliveredFields:
        """Return the fields of an environment whose data go into rows."""
        outputs = policy.outputs
        after = {f.key[1:]: replace(f, key=f.key[1:]) for f in outputs if f.key[0] == NEXT}
        states = [after[key] for key in policy.states]
        init = [Field(IS_INIT, (1,), torch.bool, device=env.device)] * (IS_INIT in policy.provided)
        root_fields = (*env.observations, *states, *init)
        observed, written = ([field.key for field in each] for each in (env.observations, outputs))
        check_options(options, observed, end_groups(options, env.dones), written)
        return cls(
            env,
            (*root_fields, *env.actions, *(field for field in outputs if field.key[0] != NEXT)),
            after.values(),
            options,
            root_fields=root_fields,
            groups=(*env.groups, *(replace(g, key=next_key(g.key)) for g in env.groups)),
        )

    def _compose(self, roots: Iterable[Field], afters: Iterable[Field]) -> tuple[Field, ...]:
        options = self._options
        root = {field.key: field for field in (*roots, *self._flags)}
        ends = (replace(flag, device=self._device) for flag in self._flags)
        after = {field.key: field for field in (*afters, *ends)}
        if options.track_traj_ids:
            root[TRAJ_IDS] = Field(TRAJ_IDS, (), torch.int64)
        if options.mask:
            root[MASK] = Field(MASK, (), torch.bool)
        for key, shape in self._counters():
            root[key] = after[key] = Field(key, shape, torch.int64)
        nexts = [replace(field, key=next_key(key)) for key, field in after.items()]
        return tuple(f for f in (*root.values(), *nexts) if not is_private(f.key))

    def _counters(self) -> list[tuple[Key, tuple[int, ...]]]:
        counters: list[tuple[Key, tuple[int, ...]]] = []
        if self._options.counts:
            counters.append((STEP_COUNT, (1,)))
        if self._options.track_policy_version:
            counters.append((POLICY_VERSION, ()))
        return counters

    @property
    def flags(self) -> frozenset[Key]:
        """End flags that are delivered, keys without ``"next"``."""
        return frozenset(field.key for field in self._flags)

    @property
    def bulk(self) -> frozenset[Key]:
        """Entries that `finish` writes."""
        counted = [key for key, _ in self._counters()]
        return frozenset((TRAJ_IDS, MASK, *counted, *map(next_key, counted)))

    def begin(self, window: Window, next_root: Window) -> None:
        """Prepare ``window``: flags False, root row 0 from ``next_root``."""
        bound = self._bound.get(window)
        if bound is None:
            bound = self._bound[window] = self._bind(window)
        for flags in bound.flags:
            flags.fill(False)
        for first, key in bound.firsts:
            first.copy_(next_root.tensor_rows(key)[0])

    def _bind(self, window: Window) -> _Bound:
        keys = [key for flag in self._flags for key in (flag.key, next_key(flag.key))]
        return _Bound(
            # Rows of flags on a device are written whole at each step.
            flags=[window.array(key) for key in keys if window.on_host(key)],
            firsts=[(window.tensor(field.key)[:, 0], field.key) for field in self.root_fields],
            ids=window.array(TRAJ_IDS) if self._options.track_traj_ids else None,
            rewards=_frame_rewards(
                [window.tensor(key) for key in self._rewards], (window.envs, window.steps)
            ),
        )

    def finish(
        self,
        window: Window,
        tracker: Tracker,
        steps: int,
        version: int | Array | None,
        rewards: Array | None = None,
    ) -> None:
        """Write ids, counts, versions and marks of a rollout of ``steps`` steps.

        ``version`` is the policy's: one for all frames, ``[T]`` or ``[P, T]``; ``None`` if it is
        not delivered. ``rewards``: one per frame, where these are not in ``window``.
        """
        options = self._options
        if steps < window.steps:
            window.zero_from(steps)
        counts = None
        if options.counts:
            counts = np.zeros((window.envs, window.steps + 1), np.int64)
        bound = self._bound[window]
        tracker.finish(steps, bound.rewards() if rewards is None else rewards, bound.ids, counts)
        if counts is not None:
            window.array(STEP_COUNT)[:, :steps, 0] = counts[:, :steps]
            window.array(next_key(STEP_COUNT))[:, :steps, 0] = counts[:, :steps] + 1
        if options.track_policy_version:
            for key in (POLICY_VERSION, next_key(POLICY_VERSION)):
                window.array(key)[:, :steps] = version
        if options.set_truncated:
            self.truncate(window, steps - 1)
        if options.mask:
            self._mark(window, tracker, steps)
        if options.check_finite:
            self._check_finite(window, steps)

    def _mark(self, window: Window, tracker: Tracker, steps: int) -> None:
        """Tell the transitions from other frames; those that there are not become zeros."""
        mask = window.tensor(MASK)
        mask[:, :steps] = True
        for env, t in tracker.voids:
            mask[env, t] = False
        for env, first in tracker.absent.items():
            first = max(0, first - 1)  # the frame of the loss is void
            window.zero_from(first, env)
            if (ids := self._bound[window].ids) is not None:
                ids[env, first:] = -1

    def complete_flags(self, window: Window, given: Collection[Key], steps: int) -> None:
        """Derive end flags of the first ``steps`` steps from those that are ``given``.

        ``given``: keys without ``"next"``.
        """
        for group in self._groups:
            flags = [window.tensor(next_key(key))[:, :steps] for key in group.keys()]
            done, dead = flags[:2]
            late = flags[2] if group.truncated else torch.zeros_like(done)
            missing = {key[-1] for key in group.keys() if key not in given}
            if "done" in missing:
                done.copy_(dead | late)
            if "terminated" in missing:
                dead.copy_(done & ~late)
            if "truncated" in missing:
                late.copy_(done & ~dead)

    def truncate(self, window: Window, last: int, envs: Array | slice | int = _ALL) -> None:
        """End the running episodes of ``envs`` with step ``last``, as truncated."""
        for group in self._groups:
            if group.truncated and last >= 0:
                prefix = (NEXT, *group.prefix)
                done, late = (window.tensor((*prefix, name)) for name in ("done", "truncated"))
                late[envs, last] |= ~done[envs, last]
                done[envs, last] = True

    def void(self, window: Window, t: int, env: int, tracker: Tracker) -> None:
        """End the running episode of ``env`` before frame ``t``, which is no transition."""
        if (env, t - 1) not in tracker.voids:
            self.truncate(window, t - 1, env)  # the last step of an earlier rollout was delivered
        for key in (*self._rewards, *(next_key(field.key) for field in self._flags)):
            window.tensor(key)[env, t] = 0

    def _check_finite(self, window: Window, steps: int) -> None:
        for field in self._finite:
            values = window.tensor(field.key)[:, :steps]
            # One sum finds a NaN or infinity anywhere; only then is it worth looking where.
            if torch.isfinite(values.sum()):
                continue
            bad = ~torch.isfinite(values)
            if bad.any():
                env, step = (int(index) for index in bad.nonzero()[0][:2])
                raise EnvError(
                    f"environment {env} returned {values[env, step].flatten()[:4].tolist()} as "
                    f"{format_key(field.key)} at step {step} of the rollout (check_finite=True)"
                )


def _frame_rewards(rewards: Sequence[torch.Tensor], size: tuple[int, int]) -> Callable[[], Array]:
    """Return a function that gives one reward per frame, see `mean_rewards`.

    ``rewards`` are ``[P, T, ...]`` each, of which ``size`` is ``P, T``; may be written later.
    """
    if len(rewards) == 1 and rewards[0].shape[2:] == (1,) and numpy_dtype(rewards[0].dtype):
        there = rewards[0][:, :, 0]
        if there.device.type != "cpu":
            return lambda: there.cpu().numpy()
        single = there.numpy()
        return lambda: single
    return lambda: mean_rewards(rewards, size)


def end_groups(options: SourceOptions, dones: Iterable[DoneGroup]) -> tuple[DoneGroup, ...]:
    """Return the delivered end flags: environments that can be cut can be truncated."""
    if options.max_frames_per_traj is None:
        return tuple(dones)
    return tuple(replace(group, truncated=True) for group in dones)


def check_options(
    options: SourceOptions,
    observed: Iterable[Key],
    groups: Sequence[DoneGroup],
    written: Iterable[Key],
) -> None:
    """Check the options against the entries of the environment and the policy's outputs."""
    delivered = {
        TRAJ_IDS: options.track_traj_ids,
        MASK: options.mask,
        STEP_COUNT: options.counts,
        POLICY_VERSION: options.track_policy_version,
    }
    for key in written:
        if delivered.get(key[key[0] == NEXT :]):
            raise PolicyError(
                f"the policy writes {format_key(key)}, which the collector delivers itself: have "
                "it write another name, and return the TensorDict that it gets, not a clone"
            )
    observed = {*observed}
    if options.track_policy_version and POLICY_VERSION in observed:
        raise ConfigError(
            "track_policy_version delivers 'policy_version', but the environment has an entry of "
            "that name; rename it with a wrapper, or drop track_policy_version"
        )
    if options.counts and any(key[-1:] == STEP_COUNT for key in observed):
        raise ConfigError(
            "max_frames_per_traj needs to count steps, but the environment already delivers "
            "'step_count'; pass max_frames_per_traj=0 and let the environment truncate"
        )
    if options.set_truncated and not any(group.truncated for group in groups):
        found = ", ".join(format_key(key) for group in groups for key in group.keys())
        raise EnvError(
            f"set_truncated=True needs a 'truncated' key, but the environment has only {found}; "
            "add one with env.add_truncated_keys()"
        )
