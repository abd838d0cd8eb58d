"""SIGTERM: a collector saves its state between two batches, and the program ends."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gleanrl.collectors.state_files import check_saves
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.buffer import ReplayBuffer

EXIT_CODE = 128 + signal.SIGTERM
"""Of a program that SIGTERM ended; shells say the same of one that does not handle the signal."""


class Preempted(SystemExit):
    """Ends the program after SIGTERM, with exit code 143, when the collector's state is saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


_active: list[Preemption] = []
"""Of all collectors of this process that handle SIGTERM: one signal saves the states of all."""


def check_preemption(path: Any, replay_buffer: Any) -> None:
    """Raise `ConfigError` unless a state can be saved at ``path`` when SIGTERM arrives.

    With a `ReplayBuffer`, that is a directory, and else a file.
    """
    directory = isinstance(replay_buffer, ReplayBuffer)
    if directory:
        check_saves(replay_buffer)
    target = os.path.abspath(name := os.fspath(path))
    if not name or "\0" in name or not os.path.isdir(os.path.dirname(target)):
        raise ConfigError(f"preemption_path ({path!r}) must be in a directory that exists")
    fits = os.path.isdir if directory else os.path.isfile  # saving would replace a device
    if os.path.exists(target) and not fits(target):
        needed, why = ("directory", "") if directory else ("file", "out")
        raise ConfigError(
            f"preemption_path ({path!r}) must be a {needed}, or nothing yet: states are saved in a "
            f"{needed} with{why} a ReplayBuffer"
        )
    folder = target if os.path.isdir(target) else os.path.dirname(target)
    try:
        trial = Path(folder, f".{os.path.basename(target)}.{uuid.uuid4().hex}")  # as drafts are
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as err:
        raise ConfigError(
            f"preemption_path ({path!r}): nothing can be written to {folder} ({err.strerror})"
        ) from err
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "preemption_path= handles SIGTERM, which Python allows in the main thread only: make "
            "the collector there"
        )


class Preemption:
    """Handles SIGTERM from its construction to `end`.

    The thread that asks for a batch saves before it, and raises `Preempted`. If no batch is
    requested within half of the grace period, or if batches are collected in the background, a
    thread of this object saves, and has the main thread raise. It ends a process that is still
    there after the grace period. Whichever of several collectors is the first to save has all
    save, and the shortest grace period counts.
    """

    def __init__(
        self,
        grace: float,
        save: Callable[[], None],
        turn: Callable[[float], AbstractContextManager[Any]],
        in_background: Callable[[], bool],
    ) -> None:
        """Handle SIGTERM from now on, in this process and in none that it forks.

        The process ends ``grace`` seconds after the signal. ``turn`` keeps collection out during a
        block, and waits for so many seconds; ``in_background`` tells whether another thread
        collects.
        """
        self._grace = min(grace, threading.TIMEOUT_MAX)
        self._save, self._turn = save, turn
        self._in_background, self._owner = in_background, os.getpid()
        self.told = False
        """Whether the state is to be saved before another batch."""
        self._arrived = self._left = self._over = False
        self._saved = threading.Event()
        self._before = signal.signal(signal.SIGTERM, self._received)
        _active.append(self)

    def _received(self, number: int, frame: Any) -> None:
        if self._over or os.getpid() != self._owner:
            self._pass_on(frame)
        elif self._saved.is_set():
            self.leave()
        elif not self._arrived:
            for one in _active:
                one.told = one._arrived = True
            _thread.start_new_thread(self._watch, ())  # `Thread` takes a lock that may be held here

    def _pass_on(self, frame: Any) -> None:
        """Do with the signal as if this had never handled it."""
        if callable(self._before):
            self._before(signal.SIGTERM, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def _watch(self) -> None:
        grace = min(one._grace for one in _active)
        deadline, at_once = Deadline(grace), any(one._in_background() for one in _active)
        if not self._saved.wait(0.0 if at_once else grace / 2):
            try:
                with self._turn(deadline.left):
                    self.save_once()
            except BaseException:  # there is nobody to raise it to
                traceback.print_exc()
            self._interrupt()
        time.sleep(deadline.left)
        done = "saved" if self._saved.is_set() else "not saved"
        sys.stderr.write(
            f"gleanrl: the program did not end within grace={grace} s of SIGTERM and is "
            f"killed; the state of its collector was {done}\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _interrupt(self) -> None:
        """Have the main thread raise `Preempted`, wherever it is."""
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def save_once(self) -> None:
        """Save all that SIGTERM has told to and have not; call it between two batches."""
        for one in (self, *_active):
            if one.told:
                one.told = False
                with one._turn(one._grace / 2):
                    one._save()
                one._saved.set()

    def reached(self) -> None:
        """Save and raise `Preempted` if SIGTERM has arrived; call it between two batches."""
        if not self.told:
            return
        self.save_once()
        if self._saved.is_set():
            if threading.current_thread() is threading.main_thread():
                self.leave()
            self._interrupt()
            raise Preempted

    def leave(self) -> None:
        """Hand the signal to the handlers from before, then raise `Preempted`; only once."""
        if not self._left:
            for one in _active:
                one._left = True
            for one in reversed(_active):
                if callable(one._before):  # others of these do nothing any more
                    one._before(signal.SIGTERM, None)
            raise Preempted

    def end(self, leave: bool = False) -> None:
        """Put the handler from before back; if SIGTERM has arrived, `leave` if the caller may."""
        self.told = False  # there is no collector any more
        if self._arrived:
            if leave:
                self.leave()
        elif not self._over:
            _active.remove(self)
            self._over, self._save = True, lambda: None
            del self._turn, self._in_background  # a handler on top of this one keeps this
            on_top = signal.getsignal(signal.SIGTERM) == self._received
            if on_top and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._before)
