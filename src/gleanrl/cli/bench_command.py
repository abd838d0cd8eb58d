"""``gleanrl bench``: measure a few settings and name the fastest on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gleanrl.cli.command_options import BenchOptions, CollectOptions
from gleanrl.cli.display import print_table
from gleanrl.cli.main import INTERRUPTED
from gleanrl.cli.topology import (
    RANDOM,
    batch_steps,
    call,
    check,
    command,
    default_workers,
    described,
    load_policy,
    make,
)
from gleanrl.collectors import BaseCollector
from gleanrl.core.cgroups import usable_cores
from gleanrl.core.errors import ConfigError, WorkerError
from gleanrl.memory import tensor_files
from gleanrl.recording.recorder import versions
from gleanrl.watch.progress import Display

_PILOT_STEPS = 4
_PILOT_SECONDS = 0.3
_BATCHES = 10
"""A setting makes at least about this many batches."""
_SHARES = ("env", "policy", "wait")
_HEADERS = ("", "setting", "frames/s", "of best", "start", *_SHARES)


@dataclass(frozen=True, slots=True)
class Result:
    """How fast one setting was."""

    setting: CollectOptions
    frames_per_batch: int
    frames: int = 0
    seconds: float = 0.0
    start_s: float = 0.0
    """Seconds from the call to the first batch."""
    shares: tuple[float, ...] = ()
    """Those of `_SHARES` in the time of a worker, or of this process where the policy is here."""
    error: str | None = None
    """The reason for a missing figure."""

    @property
    def rate(self) -> float:
        """Frames per second."""
        return self.frames / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Results:
    """All that was measured."""

    options: BenchOptions
    cores: int
    rows: list[Result] = field(default_factory=list)

    @property
    def best(self) -> Result | None:
        """The fastest, ``None`` if nothing could be measured."""
        return max((row for row in self.rows if row.rate), key=lambda row: row.rate, default=None)

    def twins(self) -> list[CollectOptions]:
        """Return the fastest setting with workers, made asynchronous, and with one policy."""
        found = [row for row in self.rows if row.rate and row.setting.workers]
        if not found:
            return []
        fastest = max(found, key=lambda row: row.rate).setting
        groups = [g for g in (1, 2) if fastest.num_envs % g == 0 and fastest.policy != RANDOM]
        central = [replace(fastest, central=number) for number in groups]
        asynchronous = [replace(each, asynchronous=True) for each in (fastest, *central[:1])]
        return [*asynchronous, *central]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table row by row, as text."""
        best, rows = self.best, []
        for row in self.rows:
            figures: tuple[str, ...] = ("failed", *[""] * (len(_HEADERS) - 3))
            if best is not None and row.error is None:
                share = f"{100 * row.rate / best.rate:.0f} %"
                shares = (f"{100 * part:.0f} %" for part in row.shares)
                figures = (f"{row.rate:,.0f}", share, f"{row.start_s:.2f} s", *shares)
            rows.append(("best" if row is best else "", described(row.setting), *figures))
        return rows

    def advice(self) -> list[tuple[str, str]]:
        """Return the failed settings and the recommended ones."""
        errors = [(described(row.setting), row.error) for row in self.rows if row.error]
        lines = [("failed", f"{name}: {error}") for name, error in errors]
        if best := self.best:
            lines.append(("command", command(best.setting)))
            lines.append(("in Python", call(best.setting, best.frames_per_batch)))
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        best = self.best
        return {
            "format": "gleanrl-bench",
            "env": self.options.env,
            "policy": self.options.policy,
            "seconds_per_setting": self.options.seconds,
            "cores": self.cores,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "settings": [
                {
                    "workers": row.setting.processes,
                    "num_envs": row.setting.num_envs,
                    "async": row.setting.asynchronous,
                    "central": row.setting.central,
                    "frames_per_batch": row.frames_per_batch,
                    "frames": row.frames,
                    "seconds": round(row.seconds, 3),
                    "frames_per_second": round(row.rate, 1) or None,
                    "relative": round(row.rate / best.rate, 4) if best and row.rate else None,
                    "start_seconds": round(row.start_s, 3) or None,
                    "shares": dict(zip(_SHARES, row.shares, strict=False)),
                    "error": row.error,
                }
                for row in self.rows
            ],
            **{name: text for name, text in self.advice() if name == "command"},
            "best": None if best is None else self.rows.index(best),
        }


