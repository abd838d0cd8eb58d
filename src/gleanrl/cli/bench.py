"""``gleanrl bench``: measure a few settings and say which to use here."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gleanrl.cli.bench_report import Result, Results, make_progress, print_results, write_results
from gleanrl.cli.codes import INTERRUPTED
from gleanrl.cli.policies import load_policy
from gleanrl.cli.settings import Setting, default_workers, usable_cores
from gleanrl.collectors.base import BaseCollector
from gleanrl.core.errors import ConfigError, WorkerError

_PILOT_STEPS = 4
_PILOT_SECONDS = 0.3
_BATCHES = 10
"""A setting makes at least about this many batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the command line asked for."""

    env: str
    policy: str = "random"
    seconds: float = 3.0
    """How long each setting runs."""
    workers: tuple[int, ...] | None = None
    """``None`` for numbers that suit the machine."""
    num_envs: tuple[int, ...] = (1, 4, 16)
    out: Path | None = None


class Watch(Protocol):
    """Is told how a measurement goes."""

    def show(self, share: float, rate: float) -> None:
        """Show how much of the time has passed and how many frames came per second."""


def run(options: BenchOptions) -> int:
    """Measure, print the table and return the exit code.

    Raises:
        ConfigError: an option is wrong or the environment is not known.
        Exception: what the environment or the policy raises, already in this process.
    """
    check_file(options.out)
    policy = load_policy(options.policy)
    cores = usable_cores()
    settings = plan(options, cores)
    results = Results(options.env, options.policy, options.seconds, cores)
    code = 0
    try:
        with make_progress(options.env, len(settings) + 1) as progress:
            pace = _pilot(options, policy)
            for setting in settings:
                progress.begin(setting)
                results.add(_tried(setting, options, policy, pace, progress))
                progress.end(results.rows[-1])
            twin = results.asynchronous_twin()
            if twin is not None:
                progress.begin(twin)
                results.add(_tried(twin, options, policy, pace, progress))
                progress.end(results.rows[-1])
    except KeyboardInterrupt:
        if not results.rows:
            raise
        code = INTERRUPTED
    print_results(results)
    if options.out is not None:
        write_results(options.out, results)
    return code


def plan(options: BenchOptions, cores: int) -> list[Setting]:
    """Return the settings to try: in this process, then with workers."""
    workers = default_workers(cores) if options.workers is None else options.workers
    return [Setting(number, envs) for number in (0, *workers) for envs in options.num_envs]


def check_file(path: Path | None) -> None:
    """Check that figures can be written to ``path``.

    Raises:
        ConfigError: it exists, or cannot be made.
    """
    if path is None:
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--out {path} exists already; choose a new file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: {path.parent} is not a directory that can be written to")


def _pilot(options: BenchOptions, policy: Any) -> float:
    """Return roughly how many steps one environment makes per second here."""
    setting = Setting()
    with setting.make(options.env, policy, _PILOT_STEPS) as collector:
        frames, seconds = collect_for(collector, min(_PILOT_SECONDS, options.seconds))
    return frames / seconds


def _tried(
    setting: Setting, options: BenchOptions, policy: Any, pace: float, watch: Watch
) -> Result:
    """Measure a setting; one that cannot run (too much memory, say) is a result too."""
    # Batches of a size that `collect` would use, unless the environment is slow.
    most = max(1, int(pace * options.seconds / _BATCHES / setting.num_envs))
    frames = setting.steps(most) * setting.lanes
    blank = Result(setting, frames)
    start = time.perf_counter()
    try:
        with setting.make(options.env, policy, frames) as collector:
            collector.next()
            started = time.perf_counter() - start
            for _ in range(setting.workers if setting.asynchronous else 0):
                collector.next()  # what was made while others were starting
            count, seconds = collect_for(collector, options.seconds, watch)
    except WorkerError as err:
        return replace(blank, error=err.headline)
    except Exception as err:
        return replace(blank, error=f"{type(err).__name__}: {err}")
    return replace(blank, frames=count, seconds=seconds, start_s=started)


def collect_for(
    collector: BaseCollector, seconds: float, watch: Watch | None = None
) -> tuple[int, float]:
    """Take batches for about ``seconds``; return frames and the seconds they took."""
    frames, start = 0, time.perf_counter()
    while True:
        batch = collector.next()
        assert batch is not None
        frames += batch.numel()
        del batch  # its memory is used again
        passed = time.perf_counter() - start
        if watch is not None:
            watch.show(min(1.0, passed / seconds), frames / passed)
        if passed >= seconds:
            return frames, passed
