"""The worker side of `ParallelEnv`: environments that step when the learner wakes them.

Inputs and results lie in windows that learner and worker share: the row of the `ParallelEnv`, and
rollouts of collectors. A step is a pulse to the worker and one back; all else is a command.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, EnvError, WeightsError
from gleanrl.core.keys import NEXT, Key, format_key
from gleanrl.core.layout import EnvLayout
from gleanrl.core.messages import Report, Snapshot, WindowRef
from gleanrl.core.protocols import Source, Spec, Stop
from gleanrl.core.window import Window
from gleanrl.envs.factory import EnvFactory, closed_on_error
from gleanrl.envs.libs.gym import make_tensordict_env
from gleanrl.envs.row_env import EnvRows, Row, RowEnv
from gleanrl.envs.serial import SerialEnv, rows_of
from gleanrl.envs.specs import Composite, masked_specs
from gleanrl.envs.tensordict import (
    EnvMetaData,
    describe,
    open_entries,
    spec_leaves,
    spec_trees,
    state_leaves,
    widened,
)
from gleanrl.memory.arena import map_window
from gleanrl.memory.pulses import PulseAddress, PulseEnds
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.tensordicts import nest

LEAVE, STEP, CUT, FINISH = range(4)
"""Orders: leave `EnvWorker.serve`; step; step and truncate some environments; finish a rollout."""
STEPPED, ENDED, FAILED = range(3)
"""Answers: nothing ended; some environments ended; an exception, which `serve` raises."""
_INSTEAD = (
    "a ParallelEnv passes data of one fixed layout through shared memory; give the environments to "
    "a collector with workers, such as MultiSyncCollector, or to a SerialEnv"
)


@dataclass(frozen=True, slots=True)
class RowsInfo:
    """The rows of one worker's environments, without the environments."""

    layout: EnvLayout
    """For any number of them: without a batch shape."""
    observation_specs: Mapping[Key, Spec]
    action_specs: Mapping[Key, Spec]
    kind: str
    """The class of the user's environment."""
    can_cut: bool


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """Where in the memory of learner and workers the small things of one worker lie (bytes)."""

    orders: int
    """Three int64: number of the window, step in it, and whether a step of the row resets."""
    reset_s: int
    """float64: seconds in resets."""
    cut: int
    """One bool per environment: whether the step truncates it."""
    ended: int
    """One bool per environment: whether it ended."""
    envs: int
    """Environments of the worker."""


@dataclass(frozen=True, slots=True)
class EnvWorkerInfo:
    """The learner's description of one worker's environments."""

    batch: tuple[int, ...]
    """Shape of one of them."""
    device: torch.device | None
    specs: tuple[Composite, ...]
    """Of one environment: observations, actions, rewards, end flags."""
    direct: bool
    """Whether they step in rows: they read actions only, in any dtype of their kind."""
    rows: RowsInfo | None
    """The rows in which collectors step them; ``None`` if they have to use TensorDicts."""
    infos: Sequence[Key]
    """The observations that are requested info entries."""


@dataclass(frozen=True, slots=True)
class EnvWorkerBuilder:
    """Makes the environments of one worker, in the worker."""

    create_env_fn: tuple[EnvFactory, ...]
    create_env_kwargs: tuple[Mapping[str, Any], ...]
    stream: int
    """The seed of the worker's random streams until environments are seeded."""
    memory: SharedMemory | None = None
    """The memory of all windows; ``None`` if the environments are only looked at."""
    pulses: PulseAddress | None = None

    def __call__(self, worker: int) -> Source:
        """Make the environments one after the other."""
        seed_streams(self.stream)
        made: list[Any] = []
        with closed_on_error(made):
            for factory, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True):
                made.append(make_tensordict_env(factory, kwargs))
            return EnvWorker(made, self.memory, self.pulses)


def without_masks(tree: Composite) -> Composite:
    """Return specs that allow every action, as only the environments know what they allow now."""
    tree = tree.clone()
    for spec in masked_specs(tree).values():
        spec.update_mask(None)
    return tree


