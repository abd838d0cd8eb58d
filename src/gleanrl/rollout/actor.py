"""What a Ray actor runs: one thread that is a worker, and methods that only hand things to it."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch

from gleanrl.core import messages as m
from gleanrl.core.protocols import Array
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.inbox import Addressed, Queued, work
from gleanrl.rollout.serve import frame_of, settle, unreadable
from gleanrl.rollout.wire import CommandReader, head_of
from gleanrl.rollout.worker import Worker
from gleanrl.weights.flat import FlatBuffer

Answer: TypeAlias = "tuple[int, bytes, Array | None]"
"""The reply's place among all of this worker's, its frame, and the rollout it is about."""


@dataclass(frozen=True, slots=True)
class ActorBoot:
    """What an actor has to know before anything of the user's is unpickled in it."""

    worker: int
    threads: int
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""


class RayWorker:
    """One worker as the methods of an asynchronous actor.

    The methods run in the actor's event loop and wait there; environments and the policy run in
    one thread of their own. Ray may start calls in another order than they were made in, so those
    whose order matters carry a number, their turn, and are taken in by it.
    """

    def __init__(self, boot: ActorBoot) -> None:
        """Remember what to do; nothing is built before `serve`."""
        self._promises = Promises()
        self._serving = Serving(boot, self._promises)
        self._turns = Turns()

    async def serve(self) -> Answer:
        """Start working; return the `Ready`, or the `Failed` of what was to be built."""
        self._promises.loop = asyncio.get_running_loop()
        threading.Thread(target=self._serving.run, name="gleanrl-worker", daemon=True).start()
        answer: Answer = await self._promises.wait("reply", 0)
        return answer

    async def ended(self) -> str:
        """Wait for as long as the worker is able to work; return why it no longer is."""
        return str(await self._promises.wait("end", 0))

    async def do(self, turn: int, frame: bytes) -> Answer:
        """Carry out the command in ``frame`` and return the reply."""
        self._turns.take(turn, lambda: self._serving.frames.put(frame))
        answer: Answer = await self._promises.wait("reply", head_of(frame)[0])
        return answer

    async def begun(self, ticket: int) -> None:
        """Wait until the worker turns to a command other than `Collect`."""
        await self._promises.wait("begun", ticket)

    async def stop(self, turn: int, value: int) -> None:
        """Set the byte that running rollouts look at."""
        self._turns.take(turn, lambda: self._serving.stop.__setitem__(0, value))

    async def publish(self, turn: int, number: int, refs: Sequence[Any]) -> None:
        """Have the worker take the weights behind ``refs[0]``, unless newer ones come first."""
        self._turns.take(turn, lambda: self._serving.weights.put(number, refs[0]))


class Turns:
    """Does things in the order of their numbers, whatever order they come in."""

    def __init__(self) -> None:
        """Start with number 0."""
        self._next = 0
        self._early: dict[int, Callable[[], None]] = {}

    def take(self, turn: int, act: Callable[[], None]) -> None:
        """Call ``act`` as soon as everything before ``turn`` was done."""
        self._early[turn] = act
        while (following := self._early.pop(self._next, None)) is not None:
            self._next += 1
            following()


class Promises:
    """What methods in the event loop wait for, and another thread will bring."""

    def __init__(self) -> None:
        """Start without any."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[tuple[str, int], asyncio.Future[Any]] = {}

    async def wait(self, kind: str, ticket: int) -> Any:
        """Return what is brought under this name, before or after this call."""
        value = await self._future(kind, ticket)
        self._futures.pop((kind, ticket), None)
        return value

    def bring(self, kind: str, ticket: int, value: Any) -> None:
        """Hand ``value`` over; from any thread, once the loop is known."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._set, kind, ticket, value)

    def _set(self, kind: str, ticket: int, value: Any) -> None:
        self._future(kind, ticket).set_result(value)

    def _future(self, kind: str, ticket: int) -> asyncio.Future[Any]:
        found = self._futures.get((kind, ticket))
        if found is None:
            found = asyncio.get_running_loop().create_future()
            self._futures[kind, ticket] = found
        return found


