"""Counts what the collectors of the script that imports it deliver, and changes nothing else.

The process that ``FILE`` names a report for counts batches, frames and the time its loop waits for
them, and ends the script at once when it has collected for ``LIMIT`` seconds.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "GLEANRL_METER"
LIMIT = "GLEANRL_METER_SECONDS"
OWNER = "GLEANRL_METER_OWNER"


class Meter:
    """What one process has been given by its collectors.

    The first batch counts for nothing: workers start and programs are built on its way.
    """

    def __init__(self, path: Path, limit: float) -> None:
        self._path, self._limit = path, limit
        self.batches = 0
        self.frames = 0
        self.waited = 0.0
        self.began: float | None = None
        self.ended = 0.0
        self._background: list[tuple[Any, float, int]] = []
        self._background_s = 0.0
        self.stopped = False
        self._inside = False

    def iterate(self, batches: Iterator[Any], collector: Any) -> Iterator[Any]:
        """Yield ``batches``, timing each; those of a collector within another are not counted."""
        while True:
            outermost = not self._inside
            self._inside = True
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._inside = not outermost
            if outermost:
                self._count(batch, collector, time.perf_counter() - start)
            yield batch

    def _count(self, batch: Any, collector: Any, waited: float) -> None:
        now = time.perf_counter()
        if self.began is None:
            self.began = now
            self._arm()
        else:
            self.frames += _frames(batch, collector)
            self.waited += waited
        self.ended = now
        self.batches += 1

    def start(self, collector: Any) -> None:
        """Note that ``collector`` fills its buffer in the background from now on."""
        buffer = getattr(collector, "replay_buffer", None)
        if buffer is not None:
            self._background.append((buffer, time.perf_counter(), _written(buffer)))
        self._arm()

    def end_background(self) -> None:
        """Count what was collected in the background, while its buffers are still there."""
        now = time.perf_counter()
        for buffer, began, before in self._background:
            self.frames += _written(buffer) - before
            self._background_s += now - began
        self._background.clear()

    def _arm(self) -> None:
        if self._limit and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, self._limit)

    def _stop(self, *_: object) -> None:
        self.stopped = True
        self.write()
        os._exit(0)  # whatever the script is inside of would take an exception for its own

    def write(self) -> None:
        """Write the report, unless that is done; nothing stops the script from now on."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.end_background()
        wall = self.ended - self.began if self.began is not None else 0.0
        report = {
            "batches": self.batches,
            "frames": self.frames,
            "waited_s": self.waited + self._background_s,
            "wall_s": wall + self._background_s,
            "stopped": self.stopped,
        }
        if not self._path.exists():
            self._path.write_text(json.dumps(report))


def _frames(batch: Any, collector: Any) -> int:
    """Return how many steps ``batch`` has; rows beyond the end of a trajectory are none."""
    if batch is None:  # it went into a replay buffer
        return int(getattr(collector, "requested_frames_per_batch", 0))
    mask = batch.get(("collector", "mask"), None)
    return int(mask.sum()) if mask is not None else int(batch.numel())


def _written(buffer: Any) -> int:
    count = getattr(buffer, "write_count", None)
    return int(count) if count is not None else len(buffer)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _patch(
    cls: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    if name in vars(cls) and not getattr(vars(cls)[name], "__isabstractmethod__", False):
        setattr(cls, name, around(vars(cls)[name]))


def install(meter: Meter) -> None:
    """Have every collector class of both libraries report to ``meter``."""
    import torchrl.collectors.distributed

    import gleanrl.collectors

    def iterated(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: meter.iterate(iter(method(self)), self)

    def started(method: Callable[..., Any]) -> Callable[..., Any]:
        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            meter.start(self)
            return method(self, *args, **kwargs)

        return start

    def ended(method: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            meter.end_background()
            return method(self, *args, **kwargs)

        return shutdown

    for base in (torchrl.collectors.BaseCollector, gleanrl.collectors.BaseCollector):
        for cls in set(_subclasses(base)):
            _patch(cls, "__iter__", iterated)
            _patch(cls, "start", started)
            _patch(cls, "shutdown", ended)
            _patch(cls, "async_shutdown", ended)


if FILE in os.environ and os.environ.setdefault(OWNER, str(os.getpid())) == str(os.getpid()):
    _meter = Meter(Path(os.environ[FILE]), float(os.environ.get(LIMIT, 0)))
    install(_meter)
    atexit.register(_meter.write)
