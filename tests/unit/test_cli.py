"""The command line: statistics, data on disk, display, commands."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from gleanrl import ConfigError
from gleanrl.cli import collect, progress, show
from gleanrl.cli.card import DatasetError, read_card
from gleanrl.cli.collect import CollectOptions, plan
from gleanrl.cli.dataset import Dataset, DatasetWriter
from gleanrl.cli.episodes import EpisodeStats, Summary
from gleanrl.cli.main import main
from gleanrl.cli.policies import load_policy
from gleanrl.cli.progress import Lines, Moment, plain
from gleanrl.core.keys import as_key

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
    assert Summary.of(stats.returns) == Summary(2.5, pytest.approx(1.118, abs=1e-3), 1.0, 4.0)
    assert Summary.of(np.array([np.nan])).as_json()["mean"] is None


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
    assert dataset.card.frames == dataset.card.rows == 10 * batches


def test_what_is_read_cannot_change_the_files(tmp_path):
    write_dataset(tmp_path / "data")
    Dataset(tmp_path / "data").read(("observation",)).zero_()
    assert Dataset(tmp_path / "data").read(("observation",))[-1, 0] == 29


def test_a_killed_collection_leaves_the_frames_its_card_counts(tmp_path):
    writer = DatasetWriter(tmp_path / "data", 30, clock=iter([0.0, 1.0, 5.0]).__next__)
    for k, counted in enumerate((10, 10, 30)):
        writer.write(make_frames(10, 10 * k), dict)
        card = read_card(tmp_path / "data")
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
    with pytest.raises(DatasetError, match="do not fit"):
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
    assert Dataset(tmp_path / "data" / "new").card.frames == 20
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
    with pytest.raises(DatasetError, match="collect fewer --frames"):
        writer.write(make_frames(10), dict)


def test_entries_that_are_not_tensors_are_named(tmp_path):
    frames = make_frames(2)
    frames["word"] = NonTensorStack("a", "b")
    with pytest.raises(DatasetError, match="'word' cannot be written"):
        DatasetWriter(tmp_path / "data", 10).write(frames, dict)


def edit_card(path, change):
    card = json.loads((path / "card.json").read_text())
    change(card)
    (path / "card.json").write_text(json.dumps(card))


def first_column(name, value):
    def change(card):
        card["keys"][0][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (first_column("file", "../secret"), "must be within the dataset"),
        (first_column("file", "/etc/passwd"), "must be within the dataset"),
        (first_column("file", "next/../../secret"), "must be within the dataset"),
        (first_column("file", "C:\\secret"), "must be within the dataset"),
        (first_column("file", "link.memmap"), "leads out of the dataset"),
        (first_column("file", "next"), "has no file 'next'"),
        (first_column("file", "missing.memmap"), "has no file"),
        (first_column("file", "\ud800"), "must be within the dataset"),
        (first_column("shape", [4]), r"has 360 bytes; 30 rows of 'observation' take 480"),
        (first_column("shape", [-3]), "must list whole numbers"),
        (first_column("shape", [2**62, 2**62]), "take"),
        (first_column("shape", "3"), "must list whole numbers"),
        (first_column("dtype", "object"), "dtype of .* is not known"),
        (first_column("dtype", ["float32"]), "dtype of .* is not known"),
        (first_column("key", []), "must be a list of strings"),
        (lambda card: card["keys"].append(3), "is not an object"),
        (lambda card: card.update(keys={}), "'keys' must be a list"),
        (lambda card: card.update(frames=31), "31 frames cannot be in files of 30 rows"),
        (lambda card: card.update(frames=-1), "'frames' .* must be a whole number"),
        (lambda card: card.update(frames=True), "'frames' .* must be a whole number"),
        (lambda card: card.update(rows=2**80), "'rows' .* must be a whole number"),
        (lambda card: card.update(status="fine"), "'status'"),
        (lambda card: card.update(format="zip"), "is not the card of a dataset"),
        (lambda card: card.update(format_version=2), "format version 2"),
    ],
)
def test_a_card_that_lies_is_refused(tmp_path, change, message):
    path = tmp_path / "data"
    write_dataset(path)
    (tmp_path / "secret").write_bytes(bytes(360))
    (path / "link.memmap").symlink_to(tmp_path / "secret")
    edit_card(path, change)
    with pytest.raises(DatasetError, match=message):
        Dataset(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\udc80"])
def test_a_card_that_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "card.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DatasetError, match=r"cannot be read as JSON|is not the card"):
        Dataset(tmp_path)
    (tmp_path / "card.json").unlink()
    os.mkfifo(tmp_path / "card.json")
    with pytest.raises(DatasetError, match=r"has no card\.json"):
        read_card(tmp_path)


class Bomb:
    def __reduce__(self):
        return (os._exit, (3,))


def test_inspecting_unpickles_nothing(tmp_path, capsys):
    path = tmp_path / "data"
    write_dataset(path)
    for name in ("other.pickle", "observation.pickle", "meta.json", "next/meta.json"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    assert main(["inspect", str(path)]) == 0
    assert "mean 5.0" in capsys.readouterr().out


# -- policies, sizes, display ----------------------------------------------------------------------


POLICIES = """
import torch
from dataclasses import dataclass

