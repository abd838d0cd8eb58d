"""Pulses: single bytes through pipes, with which a process and its workers wake each other.

A message through a socket, with its header and its reply's ticket, costs several times as much.
All else that the two have to say lies in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from dataclasses import dataclass
from time import perf_counter

from gleanrl.core.platforms import naming_limits
from gleanrl.memory.shared import FileAddress

_CODE_BITS = 8
_READ = 1 << 16
_SPIN_S, _SOON_S = 1e-4, 4e-4
"""Seconds of a busy wait, and of a wait after which the next one is busy."""


@dataclass(frozen=True, slots=True)
class WakeupAddress:
    """Where a worker finds the pipes, and opens its ends; can be pickled."""

    worker: int
    orders: FileAddress
    answers: FileAddress


class WakeupPipes:
    """The ends of the process that wakes ``workers`` workers and waits for their answers."""

    def __init__(self, workers: int) -> None:
        """Make the pipes, whose other ends workers open, as far as limits of this process allow."""
        self._orders, own = list[int](), list[int]()
        self._closing = weakref.finalize(self, _close, self._orders, own)
        self._closing.atexit = False
        with naming_limits():
            for _ in range(workers):
                read, write = os.pipe()
                self._orders.append(write)
                os.close(read)
            # Both ends: without workers, waiting for an answer waits.
            self._answers, back = os.pipe()
        own += self._answers, back
        self._arrival = _Arrival(self._answers)

    def address(self, worker: int) -> WakeupAddress:
        """Return the address of the pipes of ``worker``."""
        orders, answers = self._orders[worker], self._answers
        return WakeupAddress(worker, FileAddress.of(orders), FileAddress.of(answers))

    def drop_orders(self, worker: int) -> None:
        """Drop the orders that ``worker``, which has ended, has not read."""
        orders = FileAddress.of(self._orders[worker]).open(os.O_RDONLY | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                os.read(orders, _READ)
        finally:
            os.close(orders)

    def send(self, worker: int, code: int) -> None:
        """Wake ``worker``; one that has ended is not waited for here."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders[worker], bytes((code,)))

    def wait(self, milliseconds: float) -> bool:
        """Tell whether an answer is there within so many ``milliseconds``."""
        return self._arrival.wait(milliseconds)

    def take(self) -> list[tuple[int, int]]:
        """Return all answers that are there: workers and codes."""
        found = memoryview(os.read(self._answers, _READ)).cast("I").tolist()
        return [(answer >> _CODE_BITS, answer & (1 << _CODE_BITS) - 1) for answer in found]

    def stop(self) -> None:
        """Have all workers' waits return 0, even if a forked child keeps the pipes open."""
        for worker in range(len(self._orders)):
            self.send(worker, 0)
        _close(self._orders)

    def close(self) -> None:
        """Close all ends. Idempotent."""
        self._closing()


class WorkerPipes:
    """The ends of one worker."""

    def __init__(self, address: WakeupAddress) -> None:
        """Open them; `ReplayError` if the process that made them has ended."""
        self._orders = address.orders.open(os.O_RDONLY)
        self._answers = address.answers.open(os.O_WRONLY)
        self._arrival = _Arrival(self._orders)
        self._worker = address.worker << _CODE_BITS

    def wait(self) -> int:
        """Wait for the next code; 0 when the other process has stopped or ended."""
        self._arrival.wait()
        found = os.read(self._orders, 1)
        return found[0] if found else 0

    def answer(self, code: int) -> None:
        """Answer with ``code``."""
        os.write(self._answers, (self._worker | code).to_bytes(4, "little"))


class _Arrival:
    """Waits for bytes in a pipe: busily, if the last wait was short.

    To wake a sleeping core takes some 50 us, which is as long as a step of small environments. A
    process that runs on this core gets it meanwhile.
    """

    def __init__(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        self._poll, self._short = poller.poll, True

    def wait(self, milliseconds: float | None = None) -> bool:
        """Tell whether there is something within so many ``milliseconds``."""
        poll, began = self._poll, perf_counter()
        if self._short:
            end = began + _SPIN_S
            while not poll(0):
                if perf_counter() > end:
                    break
                os.sched_yield()
            else:
                return True
        found = bool(poll(milliseconds))
        self._short = perf_counter() - began < _SOON_S
        return found


def _close(*groups: list[int]) -> None:
    for group in groups:
        while group:
            os.close(group.pop())
