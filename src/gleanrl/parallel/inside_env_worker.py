"""The worker of `ParallelEnv`: a process whose environments step when the learner wakes it.

A step is a pulse to the worker and one back; all else is a command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch

from gleanrl.core import paths
from gleanrl.core.messages import Report
from gleanrl.core.options import GymOptions
from gleanrl.core.protocols import Stop
from gleanrl.core.streams import of_this_life
from gleanrl.core.window import Window
from gleanrl.envs.base import close_all
from gleanrl.envs.factory import EnvFactory, closed_on_error
from gleanrl.envs.gymnasium import without_call_checks
from gleanrl.envs.libs.gym import make_tensordict_env
from gleanrl.envs.restarting_envs import Restarts
from gleanrl.envs.simulator_state import StateError
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.wakeup_pipes import WakeupAddress, WorkerPipes
from gleanrl.parallel.inside_env_worker_group import EnvGroup, seed_streams

STEP, CUT, FINISH, BEGIN = range(1, 5)
"""Orders to a group: step; step and truncate some environments; end a rollout early; reset, in
place of the step of a worker that was lost."""
LEAVE = 15
"""The order to leave `EnvWorker.serve`."""
STEPPED, ENDED, FAILED, ANEW = range(4)
"""Answers: no environment ended; some did; an exception, which `EnvGroup.reraise` raises; some
began anew, others may have ended."""
GROUP_BITS = 4
"""A pulse is an order or an answer in so many bits, and the number of the group above them."""
MOST_GROUPS = 1 << (8 - GROUP_BITS)


@dataclass(frozen=True, slots=True)
class EnvWorkerBuilder:
    """Makes the environments of one worker, in the worker."""

    create_env_fn: tuple[EnvFactory, ...]
    create_env_kwargs: tuple[Mapping[str, Any], ...]
    sizes: tuple[int, ...]
    """Environments of each group."""
    storing: GymOptions
    stream: int
    """The seed of the worker's random streams until environments are seeded."""
    memory: SharedMemory | None = None
    """The memory of all windows; ``None`` if the environments are only looked at."""
    pipes: WakeupAddress | None = None
    restarts: tuple[int, float | None] | None = None
    """How often each environment that raises is built anew; ``None`` for never."""

    def __call__(self, worker: int) -> Any:
        """Make the environments one after the other."""
        seed_streams(of_this_life(self.stream))
        made: list[Any] = []
        makers = [
            partial(make_tensordict_env, factory, kwargs, self.storing)
            for factory, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True)
        ]
        restarts = [self.restarts and Restarts(size, self.restarts) for size in self.sizes]
        places = [
            (own, env) for own, n in zip(restarts, self.sizes, strict=True) for env in range(n)
        ]
        with closed_on_error(made):
            for make, (own, env) in zip(makers, places, strict=True):  # closed if one fails
                made.append(make() if own is None else own.built(env, make))
            left, anew = iter(made), map(partial, repeat(_built_anew), makers, made)
            groups = [
                EnvGroup(list(islice(left, size)), self.memory, list(islice(anew, size)), own)
                for own, size in zip(restarts, self.sizes, strict=True)
            ]
            return EnvWorker(groups, self.pipes)


def _built_anew(make: Callable[[], Any], member: Any) -> Any:
    """Return another Gymnasium environment, and have it replace the one in ``member``."""
    member.rows.envs[0] = env = without_call_checks(make().rows.envs[0])
    return env


class EnvWorker:
    """Serves groups of environments."""

    def __init__(self, groups: Sequence[EnvGroup], pipes: WakeupAddress | None) -> None:
        """Take over ``groups``, which step when a pulse comes."""
        self.groups = groups
        self.num_envs = sum(group.envs.batch_size.numel() for group in groups)
        self._ends = None if pipes is None else WorkerPipes(pipes)

    def serve(self) -> None:
        """Carry out orders until the learner has a command again."""
        ends: Any = self._ends
        mask = (1 << GROUP_BITS) - 1
        while (pulse := ends.wait()) not in (0, LEAVE):
            number, order = pulse >> GROUP_BITS, pulse & mask
            group = self.groups[number]
            try:
                answer = _carry_out(group, order)
            except Exception as err:
                group.error, answer = err, FAILED
            ends.answer(number << GROUP_BITS | answer)

    # -- what a source has; weights, seeds and resets are no commands of a `Session` alone ---------

    def layout(self) -> None:
        """Announce no rollouts; `EnvGroup.described` has the layout of the windows."""

    def part(self, number: int) -> EnvWorker:
        """Return a worker of one group, which is not woken by pulses."""
        return EnvWorker(self.groups[number : number + 1], None)

    def policy_state(self) -> dict[str, Any]:
        """Return nothing: this worker has no policy."""
        return {}

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Take steps by random actions outside of windows, in a copy of this process.

        In any other process they would be lost: there, `serve` takes the steps.
        """
        batch = torch.cat([group.random_steps(steps) for group in self.groups])
        return Report(steps, batch.numel(), 0, payload=batch)

    def place(self, base: int, stride: int) -> None:
        """Do nothing, because these environments have no numbers."""

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the state of all episodes, and the mode of each group."""
        try:
            envs = [group.snapshot(allow_pickle) for group in self.groups]
        except StateError as err:
            return {"episodes": {"why": str(err)}}
        return {"episodes": {"envs": envs}, "modes": [group.mode for group in self.groups]}

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> str | None:
        """Continue the episodes of `state` in groups that were not used; return why not, if so."""
        parts = zip(self.groups, state["episodes"]["envs"], state["modes"], strict=True)
        try:
            for group, envs, mode in parts:
                group.prepare(*mode)
                group.resume(envs, allow_pickle)
        except StateError as err:
            return str(err)
        return None

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        return paths.resolve(self, path)

    def close(self) -> None:
        close_all([group.envs for group in self.groups])


def _carry_out(group: EnvGroup, order: int) -> int:
    """Have ``group`` carry out an order; return its answer."""
    if order == BEGIN:
        group.begin()
        return ANEW
    ended = group.finish() if order == FINISH else group.step(order == CUT)
    if group.failures:
        return ANEW
    return ENDED if ended else STEPPED