def act(observation):
    return 1

def make():
    return torch.nn.Linear(4, 2)

def make_with(width=3):
    return torch.nn.Linear(4, width)

def variadic(*args):
    return 1

@dataclass
class Thing:
    n: int = 2
    def __call__(self, observation):
        return self.n

module = torch.nn.Identity()
number = 3
"""


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "some_policies.py"
    file.write_text(POLICIES)
    return file


def test_policies_are_made_by_what_makes_them_and_taken_as_they_are_otherwise(policy_file):
    assert load_policy("random") is None
    assert load_policy(f"{policy_file}:act").__name__ == "act"
    assert load_policy(f"{policy_file}:variadic").__name__ == "variadic"
    assert load_policy(f"{policy_file}:make").out_features == 2
    assert load_policy(f"{policy_file}:make_with").out_features == 3
    assert load_policy(f"{policy_file}:Thing").n == 2
    assert isinstance(load_policy(f"{policy_file}:module"), torch.nn.Identity)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("greedy", "neither 'random' nor FILE.py:NAME"),
        ("{}", "neither 'random' nor FILE.py:NAME"),
        ("{}:not a name", "neither 'random' nor FILE.py:NAME"),
        ("nowhere.py:act", "there is no file 'nowhere.py'"),
        ("{}:absent", "does not define 'absent'"),
        ("{}:number", "an? int cannot be called"),
    ],
)
def test_policies_that_cannot_be_found_are_named(policy_file, text, message):
    with pytest.raises(ConfigError, match=message):
        load_policy(text.format(policy_file))


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


def test_lines_come_every_few_seconds_and_say_where_collection_stands():
    stream = io.StringIO()
    lines = Lines(stream, "CartPole-v1", clock=iter([0.0, 1.0, 5.0, 6.0, 10.0]).__next__)
    with lines:
        for frames in (1000, 2000, 3000, 4000):
            lines.show(Moment(frames, 10_000, frames / 2000, frames // 20, (21.55, 20.0)))
    facts = "episodes, return 21.6, length 20.0"
    assert stream.getvalue().splitlines() == [
        f"CartPole-v1: 2,000/10,000 frames (20%), 2,000 frames/s, 100 {facts}",
        f"CartPole-v1: 4,000/10,000 frames (40%), 2,000 frames/s, 200 {facts}",
    ]


def test_a_terminal_gets_a_bar_and_a_table(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    with progress.make_display("[x]", 10_000) as display:
        display.show(Moment(5_000, 10_000, 1.0, 1, None))
    progress.print_facts([("name", "[bold]value")])
    captured = capsys.readouterr()
    assert "[x]" in captured.err
    assert "5,000/10,000 frames" in captured.err
    assert "1 episode" in captured.err
    assert "[bold]value" in captured.out


def test_text_from_files_cannot_drive_the_terminal():
    assert plain("a\x1b[2Jb\nc") == "a\ufffd[2Jb\ufffdc"


# -- commands --------------------------------------------------------------------------------------


def run(capsys, *arguments):
    """Run the command line; return exit code, standard output and standard error."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines_of(out):
    return dict(line.split(maxsplit=1) for line in out.splitlines() if " " in line.strip())


