"""``gleanrl collect``: run a policy in an environment; show, or keep, the results."""

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
from rich.filesize import decimal as size

from gleanrl.cli.command_options import CollectOptions
from gleanrl.cli.display import plural, print_histogram, print_table
from gleanrl.cli.main import INTERRUPTED
from gleanrl.cli.topology import batch_steps, check, described, load_policy, make
from gleanrl.collectors import BaseCollector, Interruptor, MultiAsyncCollector
from gleanrl.recording.episode_stats import EpisodeStats, describe_episodes
from gleanrl.recording.formats import check_target
from gleanrl.recording.recorder import Recorder, make_way
from gleanrl.watch.progress import Display, describe

_LINE_EVERY_S = 5.0


def rounded_frames(options: CollectOptions) -> tuple[int, int]:
    """Return frames per batch and frames in total, both rounded up to whole steps and batches."""
    envs = options.num_envs_total
    if options.frames_per_batch is not None:
        batch = -(-options.frames_per_batch // envs) * envs
        return batch, -(-options.frames // batch) * batch
    steps = -(-options.frames // envs)
    most = batch_steps(options, steps)
    # Of the sizes up to twice as small, the one that overshoots least, then the largest.
    best = min(range((most + 1) // 2, most + 1), key=lambda size: (-steps % size, -size))
    return best * envs, -(-steps // best) * best * envs


def _delivered(collector: BaseCollector) -> list[int]:
    """Return how many batches each asynchronous worker with a policy has delivered."""
    if not isinstance(collector, MultiAsyncCollector):
        return []
    stats = collector.stats("per_worker")
    return [int(count) for name, count in stats.items() if name.endswith("/batches")]


def run(options: CollectOptions) -> int:
    """Collect, print the result and return the exit code."""
    check(options)
    if options.out is not None:
        make_way(options.out)
        check_target(options.format, options.out.resolve())
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    torch.manual_seed(seed)
    policy = load_policy(options.policy)
    frames_per_batch, total = rounded_frames(options)
    interruptor = Interruptor()
    with make(options, policy, frames_per_batch, total, interruptor) as collector:
        if options.explain:
            print(collector.explain())  # noqa: T201  # this is the command's output
            return 0
        collector.set_seed(seed)
        recorder = None if options.out is None else _recorder(options, options.out, seed, total)
        display = Display(options.env, total, _LINE_EVERY_S)
        with recorder or contextlib.nullcontext(), display, _stop_on_interrupt(interruptor):
            stats, seconds = _collect(collector, total, recorder, interruptor, display)
            if recorder is not None and stats.frames < total:
                recorder.close("interrupted")
    rate = stats.frames / max(seconds, 1e-9)
    lines = [
        ("environment", options.env),
        ("setting", described(options)),
        ("policy", options.policy),
        ("seed", str(seed)),
        ("frames", f"{stats.frames:,} in {seconds:,.1f} s ({rate:,.0f} per second)"),
        *describe_episodes(stats),
    ]
    if stats.frames < total:
        lines.append(("interrupted", f"{total - stats.frames:,} frames were left"))
    if recorder is not None and recorder.nbytes:
        lines.append(("data", f"{options.out} ({size(recorder.nbytes)})"))
    print_table(lines)
    _draw(stats, options.out)
    return INTERRUPTED if stats.frames < total else 0


def _recorder(options: CollectOptions, path: Path, seed: int, total: int) -> Recorder:
    facts = {
        "workers": options.processes,
        "backend": options.backend,
        "async": options.asynchronous,
        "policy": options.policy,
        "command": options.command,
    }
    return Recorder(
        path,
        options.format,
        env=options.env,
        num_envs=options.num_envs * max(1, options.processes),
        seed=seed,
        total_frames=total,
        facts=facts,
    )


def _collect(
    collector: BaseCollector,
    total: int,
    recorder: Recorder | None,
    interruptor: Interruptor,
    display: Display,
) -> tuple[EpisodeStats, float]:
    """Take batches until all frames have come or ``interruptor`` stops; return sums and seconds."""
    stats, seconds, start = EpisodeStats(), 0.0, time.perf_counter()
    goals: list[int] = []
    for batch in collector:
        stats.update(batch)
        if recorder is not None:
            recorder.write(batch)
        del batch  # the collector uses its memory again once nobody holds it
        seconds = time.perf_counter() - start
        if recorder is not None:
            rate = round(stats.frames / seconds, 1)
            recorder.facts |= {"seconds": round(seconds, 3), "frames_per_second": rate}
        stopped = interruptor.collection_stopped()
        if display.due or stopped or stats.frames >= total:
            beside, line = describe(collector.stats(), total, last=True)
            display.show(stats.frames, beside, f": {line}")
        if stopped:
            counts = _delivered(collector)
            # A worker is at most two rollouts ahead: one that is complete, one under way.
            goals = goals or [count + 2 for count in counts]
            if all(count >= goal for count, goal in zip(counts, goals, strict=True)):
                break
    return stats, seconds


def _draw(stats: EpisodeStats, out: Path | None) -> None:
    """Print a small picture of the returns, and how to get the full one."""
    if not stats.episodes:
        return
    print()  # noqa: T201  # this is the command's output
    print_histogram(f"returns of {plural(stats.episodes, 'episode')}", stats.returns)
    how = "keep the frames with --out DIR, then: gleanrl inspect DIR"
    if out is not None:
        how = shlex.join(["gleanrl", "inspect", str(out)])
    print(f"returns over time: {how}")  # noqa: T201  # this is the command's output


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
