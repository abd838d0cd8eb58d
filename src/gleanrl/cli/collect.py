"""``gleanrl collect``: run a policy in an environment and say, or keep, what happened."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from tensordict import TensorDictBase

from gleanrl.cli.display import plural, print_table
from gleanrl.cli.histogram import print_histogram
from gleanrl.cli.main import INTERRUPTED
from gleanrl.cli.options import CollectOptions
from gleanrl.cli.policies import load_policy
from gleanrl.cli.topology import Topology
from gleanrl.collectors import BaseCollector, Interruptor, MultiAsyncCollector
from gleanrl.core.errors import ConfigError
from gleanrl.recording.dataset import size
from gleanrl.recording.episodes import EpisodeStats, describe_episodes
from gleanrl.recording.formats import check_target
from gleanrl.recording.recorder import Recorder, make_way
from gleanrl.watch.progress import Display

_RECENT = 100
"""Episodes that the display averages over."""
_LINE_EVERY_S = 5.0


def topology(options: CollectOptions) -> Topology:
    """Return the environments that were asked for, and the processes they are in."""
    count = options.workers or options.nodes or 0
    return Topology(
        count, options.num_envs, options.asynchronous, options.backend, options.launcher
    )


def plan(options: CollectOptions) -> tuple[int, int]:
    """Return frames per batch and frames in total, both rounded up to whole steps and batches."""
    where = topology(options)
    envs = where.num_envs_total
    if options.frames_per_batch is not None:
        batch = -(-options.frames_per_batch // envs) * envs
        return batch, -(-options.frames // batch) * batch
    steps = -(-options.frames // envs)
    most = where.steps(steps)
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
        self.recorder: Recorder | None = None
        self._seconds = 0.0
        self._nbytes = 0
        self._options = options
        self._seed = seed

    def record(self, path: Path) -> None:
        """Keep the frames in ``path`` as well."""
        options, where = self._options, topology(self._options)
        self.recorder = Recorder(
            path,
            options.format,
            env=options.env,
            num_envs=where.num_envs * max(1, where.workers),
            seed=self._seed,
            total_frames=self.total,
            facts={
                "workers": where.workers,
                "backend": options.backend,
                "async": options.asynchronous,
                "policy": options.policy,
                "command": options.command,
            },
        )

    def collect(self, collector: BaseCollector, interruptor: Interruptor, display: Display) -> None:
        """Take batches until all frames are there or ``interruptor`` says stop."""
        start = time.perf_counter()
        drained = _Drained()
        for batch in collector:
            self._take(batch)
            # The collector uses the batch's memory again once nobody holds it.
            del batch
            self._seconds = time.perf_counter() - start
            text = describe_progress(self.stats, self.total, self._seconds)
            display.show(self.stats.frames, self._summary(), f": {text}")
            if interruptor.collection_stopped() and drained(collector):
                break

    def _summary(self) -> str:
        """Return what stands beside the bar."""
        recent = self.stats.recent(_RECENT)
        found = "" if recent is None else f"  return {recent[0]:,.1f}"
        return f"{self._rate:,.0f} frames/s{found}"

    @property
    def _rate(self) -> float:
        return self.stats.frames / self._seconds if self._seconds else 0.0

    def _take(self, batch: TensorDictBase) -> None:
        self.stats.update(batch)
        if self.recorder is not None:
            self.recorder.write(batch)

    def finish(self, status: str) -> None:
        """Write the card."""
        if self.recorder is not None:
            self._nbytes = self.recorder.nbytes
            speed = {"seconds": round(self._seconds, 3), "frames_per_second": round(self._rate, 1)}
            self.recorder.facts |= speed
            self.recorder.close(status)

    def report(self) -> list[tuple[str, str]]:
        """Return what is printed at the end."""
        options, frames = self._options, self.stats.frames
        lines = [
            ("environment", options.env),
            ("setting", str(topology(options))),
            ("policy", options.policy),
            ("seed", str(self._seed)),
            ("frames", f"{frames:,} in {self._seconds:,.1f} s ({self._rate:,.0f} per second)"),
            *describe_episodes(self.stats),
        ]
        if frames < self.total:
            lines.append(("interrupted", f"{self.total - frames:,} frames were left"))
        if self._nbytes:
            lines.append(("data", f"{options.out} ({size(self._nbytes)})"))
        return lines

    def draw(self) -> None:
        """Print a small picture of the returns, and how to get the full one."""
        episodes = self.stats.episodes
        if not episodes:
            return
        print()  # noqa: T201  # this is the command's output
        print_histogram(f"returns of {plural(episodes, 'episode')}", self.stats.returns)
        out = self._options.out
        how = "keep the frames with --out DIR, then: gleanrl inspect DIR"
        if out is not None:
            how = shlex.join(["gleanrl", "inspect", str(out)])
        print(f"returns over time: {how}")  # noqa: T201  # this is the command's output


def describe_progress(stats: EpisodeStats, total: int, seconds: float) -> str:
    """Say in one line how far ``seconds`` of collecting have come."""
    rate = stats.frames / seconds if seconds else 0.0
    percent = 100 * stats.frames // max(total, 1)
    parts = [f"{stats.frames:,}/{total:,} frames ({percent}%)", f"{rate:,.0f} frames/s"]
    parts.append(plural(stats.episodes, "episode"))
    recent = stats.recent(_RECENT)
    parts += [] if recent is None else [f"return {recent[0]:,.1f}", f"length {recent[1]:,.1f}"]
    return ", ".join(parts)


def run(options: CollectOptions) -> int:
    """Collect, print the result and return the exit code.

    Raises:
        ConfigError: an option is wrong or the environment is not known.
        Exception: what the environment, the policy or the disk raises; data written until then is
            kept and valid.
    """
    _check_counts(options)
    if options.out is not None:
        make_way(options.out)
        check_target(options.format, options.out.resolve())
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    policy = load_policy(options.policy)
    frames_per_batch, total = plan(options)
    interruptor = Interruptor()
    with topology(options).make(
        options.env, policy, frames_per_batch, total, interruptor
    ) as collector:
        if options.explain:
            print(collector.explain())  # noqa: T201  # this is the command's output
            return 0
        collector.set_seed(seed)
        task = Run(options, seed, total)
        if options.out is not None:
            task.record(options.out)
        display = Display(options.env, total, _LINE_EVERY_S)
        with _recording(task), display, _stop_on_interrupt(interruptor):
            task.collect(collector, interruptor, display)
    print_table(task.report())
    task.draw()
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
    topology(options).check_memory()


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
        task.finish(status)


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