@pytest.mark.parametrize("num_envs", [1, 3])
def test_collect_reports_every_episode(capsys, tmp_path, num_envs):
    path = tmp_path / "data"
    code, out, _ = run(
        capsys,
        "collect",
        "CartPole-v1",
        "--frames",
        "3e3",
        "--num-envs",
        num_envs,
        "--seed",
        3,
        "--out",
        path,
    )
    assert code == 0
    card = json.loads((path / "card.json").read_text())
    data = TensorDict.load_memmap(path)
    assert data.shape == (card["frames"],)
    assert card["frames"] >= 3000
    assert card["episodes"] == int(data["next", "done"].sum()) > 50
    assert card["returns"]["mean"] == card["lengths"]["mean"]
    assert (card["status"], card["seed"], card["env"]) == ("complete", 3, "CartPole-v1")
    assert ("collector", "mask") not in data.keys(True, True)
    assert card["command"].startswith("gleanrl collect CartPole-v1")
    assert card["versions"]["torch"]
    facts = lines_of(out)
    assert facts["episodes"] == str(card["episodes"])
    assert facts["frames"].startswith(f"{card['frames']:,} in ")


def test_a_relative_directory_is_where_the_command_was_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = os.path.join("data", "cartpole")
    arguments = ("collect", "CartPole-v1", "--frames", 50, "--out", where)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert lines_of(out)["data"].startswith(f"{where} (")
    assert Dataset(tmp_path / "data" / "cartpole").card.frames == 50
    assert run(capsys, "inspect", where)[0] == 0


def test_a_collection_that_fails_at_once_can_be_tried_again(
    capsys, tmp_path, monkeypatch, policy_file
):
    monkeypatch.chdir(tmp_path)
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(3,)").replace(
            "signal.raise_signal(signal.SIGINT)", "raise OverflowError('too much')"
        )
    )
    arguments = ("collect", "CartPole-v1", "--frames", 50, "--out", "data")
    assert run(capsys, *arguments, "--policy", f"{policy_file}:act")[0] == 1
    assert not (tmp_path / "data").exists()
    assert run(capsys, *arguments)[0] == 0


def test_inspect_finds_the_episodes_that_collect_counted(capsys, tmp_path):
    path = tmp_path / "data"
    _, collected, _ = run(
        capsys, "collect", "CartPole-v1", "--frames", 2000, "--num-envs", 2, "--out", path
    )
    code, out, err = run(capsys, "inspect", path)
    assert (code, err) == (0, "")
    for name in ("episodes", "return", "length", "seed", "policy"):
        assert lines_of(out)[name] == lines_of(collected)[name]
    assert "next.reward  float32 [1]" in out
    assert (path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_frames(capsys, tmp_path):
    for name in ("one", "two"):
        arguments = ("--frames", 200, "--seed", 7, "--out", tmp_path / name)
        assert run(capsys, "collect", "CartPole-v1", *arguments)[0] == 0
    one, two = (TensorDict.load_memmap(tmp_path / name) for name in ("one", "two"))
    assert (one == two).all()


def test_a_policy_from_a_file_acts(capsys, tmp_path, policy_file):
    policy_file.write_text("import torch\ndef act(observation):\n    return torch.tensor(1)\n")
    arguments = ("--policy", f"{policy_file}:act", "--frames", 50, "--out", tmp_path / "data")
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert (code, err) == (0, "")
    assert (TensorDict.load_memmap(tmp_path / "data")["action"] == 1).all()


INTERRUPTING = """
import signal
import torch

steps = 0

def act(observation):
    global steps
    steps += 1
    if steps in {at}:
        signal.raise_signal(signal.SIGINT)
    return torch.tensor(0)
"""


def test_ctrl_c_keeps_every_step_taken(capsys, tmp_path, policy_file):
    policy_file.write_text(INTERRUPTING.replace("{at}", "(131,)"))
    path = tmp_path / "data"
    arguments = ("--frames", 1000, "--frames-per-batch", 100, "--out", path)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(
        capsys, "collect", "CartPole-v1", "--policy", f"{policy_file}:act", *arguments
    )
    assert (code, err) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before
    assert "frames were left" in lines_of(out)["interrupted"]
    card = Dataset(path).card
    assert card.status == "interrupted"
    assert card.frames in (130, 131)
    assert TensorDict.load_memmap(path).shape == (card.frames,)
    assert lines_of(run(capsys, "inspect", path)[1])["status"] == "interrupted"


def test_a_second_ctrl_c_stops_at_once_and_keeps_whole_batches(capsys, tmp_path, policy_file):
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(131,)").replace(
            "signal.raise_signal(signal.SIGINT)",
            "[signal.raise_signal(signal.SIGINT) for _ in 'ab']",
        )
    )
    path = tmp_path / "data"
    arguments = ("--frames", 1000, "--frames-per-batch", 100, "--out", path)
    code, _, err = run(
        capsys, "collect", "CartPole-v1", "--policy", f"{policy_file}:act", *arguments
    )
    assert (code, err) == (130, "gleanrl: error: interrupted\n")
    card = Dataset(path).card
    assert (card.status, card.frames) == ("interrupted", 100)


