"""The members of a TorchRL environment, without its transforms, stepped on one row of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from os import sched_yield
from socket import AF_UNIX, SOCK_DGRAM, socket
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, EnvError
from gleanrl.core.keys import REWARD, Key, as_key, next_key
from gleanrl.core.layout import DoneGroup, EnvLayout, Field, first_difference
from gleanrl.core.options import GymOptions
from gleanrl.core.protocols import Spec
from gleanrl.core.window import Window
from gleanrl.envs.gymnasium import GymnasiumEnv
from gleanrl.envs.recorded_or_called_transforms import Unproven
from gleanrl.envs.result_checks import NUMBERS
from gleanrl.envs.tensordict_envs import spec_fields, spec_trees
from gleanrl.envs.torchrl_parts import Parts, kept_rows
from gleanrl.envs.transforms_as_wrappers import showing_one_hot, wrapped

FLAGS = [Field(key, (1,), torch.bool) for key in DoneGroup(()).keys()]
"""End flags of an environment."""
BY_PARTS = "_workers_by_parts"
"""The attribute of a ``ParallelEnv`` with the ids of workers that step by parts if they can."""
STEPPING: tuple[str, Any] = ("step", {})
STEP = bytes(ForkingPickler.dumps(STEPPING))
"""TorchRL's command to take a step, and the same as a message."""
EXPLAIN = "explain how it steps"
"""The command to such a worker, with the address of the socket for its answer.

An answer through TorchRL's pipe that came late would be read as that of TorchRL's next question.
"""
_EXPLAIN_S, _MOST_BYTES = 10.0, 1 << 16
"""Seconds that it has to answer, and how long the answer can be."""
_LOOKING_S = 0.01
_PAUSE_S = 0.0005
"""Seconds in which answers are looked for without pauses, and of a pause. TorchRL would spin."""
_NOTHING: tuple[int, ...] = ()


class GymMembers:
    """Gymnasium environments in this process."""

    def __init__(self, parts: Parts, batch: tuple[int, ...]) -> None:
        """Allocate rows; `Unproven` if TorchRL shows other data than the members have."""
        self._rows = rows = _rows_of(parts, batch)
        self._parts = parts
        self.action_specs: Mapping[Key, Spec] = rows.action_specs
        inner, envs = rows.layout, rows.layout.num_envs
        self.shown = [*inner.observations, *FLAGS]
        self.actions, self.rewards = inner.actions, inner.rewards
        after = map(after_step, (*self.shown, *self.rewards))
        self.raw = Window.allocate([*inner.observations, *self.actions, *after], envs, 1)
        """What the members read and return."""
        self._behind = Window.allocate(self.shown, envs, 1)
        theirs = spec_fields(parts.members[0].full_observation_spec, ())
        self.names: dict[Key, Key] = {}
        """How TorchRL calls entries that are called otherwise here."""
        if len(inner.observations) == len(theirs) == 1:  # images
            self.names[inner.observations[0].key] = theirs[0].key
        held = kept_rows(parts)
        found = {f: held.get(self.names.get(f.key, f.key)) for f in self.shown}
        self.fresh = _window_over(found, envs)
        """What their last resets returned; in the environment's memory, if it keeps that."""
        self._reward = self.raw.rows(next_key(REWARD))[0]
        self._raised = [self.raw.rows(next_key(flag.key))[0] for flag in FLAGS]
        self._ended = False

    def explain(self) -> str:
        count, kind = len(self._parts.members), type(self._parts.members[0]).__name__
        text = f"{count} x {kind}, the Gymnasium environment in it stepped without TensorDicts"
        for transform in self._parts.leading[0]:
            text += f"\n  {type(transform).__name__}: around each Gymnasium environment"
        return text

    def begin(self, window: Window) -> None:
        """Prepare for steps from the present, the first root row of ``window``."""
        self._rows.begin(self.raw, self._behind)

    def step(self) -> None:
        """Step with the actions in the raw row."""
        if self._ended:
            for flags in self._raised:
                flags.fill(False)
        self._ended = bool(self._rows.step(0, _NOTHING, False))
        (rewards,) = self._rows.rewards
        self._rows.rewards.clear()
        try:
            # TorchRL adds rewards to a zero, which turns -0.0 into 0.0.
            values = np.array([0 if one is None else one for one in rewards])
            np.add(values.reshape(self._reward.shape), 0.0, self._reward, casting="same_kind")
        except (TypeError, ValueError) as err:
            raise EnvError(f"rewards must be numbers, got {rewards!r:.200}") from err

    def reset(self, envs: Sequence[int]) -> None:
        """Reset some, into the row for this."""
        self._rows.reset(self.fresh, envs)


