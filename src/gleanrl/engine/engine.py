"""Workers, memory and a gather, wired together: one call, one batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout, GleanError
from gleanrl.core.layout import Layout
from gleanrl.core.protocols import Backend, SourceFactory, Stop
from gleanrl.engine.assemble import Assembler, combine
from gleanrl.engine.gather import SyncGather, request
from gleanrl.memory.arena import Arena
from gleanrl.memory.window import RolloutWindow

MakeBackend = Callable[[Callable[[m.WindowRef], RolloutWindow]], Backend]

_SPARE_SLOTS = 3
"""One batch being written, one being handed over, one the consumer has not let go of yet."""


class Engine:
    """Runs sources behind a backend and turns their rollouts into batches.

    The memory rule: a batch is handed out as a view of its slot, unless that would leave no slot to
    write the next one into. Then it is copied into ordinary memory and its slot used again: the
    engine never waits for the user to let go, and what the user holds never changes.
    """

    def __init__(
        self,
        make_backend: MakeBackend,
        factories: Sequence[SourceFactory],
        *,
        stop: Stop | None = None,
        stacked: bool = False,
        same_memory: bool = False,
        start_timeout: float = 120.0,
    ) -> None:
        """Start the workers and learn what their steps look like.

        Args:
            make_backend: Builds the backend from a function that maps windows.
            factories: One per worker.
            stop: The byte the workers' rollouts look at; raised by `close`.
            stacked: Batches keep a leading worker dimension.
            same_memory: Write every batch into the same slot and return the same `TensorDict`.
            start_timeout: Seconds all workers together may take to come up.
        """
        self._arena: Arena | None = None
        self._stop = bytearray(1) if stop is None else stop
        self._workers = len(factories)
        self._stacked = stacked
        self._same_memory = same_memory
        self._kept: tuple[int, TensorDictBase] | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._busy = False
        self.copies = 0
        """Batches copied because the user held every slot."""
        self.discarded = 0
        """Frames that were stepped but not delivered."""
        self.backend = make_backend(self._open_window)
        try:
            self.backend.start(factories)
            self.layout = self._await_ready(start_timeout)
            self._num_envs = self._count_envs()
        except BaseException:
            self.close(5.0)
            raise
        self._gather = SyncGather(self.backend, self._workers)

    def _await_ready(self, timeout: float) -> Layout | None:
        layouts: dict[int, Layout | None] = {}
        deadline = time.monotonic() + timeout
        while len(layouts) < self._workers:
            reply = self.backend.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(reply, m.Failed):
                raise reply.error
            if isinstance(reply, m.Ready):
                layouts[reply.worker] = reply.layout
        first = layouts[0]
        for worker, layout in layouts.items():
            if layout != first:
                raise GleanError(f"worker {worker} steps look different from worker 0's")
        return first

    def _count_envs(self) -> int:
        if self.layout is not None:
            return self.layout.num_envs
        return int(self.request(0, m.Get("num_envs")))

    def allocate(self, steps: int, device: torch.device | None) -> None:
        """Reserve the memory of batches of ``steps`` steps; call once, before `collect`."""
        if self.layout is None:
            return
        slots = 1 if self._same_memory else _SPARE_SLOTS
        self._assembler = Assembler(self.layout, self._workers, self._stacked, device)
        self._arena = Arena(
            self.layout,
            steps,
            slots,
            self._workers,
            self._assembler.lead,
            shared=self.backend.memory,
        )
        self._windows = [
            [self._arena.reference(slot, worker) for worker in range(self._workers)]
            for slot in range(slots)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of batch memory reserved."""
        return 0 if self._arena is None else self._arena.nbytes

    def _open_window(self, reference: m.WindowRef) -> RolloutWindow:
        if self._arena is None:  # a source without fixed layout writes no window
            return RolloutWindow({}, reference.envs, reference.steps)
        return self._arena.window(reference)

    def collect(
        self, steps: int, random: bool, timeout: float | None = None
    ) -> tuple[TensorDictBase, list[m.Report]]:
        """Collect one batch of ``steps`` steps per environment.

        Returns:
            The batch, whose memory is the caller's until its last tensor is gone, and the reports.

        Raises:
            ClosedError: after `close`.
            CollectorTimeout: the workers took longer than ``timeout`` seconds.
        """
        with self.turn(None), self._alone():
            if self._closed:
                raise ClosedError("the collector was shut down; make a new one to collect more")
            if self._arena is None:
                return self._collect_payloads(steps, random, timeout)
            return self._collect_slot(self._arena, random, timeout)

    @contextmanager
    def turn(self, timeout: float | None) -> Iterator[None]:
        """Keep other threads out for the length of a block; wait for them first.

        Raises:
            CollectorTimeout: another thread did not finish within ``timeout`` seconds.
        """
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise CollectorTimeout(f"another thread has been using the collector for {timeout} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse what an environment or a policy asks of the collector that is just running it."""
        if self._busy:
            raise GleanError(
                "the collector was used from inside its own rollout (by an environment or a "
                "policy); do that between batches"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _collect_slot(
        self, arena: Arena, random: bool, timeout: float | None
    ) -> tuple[TensorDictBase, list[m.Report]]:
        slot = self._kept[0] if self._kept else arena.acquire()
        if slot is None:
            raise GleanError("no slot is free: a batch was handed out that should have been copied")
        try:
            reports = self._gather.batch(self._windows[slot], random, timeout)
        except CollectorTimeout:
            raise  # a late worker may still write into this slot: nobody else may have it
        except BaseException:
            if self._kept is None:
                arena.release(slot)
            raise
        self.discarded += sum(report.discarded for report in reports)
        return self._hand_over(arena, slot), reports

    def _hand_over(self, arena: Arena, slot: int) -> TensorDictBase:
        if self._kept is not None:
            return self._kept[1]
        if self._same_memory:
            self._kept = (slot, self._assembler.batch(arena.lease(slot)))
            return self._kept[1]
        if arena.has_free():
            return self._assembler.batch(arena.lease(slot))
        self.copies += 1
        batch = self._assembler.batch(arena.copy(slot))
        arena.release(slot)
        return batch

    def _collect_payloads(
        self, steps: int, random: bool, timeout: float | None
    ) -> tuple[TensorDictBase, list[m.Report]]:
        windows = [m.WindowRef(0, worker, 0, steps, ()) for worker in range(self._workers)]
        reports = self._gather.batch(windows, random, timeout)
        payloads = [self.backend.open(r.payload) for r in reports if r.payload is not None]
        self.discarded += sum(report.discarded for report in reports)
        return combine(payloads, self._stacked), reports

    def request(self, worker: int, command: m.Command, timeout: float | None = 60.0) -> Any:
        """Carry out a control command on one worker and return its value.

        Raises:
            ClosedError: after `close`, except for reading.
        """
        with self.turn(timeout), self._alone():
            if self._closed and not isinstance(command, m.GetState | m.Get):
                raise ClosedError("the collector was shut down")
            return request(self.backend, worker, command, timeout)

    def request_all(self, command: m.Command, timeout: float | None = 60.0) -> list[Any]:
        """Carry out a control command on every worker; values in worker order."""
        return [self.request(worker, command, timeout) for worker in range(self._workers)]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def num_envs(self) -> int:
        """Environments of one worker."""
        return self._num_envs

    def fake_batch(self, steps: int) -> TensorDictBase:
        """Return a batch of zeros with the layout of the real ones.

        Raises:
            NotImplementedError: steps have no fixed layout.
        """
        if self.layout is None:
            raise NotImplementedError(
                "the data of this environment have no fixed layout; collect a batch to see one"
            )
        arena = Arena(self.layout, steps, 1, self._workers, self._assembler.lead)
        return self._assembler.batch(arena.lease(0))

    def close(self, timeout: float, close_env: bool = True, raise_on_error: bool = False) -> None:
        """End all workers. Idempotent. Batches that were handed out stay valid.

        Args:
            timeout: Seconds it may take.
            close_env: ``False`` leaves the environments open.
            raise_on_error: Raise what closing an environment raised.
        """
        if self._closed:
            return
        self._stop[0] = 1  # a rollout that another thread is in ends after its step
        with self.turn(timeout):
            self._close(timeout, close_env, raise_on_error)

    def _close(self, timeout: float, close_env: bool, raise_on_error: bool) -> None:
        errors: list[BaseException] = []
        if close_env:
            for worker in range(self._workers):
                try:
                    self.request(worker, m.Close(), timeout)
                except Exception as err:
                    errors.append(err)
        self._closed = True
        self.backend.stop(timeout)
        if errors and raise_on_error:
            raise errors[0]