def test_a_policy_that_fails_is_one_line_and_the_data_so_far_are_kept(
    capsys, tmp_path, policy_file
):
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(131,)").replace(
            "signal.raise_signal(signal.SIGINT)", "raise OverflowError('too\\n  much')"
        )
    )
    path = tmp_path / "data"
    arguments = ["--policy", f"{policy_file}:act", "--frames-per-batch", 100, "--out", path]
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert (code, err) == (1, "gleanrl: error: OverflowError: too much\n")
    assert (Dataset(path).card.status, Dataset(path).card.frames) == ("failed", 100)
    arguments[-1] = tmp_path / "again"
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments, "--traceback")
    assert code == 1
    assert "Traceback" in err
    assert "in act" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "CartPol-v1"], "CartPole-v1"),
        (["collect", "CartPole-v1", "--frames", "many"], "'many' is not a whole number"),
        (["collect", "CartPole-v1", "--frames", "0"], "'0' is not a whole number of 1 or more"),
        (["collect", "CartPole-v1", "--num-envs", "1.5"], "'1.5' is not a whole number"),
        (["collect", "CartPole-v1", "--seed", "-1"], "expected one argument|'-1' is not a whole"),
        (["collect", "CartPole-v1", "--policy", "nowhere.py:act"], "no file 'nowhere.py'"),
        (["collect", "CartPole-v1", "--out", "/"], "is not empty"),
        (["collect"], "required: ENV"),
        (["inspect", "/nowhere/at/all"], "is not a directory"),
        (["gather"], "invalid choice: 'gather'"),
        ([], "required: COMMAND"),
        (["collect", "CartPole-v1", "--workers", "0"], "'0' is not a whole number of 1 or more"),
        (["collect", "CartPole-v1", "--async"], "say how many with --workers N"),
        (["collect", "CartPol-v1", "--workers", "1"], "error: no environment is .*CartPole-v1"),
        (["bench", "CartPol-v1"], "CartPole-v1"),
        (["bench", "CartPole-v1", "--seconds", "0"], "'0' is not a positive number of seconds"),
        (["bench", "CartPole-v1", "--seconds", "soon"], "'soon' is not a positive number"),
        (["bench", "CartPole-v1", "--workers", "1,x"], "'x' is not a whole number"),
        (["bench", "CartPole-v1", "--num-envs", "0"], "'0' is not a whole number of 1 or more"),
        (["bench", "CartPole-v1", "--out", "/"], "exists already"),
        (["bench", "CartPole-v1", "--out", "/nowhere/at/all.json"], "not a directory that can be"),
        (["bench", "CartPole-v1", "--policy", "greedy"], "neither 'random' nor"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("gleanrl")
    assert err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


def test_inspecting_a_directory_without_card_exits_with_1(capsys, tmp_path):
    code, out, err = run(capsys, "inspect", tmp_path)
    assert (code, out) == (1, "")
    assert err == (
        f"gleanrl: error: {tmp_path} has no card.json, so it was not written by "
        "'gleanrl collect --out'\n"
    )


def test_inspect_draws_where_it_is_told_to(capsys, tmp_path):
    write_dataset(tmp_path / "data")
    code, out, _ = run(capsys, "inspect", tmp_path / "data", "--plot", tmp_path / "here.png")
    assert code == 0
    assert lines_of(out)["plot"] == str(tmp_path / "here.png")
    assert (tmp_path / "here.png").exists()
    assert not (tmp_path / "data" / "returns.png").exists()
    target = tmp_path / "no" / "here.png"
    code, _, err = run(capsys, "inspect", tmp_path / "data", "--plot", target)
    assert (code, err) == (
        1,
        f"gleanrl: error: {target} cannot be written: No such file or directory\n",
    )


def test_a_link_in_a_dataset_does_not_choose_what_the_plot_overwrites(capsys, tmp_path):
    write_dataset(tmp_path / "data")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "data" / "returns.png").symlink_to(tmp_path / "precious")
    code, out, _ = run(capsys, "inspect", tmp_path / "data")
    assert code == 0
    assert "is not an ordinary file" in lines_of(out)["plot"]
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_matplotlib_inspect_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_dataset(tmp_path / "data")
    code, out, _ = run(capsys, "inspect", tmp_path / "data")
    assert code == 0
    assert lines_of(out)["plot"].endswith("pip install 'gleanrl[plot]'")
    code, _, err = run(capsys, "inspect", tmp_path / "data", "--plot", tmp_path / "x.png")
    assert code == 1
    assert "pip install 'gleanrl[plot]'" in err