def run(options: BenchOptions) -> int:
    """Measure, print the table and return the exit code."""
    _check_file(options.out)
    policy = load_policy(options.policy)
    results, code = Results(options, usable_cores()), 0
    try:
        _measure_all(results, policy)
    except KeyboardInterrupt:
        if not results.rows:
            raise
        code = INTERRUPTED
    print_table(results.cells(), _HEADERS, numbers_from=2)
    print_table([("cores", str(results.cores)), *results.advice()])
    if options.out is not None:
        tensor_files.replace(options.out, json.dumps(results.as_json(), indent=2) + "\n")
    return code


def settings_to_try(options: BenchOptions, cores: int) -> list[CollectOptions]:
    """Return the settings to try: in this process, then with workers."""
    workers = default_workers(cores) if options.workers is None else options.workers
    blank = CollectOptions(env=options.env, policy=options.policy)
    found = [
        replace(blank, workers=number, num_envs=envs)
        for number in (None, *workers)
        for envs in options.num_envs
    ]
    for each in found:
        check(each)
    return found


def _check_file(path: Path | None) -> None:
    if path is None:
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--out {path} exists already; choose a new file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: {path.parent} is not a directory that can be written to")


def _measure_all(results: Results, policy: Any) -> None:
    """Measure the planned settings, and then the twins of the fastest with workers."""
    options, settings = results.options, settings_to_try(results.options, results.cores)
    planned = len(settings)
    with Display(options.env, planned) as display:
        # Roughly how many steps one environment makes per second here.
        with make(replace(settings[0], num_envs=1), policy, _PILOT_STEPS) as collector:
            frames, seconds = _collect_for(collector, min(_PILOT_SECONDS, options.seconds))
        # Batches of a size that `collect` would use, unless the environment is slow.
        most = frames / seconds * options.seconds / _BATCHES
        for done, setting in enumerate(settings):  # which grows
            name = described(setting)
            display.show(done, f"{name}: starting")

            def watch(share: float, rate: float, done: int = done, name: str = name) -> None:
                display.show(done + share, f"{name}: {rate:,.0f} frames/s")

            result = _measure(setting, policy, int(most / setting.num_envs), options.seconds, watch)
            results.rows.append(result)
            rate = f"{result.rate:,.0f} frames/s" if result.error is None else "failed"
            text = f"{name}: {rate}"
            if done + 1 == planned:
                settings += results.twins()
                display.total = len(settings)
            display.show(done + 1, text, f" {done + 1}/{len(settings)}: {text}")


def _measure(
    setting: CollectOptions,
    policy: Any,
    most: int,
    seconds: float,
    watch: Callable[[float, float], None],
) -> Result:
    """Measure a setting; a failure (such as a lack of memory) is a result as well."""
    frames = batch_steps(setting, max(1, most)) * setting.num_envs_total
    blank = Result(setting, frames)
    start = time.perf_counter()
    try:
        with make(setting, policy, frames) as collector:
            collector.next()
            started = time.perf_counter() - start
            for _ in range(setting.processes if setting.asynchronous else 0):
                collector.next()  # it was made while other workers were starting
            count, passed = _collect_for(collector, seconds, watch)
            stats = collector.stats()
    except WorkerError as err:
        return replace(blank, error=err.headline)
    except Exception as err:
        return replace(blank, error=f"{type(err).__name__}: {err}")
    shares = tuple(float(stats.get(f"time_{name}", 0.0)) for name in _SHARES)
    return replace(blank, frames=count, seconds=passed, start_s=started, shares=shares)


def _collect_for(
    collector: BaseCollector,
    seconds: float,
    watch: Callable[[float, float], None] = lambda share, rate: None,
) -> tuple[int, float]:
    """Take batches for about ``seconds``; return frames and the seconds they took."""
    frames, start = 0, time.perf_counter()
    while True:
        batch = collector.next()
        assert batch is not None
        frames += batch.numel()
        del batch  # its memory is used again
        passed = time.perf_counter() - start
        watch(min(1.0, passed / seconds), frames / passed)
        if passed >= seconds:
            return frames, passed
