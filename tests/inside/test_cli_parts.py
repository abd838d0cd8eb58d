"""Parts of the command line with many cases: episodes, datasets, sizes, settings."""

from __future__ import annotations

import io
import itertools
import os
import shlex
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.cli import topology
from gleanrl.cli.bench_command import Result, Results, settings_to_try
from gleanrl.cli.collect_command import rounded_frames
from gleanrl.cli.command_options import BenchOptions, CollectOptions
from gleanrl.cli.main import parser
from gleanrl.core.cgroups import usable_cores
from gleanrl.recording.episode_stats import EpisodeStats, summary
from gleanrl.watch.progress import Display, describe, plain

# -- episodes --------------------------------------------------------------------------------------


def loop_over(rewards, ended):
    """Returns and lengths by a plain loop, in the order in which episodes end."""
    rows = rewards.shape[0]
    sums, steps, found = [0.0] * rows, [0] * rows, []
    for t in range(rewards.shape[1]):
        for row in range(rows):
            sums[row] += rewards[row, t]
            steps[row] += 1
            if ended[row, t]:
                found.append((sums[row], steps[row], (t + 1) * rows))
                sums[row], steps[row] = 0.0, 0
    return found


def ids_of(ended):
    """Ids as collectors make them: ``episode * stride + row``."""
    rows = len(ended)
    episode = np.cumsum(ended, 1) - ended
    return episode * rows + np.arange(rows)[:, None]


def take_in(stats, rewards, ended, ids=None):
    """Add ``[R, T]`` arrays as a batch of a collector."""
    after = {"reward": torch.from_numpy(rewards), "done": torch.from_numpy(ended)}
    batch = TensorDict({"next": after}, rewards.shape)
    if ids is not None:
        batch["collector", "traj_ids"] = torch.from_numpy(ids)
    stats.update(batch)


streams = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.booleans(), min_size=rows, max_size=rows), min_size=1, max_size=30
    ).map(lambda bits: np.array(bits).T)
)


@examples(60)
@given(streams, st.sets(st.integers(1, 29)), st.booleans())
def test_where_batches_begin_changes_no_episode(ended, cuts, with_ids):
    rewards = np.arange(ended.size, dtype=np.float32).reshape(ended.shape)
    stats = EpisodeStats()
    edges = [0, *sorted(cut for cut in cuts if cut < ended.shape[1]), ended.shape[1]]
    for begin, end in itertools.pairwise(edges):
        part = np.s_[:, begin:end]
        take_in(stats, rewards[part], ended[part], ids_of(ended)[part] if with_ids else None)
    expected = loop_over(rewards, ended)
    assert stats.returns.tolist() == [item[0] for item in expected]
    assert stats.lengths.tolist() == [item[1] for item in expected]
    assert stats.ends.tolist() == [item[2] for item in expected]
    assert (stats.episodes, stats.frames) == (len(expected), ended.size)


