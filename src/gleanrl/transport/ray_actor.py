"""What a Ray actor runs: one thread that is a worker, others that only hand things to it."""

from __future__ import annotations

import importlib
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from gleanrl.core import messages as m
from gleanrl.core.window import Array, Window
from gleanrl.transport.frames import CommandReader, frame_of
from gleanrl.transport.landing import RolloutBlock
from gleanrl.transport.weights import FlatBuffer
from gleanrl.transport.worker import Boot, CommandQueue, WeightReceiver, Worker

Answer: TypeAlias = "tuple[int, int, bytes, Array | None]"
"""The reply's place among all of this worker's, the turns taken in when it was made, its frame, and
the rollout it is about."""
COLLECTED = -1
"""The ticket of whatever answers a `Collect`: which one is told by the order of the replies."""
_STEP_WAIT_S = 0.05
"""Seconds a step waits for a command that other calls were overtaken by."""


T = TypeVar("T")
GROUPS: Mapping[str, str] = {
    "serve": "work",
    "step": "work",
    "again": "work",
    "post": "control",
    "stop": "control",
    "publish": "control",
    "begun": "begun",
    "ended": "end",
}
"""Per method its concurrency group: one thread each."""


class RayWorker:
    """One worker as the methods of an actor with a few threads.

    All of the user's code runs in the thread of the group ``"work"``, where each call of `step`
    carries out one command: the next in line, which need not be the one it came with. Commands
    that overtake rollouts come in through `post`. Calls may begin in another order than they were
    made in, so those whose order matters carry a number, their turn, and are taken in by it.
    Arguments cost Ray more than everything that is done here: rollouts like the one before are
    asked for without, by `again`.
    """

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._inbox = Arrivals()
        self._stop = bytearray(1)
        self._weights = LatestWeights()
        self._begun = EventSet()
        self._over = EventSet()
        self._loop: ActorLoop | None = None
        self._why = ""

    def serve(self) -> Answer:
        """Build the worker; return its `Ready`, or the `Failed` of what was to be built."""
        answer: Answer = self._guarded(self._serve)
        return answer

    def _serve(self) -> Answer:
        self._boot.prepare()
        self._loop = ActorLoop(self._boot, self._inbox, self._begun, self._stop, self._weights)
        return self._loop.open()

    def step(self, turn: int, frame: bytes | None) -> Answer | None:
        """Take in ``frame``, if there is one, and carry out the next command.

        Returns:
            Its reply; ``None`` if there was no command, because others have not arrived yet.
        """
        if frame is not None:
            self._inbox.take(turn, lambda: self._inbox.put(frame))
        loop = self._loop
        assert loop is not None
        answer: Answer | None = self._guarded(loop.step)
        return answer

    def again(self) -> Answer | None:
        """Take in another `Collect` like the last that was not random; else the same as `step`."""
        loop = self._loop
        assert loop is not None
        answer: Answer | None = self._guarded(loop.again)
        return answer

    def post(self, turn: int, frame: bytes) -> None:
        """Take in the command in ``frame``; a `step` that runs later carries it out."""
        self._inbox.take(turn, lambda: self._inbox.put(frame))

    def stop(self, turn: int, value: int) -> None:
        """Set the byte that running rollouts look at."""
        self._inbox.take(turn, lambda: self._stop.__setitem__(0, value))

    def publish(self, turn: int, refs: Sequence[Any]) -> None:
        """Have the worker take the weights behind ``refs[0]``, unless newer ones come first."""
        self._inbox.take(turn, lambda: self._weights.put(refs[0]))

    def begun(self, ticket: int) -> None:
        """Wait until the worker turns to a command other than `Collect`."""
        self._begun.wait(ticket)

    def ended(self) -> str:
        """Wait for as long as the worker is able to work; return why it no longer is."""
        self._over.wait(0)
        return self._why

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as err:  # `SystemExit` of a user's, which Ray would not explain
            traceback.print_exc()
            self._why = f"its code ended it with {err!r}"
            self._over.reach(0)
            raise


class InOrder(Generic[T]):
    """Numbered items that come in any order, handed over in the order of their numbers."""

    def __init__(self, hand_over: Callable[[T], object]) -> None:
        self._hand_over = hand_over
        self._early: dict[int, T] = {}
        self.due = 0
        """The next number: as many were handed over."""

    def take(self, number: int, item: T) -> None:
        """Hand over ``item`` and what follows it as soon as all before it was; once only."""
        if number >= self.due:
            self._early[number] = item
        while self.due in self._early:
            self._hand_over(self._early[self.due])
            del self._early[self.due]
            self.due += 1

    def skip_missing(self) -> None:
        """Hand over what has come although numbers before it are missing for good."""
        for number in sorted(self._early):
            self.due = number
            self._hand_over(self._early.pop(number))


