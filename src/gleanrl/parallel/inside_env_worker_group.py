"""A group of environments in a worker of `ParallelEnv`, all of which step at once.

Inputs and results lie in windows that learner and worker share: the row of the `ParallelEnv`, and
rollouts of collectors.
"""

from __future__ import annotations

import random as python_random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError, EnvError, note
from gleanrl.core.keys import NEXT, Key, format_key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.messages import WindowRef
from gleanrl.core.protocols import Spec
from gleanrl.core.streams import Streams
from gleanrl.core.window import Window
from gleanrl.envs.base import EnvBase
from gleanrl.envs.gymnasium import GymnasiumEnv
from gleanrl.envs.recorded_or_called_transforms import Unproven
from gleanrl.envs.rehearsal_proof import transformed_rows
from gleanrl.envs.restarting_envs import Make, RestartingEnv, Restarts
from gleanrl.envs.row_env import EnvRows, Row, RowEnv
from gleanrl.envs.saved_state import load_state, save_state
from gleanrl.envs.serial import SerialEnv, draws_itself, rows_of
from gleanrl.envs.specs import Composite, masked_specs
from gleanrl.envs.state_kinds import Node, Resumable
from gleanrl.envs.tensordict_envs import (
    EnvMetaData,
    TensorDictHandle,
    open_entries,
    spec_leaves,
    spec_trees,
    state_leaves,
    widened,
)
from gleanrl.envs.tensordict_rows import ForeignSpec, TensorDictRows
from gleanrl.memory.batch_arena import map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.tensordicts import described, nest

_INSTEAD = (
    "a ParallelEnv and inference='central' pass data of one fixed layout through shared memory; "
    "give the environments to a collector with inference='workers', or to a SerialEnv"
)

SHARED = (
    Field(("order",), (3,), torch.int64),
    Field(("reset_s",), (), torch.float64),
    Field(("cut",), (), torch.bool),
    Field(("ended",), (), torch.bool),
    Field(("anew",), (), torch.bool),
)
"""The fields of a window that learner and worker share besides steps: the number of the window to
step in, the step and whether a step of the row resets; the seconds in resets, in the worker's first
row; and whether an environment is truncated by the step, ended, or began anew without one."""


@dataclass(frozen=True, slots=True)
class RowsInfo:
    """The rows of one worker's part of a group, without the environments."""

    layout: EnvLayout
    """For any number of them: without a batch shape."""
    observation_specs: Mapping[Key, Spec]
    action_specs: Mapping[Key, Spec]
    kind: str
    """The class of the user's environment."""
    can_cut: bool
    checks_actions: bool


@dataclass(frozen=True, slots=True)
class EnvGroupInfo:
    """The learner's description of one worker's part of a group."""

    batch: tuple[int, ...]
    """Shape of one of them."""
    device: torch.device | None
    specs: tuple[Composite, ...]
    """Of one environment: observations, actions, rewards, end flags."""
    direct: bool
    """Whether they step in rows: they read actions only, in any dtype of their kind."""
    infos: Sequence[Key]
    """The observations that are requested info entries."""


def learner_specs(env: Any) -> list[Composite]:
    """Return specs of ``env`` that draw nothing where only ``env`` knows what is allowed now."""
    trees = [widened(tree).clone() for tree in spec_trees(env)]
    for tree in trees:
        for spec in masked_specs(tree).values():
            spec.update_mask(None)
            spec.drawn_elsewhere = True
    for action in trees[1].leaves().values() if draws_itself(env) else ():
        action.drawn_elsewhere = True
    return trees


