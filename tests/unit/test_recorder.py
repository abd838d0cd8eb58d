"""Data that stay: what is recorded reads back, whatever ends the recording."""

import json
import os
import re
import shutil
import subprocess

import pytest
import torch
from cli_rig import card_of
from disk_rig import MB, fill, rows
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import NonTensorStack, TensorDict

import gleanrl
from gleanrl import (
    Collector,
    ConfigError,
    GleanError,
    MultiStep,
    MultiSyncCollector,
    Recorder,
    load_dataset,
)
from gleanrl.cli.main import main


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


def converted(source, target, format, **facts):
    with Recorder(target, format, **facts) as recorder:
        recorder.write(load_dataset(source))


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


@pytest.mark.parametrize("format", ["tensordict", "parquet"])
def test_nested_batch_sizes_are_kept(tmp_path, format):
    agents = TensorDict({"observation": torch.rand(2, 5, 3, 4)}, [2, 5, 3])
    batch = TensorDict({"agents": agents, "next": {"agents": agents.clone()}}, [2, 5])
    with Recorder(tmp_path / "data", format) as recorder:
        recorder.write(batch)
        assert load_dataset(tmp_path / "data")["agents"].shape == (10, 3)
    converted(tmp_path / "data", tmp_path / "converted", "tensordict")
    for frames in (load_dataset(tmp_path / "data"), TensorDict.load(tmp_path / "converted")):
        assert frames.shape == (10,)
        assert frames["agents"].shape == frames["next", "agents"].shape == (10, 3)
        assert (frames["agents", "observation"] == agents["observation"].reshape(10, 3, 4)).all()


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
        with Recorder(tmp_path / "names") as other:
            for key in ("../above", ("shards", "main"), "a:b"):
                with pytest.raises(GleanError, match="no file can be called so"):
                    other.write(TensorDict(batch_size=[1]).set(key, torch.zeros(1)))
            with pytest.raises(GleanError, match="without entries"):
                other.write(TensorDict(batch_size=[1]))
            other.write(make_frames(5)[:0])
        assert other.frames == 0
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
            with pytest.raises(ConfigError, match="is being recorded to"):
                Recorder(tmp_path / "data", overwrite=True)
            with pytest.raises(ConfigError, match="status"):
                recorder.close("done")
    assert len(load_dataset(tmp_path / "data")) == 20
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "zip"}, "must be one of 'tensordict', 'minari', 'parquet'"),
        ({"where": "here"}, "must be 'workers' or 'learner'"),
        ({"format": "minari"}, "must end like 'data-v0'"),
        ({"num_envs": 0}, "num_envs"),
        ({"total_frames": "1"}, "total_frames"),
        ({"facts": {"model": object()}}, "as JSON"),
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

    pytest.importorskip("pyarrow")
    (disk / "other").unlink()
    recorder = Recorder(disk / "columns", "parquet")
    recorder.write(rows(0, 100).set("noise", torch.rand(100, 1000)))
    fill(disk)
    with pytest.raises(GleanError, match="could not be finished: .*No space left"):
        recorder.close()
    assert load_dataset(disk / "columns")["number"].tolist() == list(range(100))
    assert card_of(disk / "columns")["status"] == "failed"


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


def test_collectors_whose_episodes_have_the_same_numbers_are_kept_apart(tmp_path):
    arguments = {"frames_per_batch": 10, "total_frames": 10}
    with Recorder(tmp_path / "data") as recorder:
        Collector("CartPole-v1", replay_buffer=recorder, **arguments).shutdown()
        with pytest.raises(ConfigError, match="records another collector already"):
            Collector("CartPole-v1", replay_buffer=recorder, **arguments)


def test_writing_frames_of_two_collectors_with_the_same_ids_is_refused(tmp_path):
    arguments = {"num_envs": 2, "frames_per_batch": 200, "postproc": MultiStep(0.9, 3)}
    first, second = (Collector("CartPole-v1", **arguments) for _ in range(2))
    with Recorder(tmp_path / "data") as recorder:
        recorder.write(first.rollout())
        recorder.write(first.rollout())  # continues the episodes that were cut
        with pytest.raises(ConfigError, match="add a number to the ids"):
            recorder.write(second.rollout())
    written = load_dataset(tmp_path / "data")
    assert len(written) == 400
    with Recorder(tmp_path / "both-v0", "minari") as recorder:
        recorder.write(written)
        batch = second.rollout()
        batch["collector", "traj_ids"] += 1000
        recorder.write(batch)
    both = load_dataset(tmp_path / "both-v0")["collector", "traj_ids"]
    alone = (written["collector", "traj_ids"], batch["collector", "traj_ids"])
    assert len(both.unique()) == sum(len(ids.unique()) for ids in alone)