class Serving:
    """What the worker's own thread does."""

    def __init__(self, boot: ActorBoot, promises: Promises) -> None:
        """Remember what to do and who waits for the replies."""
        self._boot = boot
        self._promises = promises
        self.stop = bytearray(1)
        self.frames = Frames()
        self.weights = PutWeights()
        self._reader = CommandReader()
        self._queued = Queued()
        self._blocks = Blocks()
        self._block: Array | None = None
        self._place = 0

    def run(self) -> None:
        """Build the source and answer commands; say so if that ends in any other way."""
        try:
            sys.path.extend(entry for entry in self._boot.path if entry not in sys.path)
            settle(self._boot.threads)
            work(self._boot.worker, self._build, self._next, self._answer)
        except BaseException as err:  # `SystemExit` of a user's, too: nobody else would see it
            traceback.print_exc()
            self._promises.bring("end", 0, f"its code ended it with {err!r}")

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._boot.factory)
        return Worker(self._boot.worker, factory, self._open, self.stop, self.weights)

    def _next(self) -> Addressed:
        while True:
            for frame in self.frames.take(wait=not self._queued):
                ticket, _ = head_of(frame)
                try:
                    self._queued.put(ticket, self._reader.read(frame))
                except Exception as err:  # whatever the user's objects do when unpickled
                    self._answer(m.Failed(self._boot.worker, ticket, unreadable(err)))
            if self._queued:
                return self._queued.pop()

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        self._block = None
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        window, self._block = self._blocks.take(reference)
        return window

    def _answer(self, reply: m.Reply) -> None:
        ticket = 0 if isinstance(reply, m.Ready) else reply.ticket
        if isinstance(reply, m.Begun):
            self._promises.bring("begun", ticket, None)
            return
        block = None
        if isinstance(reply, m.Rolled) and reply.report.payload is None:
            block, self._block = self._block, None
        self._promises.bring("reply", ticket, (self._place, frame_of(reply), block))
        self._place += 1


class Frames:
    """Commands as they came in, put by one thread for another to take."""

    def __init__(self) -> None:
        """Start empty."""
        self._frames: list[bytes] = []
        self._arrived = threading.Condition()

    def put(self, frame: bytes) -> None:
        """Add a frame."""
        with self._arrived:
            self._frames.append(frame)
            self._arrived.notify()

    def take(self, wait: bool) -> list[bytes]:
        """Return all there are, after waiting for one if told to."""
        with self._arrived:
            while wait and not self._frames:
                self._arrived.wait()
            frames, self._frames = self._frames, []
        return frames


class Blocks:
    """Memory for rollouts, each in one piece, used again once Ray has let go of it.

    Ray serialises what a method returns after it has returned, while the worker is at its next
    rollout already. So a block is free again when the array that was sent is gone.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._free: dict[int, list[tuple[RolloutWindow, Array]]] = {}
        self.made = 0
        """Blocks there are."""

    def take(self, reference: m.WindowRef) -> tuple[RolloutWindow, Array]:
        """Return a window like ``reference`` and its memory, uint8 ``[nbytes]``."""
        free = self._free.setdefault(reference.steps, [])
        if not free:
            plan, nbytes = packed(reference)
            memory = torch.zeros(nbytes, dtype=torch.uint8)
            free.append((window_over(memory, plan), memory.numpy()))
            self.made += 1
        entry = free.pop()
        window, memory_array = entry
        array = memory_array[:]
        weakref.finalize(array, free.append, entry).atexit = False
        return window, array


class PutWeights:
    """The newest weights that the learner has put into the object store; a `Mailbox`."""

    def __init__(self) -> None:
        """Start without any."""
        self._models: dict[int, tuple[str, FlatBuffer]] = {}
        self._coming: dict[int, Any] = {}
        self._lock = threading.Lock()

    def put(self, number: int, ref: Any) -> None:
        """Note where the newest weights of board ``number`` are; older ones are not fetched."""
        with self._lock:
            self._coming[number] = ref

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Take what is published on ``board`` for weights of ``model_id`` from now on."""
        self._models[board.offset] = (model_id, FlatBuffer(board))

    def newest(self) -> m.Snapshot | None:
        """Fetch the newest weights, if there are any that were not fetched before."""
        with self._lock:
            number = next((n for n in self._coming if n in self._models), None)
            if number is None:
                return None
            ref = self._coming.pop(number)
        model_id, buffer = self._models[number]
        # Copied, because what Ray returns is read-only and occupies its store while we hold it.
        np.copyto(buffer.bytes.numpy(), importlib.import_module("ray").get(ref))
        version, serial = buffer.stamp
        return m.Snapshot(version, {model_id: buffer.views}, serial)
