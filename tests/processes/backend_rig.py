"""Scripted workers and self-checking data, for tests of engines and backends."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, WorkerDied
from gleanrl.core.layout import Field, Layout
from gleanrl.core.options import FrameLimits
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.core.window import Window
from gleanrl.engine.batch_delivery import BatchOptions
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import FrameCounts
from gleanrl.transport.worker_loop import OpenWindow, Worker


@dataclass(frozen=True, slots=True)
class Act:
    """Carry the command out and reply ``after`` virtual seconds, ``copies`` times."""

    after: float = 0.0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """Reply with ``error`` instead."""

    error: BaseException
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Die:
    """Never reply; the death is seen ``after`` virtual seconds."""

    after: float = 0.0


Script = Mapping[tuple[int, int], Act | Fail | Die]
"""What worker ``w`` does with the ``n``-th command it gets: ``{(w, n): ...}``."""


class ScriptedBackend:
    """Runs real sources; only the timing and the failures are made up."""

    memory = None
    inline = True
    worker_name = "worker {}"

    def __init__(self, open_window: OpenWindow, script: Script | None = None) -> None:
        """Follow ``script``; where it says nothing, act at once."""
        self._open_window = open_window
        self._script = dict(script or {})
        self._workers: list[Worker] = []
        self._counts: list[int] = []
        self._due: list[tuple[float, int, m.Reply | Die, int]] = []
        self._order = 0
        self.stop_byte = bytearray(1)
        self.now = 0.0
        """Virtual seconds since the start."""

    def weight_publisher(self, weights: Mapping[str, Any]) -> None:
        """Return ``None``: weights travel as messages."""

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Build the workers; all are ready at once."""
        for index, factory in enumerate(factories):
            worker = Worker(index, factory, self._open_window, self.stop_byte)
            self._workers.append(worker)
            self._counts.append(0)
            self._post(0.0, worker.ready(), index)

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Have ``worker`` do what the script says of this command (`Place` is not counted)."""
        if isinstance(command, m.Place):
            self._post(0.0, self._workers[worker].handle(ticket, command), worker)
            return
        number, self._counts[worker] = self._counts[worker], self._counts[worker] + 1
        match self._script.get((worker, number), Act()):
            case Act(after, copies):
                reply = self._workers[worker].handle(ticket, command)
                for _ in range(copies):
                    self._post(after, reply, worker)
            case Fail(error, after):
                self._post(after, m.Failed(worker, ticket, error), worker)
            case Die(after) as death:
                self._post(after, death, worker)

    def _post(self, after: float, what: m.Reply | Die, worker: int) -> None:
        self._order += 1
        heapq.heappush(self._due, (self.now + after, self._order, what, worker))

    def receive(self, timeout: float | None) -> m.Reply:
        """Move the clock to the next reply and return it."""
        if not self._due or (timeout is not None and self._due[0][0] > self.now + timeout):
            self.now += timeout or 0.0
            raise CollectorTimeout(f"no reply within {timeout} s")
        self.now, _, what, worker = heapq.heappop(self._due)
        if isinstance(what, Die):
            death = WorkerDied(f"worker {worker} died")
            death.worker = worker
            raise death
        return what

    def no_end_noticed(self) -> bool:
        """Return False: deaths are scripted."""
        return False

    def end(self, worker: int) -> bool:
        """Return True: a worker that died by the script writes nothing any more."""
        return True

    def wait(self, timeout: float) -> None:
        """Nothing happens between calls: there is nothing to wait for."""

    def stop(self, timeout: float) -> None:
        """Let go of the workers."""
        self._workers = []
        self._due = []


_STAMP = ("stamp",)
_WIDE = ("next", "wide")


class StampedSource:
    """Writes ``worker * 10**6 + rollout`` into every element of its rollout, wide rows included."""

    memory = None

    def __init__(self, worker: int, envs: int = 2, width: int = 64) -> None:
        """Serve ``envs`` environments with rows of ``width`` elements."""
        self._worker = worker
        self._layout = Layout(
            (envs,), (Field(_STAMP, (), torch.int64), Field(_WIDE, (width,), torch.int32))
        )
        self._rollouts = 0
        self.num_envs = envs

    def layout(self) -> Layout:
        """Describe one step."""
        return self._layout

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> m.Report:
        """Stamp every element of the rollout."""
        stamp = self._worker * 10**6 + self._rollouts
        self._rollouts += 1
        for step in range(steps):
            window.tensor(_STAMP)[:, step] = stamp
            window.tensor(_WIDE)[:, step] = stamp
        return m.Report(steps, steps * window.envs, 0)

    def place(self, base: int, stride: int) -> None:
        """Nothing is numbered."""

    def load(self, snapshot: m.Snapshot) -> None:
        """Nothing to load."""

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Nothing is random."""
        return seed

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Nothing to reset."""

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the rollout counter."""
        return {"rollouts": self._rollouts}

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> None:
        """Continue from a saved counter."""
        self._rollouts = int(state["rollouts"])

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return an attribute."""
        return getattr(self, path)

    def get(self, path: str) -> Any:
        """Return an attribute."""
        return getattr(self, path)

    def close(self) -> None:
        """Nothing to release."""


def check_stamps(batch: TensorDictBase) -> list[int]:
    """Check that every rollout in a stacked batch is whole; return one stamp per worker.

    Raises:
        AssertionError: a rollout holds elements of another one.
    """
    stamps = []
    for rollout in batch.unbind(0):
        values = set(rollout["stamp"].unique().tolist())
        values |= set(rollout["next", "wide"].unique().tolist())
        assert len(values) == 1, f"a torn rollout holds {sorted(values)}"
        stamps.append(values.pop())
    return stamps


def plan(engine, steps, options):
    frames = [steps * envs for envs in engine.envs]
    engine.plan(FrameLimits(frames_per_batch=sum(frames), total_frames=None), frames, options)


def running(make_backend, factories, steps, **options):
    """Return an engine that makes stacked batches, and a function that collects one."""
    engine = Engine(make_backend, factories)
    plan(engine, steps, BatchOptions(stacked=True, **options))
    return engine


def collect(engine, timeout=30.0):
    counts = FrameCounts(FrameLimits(frames_per_batch=1, total_frames=None))
    batch, _ = engine.collect(counts, timeout)
    return batch