def test_a_worker_that_does_not_see_the_disk_says_so(tmp_path):
    with Recorder(tmp_path / "data") as recorder:
        card = tmp_path / "data" / "card.json"
        away = card.rename(tmp_path / "away")  # as on another machine's disk
        with pytest.raises(ConfigError, match="worker 0 on .* record with .*where='learner'"):
            MultiSyncCollector(
                ["CartPole-v1"], frames_per_batch=10, replay_buffer=recorder, backend="inline"
            )
        away.rename(card)


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
    pytest.importorskip("pyarrow")
    path = tmp_path / "data"
    done = subprocess.run([python, "-c", SCRIPT, kind, str(path)], capture_output=True, text=True)
    assert done.returncode, done.stderr
    frames = load_dataset(path)
    assert len(frames) >= 200
    for _, steps in groups(frames["collector", "traj_ids"], frames):
        assert (steps["next", "observation"][:-1] == steps["observation"][1:]).all()
    assert main(["inspect", str(path)]) == 0
    assert re.search(f"^status +{status}$", capsys.readouterr().out, re.M)
    converted(path, tmp_path / "again", "parquet")
    equal(in_order(load_dataset(tmp_path / "again")), in_order(frames))


def groups(ids, frames):
    """The frames of each episode."""
    return [(number, frames[ids == number]) for number in ids.unique().tolist()]


# -- formats ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The same 400 frames of two environments in every format, by seed."""
    root = tmp_path_factory.mktemp("recorded")
    for format in ("tensordict", "minari", "parquet"):
        record(root / f"{format}-v0", format, workers=0)
    return root


def in_order(frames):
    """Frames by episode, as all formats have them."""
    keys = ["observation", "action", ("collector", "traj_ids")]
    keys += [("next", name) for name in ("observation", "reward", "terminated", "truncated")]
    order = frames["collector", "traj_ids"].argsort(stable=True)
    return frames.select(*keys)[order]


def test_one_seed_gives_the_same_frames_in_every_format(recorded, capsys):
    expected = in_order(load_dataset(recorded / "tensordict-v0"))
    said = set()
    for format in ("tensordict", "minari", "parquet"):
        equal(in_order(load_dataset(recorded / f"{format}-v0")), expected)
        assert main(["inspect", str(recorded / f"{format}-v0")]) == 0
        out = capsys.readouterr().out
        said.add(tuple(re.findall("^(?:episodes|return|length|frames) .*", out, re.M)))
    assert len(said) == 1


def test_minari_reads_whole_episodes(recorded, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(recorded))
    dataset = minari.load_dataset("minari-v0")
    expected = load_dataset(recorded / "tensordict-v0")
    card = card_of(recorded / "minari-v0")
    assert dataset.total_steps == 400
    assert dataset.total_episodes == len(expected["collector", "traj_ids"].unique())
    assert len(card["episodes_cut"]) <= 2
    environment = dataset.recover_environment()
    assert environment.spec.id == "CartPole-v1"
    for number, (_, frames) in enumerate(groups(expected["collector", "traj_ids"], expected)):
        episode = dataset[number]
        assert len(episode.observations) == len(frames) + 1
        assert (episode.observations[:-1] == frames["observation"].numpy()).all()
        assert (episode.observations[-1] == frames["next", "observation"][-1].numpy()).all()
        assert (episode.actions == frames["action"].numpy()).all()
        assert episode.rewards.sum() == len(frames)
        assert episode.terminations[-1] | episode.truncations[-1]
        assert (number in card["episodes_cut"]) == (not frames["next", "done"][-1].item())
    metadata = list(dataset.storage.get_episode_metadata([0, 1]))
    assert [found["seed"] for found in metadata] == [3, 4]
    assert (environment.reset(seed=3)[0] == dataset[0].observations[0]).all()