@examples(40)
@given(streams, st.integers(1, 20))
def test_frames_laid_end_to_end_give_the_same_episodes(ended, steps):
    """As a dataset has them: batch after batch, within each one environment after the other."""
    rewards = np.arange(ended.size, dtype=np.float32).reshape(ended.shape)
    ids = ids_of(ended)
    batches = [np.s_[:, begin : begin + steps] for begin in range(0, ended.shape[1], steps)]
    flat = [np.concatenate([x[b].ravel() for b in batches])[None] for x in (rewards, ended, ids)]
    stats = EpisodeStats()
    half = max(1, ended.size // 2)
    take_in(stats, *(x[:, :half] for x in flat))
    if half < ended.size:
        take_in(stats, *(x[:, half:] for x in flat))
    found = sorted(zip(stats.returns.tolist(), stats.lengths.tolist(), strict=True))
    assert found == sorted((item[0], item[1]) for item in loop_over(rewards, ended))


def test_frames_never_collected_do_not_count():
    stats = EpisodeStats()
    none = np.zeros((2, 3), bool)
    take_in(stats, np.ones((2, 3)), none, np.array([[0, 0, -1], [-1, -1, -1]]))
    take_in(
        stats, np.ones((2, 3)), np.array([[0, 1, 0], [0, 0, 1]], bool), np.array([[0] * 3, [1] * 3])
    )
    assert stats.lengths.tolist() == [4, 3]
    assert stats.frames == 8


def test_an_episode_cut_by_a_reset_is_not_counted():
    stats = EpisodeStats()
    take_in(stats, np.ones((1, 3)), np.zeros((1, 3), bool), np.array([[0, 0, 0]]))
    take_in(stats, np.ones((1, 2)), np.array([[False, True]]), np.array([[1, 1]]))
    assert stats.lengths.tolist() == [2]


def test_a_return_is_the_mean_over_several_agents():
    batch = TensorDict(
        {
            "next": {
                "agents": {"reward": torch.ones(3, 2, 1), "done": torch.zeros(3, 2, 1).bool()},
                "done": torch.tensor([[False], [False], [True]]),
            }
        },
        [3],
    )
    stats = EpisodeStats()
    stats.update(batch)
    assert stats.returns.tolist() == [3.0]
    assert stats.lengths.tolist() == [3]


def test_returns_are_summed_up_for_json():
    stats = EpisodeStats()
    for reward in (1, 2, 3, 4):
        take_in(stats, np.full((1, 1), reward), np.ones((1, 1), bool))
    found = summary(stats.returns)
    assert found == {"mean": 2.5, "std": pytest.approx(1.118, abs=1e-3), "min": 1.0, "max": 4.0}
    assert summary(np.array([np.nan]))["mean"] is None
    assert summary(np.empty(0)) is None


# -- sizes and display -----------------------------------------------------------------------------


@examples(200)
@given(st.integers(1, 300_000), st.integers(1, 700))
def test_the_planned_sizes_are_whole_steps_and_overshoot_little(frames, num_envs):
    batch, total = rounded_frames(CollectOptions(env="e", frames=frames, num_envs=num_envs))
    assert batch % num_envs == 0
    assert total % batch == 0
    assert frames <= total <= frames * 1.05 + 8 * num_envs


@examples(100)
@given(st.integers(1, 300_000), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_planned_sizes_are_whole_steps_of_all_workers(frames, num_envs, workers, asynchronous):
    options = CollectOptions(
        env="e", frames=frames, num_envs=num_envs, workers=workers, asynchronous=asynchronous
    )
    batch, total = rounded_frames(options)
    lanes = num_envs if asynchronous else num_envs * workers
    assert batch % lanes == 0
    assert total % batch == 0
    assert frames <= total <= frames * 1.05 + 8 * lanes


def test_a_batch_size_that_was_asked_for_is_kept():
    options = CollectOptions(env="e", frames=1000, num_envs=3, frames_per_batch=100)
    assert rounded_frames(options) == (102, 1020)
    assert rounded_frames(CollectOptions(env="e")) == (500, 10_000)


def test_lines_come_every_few_seconds_and_say_where_collection_stands(capsys):
    facts = {"fps_mean": 2000.4, "episodes": 100, "return_mean": 21.56}
    with Display("CartPole-v1", 10_000, 5.0, clock=iter([0.0, 1.0, 5.0, 6.0, 10.0]).__next__) as d:
        for frames in (1000, 2000, 3000, 4000):
            text, line = describe({"frames": frames, **facts}, 10_000, last=True)
            assert text == "2,000 frames/s  return 21.6"
            d.show(frames, text, f": {line}")
    assert capsys.readouterr().err.splitlines() == [
        "CartPole-v1: 2,000/10,000 frames (20%), 2,000 frames/s, return 21.6",
        "CartPole-v1: 4,000/10,000 frames (40%), 2,000 frames/s, return 21.6",
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_shows_one_line_that_fits_and_cuts_the_label_last(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with Display("A label " * 5, 100_000, console=console, clock=iter([0.0, 3.0]).__next__) as d:
        d.show(60_000, "1,234,567 frames/s  return -123.4")
    line = console.file.getvalue().splitlines()[0].split("\x1b")[-1]
    assert "60%  1,234,567 frames/s  return -123.4  ETA 0:02" in line
    assert "━" in line
    assert ("A label A label A label A label A label" in line) == (width == 200)
    assert cell_len(line.partition("l")[2]) <= width


def test_text_from_files_cannot_drive_the_terminal():
    assert plain("a\x1b[2Jb\nc") == "a\ufffd[2Jb\ufffdc"


# -- what bench tries and says ---------------------------------------------------------------------


def setting(workers=None, num_envs=1, asynchronous=False, **more):
    more = {"env": "CartPole-v1", **more}
    return CollectOptions(workers=workers, num_envs=num_envs, asynchronous=asynchronous, **more)


SETTINGS = [
    setting(),
    setting(num_envs=4),
    setting(2),
    setting(2, 3),
    setting(3, 16, asynchronous=True),
]


@pytest.mark.parametrize("asked", SETTINGS, ids=topology.described)
def test_the_advised_command_means_the_setting(asked):
    asked = replace(asked, env="my module:Env-v0", policy="a b.py:act")
    words = shlex.split(topology.command(asked))
    options = parser().parse_args(words[1:])
    assert words[:2] == ["gleanrl", "collect"]
    assert asked == CollectOptions(
        **{item.name: getattr(options, item.name, "") for item in fields(asked)}
    )


@pytest.mark.parametrize("asked", [*SETTINGS[:4], setting(1, 2, True)], ids=topology.described)
def test_the_advised_call_makes_the_collector(asked):
    names = {
        "Collector": Collector,
        "MultiSyncCollector": MultiSyncCollector,
        "MultiAsyncCollector": MultiAsyncCollector,
        "policy": lambda observation: torch.ones(observation.shape[:-1], dtype=torch.int64),
    }
    frames = topology.batch_steps(asked, 5) * asked.num_envs_total
    asked = replace(asked, policy="x.py:policy")
    with (
        eval(topology.call(asked, frames), names) as called,
        topology.make(asked, names["policy"], frames) as made,
    ):
        assert type(called) is type(made)
        batch = called.next()
        assert batch.shape == made.next().shape
        assert batch.numel() == frames
        assert (batch["action"] == 1).all()


def test_what_is_tried_suits_the_cores(tmp_path):
    tried = settings_to_try(BenchOptions(env="CartPole-v1", num_envs=(1, 8)), cores=8)
    assert tried == [setting(w, n) for w in (None, 4, 8) for n in (1, 8)]
    tried = settings_to_try(BenchOptions(env="CartPole-v1", num_envs=(2,), workers=(3,)), cores=8)
    assert tried == [setting(None, 2), setting(3, 2)]
    own, group = len(os.sched_getaffinity(0)), tmp_path / "sys/fs/cgroup"
    for folder in (group / "job", group / "cpu/job", tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    for line, file, text, cores in (
        ("0::/", "cpu.max", "max 100000", own),
        ("0::/job", "cpu.max", "50000 100000", 1),  # of a group around its own
        ("0::/job", "job/cpu.max", "90000000 100000", 1),
        ("3:cpu,cpuacct:/job", "cpu/cpu.cfs_period_us", "100000", own),
        ("3:cpu,cpuacct:/job", "cpu/cpu.cfs_quota_us", "-1", own),
        ("3:cpu,cpuacct:/job", "cpu/cpu.cfs_quota_us", "50000", 1),
    ):
        (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
        (group / file).write_text(text)
        assert usable_cores(tmp_path) == cores


def results(*rows):
    return Results(BenchOptions(env="CartPole-v1", seconds=1.0), 2, list(rows))


def test_a_setting_that_fails_is_a_row_and_the_others_count():
    failed = Result(setting(9, 99), 8, error="ConfigError: too much memory")
    good = Result(setting(2, 4), 8, frames=500, seconds=1.0, start_s=0.2)
    found = results(failed, good, Result(setting(), 8, frames=250, seconds=1.0))
    assert found.best is good
    assert found.twins() == [setting(2, 4, asynchronous=True)]  # random actions need no policy
    assert [cells[0] for cells in found.cells()] == ["", "best", ""]
    assert [cells[3] for cells in found.cells()] == ["", "100 %", "50 %"]
    assert found.advice()[:2] == [
        ("failed", "9 workers with 99 environments each: ConfigError: too much memory"),
        ("command", "gleanrl collect CartPole-v1 --workers 2 --num-envs 4"),
    ]
    assert found.as_json()["settings"][0]["frames_per_second"] is None
    none = results(failed)
    assert (none.best, none.twins()) == (None, [])
    assert none.as_json()["best"] is None
