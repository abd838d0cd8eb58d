"""A trace of a collection for Perfetto (ui.perfetto.dev) and other viewers of Chrome's format.

The file is a JSON array to which events are appended as batches come; its closing bracket is
optional in that format, so the trace of a process that was killed opens as well. It lacks at most
the events of the last second.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

from gleanrl.core.messages import Report
from gleanrl.core.options import warn

_FLUSH_S = 1.0
"""Seconds between two times at which events are handed to the operating system."""
_FAR_S = 3600.0
"""A worker whose clock shows times that long ago has another clock than the learner."""


class Timeline:
    """Appends the activity of workers and the learner to a file, until it is closed.

    Everything is on one clock, the learner's; of a worker on another machine, the first rollout is
    taken to have ended when it arrived. Within a rollout, steps and calls of the policy alternate:
    the sum of each is shown as one slice, one after the other.
    """

    def __init__(self, path: str | Path, title: str, workers: Sequence[str]) -> None:
        """Begin a trace of ``workers``, which are named."""
        self._lock = threading.Lock()
        self._file = Path(path).open("w", encoding="utf-8", buffering=1 << 16)  # noqa: SIM115
        self._began = monotonic()
        self._flush_at = self._began
        self._delivered = self._began
        self._ended = [self._began] * len(workers)
        """Per worker, the end of its last event in the trace."""
        self._shifts: dict[int, float] = {}
        """Per worker, the offset of its times to the learner's clock."""
        self._pid = os.getpid()
        self._file.write("[\n" + self._meta("process_name", 0, {"name": title}))
        for tid, name in enumerate(["learner", *workers]):
            self._file.write(self._meta("thread_name", tid, {"name": name}))
            self._file.write(self._meta("thread_sort_index", tid, {"sort_index": tid}))

    def _meta(self, kind: str, tid: int, args: Mapping[str, object]) -> str:
        event = {"ph": "M", "name": kind, "pid": self._pid, "tid": tid, "ts": 0, "args": args}
        return json.dumps(event) + ",\n"

    def _slice(self, tid: int, name: str, begin: float, end: float, args: str = "") -> str:
        """Return the event of an activity; its part before the trace is cut off."""
        start = round(1e6 * max(0.0, begin - self._began), 3)
        duration = round(max(0.0, 1e6 * (end - self._began) - start), 3)
        return (
            f'{{"ph":"X","name":"{name}","pid":{self._pid},"tid":{tid},"ts":{start},'
            f'"dur":{duration},"args":{{{args}}}}},\n'
        )

    def _write(self, events: str) -> None:
        """Append events; a full disk ends the trace, not the collection."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._file.write(events)
                if monotonic() >= self._flush_at:
                    self._file.flush()
                    self._flush_at = monotonic() + _FLUSH_S
            except OSError as err:
                with contextlib.suppress(OSError):
                    self._file.close()
                warn(f"the timeline ends here: {err}")

    def gathered(self, reports: Mapping[int, Report], version: int, requested: float) -> None:
        """Add a batch; arguments as in `Watching.gathered`."""
        now = monotonic()
        frames = sum(report.frames for report in reports.values())
        events = [
            self._slice(0, "learner", self._delivered, requested),
            self._slice(
                0, "batch", requested, now, f'"frames":{frames},"policy version":{version}'
            ),
        ]
        self._delivered = now
        for worker, report in reports.items():
            events += self._rollout(worker, report, now)
        self._write("".join(events))

    def _rollout(self, worker: int, report: Report, now: float) -> list[str]:
        tid = worker + 1
        same = now - _FAR_S < report.times[2] <= now
        shift = self._shifts.setdefault(worker, 0.0 if same else now - report.times[2])
        taken, begin, end = (at + shift for at in report.times)
        env_s, policy_s, _, wait_s, _ = report.seconds
        before, self._ended[worker] = self._ended[worker], end
        middle = min(begin + env_s, end)
        loaded = min(taken + report.weights_s, begin)
        version = f'"policy version":{report.policy_version}'
        return [
            self._slice(tid, "waiting", max(before, taken - wait_s), taken),
            *([self._slice(tid, "weights", taken, loaded, version)] if report.weights_s else []),
            self._slice(tid, "rollout", begin, end, f'"frames":{report.frames},{version}'),
            self._slice(tid, "environment", begin, middle),
            self._slice(tid, "policy", middle, min(middle + policy_s, end)),
        ]

    def published(self, requested: float, version: int) -> None:
        """Add an update of weights that began at its request (``requested``)."""
        args = f'"policy version":{version}'
        self._write(self._slice(0, "publish weights", requested, monotonic(), args))

    def close(self) -> None:
        """Complete the file. Idempotent."""
        with self._lock:
            if not self._file.closed:
                end = self._slice(0, "learner", self._delivered, monotonic())
                self._file.write(end.removesuffix(",\n") + "\n]\n")
                self._file.close()
