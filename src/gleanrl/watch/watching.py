"""The views of one collection: numbers, progress, logs, a page, a trace, `gleanrl top`."""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import FrameCounts, Rollouts
from gleanrl.watch.loggers import Loggers, Stats
from gleanrl.watch.measures import Measures
from gleanrl.watch.page import save
from gleanrl.watch.progress import Progress
from gleanrl.watch.status import StatusFile
from gleanrl.watch.timeline import Timeline

Watcher: TypeAlias = Callable[[Rollouts, int], None]
Status: TypeAlias = Mapping[str, Any]
_SHOW_EVERY_S, _SHARE_OF_TIME = 1.0, 0.001
"""Seconds between two writes of the status; more of them if it takes more than that share."""


class Watching:
    """Receives every batch of a collector, and shows the views that users request.

    Nothing in it refers to the collector strongly, and nothing that lives on refers to it: it ends
    with the collector.
    """

    def __init__(self, name: str, progress: bool | str, logger: Any) -> None:
        """Take the arguments ``progress`` and ``logger`` of the collector called ``name``."""
        self._name = name
        self._label = name if progress is True else progress or ""
        self._loggers = Loggers(logger)
        self._progress: Progress | None = None
        self._timeline: Timeline | None = None
        self._watchers: list[Watcher] = []

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Show that workers are being started while the body runs."""
        if self._label:
            self._progress = Progress(self._label)
        try:
            yield
        except BaseException:
            self.end_progress()
            raise

    def begin(self, engine: Engine, counts: FrameCounts, status: Callable[[], Status]) -> None:
        """Begin: the workers of ``engine`` are up. ``status`` returns the collection's status."""
        self._engine, self._counts, self._started = engine, counts, time.time()
        self._last = math.inf if counts.limits.total_frames is None else counts.limits.total_frames
        self.measures = Measures(engine.workers)
        """The statistics."""
        if self._progress is not None:
            facts = partial(_facts, engine, counts, self.measures)
            self._progress.follow(facts, counts.limits.total_frames)
            weakref.finalize(self, self._progress.close)
        weakref.finalize(self, self._loggers.close)
        self._file = StatusFile()
        weakref.finalize(self, self._file.remove)
        self._show(status)

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` for every batch, in the thread that gathers it.

        Args:
            watcher: A function of the reports of the batch's rollouts, by worker, and of the newest
                policy version. It delays the batch. ``gleanrl top`` does not show the collection
                any more; the watcher may.
        """
        self._watchers.append(watcher)
        self._file.remove()

    def gathered(
        self, reports: Rollouts, version: int, requested: float, status: Callable[[], Status]
    ) -> None:
        """Take in a batch, which the learner had ``requested`` at that time.

        ``reports`` are those of its rollouts, by worker; ``version`` is the newest policy version.
        """
        now = self.measures.add(reports, version, requested)
        for watcher in self._watchers:
            watcher(reports, version)
        if (timeline := self._timeline) is not None:
            timeline.gathered(reports, version, requested)
        if self._loggers.active:
            self._loggers.log(status()["stats"])
        if now >= self._show_due or self._counts.delivered >= self._last:
            self._show(status)

    def failed(self, status: Callable[[], Status]) -> None:
        """Show the state for the last time, after a failure of the collection."""
        self.end_progress()
        self._show(status)

    def _show(self, status: Callable[[], Status]) -> None:
        self.measures.settle()  # for the progress line, too: its thread would need more time
        began = time.monotonic()
        self._file.write(status)
        end = time.monotonic()
        self._show_due = end + max(_SHOW_EVERY_S, (end - began) / _SHARE_OF_TIME)

    def published(self, requested: float, version: int) -> None:
        """Add an update of weights that began at its request (``requested``)."""
        if (timeline := self._timeline) is not None:
            timeline.published(requested, version)

    def load_state_dict(self, state: Any, frames: int) -> None:
        """Continue statistics from ``state``, and logs from a run of so many ``frames``."""
        self.measures.load_state_dict(state)
        self._loggers.resume(frames)

    def status(self, collector: str, stats: Stats) -> Status:
        """Return the values of ``gleanrl top`` for a ``collector`` with these ``stats``."""
        return {
            "collector": collector,
            "pid": os.getpid(),
            "started": self._started,
            "command": shlex.join(sys.orig_argv),
            "stats": stats,
        }

    def report(self, path: str | Path, status: Status) -> None:
        """Write the page of a collection with this `status`; see `BaseCollector.report`."""
        facts = [
            ("collector", status["collector"]),
            ("command", status["command"]),
            ("process", f"{status['pid']} on {platform.node()}"),
            ("started", f"{datetime.fromtimestamp(self._started):%d %B %Y, %H:%M:%S}"),
        ]
        if self._engine.failure is not None:
            facts.append(("failed with", repr(self._engine.failure)))
        losses = tuple(self._engine.newest_losses)
        save(path, self.measures.history.page(self._name, facts, status["stats"], losses))

    @contextmanager
    def timeline(self, path: str | Path) -> Iterator[None]:
        """Write a trace of the workers' and the learner's activity during a ``with`` block.

        The file opens in https://ui.perfetto.dev and in ``chrome://tracing``, also after a kill of
        the process. Each worker has a row with its rollouts, their parts in environment and policy,
        waiting and new weights. The learner's row has waits for batches, published weights, and
        other work.

        Args:
            path: The path of the file, which is overwritten.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another trace is being written.

        Example:
            >>> import tempfile
            >>> from gleanrl.collectors import Collector
            >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=500)
            >>> with collector.timeline(f"{tempfile.mkdtemp()}/trace.json"):
            ...     batches = list(collector)
            >>> collector.shutdown()
        """
        if self._timeline is not None:
            raise RuntimeError("a timeline of this collector is being written: end that one first")
        names = [self._engine.name_of(worker) for worker in range(self._engine.workers)]
        self._timeline = trace = Timeline(path, self._name, names)
        try:
            yield
        finally:
            self._timeline = None
            trace.close()

    def end_progress(self) -> None:
        """Show progress for the last time. Idempotent."""
        if self._progress is not None:
            self._progress.close()

    def close(self) -> None:
        """End the views. Idempotent; numbers and `report` stay."""
        self._file.remove()
        self.end_progress()
        self._loggers.close()


def _facts(engine: Engine, counts: FrameCounts, measures: Measures, last: bool) -> dict[str, Any]:
    """Return the facts that progress shows."""
    return {
        "frames": counts.delivered,
        "completed": counts.exhausted,
        "failed": engine.failure is not None,
        "busy": engine.awaited,
        **measures.stats(newest=last),
    }
