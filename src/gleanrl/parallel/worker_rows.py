"""The rows of a `ParallelEnv`: workers step them in the memory of a collector's rollouts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from gleanrl.core.keys import Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import GymOptions
from gleanrl.core.window import Window
from gleanrl.envs.base import EnvBase
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.state_kinds import Node
from gleanrl.parallel.env_workers import WorkerGroup, field_of
from gleanrl.parallel.inside_env_worker import CUT, FINISH, STEP
from gleanrl.parallel.inside_env_worker_group import RowsInfo


class WorkerRows(EnvRows):
    """Environments in workers, which write their steps where a collector wants them.

    Where a window is not in memory that workers map, they write into a copy of it that is.
    """

    face: EnvBase
    _was_reset = False
    _resetting: tuple[Callable[[], Any], Window] | None = None
    """What waits for the reset that goes on, and the carry of that."""

    def __init__(self, group: WorkerGroup, info: RowsInfo, batch: Sequence[int]) -> None:
        """Step the environments of ``group`` as one batch of shape ``batch``.

        ``info`` is that of the first worker's part.
        """
        self._group, self.memory = group, group.workers.memory
        self.layout = layout = replace(info.layout, batch_shape=tuple(batch))
        self.observation_specs, self.action_specs = info.observation_specs, info.action_specs
        self.can_cut, self.checks_actions = info.can_cut, info.checks_actions
        self._kind = info.kind
        flags = [Field(key, g.shape, torch.bool) for g in layout.dones for key in g.keys()]
        self._seen = [field.key for field in layout.observations]
        self._given = [field.key for field in layout.actions]
        after = [field.key for field in (*layout.observations, *layout.rewards, *flags)]
        self._keys = {*self._seen, *self._given, *map(next_key, after)}
        self.only_rows, self.failures = group.workers.only_rows, []
        self.gone = group.gone
        self._targets: WeakKeyDictionary[Window, tuple[int, Window | None]] = WeakKeyDictionary()
        """By a window of any collector: its number in workers, and the copy that these write."""
        self.carry = group.reserve(layout.observations, 1)
        """Root row ``T`` of a rollout, and the observations of resets."""

    def joined(
        self, others: Sequence[Any], face: EnvBase, options: GymOptions | None, fresh: bool
    ) -> WorkerRows | None:
        if others:
            return None
        rows = copy.copy(self)
        rows.face = face
        return rows

    def explain(self) -> str:
        envs, workers = self.layout.num_envs, len(self._group.members)
        return f"{envs} x {self._kind} in {workers} workers, which step them without TensorDicts"

    # -- steps -----------------------------------------------------------------------------------

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        self._number, target = self._targets.get(window) or self._open(window)
        self._target = window if target is None else target
        self._last, self._after_last, self._pulled = window.steps - 1, carry, 0
        self._group.forget()
        if self._target is not window:
            _copy(window, self._target, self._target.keys())
        if self.gone:
            self._repeat(1)

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        self.post(t, cut)
        return self.complete(t)

    def post(self, t: int, cut: Sequence[int]) -> None:
        if self._target is not self._window:
            _copy(self._window, self._target, self._given, t)
        if cut:
            self._group.cut[list(cut)] = True
        self._group.give(CUT if cut else STEP, self._number, t)

    @property
    def under_way(self) -> bool:
        return bool(self._group.pending)

    def wait(self, seconds: float | None = None) -> None:
        self._group.workers.take_answers(seconds)

    def complete(self, t: int) -> Sequence[int]:
        ended = self._group.settle()
        if self._target is not self._window and t < self._last:
            _copy(self._target, self._window, self._seen, t + 1)
        for env in self._group.began_anew():
            self._pull(t + 1)  # first, because it is marked in the window
            self.on_rebuilt(t, env)
            if env in self.gone:
                self._repeat(t + 1)
        return ended

    def _repeat(self, first: int) -> None:
        """Repeat observations of environments that are gone from step ``first`` on.

        The policy acts for all, and may not take zeros.
        """
        for key in self._seen:
            shown = self._window.tensor(key)
            shown[list(self.gone), first:] = shown[list(self.gone), first - 1 : first]

    def finish(self, steps: int) -> None:
        if steps <= self._last:
            self._group.give(FINISH, self._number, steps)
            self._group.settle()
        else:
            _copy(self.carry, self._after_last, self._seen)
        for key in self._seen if self.gone else ():
            last = self._window.tensor(key)[list(self.gone), steps - 1]
            self._after_last.tensor(key)[list(self.gone), 0] = last
        self._pull(steps)
        self.reset_s = self._group.reset_s
        self.failures += self._group.take_failures()

    def _pull(self, steps: int) -> None:
        """Copy the rows of the first ``steps`` steps, if workers wrote elsewhere."""
        if self._target is not self._window:
            keys = [key for key in self._target.keys() if key not in self._given]
            _copy(self._target, self._window, keys, slice(self._pulled, steps))
            self._pulled = steps

    def _open(self, window: Window) -> tuple[int, Window | None]:
        """Tell workers of a new window, and of those that exist no longer."""
        group, keys = self._group, [key for key in window.keys() if key in self._keys]
        target = None
        if not group.sees(window):
            fields = [field_of(key, window.tensor(key)) for key in keys]
            target = group.reserve(fields, window.steps)
        others = [number for number, _ in self._targets.values()]
        number = next(number for number in itertools.count(1) if number not in others)
        parts = group.references(target or window, keys)
        group.forget_standing(lambda what: isinstance(what, str) or what in others)
        group.ask_for_good("open", [(number, part, others) for part in parts], number)
        self._targets[window] = number, target
        return number, target

    # -- everything else -------------------------------------------------------------------------

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        group, chosen = self._group, {}
        group.wait()
        _copy(carry, self.carry, self._seen)
        for worker, part in enumerate(group.parts):
            own = None if envs is None else [env - part.start for env in part if env in envs]
            if own != []:
                chosen[worker] = own, options
        # The first one belongs to the start.
        limit = group.workers.timeout if self._was_reset else group.workers.start_timeout
        wait = group.order("restart_rollouts", chosen, limit, begins=envs is None)
        self._resetting = wait, carry
        if not (self._was_reset and group.workers.apart):
            self.settle()

    def settle(self) -> None:
        if self._resetting is None:
            return
        (wait, carry), self._resetting = self._resetting, None
        wait()
        if not self._was_reset:
            self._was_reset = True
            self._group.was_reset()
        _copy(self.carry, carry, self._seen)

    def seed(self, seed: int, static: bool = False) -> None:
        self.face.set_seed(seed, static)

    def state(self) -> dict[str, Any]:
        return self.face.state_dict()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        self.face.load_state_dict(state, strict)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        return self._group.snapshot(allow_pickle)

    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        self._group.resume(snapshot, allow_pickle)

    def close(self) -> None:
        self.face.close()


def _copy(of: Window, to: Window, keys: Iterable[Key], steps: int | slice = slice(None)) -> None:
    for key in keys:
        to.tensor(key)[:, steps] = of.tensor(key)[:, steps]