def test_pandas_and_hugging_face_read_a_row_per_frame(recorded):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    expected = load_dataset(recorded / "tensordict-v0")
    table = pandas.read_parquet(recorded / "parquet-v0" / "data")
    assert len(table) == 400
    assert table["observation"].tolist()[7].tolist() == expected["observation"][7].tolist()
    assert (table["action"] == expected["action"].numpy()).all()
    assert (table["terminated"] == expected["next", "terminated"].squeeze(1).numpy()).all()
    assert (table["env"] == expected["collector", "traj_ids"].numpy() % 2).all()
    episode = table[table["episode"] == 3]
    assert episode["step"].tolist() == list(range(len(episode)))
    files = str(recorded / "parquet-v0" / "data" / "*.parquet")
    cache = str(recorded / "cache")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert rows.column_names == list(table.columns)
    assert (
        rows.with_format("torch")[7]["observation"].tolist() == expected["observation"][7].tolist()
    )


def dict_frames(number):
    def observed(index):
        image = index.to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 16, 20, 3)
        return {"image": image.clone(), "inner": {"speed": index.double()}}

    index = torch.arange(number)
    ended = ((index + 1) % 4 == 0).unsqueeze(1)
    after = {"reward": torch.ones(number, 1), "terminated": ended, "truncated": ended & False}
    return TensorDict(
        {
            **observed(index),
            "action": torch.eye(3)[index % 3],
            "policy_version": index,
            "collector": {"traj_ids": index // 4},
            "next": {**observed(index + 1), **after},
        },
        [number],
    )


def test_dict_observations_images_and_other_entries_are_kept(tmp_path):
    minari, pq = pytest.importorskip("minari"), pytest.importorskip("pyarrow.parquet")
    for format in ("tensordict", "parquet", "minari"):
        with Recorder(tmp_path / f"{format}-v0", format) as recorder:
            recorder.write(dict_frames(10))
            recorder.write(dict_frames(20)[10:])
        equal(load_dataset(tmp_path / f"{format}-v0"), dict_frames(20))
    episode = minari.MinariDataset(tmp_path / "minari-v0" / "data")[1]
    assert episode.observations["image"].shape == (5, 16, 20, 3)
    assert episode.observations["inner"]["speed"].tolist() == [4, 5, 6, 7, 8]
    assert episode.infos["policy_version"].tolist() == [4, 5, 6, 7]
    (file,) = (tmp_path / "parquet-v0" / "data").iterdir()
    shapes = json.loads(pq.read_schema(file).metadata[b"gleanrl.shapes"])
    assert shapes["image"] == [16, 20, 3]


def test_a_dataset_is_written_in_other_formats(tmp_path, recorded):
    pytest.importorskip("pyarrow")
    converted(recorded / "tensordict-v0", tmp_path / "parquet", "parquet")
    converted(tmp_path / "parquet", tmp_path / "again-v0", "minari", seed=3)
    converted(tmp_path / "parquet", tmp_path / "twice", "parquet")
    expected = in_order(load_dataset(recorded / "tensordict-v0"))
    equal(in_order(load_dataset(tmp_path / "again-v0")), expected)
    twice = load_dataset(tmp_path / "twice")
    equal(in_order(twice), expected)
    assert not {"done", "terminated", "truncated"} & set(twice.keys())
    assert card_of(tmp_path / "again-v0")["seed"] == 3


def test_a_directory_that_minari_takes_for_no_namespace_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'x', .* for a namespace: use two or more letters"):
        Recorder(tmp_path / "x" / "data-v0", "minari")
    Recorder(tmp_path / "mine" / "x" / "data-v0", "minari").close()


def test_what_minari_needs_is_asked_for_at_the_first_write(tmp_path):
    pytest.importorskip("minari")
    recorder = Recorder(tmp_path / "data-v0", "minari")
    with pytest.raises(GleanError, match=r"need .*traj_ids.*, 'action', .*; the frames have none"):
        recorder.write(make_frames(4).exclude("collector"))
    recorder.close()


def test_minari_refuses_names_that_hdf5_reads_as_groups(tmp_path):
    pytest.importorskip("minari")
    recorder = Recorder(tmp_path / "data-v0", "minari")
    with pytest.raises(GleanError, match=r"rename 'a/b': a slash"):
        recorder.write(dict_frames(4).set("a/b", torch.zeros(4)))
    recorder.close()


def test_entries_without_elements_are_recorded(tmp_path):
    frames = make_frames(4).set("nothing", torch.zeros(4, 0))
    with Recorder(tmp_path / "data") as recorder:
        recorder.write(frames)
        recorder.write(frames)
    assert load_dataset(tmp_path / "data")["nothing"].shape == (8, 0)


def test_minari_needs_both_observations_of_a_step(tmp_path):
    pytest.importorskip("minari")
    with (
        Recorder(tmp_path / "data-v0", "minari") as recorder,
        gleanrl.Collector(
            CartPoleEnv,  # its spaces are in the card
            frames_per_batch=20,
            total_frames=40,
            max_frames_per_traj=5,
            compact_obs=True,
            replay_buffer=recorder,
        ) as collector,
        pytest.raises(GleanError, match=r"an observation .* under 'next' \(compact_obs=False\)"),
    ):
        next(iter(collector))


def test_a_table_refuses_flags_that_it_has_no_column_for(tmp_path):
    pytest.importorskip("pyarrow")
    frames = make_frames(10)
    frames["done"] = torch.zeros(10, 1, dtype=torch.bool)
    for name, flag in (("never", False), ("once", True)):
        frames["done"][3] = flag
        with Recorder(tmp_path / name, "tensordict") as recorder:
            recorder.write(frames)
    converted(tmp_path / "never", tmp_path / "never-table", "parquet")
    with pytest.raises(GleanError, match="'done' is True in some frames"):
        converted(tmp_path / "once", tmp_path / "once-table", "parquet")


@pytest.mark.parametrize(("envs", "known"), [(1, True), (3, False)])
def test_episodes_without_ids_are_counted_only_if_one_environment_made_them(tmp_path, envs, known):
    with Recorder(tmp_path / "data") as recorder:
        for _ in Collector(
            "CartPole-v1",
            num_envs=envs,
            frames_per_batch=30,
            total_frames=300,
            track_traj_ids=False,
            replay_buffer=recorder,
        ):
            pass
    assert ("episodes" in card_of(tmp_path / "data")) is known


def test_a_card_without_entries_is_no_dataset(recorded, tmp_path):
    path = shutil.copytree(recorded / "tensordict-v0", tmp_path / "data")
    (path / "card.json").write_text(json.dumps({**card_of(path), "keys": []}))
    with pytest.raises(GleanError, match="holds no frames"):
        gleanrl.load_dataset(path)


def test_a_dataset_of_anyone_neither_runs_code_nor_reads_other_files(recorded, tmp_path):
    path = shutil.copytree(recorded / "tensordict-v0", tmp_path / "data")
    called = tmp_path / "called"
    spec = json.loads(card_of(path)["env_spec"])
    spec |= {"id": "Evil-v0", "entry_point": "os:mkdir", "kwargs": {"path": str(called)}}
    card = {**card_of(path), "env": "Evil-v0", "env_spec": json.dumps(spec)}
    (path / "card.json").write_text(json.dumps(card))
    converted(path, tmp_path / "converted-v0", "minari")
    assert not called.exists()
    card |= {"observation_space": {"type": "Box"}, "action_space": {"type": "Box"}}
    (path / "card.json").write_text(json.dumps(card))
    converted(path, tmp_path / "no-spaces-v0", "minari")

    h5py = pytest.importorskip("h5py")
    other = tmp_path / "converted-v0/data/main_data.hdf5"
    path = shutil.copytree(recorded / "minari-v0", tmp_path / "linked")
    with h5py.File(path / "data/main_data.hdf5", "r+") as file:
        rewards = file["episode_0/rewards"]
        shape, dtype = rewards.shape, rewards.dtype
        del file["episode_0/rewards"]
        file["episode_0/rewards"] = h5py.ExternalLink(str(other), "episode_0/rewards")
    with pytest.raises(GleanError, match="leads out of the file"):
        load_dataset(path)
    with h5py.File(path / "data/main_data.hdf5", "r+") as file:
        del file["episode_0/rewards"]
        raw = [(str(other), 0, h5py.h5f.UNLIMITED)]
        file["episode_0"].create_dataset("rewards", shape, dtype, external=raw)
    with pytest.raises(GleanError, match="leads out of the file"):
        load_dataset(path)
    path = shutil.copytree(recorded / "parquet-v0", tmp_path / "parquet")
    (path / "data").rename(tmp_path / "elsewhere")
    (path / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GleanError, match="leads out of the dataset"):
        load_dataset(path)
