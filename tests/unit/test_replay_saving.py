"""What is saved comes back: in memory and on disk, without pickle."""

import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl import (
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)


def rows(first, count):
    number = torch.arange(first, first + count)
    data = {"number": number, "next": {"half": number.bfloat16().unsqueeze(1)}}
    return TensorDict(data, [count])


def through_memory(source, target, _):
    target.load_state_dict(source.state_dict())


def through_files(source, target, path):
    source.dumps(path)
    target.loads(path)


WAYS = [through_memory, through_files]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None)
@given(writes=st.lists(st.integers(1, 9), max_size=5), shared=st.booleans(), size=st.integers(2, 9))
def test_a_buffer_comes_back(tmp_path_factory, way, writes, shared, size):
    path = tmp_path_factory.mktemp("buffer")
    source = ReplayBuffer(storage=LazyTensorStorage(7), shared=shared)
    written = 0
    for count in writes:
        source.extend(rows(written, count))
        written += count
    target = ReplayBuffer(storage=LazyMemmapStorage(size), shared=shared)
    target.extend(rows(1000, 3))
    way(source, target, path)
    assert target.write_count == source.write_count == written
    assert len(target) == min(size, len(source))
    if written:
        expected = sorted(source[:]["number"].tolist())[-size:]
        assert sorted(target[:]["number"].tolist()) == expected
        if size == 7:
            assert (target[:] == source[:]).all()
            assert target.extend(rows(0, 2)).tolist() == source.extend(rows(0, 2)).tolist()


@pytest.mark.parametrize("way", WAYS)
def test_env_time_and_slices_come_back(tmp_path, way):
    def make():
        sampler = SliceSampler(slice_len=4, end_key="done")
        return ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), sampler=sampler)

    source, target = make(), make()
    number = torch.arange(14).repeat(2, 1)
    source.extend(TensorDict({"number": number, "done": number % 7 == 6}, [2, 14]))
    way(source, target, tmp_path)
    assert (target[:] == source[:]).all()
    assert (target.sample(40)["number"].view(-1, 4).diff(dim=1) == 1).all()


@pytest.mark.parametrize("way", WAYS)
def test_priorities_come_back(tmp_path, way):
    def make():
        sampler = PrioritizedSampler(10, 1.0, 1.0)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)

    source, target = make(), make()
    source.extend(rows(0, 6))
    source.update_priority(torch.arange(6), torch.tensor([0, 0, 5.0, 0, 0, 0]))
    way(source, target, tmp_path)
    assert set(target.sample(50)["number"].tolist()) == {2}
    assert target.sampler.default_priority == 5.0


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_goes_on(tmp_path, way):
    def make():
        return ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement())

    source, target = make(), make()
    source.extend(rows(0, 10))
    first = source.sample(6)["number"].tolist()
    way(source, target, tmp_path)
    assert sorted(first + target.sample(6)["number"].tolist()) == list(range(10))


def test_lists_come_back_in_memory_only(tmp_path):
    source, target = (ReplayBuffer(storage=ListStorage(4)) for _ in range(2))
    source.extend(["a", "b", "c", "d", "e"])
    target.load_state_dict(source.state_dict())
    assert sorted(target[:]) == ["b", "c", "d", "e"]
    assert target.write_count == 5
    with pytest.raises(ConfigError, match="state_dict"):
        source.dumps(tmp_path)


def test_other_rows_are_refused(tmp_path):
    source = ReplayBuffer(storage=LazyTensorStorage(5))
    source.extend(rows(0, 3))
    source.dumps(tmp_path)
    target = ReplayBuffer(storage=LazyTensorStorage(5))
    target.extend(torch.arange(3))
    with pytest.raises(ConfigError, match="this storage holds rows of"):
        target.loads(tmp_path)


def test_a_second_dump_replaces_the_first(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(rows(0, 3))
    rb.dumps(tmp_path)
    rb.extend(rows(3, 2))
    rb.dumps(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    fresh = ReplayBuffer(storage=LazyTensorStorage(5))
    fresh.loads(tmp_path)
    assert fresh[:]["number"].tolist() == [0, 1, 2, 3, 4]


class Canary:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def damage_text(folder, meta):
    (folder / "meta.json").write_text("{")


def damage_folder(folder, meta):
    (folder / "meta.json").write_text(json.dumps({**meta, "folder": "../elsewhere"}))


def damage_size(folder, meta):
    (folder / meta["folder"] / "0.bin").write_bytes(b"short")


def damage_shape(folder, meta):
    meta["files"][0]["shape"] = [2**62, 4]
    (folder / "meta.json").write_text(json.dumps(meta))


def damage_link(folder, meta):
    path = folder / meta["folder"] / "0.bin"
    path.rename(folder / "moved")
    path.symlink_to(folder / "moved")


def damage_pickle(folder, meta):
    (folder / "meta.json").write_bytes(pickle.dumps(Canary()))


def damage_layout(folder, meta):
    meta["storage"]["layout"] = meta["storage"]["layout"].replace("int64", "load")
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage",
    [
        damage_text,
        damage_folder,
        damage_size,
        damage_shape,
        damage_link,
        damage_pickle,
        damage_layout,
    ],
)
def test_damaged_files_are_refused_and_change_nothing(tmp_path, damage, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(rows(0, 3))
    folder = tmp_path / "buffer"
    rb.dumps(folder)
    damage(folder, json.loads((folder / "meta.json").read_text()))
    with pytest.raises(ConfigError):
        rb.loads(folder)
    assert rb[:]["number"].tolist() == [0, 1, 2]
    assert not (tmp_path / "sprung").exists()