class Arrivals:
    """What comes in, in any thread and any order, to be taken in one order by one thread."""

    def __init__(self) -> None:
        self._in_order: InOrder[Callable[[], None]] = InOrder(lambda act: act())
        self._frames: list[bytes] = []
        self._arrived = threading.Condition(threading.RLock())

    @property
    def turn(self) -> int:
        """The next turn: as many were taken in."""
        return self._in_order.due

    def take(self, turn: int, act: Callable[[], None]) -> None:
        """Call ``act`` as soon as everything before ``turn`` was done."""
        with self._arrived:
            self._in_order.take(turn, act)

    def put(self, frame: bytes) -> None:
        """Add a command."""
        with self._arrived:
            self._frames.append(frame)
            self._arrived.notify()

    def frames(self, wait: float) -> list[bytes]:
        """Return all commands there are; wait for one for that many seconds."""
        with self._arrived:
            if wait and not self._frames:
                self._arrived.wait(wait)
            frames, self._frames = self._frames, []
        return frames


class EventSet:
    """Numbers that one thread reaches and others wait for."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._changed = threading.Condition()

    def reach(self, number: int) -> None:
        """Let go who waits for ``number``."""
        with self._changed:
            self._reached.add(number)
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait until ``number`` is reached; it is forgotten then."""
        with self._changed:
            while number not in self._reached:
                self._changed.wait()
            self._reached.discard(number)


class ActorLoop:
    """What the thread that works does: one command at a time."""

    def __init__(
        self, boot: Boot, inbox: Arrivals, begun: EventSet, stop: bytearray, weights: WeightReceiver
    ) -> None:
        self._boot = boot
        self._inbox = inbox
        self._begun = begun
        self._stop = stop
        self._weights = weights
        self._reader = CommandReader(boot.worker)
        self._queued = CommandQueue()
        self._blocks = Blocks()
        self._block: Array | None = None
        self._place = 0
        self._worker: Worker | None = None
        self._usual: m.Collect | None = None

    def open(self) -> Answer:
        index = self._boot.worker
        try:
            self._worker = self._boot.build(self._open, self._stop, self._weights)
            return self._answer(self._worker.ready())
        except Exception as err:
            return self._answer(m.Failed(index, 0, err))

    def step(self) -> Answer | None:
        """Carry out the next command, if one has arrived."""
        self._take_in(0.0 if self._queued else _STEP_WAIT_S)
        return self._next()

    def again(self) -> Answer | None:
        """Add a rollout like the last, and carry out the next command."""
        self._take_in(0.0)
        assert self._usual is not None
        self._queued.put(COLLECTED, self._usual)
        return self._next()

    def _next(self) -> Answer | None:
        if not self._queued:
            return None
        ticket, command = self._queued.pop()
        if not isinstance(command, m.Collect):
            self._begun.reach(ticket)
        assert self._worker is not None
        self._block = None
        return self._answer(self._worker.handle(ticket, command))

    def _take_in(self, wait: float) -> None:
        for frame in self._inbox.frames(wait):
            ticket, command = self._reader.read(frame)
            if isinstance(command, m.Collect):
                ticket = COLLECTED
                self._usual = self._usual if command.random else command
            self._queued.put(ticket, command)

    def _open(self, reference: m.WindowRef) -> Window:
        window, self._block = self._blocks.take(reference)
        return window

    def _answer(self, reply: m.Reply) -> Answer:
        block = None
        if isinstance(reply, m.Rolled) and reply.report.payload is None:
            block, self._block = self._block, None
        place, self._place = self._place, self._place + 1
        return place, self._inbox.turn, frame_of(reply), block


class Blocks:
    """Memory for rollouts, each in one piece, used again once Ray has let go of it.

    Ray serialises what a method returns after it has returned: a block is free again when the
    array that was sent is gone.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Window, Array]]] = {}
        self.made = 0
        """Blocks there are."""

    def take(self, reference: m.WindowRef) -> tuple[Window, Array]:
        """Return a window like ``reference`` and its memory, uint8 ``[nbytes]``."""
        free = self._free.setdefault(reference.steps, [])
        if not free:
            block = RolloutBlock(reference)
            free.append((block.window, block.bytes.numpy()))
            self.made += 1
        entry = free.pop()
        window, memory_array = entry
        array = memory_array[:]
        weakref.finalize(array, free.append, entry).atexit = False
        return window, array


class LatestWeights:
    """The newest weights that were put here and not taken over yet; a `WeightReceiver`."""

    def __init__(self) -> None:
        self._model_id = ""
        self._buffer: FlatBuffer | None = None
        self._newest: deque[Any] = deque(maxlen=1)

    def put(self, ref: Any) -> None:
        """Note the newest; those before are never fetched. Any thread may."""
        self._newest.append(ref)

    def bind(self, model_id: str, ref: m.WeightsRef) -> None:
        self._model_id, self._buffer = model_id, FlatBuffer(ref)

    def newest(self) -> m.Snapshot | None:
        if self._buffer is None or not self._newest:
            return None
        # Copied, because Ray's are read-only and occupy its store while they are held.
        found = importlib.import_module("ray").get(self._newest.pop())
        np.copyto(self._buffer.bytes.numpy(), found)
        return self._buffer.snapshot(self._model_id)
