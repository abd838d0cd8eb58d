"""Pulses: single bytes through pipes, with which a process and its workers wake each other.

A message through a socket, with its header and its reply's ticket, costs some hundred
microseconds. A pulse costs a tenth of that; all else that the two have to say lies in shared
memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TypeAlias

from gleanrl.memory.shared import FileAddress

_CODE_BITS = 8
_READ = 1 << 16
_SPIN_S = 1e-4
_Poll: TypeAlias = Callable[[float], list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where a worker finds its ends of the pipes; can be pickled, as long as `Pulses` has both."""

    worker: int
    orders: FileAddress
    answers: FileAddress


class Pulses:
    """The ends of the process that wakes ``workers`` workers and waits for their answers."""

    def __init__(self, workers: int) -> None:
        """Make the pipes, all of whose ends this process has until `opened`."""
        pipes = [os.pipe() for _ in range(workers)]
        answers, back = os.pipe()
        self._orders = [write for _, write in pipes]
        self._answers = answers
        self._theirs = [*(read for read, _ in pipes), back]
        self._arrived = _polling(answers)
        self._closing = weakref.finalize(self, _close, self._orders, [answers], self._theirs)
        self._closing.atexit = False

    def address(self, worker: int) -> PulseAddress:
        """Return the address of the ends of ``worker``."""
        return PulseAddress(
            worker, FileAddress.of(self._theirs[worker]), FileAddress.of(self._theirs[-1])
        )

    def opened(self) -> None:
        """Drop the workers' ends, which all have opened: the end of a process shows in the pipe."""
        _close(self._theirs)

    def send(self, worker: int, code: int) -> None:
        """Wake ``worker``; one that has ended is not waited for here."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders[worker], bytes((code,)))

    def wait(self, milliseconds: float) -> bool:
        """Tell whether an answer is there within so many ``milliseconds``."""
        return _spun(self._arrived) or bool(self._arrived(milliseconds))

    def take(self) -> list[tuple[int, int]]:
        """Return all answers that are there: workers and codes."""
        found = memoryview(os.read(self._answers, _READ)).cast("I").tolist()
        return [(answer >> _CODE_BITS, answer & (1 << _CODE_BITS) - 1) for answer in found]

    def stop(self) -> None:
        """Have all workers' waits return 0 from now on."""
        _close(self._orders)

    def close(self) -> None:
        """Close all ends. Idempotent."""
        self._closing()


class PulseEnds:
    """The ends of one worker."""

    def __init__(self, address: PulseAddress) -> None:
        """Open them.

        Raises:
            ReplayError: the process that made them has ended.
        """
        self._orders = address.orders.open(os.O_RDONLY)
        self._answers = address.answers.open(os.O_WRONLY)
        self._arrived = _polling(self._orders)
        self._worker = address.worker << _CODE_BITS

    def wait(self) -> int:
        """Wait for the next code; 0 when the other process has stopped or ended."""
        _spun(self._arrived)
        found = os.read(self._orders, 1)
        return found[0] if found else 0

    def answer(self, code: int) -> None:
        """Answer with ``code``."""
        os.write(self._answers, (self._worker | code).to_bytes(4, "little"))


def _polling(fd: int) -> _Poll:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return poller.poll


def _spun(arrived: _Poll) -> bool:
    """Tell whether a pulse comes soon; whoever else wants this core gets it meanwhile.

    To wake a sleeping core takes some 50 us, which is as long as a step of small environments.
    """
    end = perf_counter() + _SPIN_S
    while not arrived(0):
        if perf_counter() > end:
            return False
        os.sched_yield()
    return True


def _close(*groups: list[int]) -> None:
    for group in groups:
        while group:
            os.close(group.pop())
