"""Nodes that are told to end by a signal: the learner hears of it at once, then they end in order.

Schedulers send SIGTERM some seconds before they kill: at a time limit, for a preemption, when
somebody cancels a job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

from gleanrl.rollout.link import Link

_GRACE = 5.0
"""Seconds an environment gets to end its step and to close."""


class Leaving:
    """While entered, signals make the node of a link leave. For the main thread.

    Python runs handlers in the main thread between two of its instructions, and a step of an
    environment may take long. So the handlers here do nothing: the number of the signal arrives
    through the wake-up descriptor, whatever the main thread is doing, and another thread reads it.
    """

    def __init__(
        self,
        link: Link,
        signals: Sequence[signal.Signals],
        label: str,
        note: Callable[[str], object],
    ) -> None:
        """Prepare.

        Args:
            link: The node's end of its connection.
            signals: That make it leave.
            label: Of what this process belongs to, for the learner: ``"Slurm job 12"``.
            note: Also told why it leaves.
        """
        self._link, self._signals, self._label, self._note = link, signals, label, note
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._got: int | None = None

    def __enter__(self) -> Leaving:
        """Take over the signals."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            self._before[number] = signal.signal(number, lambda *_: None)
        # What an environment forks must neither survive a signal for want of a handler that does
        # something, nor speak through this process's descriptor, not even as it begins.
        hold, free, forget = map(weakref.WeakMethod, (self._hold, self._free, self._forget))
        os.register_at_fork(
            before=lambda: _call(hold),
            after_in_parent=lambda: _call(free),
            after_in_child=lambda: _call(forget),
        )
        self._thread = threading.Thread(target=self._wait, name="gleanrl leaving", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """Give the signals back.

        Raises:
            SystemExit: the node was told to leave, and has.
        """
        signal.set_wakeup_fd(self._wakeup)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._signals = ()
        os.write(self._write, bytes(1))
        self._thread.join()
        os.close(self._write)
        os.close(self._read)
        if self._got is not None:
            # Whatever went wrong on the way out: the learner has gone, or is about to.
            raise SystemExit(128 + self._got) from error

    def _wait(self) -> None:
        while (got := os.read(self._read, 1)[0]) != 0:
            if got in self._signals:
                self._leave(signal.Signals(got))
                return

    def _leave(self, number: signal.Signals) -> None:
        end = threading.Timer(_GRACE, os._exit, [128 + number])
        end.daemon = True
        end.start()
        self._got = number
        reason = f"was told to end by {number.name} ({self._label}) and left"
        self._link.leave(reason)
        with contextlib.suppress(Exception):  # the connection has told it already
            self._note(reason)

    def _hold(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)

    def _free(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)

    def _forget(self) -> None:
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        self._free()


def _call(method: Callable[[], Callable[[], None] | None]) -> None:
    found = method()
    if found is not None:
        found()
