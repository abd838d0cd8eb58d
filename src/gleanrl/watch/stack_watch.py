"""A warning with the stack of a thread that is in one call for too long."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from time import monotonic
from types import FrameType, SimpleNamespace
from typing import Any

from gleanrl.core.options import warn

_LOOKS = 8
"""The number of looks at a call before it is late."""


class StackWatch:
    """Warns, once per call, where a thread is that stays in a ``with`` block for too long.

    The call goes on: nothing can end it but itself. The watching thread is started at the first
    use, and ends with this object.
    """

    def __init__(self, seconds: float) -> None:
        """Warn after ``seconds``, or up to an eighth later."""
        self._seconds = seconds
        self._call = _call()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._call = call = _call()
            self._thread = threading.Thread(target=_watch, args=(call, self._seconds), daemon=True)
            self._thread.start()
            weakref.finalize(self, call.ended.set).atexit = False
        self._call.at = threading.get_ident(), monotonic()

    def __exit__(self, *error: object) -> None:
        self._call.at = None


def _call() -> SimpleNamespace:
    """Return a call to watch: its thread and when it began, if it runs; and whether all ended."""
    return SimpleNamespace(at=None, ended=threading.Event())


def _watch(call: SimpleNamespace, seconds: float) -> None:
    warned: Any = None
    while not call.ended.wait(seconds / _LOOKS):
        at = call.at
        if at is not None and at is not warned and monotonic() - at[1] >= seconds:
            warned = at
            frame = sys._current_frames().get(at[0])
            if frame is not None:
                warn(_described(frame, seconds), RuntimeWarning)


def _described(frame: FrameType, seconds: float) -> str:
    stack = "".join(traceback.format_stack(frame)).rstrip()
    steps = [each.f_locals["t"] for each, _ in traceback.walk_stack(frame) if _is_loop(each)]
    at = f", in step {steps[0]} of the rollout" if steps else ""
    return (
        f"collecting has taken more than {seconds} s (timeout=){at}, and cannot be ended in this "
        f"process; its thread is here:\n{stack}"
    )


def _is_loop(frame: FrameType) -> bool:
    inside = str(frame.f_globals.get("__name__")).startswith("gleanrl.rollout.")
    return inside and isinstance(frame.f_locals.get("t"), int)