class WorkerMembers:
    """Environments in the workers of a ``ParallelEnv``, in the memory that it shares with them.

    Workers get the commands that it would send.
    """

    def __init__(self, parts: Parts, batch: tuple[int, ...]) -> None:
        """Find the rows; `Unproven` if its memory has other entries than its specs declare."""
        self._base = base = parts.base
        self.action_specs: Mapping[Key, Spec] = {}
        self.names: dict[Key, Key] = {}
        held, self._workers = kept_rows(parts), range(base.num_workers)
        seen, self.actions, self.rewards, flags = (spec_fields(t, batch) for t in spec_trees(base))
        self.shown = [*seen, *FLAGS]
        after = list(map(after_step, (*self.shown, *self.rewards)))
        rows = {f: held.get(f.key) for f in [*self.shown, *self.actions, *after]}
        fits = (
            v is not None and (v.shape[1:], v.dtype) == (f.shape, f.dtype) for f, v in rows.items()
        )
        if sorted(flags, key=str) != sorted(FLAGS, key=str) or not all(fits):
            raise Unproven("its ParallelEnv shares other entries than its specs declare")
        self.raw = self.fresh = _window_over(rows, len(self._workers))
        pairs = [(f.key, next_key(f.key)) for f in self.shown]
        self._pairs = [tuple(self.raw.rows(key)[0] for key in pair) for pair in pairs]
        self._inputs = {f.key for f in seen}.intersection(map(as_key, base._env_input_keys))
        self._resets = held[("_reset",)].numpy()

    def explain(self) -> str:
        """Return how they are stepped: in each worker like in the first one."""
        held, count = vars(self._base), len(self._workers)
        text = f"ParallelEnv of {count}, whose workers are told to step without TensorDicts"
        how = "called as it is"
        if [worker.pid for worker in held.get("_workers", ())] == held.get(BY_PARTS):
            how = "worker 0 did not say"
            with contextlib.suppress(OSError), socket(AF_UNIX, SOCK_DGRAM) as answer:
                answer.settimeout(_EXPLAIN_S)
                answer.bind(f"\0gleanrl-{uuid4()}")
                held["parent_channels"][0].send((EXPLAIN, answer.getsockname()))
                how = answer.recv(_MOST_BYTES).decode()
        return f"{text}\n  in a worker: " + how.replace("\n", "\n  ")

    def begin(self, window: Window) -> None:
        """Show workers the present, the first root row of ``window``; then they know it."""
        for key in self._inputs.intersection(window.keys()):
            self.raw.rows(key)[0][...] = window.rows(key)[0]

    def step(self) -> None:
        """Step with the actions in the raw row."""
        self._order(self._workers, STEP)

    def reset(self, envs: Sequence[int]) -> None:
        """Reset some; the rows of the others are those of the last step."""
        others = [worker for worker in self._workers if worker not in envs]
        for root, after in self._pairs:
            root[others] = after[others]
        self._resets[...] = False
        self._resets[envs] = True
        self._order(envs, ForkingPickler.dumps(("reset", (["_reset"], {}))))

    def _order(self, workers: Sequence[int], message: bytes | memoryview) -> None:
        base = self._base
        done = base._shm_done_flags
        with contextlib.suppress(OSError):  # of workers that ended, which is noticed below
            for worker in workers:
                base.parent_channels[worker].send_bytes(message)
        began = monotonic()
        while not all(done[worker] for worker in workers):
            waited = monotonic() - began
            if waited < _LOOKING_S:
                sched_yield()
            elif waited < base.BATCHED_PIPE_TIMEOUT and all(
                base._workers[worker].is_alive() for worker in workers
            ):
                sleep(_PAUSE_S)
            else:
                break
        base._wait_for_workers(workers)  # takes the answers back, or raises


def after_step(field: Field) -> Field:
    """Return ``field`` of the results of a step."""
    return replace(field, key=next_key(field.key))


def _window_over(held: Mapping[Field, torch.Tensor | None], envs: int) -> Window:
    """Return a window of one row over the tensors in ``held``, and over new ones for ``None``."""
    own = Window.allocate([field for field, one in held.items() if one is None], envs, 1)
    tensors = {f.key: own.tensor(f.key) if v is None else v[:, None] for f, v in held.items()}
    return Window(tensors, envs, 1)


class _Rows(GymnasiumEnv):
    _casts = NUMBERS  # as TorchRL's wrappers do


def _rows_of(parts: Parts, batch: tuple[int, ...]) -> GymnasiumEnv:
    """Return the members as rows of one batch; `Unproven` if TorchRL shows other data."""
    first = parts.members[0]
    if batch not in ((), (len(parts.members),)):
        raise Unproven(f"its batch size {batch} is not that of its members")
    own = [spec_fields(tree, ()) for tree in spec_trees(first)]
    acts = parts.gym_envs[0].action_space.shape
    options = GymOptions(categorical_action_encoding=own[1][0].shape == acts)
    stepped = [*map(wrapped, parts.gym_envs, parts.members, parts.leading)]
    difference = None
    for envs in (stepped, [*map(showing_one_hot, stepped)]):
        try:
            rows = _Rows(envs, batch, options)
        except ConfigError as err:
            raise Unproven(str(err)) from err
        new = _unlike(rows.layout, own)
        if new is None:
            return rows
        difference = difference or new
    raise Unproven(f"TorchRL shows other data than Gymnasium's spaces say: {difference}")


def _unlike(layout: EnvLayout, own: Sequence[Sequence[Field]]) -> str | None:
    """Say what differs between ``layout`` and TorchRL's entries; one observation has any name."""
    shown = (layout.observations, layout.actions, layout.rewards, FLAGS)
    for fields, mine in zip(shown, own, strict=True):
        alone = len(fields) == len(mine) == 1
        theirs = [replace(f, key=fields[0].key) for f in mine] if alone else mine
        if difference := first_difference(theirs, fields):
            return difference
    return None
