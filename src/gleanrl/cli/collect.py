"""``gleanrl collect``: run a policy in an environment and say, or keep, what happened."""

from __future__ import annotations

import contextlib
import platform
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl import __version__
from gleanrl.cli.codes import INTERRUPTED
from gleanrl.cli.dataset import DatasetWriter, check_target, size
from gleanrl.cli.episodes import EpisodeStats, Summary
from gleanrl.cli.policies import load_policy
from gleanrl.cli.progress import Display, Moment, make_display, print_facts
from gleanrl.cli.settings import Setting
from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.multi import MultiAsyncCollector
from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import MASK
from gleanrl.engine.interruptor import Interruptor

_RECENT = 100
_LIBRARIES = ("torch", "tensordict", "gymnasium", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectOptions:
    """What the command line asked for."""

    env: str
    policy: str = "random"
    num_envs: int = 1
    """Environments of each worker."""
    workers: int | None = None
    """Worker processes; ``None`` to collect in this one."""
    asynchronous: bool = False
    explain: bool = False
    """Say what is called as it is, and collect nothing."""
    backend: str = "process"
    """Where workers are: ``"process"``, ``"distributed"`` or ``"ray"``."""
    nodes: int | None = None
    """How many there are, unless they are processes."""
    launcher: str = "mp"
    """What starts distributed nodes."""
    frames: int = 10_000
    frames_per_batch: int | None = None
    """``None`` for a size that shows progress often and divides ``frames`` well."""
    seed: int | None = None
    """``None`` for any; it is drawn and told, so that the run can be repeated."""
    out: Path | None = None
    command: str = ""

    @property
    def setting(self) -> Setting:
        """The environments and the processes they are in."""
        count = self.workers or self.nodes or 0
        return Setting(count, self.num_envs, self.asynchronous, self.backend, self.launcher)


def plan(options: CollectOptions) -> tuple[int, int]:
    """Return frames per batch and frames in total, both rounded up to whole steps and batches."""
    setting = options.setting
    envs = setting.lanes
    if options.frames_per_batch is not None:
        batch = -(-options.frames_per_batch // envs) * envs
        return batch, -(-options.frames // batch) * batch
    steps = -(-options.frames // envs)
    most = setting.steps(steps)
    # Of the sizes up to twice as small, the one that overshoots least, then the largest.
    best = min(range((most + 1) // 2, most + 1), key=lambda size: (-steps % size, -size))
    return best * envs, -(-steps // best) * best * envs


class _Drained:
    """Tells when what asynchronous workers had collected at an interrupt has been delivered."""

    _goals: list[int] | None = None

    def __call__(self, collector: BaseCollector) -> bool:
        """Return whether everything is here; call after each batch, from the interrupt on."""
        if not isinstance(collector, MultiAsyncCollector):
            return True
        stats = collector.stats("per_worker")
        counts = [int(stats[f"worker_{w}/batches"]) for w in range(collector.num_workers)]
        if self._goals is None:
            # A worker is at most two rollouts ahead: one that is complete, one under way.
            self._goals = [count + 2 for count in counts]
        return all(count >= goal for count, goal in zip(counts, self._goals, strict=True))


class Run:
    """One collection: counts, shows and writes what a collector delivers."""

    def __init__(self, options: CollectOptions, seed: int, total: int) -> None:
        """Prepare to collect ``total`` frames."""
        self.stats = EpisodeStats()
        self.total = total
        self.seconds = 0.0
        self.writer: DatasetWriter | None = None
        self._options = options
        self._seed = seed
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if options.out is not None:
            self.writer = DatasetWriter(options.out, total)

    def collect(self, collector: BaseCollector, interruptor: Interruptor, display: Display) -> None:
        """Take batches until all frames are there or ``interruptor`` says stop."""
        start = time.perf_counter()
        drained = _Drained()
        for batch in collector:
            self._take(batch)
            # The collector uses the batch's memory again once nobody holds it.
            del batch
            self.seconds = time.perf_counter() - start
            display.show(self._moment())
            if interruptor.collection_stopped() and drained(collector):
                break

    def _moment(self) -> Moment:
        stats = self.stats
        return Moment(stats.frames, self.total, self.seconds, stats.episodes, stats.recent(_RECENT))

    def _take(self, batch: TensorDictBase) -> None:
        self.stats.update(batch)
        if self.writer is None:
            return
        mask = batch.get(MASK, None)
        frames = batch.exclude(MASK).reshape(-1)
        if mask is not None and not mask.all():
            frames = frames[mask.reshape(-1)]
        self.writer.write(frames, self.facts)

    def facts(self) -> Mapping[str, Any]:
        """Return what the card says beside the layout of the data."""
        returns, lengths = Summary.of(self.stats.returns), Summary.of(self.stats.lengths)
        rate = self.stats.frames / self.seconds if self.seconds else 0.0
        return {
            "env": self._options.env,
            "num_envs": self._options.num_envs,
            "workers": self._options.setting.workers,
            "backend": self._options.backend,
            "async": self._options.asynchronous,
            "policy": self._options.policy,
            "seed": self._seed,
            "command": self._options.command,
            "created": self._created,
            "versions": versions(),
            "seconds": round(self.seconds, 3),
            "frames_per_second": round(rate, 1),
            "episodes": self.stats.episodes,
            "returns": returns and returns.as_json(),
            "lengths": lengths and lengths.as_json(),
        }

    def report(self) -> list[tuple[str, str]]:
        """Return what is printed at the end."""
        options, stats = self._options, self.stats
        rate = stats.frames / self.seconds if self.seconds else 0.0
        lines = [
            ("environment", options.env),
            ("setting", str(options.setting)),
            ("policy", options.policy),
            ("seed", str(self._seed)),
            ("frames", f"{stats.frames:,} in {self.seconds:,.1f} s ({rate:,.0f} per second)"),
            *describe_episodes(stats),
        ]
        if stats.frames < self.total:
            lines.append(("interrupted", f"{self.total - stats.frames:,} frames were left"))
        if self.writer is not None and self.writer.frames:
            lines.append(("data", f"{options.out} ({size(self.writer.nbytes)})"))
        return lines


def run(options: CollectOptions) -> int:
    """Collect, print the result and return the exit code.

    Raises:
        ConfigError: an option is wrong or the environment is not known.
        Exception: what the environment, the policy or the disk raises; data written until then is
            kept and valid.
    """
    _check_counts(options)
    if options.out is not None:
        check_target(options.out)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    policy = load_policy(options.policy)
    frames_per_batch, total = plan(options)
    interruptor = Interruptor()
    with options.setting.make(
        options.env, policy, frames_per_batch, total, interruptor
    ) as collector:
        if options.explain:
            print(collector.explain())  # noqa: T201  # this is the command's output
            return 0
        collector.set_seed(seed)
        task = Run(options, seed, total)
        display = make_display(options.env, total)
        with _recording(task), display, _stop_on_interrupt(interruptor):
            task.collect(collector, interruptor, display)
    print_facts(task.report())
    return INTERRUPTED if task.stats.frames < total else 0


def _check_counts(options: CollectOptions) -> None:
    """Processes are counted by ``--workers``, everything else by ``--nodes``."""
    over_nodes = options.backend != "process"
    if over_nodes and options.nodes is None:
        raise ConfigError(f"--backend {options.backend} needs --nodes N")
    if over_nodes and options.workers is not None:
        raise ConfigError(
            "--workers counts processes of this machine: use --nodes for nodes, and --num-envs for "
            "the environments of each"
        )
    if options.nodes is not None and not over_nodes:
        raise ConfigError("--nodes needs --backend distributed or --backend ray")
    if options.asynchronous and not (options.workers or options.nodes):
        raise ConfigError("--async is about worker processes: say how many with --workers N")


@contextlib.contextmanager
def _recording(task: Run) -> Iterator[None]:
    """Leave a valid dataset whatever ends the collection."""
    status = "failed"
    try:
        yield
        status = "complete" if task.stats.frames >= task.total else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        if task.writer is not None:
            task.writer.finish(status, task.facts())


@contextlib.contextmanager
def _stop_on_interrupt(interruptor: Interruptor) -> Iterator[None]:
    """Let the first Ctrl-C end the rollout after its current step, the second one everything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if interruptor.collection_stopped():
            raise KeyboardInterrupt
        interruptor.stop_collection()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"gleanrl": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def describe_episodes(stats: EpisodeStats) -> list[tuple[str, str]]:
    """Return lines about the episodes that ended."""
    lines = [("episodes", f"{stats.episodes:,}")]
    for name, values in (("return", stats.returns), ("length", stats.lengths)):
        summary = Summary.of(values)
        if summary is not None:
            lines.append((name, spell(summary)))
    return lines


def spell(summary: Summary) -> str:
    """Spell a summary in one line."""
    return (
        f"mean {summary.mean:,.1f}, std {summary.std:,.1f}, "
        f"min {summary.min:,.1f}, max {summary.max:,.1f}"
    )


def command_line(arguments: list[str]) -> str:
    """Spell a command as it can be typed again."""
    return shlex.join(["gleanrl", *arguments])