def seed_streams(seed: int) -> None:
    """Seed the random generators of this process, which environments may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    python_random.seed(seed)


class EnvWorker:
    """Serves environments of one kind."""

    memory = None

    def __init__(
        self, envs: Sequence[Any], memory: SharedMemory | None, pulses: PulseAddress | None
    ) -> None:
        """Take over ``envs``.

        Raises:
            ConfigError: they do not fit together.
        """
        self.envs = SerialEnv.of(envs)
        self.num_envs = self.envs.batch_size.numel()
        self._memory = memory
        self._ends = None if pulses is None else PulseEnds(pulses)
        self._seeded: Any = self.envs
        self._row: RowEnv | _TensorDictRow
        self._rollouts: _Rollouts | None = None

    def layout(self) -> None:
        """Announce no rollouts; `described` has the layout of the windows."""

    def described(self) -> EnvWorkerInfo:
        """Return the description for the learner.

        Raises:
            ConfigError: data without a fixed layout.
        """
        row = self._row = _make_row(self.envs)
        self._seeded, first = row if isinstance(row, RowEnv) else self.envs, self.envs.members[0]
        if isinstance(row, RowEnv) and not any(masked_specs(tree) for tree in spec_trees(row)):
            self._rollouts = _Rollouts(row.rows)
        return EnvWorkerInfo(
            batch=tuple(first.batch_size),
            device=first.device,
            specs=tuple(without_masks(widened(tree)) for tree in spec_trees(first)),
            direct=isinstance(row, RowEnv),
            rows=None if self._rollouts is None else self._rollouts.info(type(first).__name__),
            infos=self.envs.info_entries,
        )

    def meta_data(self) -> EnvMetaData:
        """Describe the first environment to a user."""
        return describe(self.envs.members[0])

    # -- memory ----------------------------------------------------------------------------------

    def share(self, places: SharedPlaces, row: WindowRef, carry: WindowRef | None) -> None:
        """Take the places of what is shared: the row of the `ParallelEnv`, which is window 0.

        ``carry``: one step long, where rollouts leave what the next one begins with.
        """
        memory: Any = self._memory
        found = memory.map()
        self._orders = np.frombuffer(found, np.int64, 3, places.orders)
        self._reset_s = np.frombuffer(found, np.float64, 1, places.reset_s)
        self._cut = np.frombuffer(found, np.bool_, places.envs, places.cut)
        self._ended = np.frombuffer(found, np.bool_, places.envs, places.ended)
        self._row.bind(map_window(found, row))
        if self._rollouts is not None and carry is not None:
            self._rollouts.carry = map_window(found, carry)

    def open(self, window: WindowRef) -> None:
        """Add a window for rollouts; they are numbered from 1."""
        memory, rollouts = self._memory, self._rollouts
        assert memory is not None
        assert rollouts is not None
        rollouts.windows.append(map_window(memory.map(), window))

    # -- stepping --------------------------------------------------------------------------------

    def take(self, present: tuple[Key, ...]) -> None:
        """Remember the inputs that the learner writes, where a step may do without some."""
        if isinstance(self._row, _TensorDictRow):
            self._row.inputs = present

    def serve(self) -> None:
        """Carry out orders until the learner has a command again.

        Raises:
            EnvError: an environment returned data that do not fit the window.
        """
        ends: Any = self._ends
        while order := ends.wait():
            try:
                ended = self._carry_out(order)
            except BaseException:
                ends.answer(FAILED)
                raise
            if ended:
                self._ended[ended] = True
            ends.answer(ENDED if ended else STEPPED)

    def _carry_out(self, order: int) -> Sequence[int]:
        number, t, resets = self._orders.tolist()
        if number == 0:
            self._row.step_row(bool(resets))
            return ()
        rollouts: Any = self._rollouts
        if order == FINISH:
            rollouts.rows.finish(t)
            return ()
        cut = np.flatnonzero(self._cut).tolist() if order == CUT else ()
        ended: list[int] = list(rollouts.step(number - 1, t, cut))
        if ended:
            self._reset_s[0] = rollouts.rows.reset_s
        return ended

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Refuse rollouts, because this worker has no policy."""
        raise NotImplementedError("give orders")

    def restart(self, masks: Mapping[Key, torch.Tensor], options: Mapping[str, Any]) -> None:
        """Reset into the row: all environments, or those in the masks.

        Raises:
            EnvError: an environment returned data that do not fit the window.
        """
        self._row.reset_row(masks, options)

    def restart_rollouts(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments into the carry: all, or those with the given indices."""
        rollouts: Any = self._rollouts
        rollouts.rows.reset(rollouts.carry, envs, **options)

    # -- what every source has -------------------------------------------------------------------

    def place(self, base: int, stride: int) -> None:
        """Do nothing, because these environments have no numbers."""

    def load(self, snapshot: Snapshot) -> None:
        """Refuse weights, because this worker has no policy."""
        raise WeightsError("environments of a ParallelEnv have no policy to load weights into")

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed environments, from their next reset on, and this process's random streams."""
        seed_streams(seed if stream is None else stream)
        return int(self._seeded.set_seed(seed, static_seed=static))

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Refuse a reset outside the window, where its results would be lost."""
        raise NotImplementedError("call restart")

    def state(self) -> dict[str, Any]:
        """Return the environments' states, ``"worker0"`` and so on."""
        return self.envs.state_dict()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a state from `state`."""
        self.envs.load_state_dict(state, strict)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve ``path`` in this worker and call the object."""
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        """Return the object at ``path`` in this worker."""
        return paths.resolve(self, path)

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


class _Rollouts:
    """Steps rows in the windows of a collector."""

    carry: Window

    def __init__(self, rows: EnvRows) -> None:
        self.rows = rows
        self.windows: list[Window] = []
        self._last = 0

    def info(self, kind: str) -> RowsInfo:
        rows = self.rows
        layout = replace(rows.layout, batch_shape=())
        return RowsInfo(layout, rows.observation_specs, rows.action_specs, kind, rows.can_cut)

    def step(self, number: int, t: int, cut: Sequence[int]) -> Sequence[int]:
        """Take step ``t`` in a window; return the environments that ended."""
        rows = self.rows
        if t == 0:
            window = self.windows[number]
            self._last = window.steps - 1
            rows.begin(window, self.carry)
        ended = rows.step(t, cut)
        if t == self._last:
            rows.finish(t + 1)
        return ended


# -- environments whose data lie in a window of one step -------------------------------------------


def _make_row(envs: SerialEnv) -> RowEnv | _TensorDictRow:
    """Return the way to step ``envs`` in a window.

    Raises:
        ConfigError: their data have no fixed layout.
    """
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


class _TensorDictRow:
    """Any other environments, stepped with TensorDicts."""

    def __init__(self, env: SerialEnv) -> None:
        self.env, self._row = env, Row(env)
        self._sizes = {group.key: group.shape for group in self._row.groups}
        self.inputs: tuple[Key, ...] = tuple(field.key for field in self._row.fields)
        """The entries of the row that a step reads."""
        device = env.device
        self._device = None if device is None or device.type == "cpu" else device

    def bind(self, window: Window) -> None:
        """Step in ``window`` from now on."""
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
            return f"{format_key(key)} as {_say(came)}, its specs declare {_say(view)}"
    return ""


def _say(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, TensorDictBase):
        return f"{type(value).__name__} of batch {tuple(value.batch_size)}, named {value.names}"
    return "nothing" if value is None else f"{value!r:.60}, no tensor"
