"""Parts of the command line with many cases: episodes, datasets, sizes, settings."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from gleanrl import Collector, ConfigError, MultiAsyncCollector, MultiSyncCollector
from gleanrl.cli import inspect, topology
from gleanrl.cli.bench import Result, Results
from gleanrl.cli.bench import plan as plan_bench
from gleanrl.cli.collect import describe_progress, plan
from gleanrl.cli.dataset import Dataset, DatasetWriter, Metadata
from gleanrl.cli.display import Display, plain
from gleanrl.cli.episodes import EpisodeStats, summary
from gleanrl.cli.main import main, parser
from gleanrl.cli.options import BenchOptions, CollectOptions
from gleanrl.cli.topology import Topology
from gleanrl.core.keys import as_key
from gleanrl.memory.tensor_files import TensorFileError

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


streams = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.booleans(), min_size=rows, max_size=rows), min_size=1, max_size=30
    ).map(lambda bits: np.array(bits).T)
)


@settings(max_examples=60, deadline=None)
@given(streams, st.sets(st.integers(1, 29)), st.booleans())
def test_where_batches_begin_changes_no_episode(ended, cuts, with_ids):
    rewards = np.arange(ended.size, dtype=np.float32).reshape(ended.shape)
    stats = EpisodeStats()
    edges = [0, *sorted(cut for cut in cuts if cut < ended.shape[1]), ended.shape[1]]
    for begin, end in itertools.pairwise(edges):
        part = np.s_[:, begin:end]
        stats.add(rewards[part], ended[part], ids_of(ended)[part] if with_ids else None)
    expected = loop_over(rewards, ended)
    assert stats.returns.tolist() == [item[0] for item in expected]
    assert stats.lengths.tolist() == [item[1] for item in expected]
    assert stats.ends.tolist() == [item[2] for item in expected]
    assert (stats.episodes, stats.frames) == (len(expected), ended.size)


@settings(max_examples=40, deadline=None)
@given(streams, st.integers(1, 20))
def test_frames_laid_end_to_end_give_the_same_episodes(ended, steps):
    """As a dataset has them: batch after batch, within each one environment after the other."""
    rewards = np.arange(ended.size, dtype=np.float32).reshape(ended.shape)
    ids = ids_of(ended)
    batches = [np.s_[:, begin : begin + steps] for begin in range(0, ended.shape[1], steps)]
    flat = [np.concatenate([x[b].ravel() for b in batches])[None] for x in (rewards, ended, ids)]
    stats = EpisodeStats()
    half = flat[0].shape[1] // 2
    stats.add(*(x[:, :half] for x in flat))
    stats.add(*(x[:, half:] for x in flat))
    found = sorted(zip(stats.returns.tolist(), stats.lengths.tolist(), strict=True))
    assert found == sorted((item[0], item[1]) for item in loop_over(rewards, ended))


def test_frames_never_collected_do_not_count():
    stats = EpisodeStats()
    none = np.zeros((2, 3), bool)
    stats.add(np.ones((2, 3)), none, np.array([[0, 0, -1], [-1, -1, -1]]))
    stats.add(np.ones((2, 3)), np.array([[0, 1, 0], [0, 0, 1]], bool), np.array([[0] * 3, [1] * 3]))
    assert stats.lengths.tolist() == [4, 3]
    assert stats.frames == 8


def test_an_episode_cut_by_a_reset_is_not_counted():
    stats = EpisodeStats()
    stats.add(np.ones((1, 3)), np.zeros((1, 3), bool), np.array([[0, 0, 0]]))
    stats.add(np.ones((1, 2)), np.array([[False, True]]), np.array([[1, 1]]))
    assert stats.lengths.tolist() == [2]


def test_rewards_of_several_agents_add_up():
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
    assert stats.returns.tolist() == [6.0]
    assert stats.recent(100) == (6.0, 3.0)


def test_recent_looks_at_the_latest_episodes_only():
    stats = EpisodeStats()
    assert stats.recent(2) is None
    for reward in (1, 2, 3, 4):
        stats.add(np.full((1, 1), reward), np.ones((1, 1), bool))
    assert stats.recent(2) == (3.5, 1.0)
    found = summary(stats.returns)
    assert found == {"mean": 2.5, "std": pytest.approx(1.118, abs=1e-3), "min": 1.0, "max": 4.0}
    assert summary(np.array([np.nan]))["mean"] is None
    assert summary(np.empty(0)) is None


# -- datasets --------------------------------------------------------------------------------------


def make_frames(number, start=0, episode=5):
    """``[number]`` frames; an episode ends every ``episode`` frames."""
    index = torch.arange(start, start + number)
    done = ((index + 1) % episode == 0).unsqueeze(-1)
    return TensorDict(
        {
            "observation": index.float().unsqueeze(-1).expand(number, 3).clone(),
            "a/b": index.to(torch.bfloat16),
            "collector": {"traj_ids": index // episode},
            "next": {
                "reward": torch.ones(number, 1),
                "done": done,
                "inner": {"image": index.to(torch.uint8)},
            },
        },
        [number],
        names=["time"],
    )


def write_dataset(path, batches=3, capacity=30, status="complete", **facts):
    writer = DatasetWriter(path, capacity)
    for k in range(batches):
        writer.write(make_frames(10, 10 * k), lambda: facts)
    writer.finish(status, facts)
    return writer


@pytest.mark.parametrize("batches", [3, 2])
def test_what_was_written_reads_back_with_both_readers(tmp_path, batches):
    write_dataset(tmp_path / "data", batches)
    expected = make_frames(10 * batches)
    dataset, loaded = Dataset(tmp_path / "data"), TensorDict.load_memmap(tmp_path / "data")
    assert loaded.batch_size == expected.batch_size
    for key in expected.keys(True, True):
        torch.testing.assert_close(dataset.read(as_key(key)), expected[key], rtol=0, atol=0)
        torch.testing.assert_close(loaded[key] + 0, expected[key] + 0, rtol=0, atol=0)
    assert dataset.metadata.frames == dataset.metadata.rows == 10 * batches


def test_what_is_read_cannot_change_the_files(tmp_path):
    write_dataset(tmp_path / "data")
    Dataset(tmp_path / "data").read(("observation",)).zero_()
    assert Dataset(tmp_path / "data").read(("observation",))[-1, 0] == 29


def test_a_killed_collection_leaves_the_frames_its_card_counts(tmp_path):
    writer = DatasetWriter(tmp_path / "data", 30, clock=iter([0.0, 1.0, 5.0]).__next__)
    for k, counted in enumerate((10, 10, 30)):
        writer.write(make_frames(10, 10 * k), dict)
        card = Metadata.read(tmp_path / "data")
        assert (card.status, card.frames, card.rows) == ("collecting", counted, 30)
    found = Dataset(tmp_path / "data").read(("next", "inner", "image"))
    assert found.tolist() == list(range(30))


def test_a_batch_that_was_interrupted_midway_is_not_counted(tmp_path):
    writer = DatasetWriter(tmp_path / "data", 30)
    writer.write(make_frames(10), dict)
    with pytest.raises(RuntimeError):
        writer.write(make_frames(10, 10).set("observation", torch.zeros(10, 4)), dict)
    writer.finish("interrupted", {})
    assert TensorDict.load_memmap(tmp_path / "data").shape == (10,)


def test_nothing_collected_leaves_no_directory(tmp_path):
    DatasetWriter(tmp_path / "deep" / "data", 10).finish("interrupted", {})
    assert not (tmp_path / "deep").exists()
    assert tmp_path.exists()


def test_a_first_batch_that_fails_leaves_nothing_of_ours(tmp_path):
    (tmp_path / "mine").mkdir()
    writer = DatasetWriter(tmp_path / "mine", 10)
    with pytest.raises(TensorFileError, match="do not fit"):
        writer.write(make_frames(11), dict)
    assert (tmp_path / "mine" / "next" / "inner").is_dir()
    (tmp_path / "mine" / "next" / "notes.txt").write_text("not ours")
    writer.finish("failed", {})
    writer.finish("failed", {})
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["notes.txt"]


def test_a_dataset_is_complete_if_the_working_directory_changes_midway(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = DatasetWriter(Path("data") / "new", 30)
    writer.write(make_frames(10), dict)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer.write(make_frames(10, 10), dict)
    writer.finish("complete", {})
    assert Dataset(tmp_path / "data" / "new").metadata.frames == 20
    assert TensorDict.load_memmap(tmp_path / "data" / "new").shape == (20,)


def test_targets_that_would_overwrite_something_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        DatasetWriter(tmp_path, 10)
    with pytest.raises(ConfigError, match="is not a directory"):
        DatasetWriter(tmp_path / "file", 10)
    with pytest.raises(ConfigError, match="cannot be made"):
        DatasetWriter(tmp_path / "file" / "below", 10)


def test_frames_that_do_not_fit_the_disk_are_refused_before_any_is_written(tmp_path):
    writer = DatasetWriter(tmp_path / "data", 10**15)
    with pytest.raises(TensorFileError, match="collect fewer --frames"):
        writer.write(make_frames(10), dict)


def test_entries_that_are_not_tensors_are_named(tmp_path):
    frames = make_frames(2)
    frames["word"] = NonTensorStack("a", "b")
    with pytest.raises(TensorFileError, match="'word' cannot be written"):
        DatasetWriter(tmp_path / "data", 10).write(frames, dict)


def test_data_without_rewards_or_episodes_can_be_inspected(capsys, tmp_path):
    writer = DatasetWriter(tmp_path / "data", 4)
    writer.write(make_frames(4).exclude(("next", "reward")), dict)
    writer.finish("complete", {"env": "\x1b[31mred", "versions": {"torch": "2"}})
    assert main(["inspect", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    assert re.search("^episodes .*no rewards or no end flags", out, re.M)
    assert "\x1b" not in out
    write_dataset(tmp_path / "short", batches=1, capacity=10)
    card = json.loads((tmp_path / "short" / "card.json").read_text())
    (tmp_path / "short" / "card.json").write_text(json.dumps({**card, "frames": 3}))
    assert main(["inspect", str(tmp_path / "short")]) == 0
    out = capsys.readouterr().out
    assert re.search("^plot *none: there is no complete episode to draw$", out, re.M)


def test_a_dataset_is_read_a_bounded_number_of_frames_at_a_time(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(inspect, "_CHUNK_FRAMES", 7)
    stats = inspect.episodes(Dataset(tmp_path / "data"))
    assert stats.lengths.tolist() == [5] * 6
    assert stats.ends.tolist() == [5, 10, 15, 20, 25, 30]


# -- sizes and display -----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 700))
def test_the_planned_sizes_are_whole_steps_and_overshoot_little(frames, num_envs):
    batch, total = plan(CollectOptions(env="e", frames=frames, num_envs=num_envs))
    assert batch % num_envs == 0
    assert total % batch == 0
    assert frames <= total <= frames * 1.05 + 8 * num_envs


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_planned_sizes_are_whole_steps_of_all_workers(frames, num_envs, workers, asynchronous):
    options = CollectOptions(
        env="e", frames=frames, num_envs=num_envs, workers=workers, asynchronous=asynchronous
    )
    batch, total = plan(options)
    lanes = num_envs if asynchronous else num_envs * workers
    assert batch % lanes == 0
    assert total % batch == 0
    assert frames <= total <= frames * 1.05 + 8 * lanes


def test_a_batch_size_that_was_asked_for_is_kept():
    options = CollectOptions(env="e", frames=1000, num_envs=3, frames_per_batch=100)
    assert plan(options) == (102, 1020)
    assert plan(CollectOptions(env="e")) == (500, 10_000)


def test_lines_come_every_few_seconds_and_say_where_collection_stands(capsys):
    stats = EpisodeStats()
    rewards, ended = np.full((1, 1000), 21.56 / 20), np.tile([False] * 19 + [True], 50)[None]
    with Display("CartPole-v1", 10_000, 5.0, clock=iter([0.0, 1.0, 5.0, 6.0, 10.0]).__next__) as d:
        for frames in (1000, 2000, 3000, 4000):
            stats.add(rewards, ended)
            d.show(frames, "", f": {describe_progress(stats, 10_000, frames / 2000)}")
    facts = "episodes, return 21.6, length 20.0"
    assert capsys.readouterr().err.splitlines() == [
        f"CartPole-v1: 2,000/10,000 frames (20%), 2,000 frames/s, 100 {facts}",
        f"CartPole-v1: 4,000/10,000 frames (40%), 2,000 frames/s, 200 {facts}",
    ]


def test_text_from_files_cannot_drive_the_terminal():
    assert plain("a\x1b[2Jb\nc") == "a\ufffd[2Jb\ufffdc"


# -- what bench tries and says ---------------------------------------------------------------------


SETTINGS = [
    Topology(),
    Topology(0, 4),
    Topology(2, 1),
    Topology(2, 3),
    Topology(3, 16, asynchronous=True),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_advised_command_means_the_setting(setting):
    words = shlex.split(setting.command("my module:Env-v0", "a b.py:act"))
    options = parser().parse_args(words[1:])
    assert words[:2] == ["gleanrl", "collect"]
    assert (options.env, options.policy) == ("my module:Env-v0", "a b.py:act")
    found = Topology(options.workers or 0, options.num_envs, options.asynchronous)
    assert found == setting


@pytest.mark.parametrize("setting", [*SETTINGS[:4], Topology(1, 2, asynchronous=True)], ids=str)
def test_the_advised_call_makes_the_collector(setting):
    names = {
        "Collector": Collector,
        "MultiSyncCollector": MultiSyncCollector,
        "MultiAsyncCollector": MultiAsyncCollector,
        "policy": lambda observation: torch.ones(observation.shape[:-1], dtype=torch.int64),
    }
    frames = setting.steps(5) * setting.num_envs_total
    with (
        eval(setting.call("CartPole-v1", "x.py:policy", frames), names) as called,
        setting.make("CartPole-v1", names["policy"], frames) as made,
    ):
        assert type(called) is type(made)
        batch = called.next()
        assert batch.shape == made.next().shape
        assert batch.numel() == frames
        assert (batch["action"] == 1).all()


def test_what_is_tried_suits_the_cores(monkeypatch, tmp_path):
    tried = plan_bench(BenchOptions(env="e", num_envs=(1, 8)), cores=8)
    assert tried == [Topology(w, n) for w in (0, 4, 8) for n in (1, 8)]
    tried = plan_bench(BenchOptions(env="e", num_envs=(2,), workers=(3,)), cores=8)
    assert tried == [Topology(0, 2), Topology(3, 2)]
    own = len(os.sched_getaffinity(0))
    for text, cores in (("max 100000", own), ("50000 100000", 1), ("90000000 100000", own)):
        (tmp_path / "cpu.max").write_text(text)
        monkeypatch.setattr(topology, "_CPU_QUOTA", tmp_path / "cpu.max")
        assert topology.usable_cores() == cores


def results(*rows):
    found = Results("CartPole-v1", "random", 1.0, 2)
    found.rows += rows
    return found


def test_a_setting_that_fails_is_a_row_and_the_others_count():
    failed = Result(Topology(9, 99), 8, error="ConfigError: too much memory")
    good = Result(Topology(2, 4), 8, frames=500, seconds=1.0, start_s=0.2)
    found = results(failed, good, Result(Topology(), 8, frames=250, seconds=1.0))
    assert found.best is good
    assert found.asynchronous_twin() == Topology(2, 4, asynchronous=True)
    assert [cells[0] for cells in found.cells()] == ["", "best", ""]
    assert [cells[3] for cells in found.cells()] == ["", "100 %", "50 %"]
    assert found.advice()[:2] == [
        ("failed", "9 workers with 99 environments each: ConfigError: too much memory"),
        ("command", "gleanrl collect CartPole-v1 --workers 2 --num-envs 4"),
    ]
    assert found.as_json()["settings"][0]["frames_per_second"] is None
    none = results(failed)
    assert none.best is none.asynchronous_twin() is None
    assert none.as_json()["best"] is None