def seed_streams(seed: int) -> None:
    """Seed the random generators of this process, which environments may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    python_random.seed(seed)


class EnvGroup:
    """Environments of one kind, stepped one after the other."""

    def __init__(
        self,
        envs: Sequence[Any],
        memory: SharedMemory | None,
        makers: Sequence[Make] = (),
        restarts: Restarts | None = None,
    ) -> None:
        """Take over ``envs``, whose windows lie in ``memory``, ``None`` if they are only looked at.

        Each of ``makers`` builds another environment like that of ``envs``. ``restarts``: how often
        each may be built anew when it raises; ``None`` for never.
        """
        self.envs = SerialEnv.of(envs)
        self._memory: Any = memory
        self._makers, self._restarts = makers, restarts
        self.failures: list[str] = []
        """The errors of environments that were built anew since `take_failures`."""
        self._seeded: Any = self.envs
        self._row: RowEnv | _TensorDictRow
        self._rollouts: _Rollouts
        self._stepped: Resumable
        """The object by which environments are stepped."""
        self.error: BaseException | None = None
        """The error of an order, which `reraise` raises."""
        self._opened: tuple[bool, bool] | None = None
        """The arguments of `open_rows`, if it has found rows."""

    def described(self) -> EnvGroupInfo:
        """Return the description for the learner."""
        row = self._row = self._stepped = _make_row(self.envs)
        if self._restarts is not None:
            row = self._row = self._stepped = RowEnv(self._restarting(row, self._restarts))
        self._seeded, first = row if isinstance(row, RowEnv) else self.envs, self.envs.members[0]
        return EnvGroupInfo(
            batch=tuple(first.batch_size),
            device=first.device,
            specs=tuple(learner_specs(first)),
            direct=isinstance(row, RowEnv),
            infos=self.envs.info_entries,
        )

    def _restarting(self, row: Any, restarts: Restarts) -> RestartingEnv:
        """Return the rows of ``row``, but with environments that are built anew when they raise."""
        rows = row.rows if isinstance(row, RowEnv) else None
        single = all(isinstance(member, RowEnv) for member in self.envs.members)
        if type(rows) is not GymnasiumEnv or not single:
            raise ConfigError(
                "on_env_error='restart' builds single Gymnasium environments anew: give ids or "
                f"callables that make one, not a {type(self.envs.members[0]).__name__}"
            )
        made = RestartingEnv(
            rows.envs, self._makers, rows.layout.batch_shape, rows.options, restarts
        )
        # Bound to a proxy, as a cycle would keep memory and descriptors.
        made.on_rebuilt = MethodType(type(self)._rebuilt, weakref.proxy(self))
        self.failures = made.failures
        return made

    def _rebuilt(self, t: int, env: int) -> None:
        self._anew[env] = True

    def take_failures(self) -> list[str]:
        """Return the errors of environments that were built anew since the last call."""
        found = self.failures.copy()
        self.failures.clear()
        return found

    def open_rows(self, always: bool = False, at_once: bool = False) -> RowsInfo | None:
        """Prepare to step in rows of a collector; ``None`` if it has to use TensorDicts.

        With ``always``, environments with TensorDict methods of their own are called by these. With
        ``at_once``, each step is written whole, because this process may be lost.
        """
        found = self._find_rows() or (self._tensordict_rows() if always else None)
        if found is None:
            return None
        self._opened = always, at_once
        rows, specs = found
        self._rollouts, self._stepped = _Rollouts(rows, at_once), rows
        return RowsInfo(
            layout=replace(rows.layout, batch_shape=()),
            observation_specs=rows.observation_specs,
            action_specs=specs,
            kind=type(self.envs.members[0]).__name__,
            can_cut=rows.can_cut,
            checks_actions=rows.checks_actions,
        )

    def take_place(self, before: RowsInfo, *opened: bool) -> None:
        """Prepare to step in the rows of a lost worker's group, which had the same layout."""
        self.described()
        if (info := self.open_rows(*opened)) != before:
            raise ConfigError(f"its environments are {info}, those of the lost one were {before}")

    def _find_rows(self) -> tuple[EnvRows, Mapping[Key, Spec]] | None:
        """Return rows that step as the environments do, and the specs of actions."""
        if isinstance(self._row, RowEnv):
            masked = any(masked_specs(tree) for tree in spec_trees(self._row))
            return None if masked else (self._row.rows, self._row.rows.action_specs)
        try:
            rows = transformed_rows(TensorDictHandle(self.envs), fresh=True)
        except Unproven:
            return None
        specs = rows.proven_specs()
        return None if specs is None or rows.parts.primed else (rows, specs)

    def _tensordict_rows(self) -> tuple[EnvRows, Mapping[Key, Spec]]:
        leaves = (spec_leaves(tree) for tree in learner_specs(self.envs.members[0])[:2])
        seen, acted = ({key: ForeignSpec(leaf) for key, leaf in found} for found in leaves)
        return TensorDictRows(TensorDictHandle(self.envs), (seen, acted)), acted

    def meta_data(self) -> EnvMetaData:
        """Describe the first environment to a user."""
        env = self.envs.members[0]
        return EnvMetaData(env.fake_tensordict(), env.batch_size, env.device, *spec_trees(env))

    # -- memory ----------------------------------------------------------------------------------

    def share(self, shared: WindowRef, row: WindowRef) -> None:
        """Take the places of the fields `SHARED`, and of the row of the `ParallelEnv`, window 0."""
        found = self._memory.map()
        fields = (map_window(found, shared).array(field.key)[:, 0] for field in SHARED)
        orders, self._reset_s, self._cut, self._ended, self._anew = fields
        self._order = orders[0]
        self._row.bind(map_window(found, row))

    def open_carry(self, carry: WindowRef) -> None:
        """Take the place, one step long, where rollouts leave what the next one begins with."""
        self._rollouts.carry = map_window(self._memory.map(), carry)

    def open(self, number: int, window: WindowRef, others: Sequence[int]) -> None:
        """Add a window for rollouts, with a ``number`` from 1 on; keep no more than ``others``."""
        windows = self._rollouts.windows
        self._rollouts.windows = {other: windows[other] for other in others if other in windows}
        self._rollouts.windows[number] = map_window(self._memory.map(), window)

    # -- orders: what is to be done lies in memory -------------------------------------------------

    def step(self, cuts: bool) -> bool:
        """Step in a window, and truncate environments if it ``cuts``; tell whether some ended."""
        number, t, resets = self._order.tolist()
        if number == 0:
            self._row.step_row(bool(resets))
            return False
        rollouts = self._rollouts
        cut: Sequence[int] = ()
        if cuts:
            cut = np.flatnonzero(self._cut).tolist()
            self._cut[:] = False
        ended = rollouts.step(number, t, cut)
        if ended:
            self._ended[list(ended)] = True
        self._reset_s[0] = rollouts.rows.reset_s
        return bool(ended)

    def begin(self) -> None:
        """Reset all environments, in place of a step that was under way when a worker was lost.

        A step of the row is followed by a reset if the learner wants that.
        """
        number, t, resets = self._order.tolist()
        self._cut[:] = self._ended[:] = False
        self._anew[:] = True
        if number:
            self._rollouts.begin(number, t + 1)
        elif resets:
            self._row.reset_row({}, {})

    def finish(self) -> bool:
        """End a rollout that was stopped early."""
        rollouts = self._rollouts
        rollouts.finish(int(self._order[1]))
        self._reset_s[0] = rollouts.rows.reset_s
        return False

    def reraise(self) -> None:
        """Raise the error that was kept, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    # -- commands --------------------------------------------------------------------------------

    def take(self, present: tuple[Key, ...]) -> None:
        """Remember the inputs that the learner writes, where a step may do without some."""
        if isinstance(self._row, _TensorDictRow):
            self._row.inputs = present

    def restart(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Reset into the row: all environments, or those in the masks."""
        self._row.reset_row(masks, options)

    def restart_rollouts(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments into the carry: all, or those with the given indices."""
        self._rollouts.rows.reset(self._rollouts.carry, envs, **options)

    def seed(self, seed: int, static: bool) -> int:
        """Seed environments, from their next reset on, and this process's random streams."""
        seed_streams(seed)
        return int(self._seeded.set_seed(seed, static_seed=static))

    def snapshot(self, allow_pickle: bool) -> dict[str, Any]:
        """Return the environments' state in the middle of episodes, and this process's streams."""
        streams = Streams()
        streams.take()
        return {"envs": self._stepped.snapshot(allow_pickle), "streams": streams.state()}

    def resume(self, snapshot: Mapping[str, Any], allow_pickle: bool) -> None:
        self._stepped.resume(snapshot["envs"], allow_pickle)
        streams = Streams()
        streams.load_state(snapshot["streams"])
        streams.give()

    # -- steps outside of shared memory, in a copy of this process ---------------------------------

    @property
    def mode(self) -> tuple[tuple[bool, bool] | None, TensorDictBase | None]:
        """How they are stepped: the arguments of `open_rows`, or TensorDicts from this root on."""
        row = self._stepped
        return self._opened, row.present() if isinstance(row, _TensorDictRow) else None

    def prepare(self, opened: tuple[bool, bool] | None, root: TensorDictBase | None) -> None:
        """Reset the environments, which were not used yet, to be stepped in such a `mode`."""
        self.described()
        if opened is not None:
            self.open_rows(*opened)
        if isinstance(self._stepped, _TensorDictRow):
            self._stepped.show(root)
        self._apart()[0].reset()

    def random_steps(self, steps: int) -> TensorDictBase:
        """Take steps by random actions; return them, ``[environments, steps]``."""
        (env, data), taken = self._apart(), []
        for t in range(steps):
            try:
                finished, data = env.step_and_maybe_reset(env.rand_action(data))
            except Exception as err:
                note(err, f"this was step {t} of {steps} random ones")
                raise
            taken.append(finished)
        return torch.stack(taken, 1)

    def _apart(self) -> tuple[EnvBase, TensorDictBase]:
        """Return the environments with TensorDict methods and memory of their own, and their root.

        The root of rows is not read by steps.
        """
        stepped = self._stepped
        if isinstance(stepped, _TensorDictRow):
            return self.envs, stepped.present()
        if isinstance(stepped, TensorDictRows):
            return self.envs, stepped.handle.root
        rows: Any = stepped.rows if isinstance(stepped, RowEnv) else stepped
        rows.on_rebuilt = lambda t, env: None  # which would be written into shared memory
        env = RowEnv(rows)
        return env, env.fake_tensordict().exclude("next", *env.action_keys)

    def state(self) -> dict[str, Any]:
        """Return the environments' states, ``"worker0"`` and so on."""
        return self.envs.state_dict()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.envs.load_state_dict(state, strict)


class _Rollouts:
    """Steps rows in the windows of a collector."""

    carry: Window

    def __init__(self, rows: EnvRows, at_once: bool) -> None:
        self.rows, self._at_once = rows, at_once
        self.windows: dict[int, Window] = {}
        """By number."""
        self._first = self._last = 0
        """The steps with which the rows begin, and end, in the present window."""

    def step(self, number: int, t: int, cut: Sequence[int]) -> Sequence[int]:
        """Take step ``t`` in a window; return the environments that ended."""
        rows = self.rows
        if t == 0:
            window = self.windows[number]
            self._first, self._last = 0, window.steps - 1
            rows.begin(window, self.carry)
        ended = rows.step(t - self._first, cut)
        if t == self._last:
            self.finish(t + 1)
        elif self._at_once:
            rows.keep(t - self._first)
        return ended

    def begin(self, number: int, first: int) -> None:
        """Reset, and begin in a window with step ``first``."""
        self.rows.reset(self.carry)
        window = self.windows[number]
        self._first, self._last = first, window.steps - 1
        rest = {key: window.tensor(key)[:, first:] for key in window.keys()}
        for key in self.carry.keys():
            shown = self.carry.tensor(key)
            rest[key][:, :1] = shown  # which has no steps after the last one
            if (after := next_key(key)) in window.keys():
                window.tensor(after)[:, first - 1 : first] = shown
        if first < window.steps:
            self.rows.begin(Window(rest, window.envs, window.steps - first), self.carry)

    def finish(self, steps: int) -> None:
        """End a rollout after so many ``steps``."""
        self.rows.finish(steps - self._first)


# -- environments whose data lie in a window of one step -------------------------------------------


def _make_row(envs: SerialEnv) -> RowEnv | _TensorDictRow:
    """Return the way to step ``envs`` in a window."""
    # Made by this worker, so nobody else relies on the checks of Gymnasium's wrappers.
    rows = rows_of(envs, fresh=True)
    if rows is not None:
        return RowEnv(rows)
    shown = {key for key, _ in spec_leaves(envs.full_observation_spec)}
    for env in envs.members:
        wrong = [*open_entries(env), *(key for key, _ in state_leaves(env) if key not in shown)]
        if wrong:
            raise ConfigError(
                f"{format_key(wrong[0])} of {type(env).__name__} is no tensor, has an open "
                f"dimension or is an input that observations lack: {_INSTEAD}"
            )
    return _TensorDictRow(envs)


class _TensorDictRow(Resumable):
    """Any other environments, stepped with TensorDicts."""

    def __init__(self, env: SerialEnv) -> None:
        self.env, self._row = env, Row(env)
        self._sizes = {group.key: group.shape for group in self._row.groups}
        self.inputs: tuple[Key, ...] = tuple(field.key for field in self._row.fields)
        """The entries of the row that a step reads."""
        device = env.device
        self._device = None if device is None or device.type == "cpu" else device

    def bind(self, window: Window) -> None:
        self._row.bind(window)

    def step_row(self, and_reset: bool) -> None:
        """Step, and reset ended environments if the learner wants that."""
        row = self._row
        given = row.copy({key: row.views[key] for key in self.inputs}, self._device)
        if not and_reset:
            self._put(self.env.step(given).get(NEXT), row.after)
            return
        finished, root = self.env.step_and_maybe_reset(given)
        self._put(finished.get(NEXT), row.after)
        self._put(root.exclude(*row.actions), row.root)

    def reset_row(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Reset all environments, or those in the masks; the others keep the root row."""
        row = self._row
        given = row.copy(row.root, self._device).update(nest(masks)) if masks else None
        self._put(self.env.reset(given, **options), row.root)

    def present(self) -> TensorDictBase:
        """Return the root of the next step."""
        return self._row.copy(self._row.root, self._device)

    def show(self, present: Any) -> None:
        """Step in memory of its own, from the root ``present`` on."""
        self.bind(Window.allocate(self._row.fields, self.env.batch_size.numel(), 1))
        self._put(present, self._row.root)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return save_state(list(self.env.members), allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        load_state(list(self.env.members), snapshot, allow_pickle)

    def _put(self, data: TensorDictBase, row: Mapping[Key, torch.Tensor]) -> None:
        """Write ``data`` into the row."""
        found = dict(self._entries(data, self._row.batch))
        if _misfit(found, row):
            for env, part in enumerate(data.unbind(0)):
                own = dict(self._entries(part, self._row.batch[1:]))
                if wrong := _misfit(own, {key: view[env] for key, view in row.items()}):
                    raise EnvError(f"environment {env} returned {wrong}; correct one: {_INSTEAD}")
        for key, view in row.items():
            view.copy_(found[key].detach())

    def _entries(
        self, data: TensorDictBase, batch: Sequence[int], at: Key = ()
    ) -> Iterator[tuple[Key, Any]]:
        """Yield the entries of ``data``, but as a whole what a group of the layout cannot hold."""
        odd = tuple(data.batch_size) != (*batch, *self._sizes.get(at, ())) or any(data.names)
        if odd or isinstance(data, LazyStackedTensorDict):
            yield at, data
            return
        for name, value in data.items():
            if isinstance(value, TensorDictBase):
                yield from self._entries(value, batch, (*at, name))
            else:
                yield (*at, name), value


def _misfit(found: Mapping[Key, Any], row: Mapping[Key, torch.Tensor]) -> str:
    """Describe the first entry that is not in the row, with that shape and dtype; else ``""``."""
    for key in {**found, **row}:
        came, view = found.get(key), row.get(key)
        if not (isinstance(came, torch.Tensor) and view is not None) or (
            (came.shape, came.dtype) != (view.shape, view.dtype)
        ):
            return f"{format_key(key)} as {described(came)}, its specs declare {described(view)}"
    return ""