def test_data_without_rewards_or_episodes_can_be_inspected(capsys, tmp_path):
    writer = DatasetWriter(tmp_path / "data", 4)
    writer.write(make_frames(4).exclude(("next", "reward")), dict)
    writer.finish("complete", {"env": "\x1b[31mred", "versions": {"torch": "2"}})
    code, out, _ = run(capsys, "inspect", tmp_path / "data")
    assert code == 0
    assert "no rewards or no end flags" in lines_of(out)["episodes"]
    assert "\x1b" not in out
    write_dataset(tmp_path / "short", batches=1, capacity=10)
    edit_card(tmp_path / "short", lambda card: card.update(frames=3))
    code, out, _ = run(capsys, "inspect", tmp_path / "short")
    assert code == 0
    assert lines_of(out)["plot"] == "none: there is no complete episode to draw"


def test_a_dataset_is_read_a_bounded_number_of_frames_at_a_time(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(show, "_CHUNK_FRAMES", 7)
    stats = show.episodes(Dataset(tmp_path / "data"))
    assert stats.lengths.tolist() == [5] * 6
    assert stats.ends.tolist() == [5, 10, 15, 20, 25, 30]


def test_help_shows_examples_and_version_is_printed(capsys):
    for arguments in (["--help"], *([name, "--help"] for name in ("collect", "bench", "inspect"))):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert "examples:\n  gleanrl " in out
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("gleanrl 0.")


@pytest.mark.parametrize(
    ("argument", "code"), [("--version", 0), ("--help", 0), ("colect", 2)], ids=str
)
def test_nothing_heavy_is_imported_before_a_command_needs_it(argument, code):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gleanrl", argument],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == code
    assert {name for name in imported if name.startswith("gleanrl")} == {
        "gleanrl", "gleanrl.core", "gleanrl.core.errors", "gleanrl.core.lazy",
        "gleanrl.cli", "gleanrl.cli.main", "gleanrl.cli.arguments", "gleanrl.cli.codes",
    }  # fmt: skip
    assert not imported & {"torch", "tensordict", "gymnasium", "numpy", "rich", "rich.console"}
    assert "gleanrl" in done.stdout + done.stderr


def test_the_command_on_the_card_can_be_typed_again():
    assert collect.command_line(["collect", "X", "--out", "a b"]) == "gleanrl collect X --out 'a b'"
