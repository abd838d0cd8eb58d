"""Data that stay: what is recorded reads back, whatever ends the recording."""

import json
import os
import re
import subprocess

import pytest
import torch
from disk_rig import MB, fill, rows
from tensordict import NonTensorStack, TensorDict

import gleanrl
from gleanrl import Collector, ConfigError, GleanError, MultiSyncCollector, Recorder, load_dataset
from gleanrl.cli.main import main


def card_of(path):
    return json.loads((path / "card.json").read_text())


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


def equal(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        torch.testing.assert_close(one[key] + 0, other[key] + 0, rtol=0, atol=0)


# -- writing by hand -------------------------------------------------------------------------------


def test_what_was_written_reads_back_with_both_readers(tmp_path):
    with Recorder(tmp_path / "data") as recorder:
        for k in range(3):
            recorder.write(make_frames(10, 10 * k))
            equal(load_dataset(tmp_path / "data"), make_frames(10 * (k + 1)))
        assert card_of(tmp_path / "data")["status"] == "collecting"
    for frames in (load_dataset(tmp_path / "data"), TensorDict.load_memmap(tmp_path / "data")):
        equal(frames, make_frames(30))
    assert (card_of(tmp_path / "data")["status"], recorder.frames) == ("complete", 30)
    load_dataset(tmp_path / "data")["observation"].zero_()
    assert load_dataset(tmp_path / "data")["observation"][-1, 0] == 29
    with pytest.raises(gleanrl.ClosedError):
        recorder.write(make_frames(10))


def test_a_mask_and_leading_dimensions_are_taken_out(tmp_path):
    batch = make_frames(12).reshape(3, 4)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    with Recorder(tmp_path / "data") as recorder:
        recorder.write(batch.set(("collector", "mask"), mask))
    frames = load_dataset(tmp_path / "data")
    assert ("collector", "mask") not in frames.keys(True)
    assert frames["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]


def test_frames_that_differ_are_refused_and_those_before_kept(tmp_path):
    with Recorder(tmp_path / "data") as recorder:
        recorder.write(make_frames(10))
        odd = make_frames(10, 10).set("observation", torch.zeros(10, 4))
        with pytest.raises(GleanError, match=r"'observation' is \[4\] .* and \[3\] float32"):
            recorder.write(odd)
        with pytest.raises(GleanError, match="'a/b' is missing"):
            recorder.write(make_frames(10).exclude("a/b"))
        with pytest.raises(GleanError, match="'word' cannot be recorded: not a tensor"):
            recorder.write(make_frames(2).set("word", NonTensorStack("a", "b")))
        recorder.write(make_frames(10, 10))
    equal(load_dataset(tmp_path / "data"), make_frames(20))


def test_nothing_recorded_leaves_nothing_but_what_others_put_there(tmp_path):
    with Recorder(tmp_path / "deep" / "data"):
        pass
    assert not (tmp_path / "deep").exists()
    recorder = Recorder(tmp_path / "data", total_frames=10**15)
    with pytest.raises(GleanError, match="collect fewer frames"):
        recorder.write(make_frames(11))
    (tmp_path / "data" / "notes.txt").write_text("not ours")
    recorder.close("failed")
    recorder.close("failed")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "notes.txt"]


def test_only_a_dataset_is_overwritten_and_only_if_told_to(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        Recorder(tmp_path)
    with pytest.raises(ConfigError, match="is not overwritten"):
        Recorder(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="is not a directory"):
        Recorder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be made"):
        Recorder(tmp_path / "file" / "below")
    for number in (10, 20):
        with Recorder(tmp_path / "data", overwrite=True) as recorder:
            recorder.write(make_frames(number))
    assert len(load_dataset(tmp_path / "data")) == 20
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "zip"}, "must be one of 'tensordict', 'minari', 'parquet'"),
        ({"where": "here"}, "must be 'workers' or 'learner'"),
        ({"format": "minari"}, "has to end like 'data-v0'"),
        ({"num_envs": 0}, "num_envs"),
    ],
)
def test_arguments_that_are_wrong_are_named_before_anything_is_made(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        Recorder(tmp_path / "data", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_recording_is_whole_if_the_working_directory_changes_midway(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(os.path.join("data", "new"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recorder.write(make_frames(20))
    recorder.close()
    assert len(load_dataset(tmp_path / "data" / "new")) == 20


def test_a_disk_that_fills_up_is_an_error_and_keeps_what_was_written(small_disk):
    disk = small_disk(4 * MB)

    recorder = Recorder(disk / "data")
    recorder.write(rows(0, 100))
    fill(disk)
    with pytest.raises(GleanError, match="No space left.*the 100 frames before are kept"):
        recorder.write(rows(100, 1000))
    recorder.close("failed")
    frames = load_dataset(disk / "data")
    assert frames["number"].tolist() == list(range(100))
    assert card_of(disk / "data")["status"] == "failed"
    assert TensorDict.load_memmap(disk / "data").shape == frames.shape


# -- collectors ------------------------------------------------------------------------------------


def record(path, format="tensordict", workers=2, **arguments):
    """Record 400 frames of CartPole, made with seed 3."""
    with Recorder(path, format, **arguments) as recorder:
        common = {"frames_per_batch": 100, "total_frames": 400, "replay_buffer": recorder}
        if workers:
            envs = ["CartPole-v1"] * workers
            collector = MultiSyncCollector(envs, num_envs=2, backend="inline", **common)
        else:
            collector = Collector("CartPole-v1", num_envs=2, **common)
        collector.set_seed(3)
        assert [batch for batch in collector if batch is not None] == []
    assert collector.closed


@pytest.mark.parametrize("where", ["workers", "learner"])
def test_workers_write_the_frames_that_the_learner_would_get(tmp_path, where):
    record(tmp_path / "data", where=where)
    with MultiSyncCollector(
        ["CartPole-v1"] * 2, num_envs=2, frames_per_batch=100, total_frames=400, backend="inline"
    ) as collector:
        collector.set_seed(3)
        delivered = torch.cat([batch.reshape(-1) for batch in collector])
    recorded = load_dataset(tmp_path / "data")
    order = [
        (frames["collector", "traj_ids"] * 1000).argsort(stable=True)
        for frames in (recorded, delivered)
    ]
    equal(recorded[order[0]], delivered[order[1]])
    card = card_of(tmp_path / "data")
    assert (card["env"], card["num_envs"], card["seed"]) == ("CartPole-v1", 4, 3)
    assert "environment after environment" in card["rows"]
    assert card["episodes"] == int(delivered["next", "done"].sum())
    assert main(["inspect", str(tmp_path / "data")]) == 0


SCRIPT = """
import os, signal, sys
import torch
from gleanrl import MultiSyncCollector, Recorder

kind, path = sys.argv[1:]
calls = 0

def policy(observation):
    global calls
    calls += 1
    if calls == 120 and kind == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros(len(observation), dtype=torch.int64)

with Recorder(path) as recorder:
    collector = MultiSyncCollector(
        ["CartPole-v1"] * 2, policy, num_envs=2, frames_per_batch=100, replay_buffer=recorder
    )
    for number, _ in enumerate(collector):
        if number == 3 and kind != "worker":
            os.kill(os.getpid(), {"learner": signal.SIGKILL, "ctrl-c": signal.SIGINT}[kind])
"""


@pytest.mark.parametrize(
    ("kind", "status"),
    [("worker", "failed"), ("learner", "interrupted"), ("ctrl-c", "interrupted")],
)
def test_whatever_is_killed_every_frame_that_was_written_is_read(
    tmp_path, python, capsys, kind, status
):
    path = tmp_path / "data"
    done = subprocess.run([python, "-c", SCRIPT, kind, str(path)], capture_output=True, text=True)
    assert done.returncode, done.stderr
    frames = load_dataset(path)
    assert len(frames) >= 200
    for _, steps in groups(frames["collector", "traj_ids"], frames):
        assert (steps["next", "observation"][:-1] == steps["observation"][1:]).all()
    assert main(["inspect", str(path)]) == 0
    assert re.search(f"^status +{status}$", capsys.readouterr().out, re.M)


def groups(ids, frames):
    """The frames of each episode."""
    return [(number, frames[ids == number]) for number in ids.unique().tolist()]
