"""What is saved comes back: in memory and on disk, without pickle."""

import contextlib
import copy
import itertools
import json
import os
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import (
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gleanrl.memory import tensor_files


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
@examples(25)
@given(writes=st.lists(st.integers(1, 9), max_size=5), shared=st.booleans())
def test_a_buffer_comes_back(tmp_path_factory, way, writes, shared):
    path = tmp_path_factory.mktemp("buffer")
    source = ReplayBuffer(storage=LazyTensorStorage(7), shared=shared)
    written = 0
    for count in writes:
        source.extend(rows(written, count))
        written += count
    target = ReplayBuffer(storage=LazyMemmapStorage(7), shared=shared)
    target.extend(rows(1000, 3))
    way(source, target, path)
    assert target.write_count == source.write_count == written
    assert len(target) == len(source)
    if written:
        assert (target[:] == source[:]).all()
        assert target.extend(rows(0, 2)).tolist() == source.extend(rows(0, 2)).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", [1, 2])
def test_a_storage_of_another_size_takes_no_state(tmp_path, way, made):
    source, target = (ReplayBuffer(storage=LazyTensorStorage(size, ndim=made)) for size in (8, 12))
    for rb, first in ((source, 0), (target, 50)):
        rb.extend(rows(first, 6) if made == 1 else rows(first, 6).reshape(2, 3))
    before = target[:].clone()
    with pytest.raises(ConfigError, match=f"of {8 // made} places .* a storage of {12 // made}:"):
        way(source, target, tmp_path)
    assert (target[:] == before).all()


def test_nor_does_a_list_of_another_size():
    source, target = (ReplayBuffer(storage=ListStorage(size)) for size in (4, 5))
    source.extend(["a"])
    target.extend(["b"])
    with pytest.raises(ConfigError, match="a state of 4 places"):
        target.load_state_dict(source.state_dict())
    assert target[:] == ["b"]


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
def test_saved_priorities_count_by_the_alpha_of_the_sampler_that_loads_them(tmp_path, way):
    def make(alpha):
        sampler = PrioritizedSampler(10, alpha, 1.0, eps=0.0)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler)

    source, target, third = make(2.0), make(0.5), make(0.0)
    source.extend(rows(0, 4))
    source.update_priority(torch.arange(4), torch.tensor([0.0, 1.0, 4.0, 16.0]))
    way(source, target, tmp_path)
    shares = torch.bincount(target.sample(7000)["number"], minlength=4) / 1000
    assert torch.allclose(shares, torch.tensor([0.0, 1.0, 2.0, 4.0]), atol=0.3)
    target.sampler.alpha = 2.0  # as a schedule does
    assert torch.equal(target.state_dict()["sampler"]["priorities"][:4].sqrt().round(), FOUR)
    target.sampler.alpha = 0.0
    with pytest.raises(ConfigError, match="equal for good"):
        target.sampler.alpha = 1.0
    way(target, third, tmp_path)
    with pytest.raises(ConfigError, match="equal for good"):
        way(third, source, tmp_path)
    assert torch.equal(source.state_dict()["sampler"]["priorities"][:4].sqrt(), FOUR)


FOUR = torch.tensor([0.0, 1.0, 4.0, 16.0], dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_an_epoch_goes_on(tmp_path, way):
    def make():
        return ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement())

    source, target = make(), make()
    source.extend(rows(0, 10))
    first = source.sample(6)["number"].tolist()
    way(source, target, tmp_path)
    assert sorted(first + target.sample(6)["number"].tolist()) == list(range(10))


EPISODES = {
    "random": RandomSampler,
    "each once": lambda: SamplerWithoutReplacement(drop_last=True),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "short slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4, strict_length=False),
    "priorities": lambda: PrioritizedSampler(24, 0.7, 0.5),
}
STORAGES = {
    "tensors": LazyTensorStorage,
    "compact": lambda size: LazyTensorStorage(size, compact=["number"]),
    "memmap": LazyMemmapStorage,
    "env, time": lambda size: LazyTensorStorage(size, ndim=2),
    "list": ListStorage,
}


def episodes(storage, first, count):
    number = torch.arange(first, first + count)
    inner = {"next": {"number": number + 1}, "collector": {"traj_ids": number // 5}}
    data = TensorDict({"number": number, **inner}, [count])
    return data.reshape(2, -1) if storage.ndim == 2 else data


def through_a_copy(source, target, _):
    vars(target).update(vars(copy.deepcopy(source)))


CASES = [
    (through_memory, sampler, storage)
    for sampler in EPISODES
    for storage in STORAGES
    if storage != "list" or "slice" not in sampler
]
CASES += [(through_a_copy, sampler, "tensors") for sampler in EPISODES]
CASES += [(through_files, "slices once", "tensors")]


@pytest.mark.parametrize(("way", "sampler", "storage"), CASES)
def test_what_was_saved_continues_as_the_original(tmp_path, way, sampler, storage):
    def make(seed):
        return ReplayBuffer(
            storage=STORAGES[storage](24),
            sampler=EPISODES[sampler](),
            batch_size=4,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
        )

    def numbers(rb):
        return rb.sample()["number"].tolist()

    for seed, drawn in [(None, 0), (None, 3), (7, 3)]:
        torch.manual_seed(0)
        source = make(seed)
        source.extend(episodes(source.storage, 0, 20))
        for number in range(drawn):
            source.sample()
            if number == 1:
                source.extend(episodes(source.storage, 20, 12))
        target = make(None if seed is None else 99)
        target.extend(episodes(target.storage, 100, 10))
        way(source, target, tmp_path / f"{seed}-{drawn}")
        known = torch.get_rng_state()
        expected = [numbers(source) for _ in range(7)]
        torch.set_rng_state(known)
        assert [numbers(target) for _ in range(7)] == expected


def test_a_list_storage_says_that_it_stays_in_its_process():
    with pytest.raises(ReplayError, match="ListStorage stays in its process"):
        pickle.dumps(ReplayBuffer())


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


def test_a_dump_into_no_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    with pytest.raises(ConfigError, match=r"x cannot be made: Not a directory"):
        rb.dumps(tmp_path / "file" / "x")


def test_a_dump_replaces_nothing_that_another_program_wrote(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    with pytest.raises(ConfigError, match="another directory"):
        rb.dumps(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["meta.json"]


def test_a_dump_has_all_rows_though_others_write_while_the_disk_is_slow(tmp_path, monkeypatch):
    rb = ReplayBuffer(storage=LazyTensorStorage(5), shared=True)
    rb.extend(rows(0, 5))
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (rb.extend(rows(5, 5)), flush(fd)))
    rb.dumps(tmp_path)
    fresh = ReplayBuffer(storage=LazyTensorStorage(5))
    fresh.loads(tmp_path)
    assert fresh[:]["number"].tolist() == [0, 1, 2, 3, 4]


POISON = [
    {"cursor": 2**60},
    {"cursor": -1},
    {"cursor": 3.0},
    {"cursor": 2**41 + 3},
    {"base": 2**60},
    {"base": 1},
    {"count": 2**60},
    {"count": 1},
    {"count": True},
    {"slots": 2**60},
    {"stamps": torch.tensor([1, 1, 1]) << 20},
    {"stamps": torch.tensor([1, 2, 9]) << 20},
    {"stamps": torch.tensor([1, 2, -3]) << 20},
    {"stamps": torch.tensor([1.0, 2.0, 3.0])},
    {"stamps": torch.tensor([1, 2, 3, 4]) << 20},
    {"tensors": [torch.arange(3), torch.zeros(3, 2, dtype=torch.bfloat16)]},
    {"tensors": [torch.arange(3.0), torch.zeros(3, 1, dtype=torch.bfloat16)]},
    {"tensors": [torch.arange(3)]},
    {"layout": "{}"},
    {"layout": 7},
    {"layout": '{"fields": [[["number"], [], "qint8"]], "element": [], "envs": null}'},
]


def describe(path, meta, default=None):
    """Replace the description of a dump by one whose checksum fits."""
    text = json.dumps({**meta, "checksum": None}, default=default).encode()
    (path / "meta.json").write_bytes(tensor_files.sealed(text))


def put_into(path, part, entries):
    """Change the description of a dump; tensors become files of it."""
    meta = json.loads((path / "meta.json").read_text())
    names = itertools.count()

    def save(tensor):
        name = f"poison-{next(names)}.bin"
        return tensor_files.save(path / meta["folder"], (name,), tensor, name).to_json()

    meta[part] |= entries
    describe(path, meta, save)


@pytest.mark.covering
@pytest.mark.parametrize("poison", POISON, ids=[f"{n}" for n in range(len(POISON))])
@pytest.mark.parametrize("shared", [False, True])
def test_files_that_contradict_each_other_change_nothing(tmp_path, poison, shared):
    source, target = (
        ReplayBuffer(storage=LazyTensorStorage(5), sampler=SamplerWithoutReplacement(), shared=s)
        for s in (False, shared)
    )
    source.extend(rows(0, 3))
    target.extend(rows(10, 4))
    taken = target.sample(1)["number"].tolist()
    source.dumps(tmp_path)
    put_into(tmp_path, "storage", poison)
    with pytest.raises(ConfigError):
        target.loads(tmp_path)
    assert target[:]["number"].tolist() == [10, 11, 12, 13]
    assert target.write_count == 4
    assert sorted(taken + target.sample(3)["number"].tolist()) == [10, 11, 12, 13]
    target.extend(rows(14, 3))
    assert sorted(target[:]["number"].tolist()) == [12, 13, 14, 15, 16]
    fresh = ReplayBuffer(storage=LazyTensorStorage(5), shared=shared)
    with pytest.raises(ConfigError):
        fresh.loads(tmp_path)
    fresh.extend(torch.arange(3))  # not even what rows are was decided


ORDER, SEGMENTS = SamplerWithoutReplacement, SliceSamplerWithoutReplacement


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (ORDER, {"order": torch.tensor([0, 5])}),
        (ORDER, {"order": torch.tensor([-1])}),
        (ORDER, {"order": torch.tensor([0.0])}),
        (SEGMENTS, {"segments": torch.arange(3)}),
        (SEGMENTS, {"segments": torch.tensor([[0, 1], [3, 7]])}),
        (PrioritizedSampler, {"priorities": torch.zeros(5)}),
        (PrioritizedSampler, {"priorities": torch.full((5,), torch.nan).double()}),
        (PrioritizedSampler, {"priorities": torch.full((5,), -1.0).double()}),
        (PrioritizedSampler, {"max_priority": float("nan")}),
        (PrioritizedSampler, {"alpha": "1"}),
    ],
)
def test_files_of_a_sampler_that_are_damaged_change_nothing(tmp_path, make, state):
    arguments = {
        ORDER: {},
        SEGMENTS: {"slice_len": 1, "traj_key": "number"},
        PrioritizedSampler: {"max_capacity": 5, "alpha": 1.0, "beta": 1.0},
    }
    source, target = (
        ReplayBuffer(storage=LazyTensorStorage(5), sampler=make(**arguments[make]))
        for _ in range(2)
    )
    source.extend(rows(0, 3))
    target.extend(rows(10, 4))
    source.dumps(tmp_path)
    put_into(tmp_path, "sampler", state)
    with pytest.raises(ConfigError):
        target.loads(tmp_path)
    assert target[:]["number"].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("sampler", [ORDER(), PrioritizedSampler(5, 1.0, 1.0)])
def test_the_state_of_another_sampler_changes_nothing(sampler):
    source = ReplayBuffer(storage=LazyTensorStorage(5), sampler=SEGMENTS(slice_len=1))
    target = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler)
    source.extend(rows(0, 3))
    target.extend(rows(10, 4))
    with pytest.raises(ConfigError, match="state of another sampler"):
        target.load_state_dict(source.state_dict())
    assert target[:]["number"].tolist() == [10, 11, 12, 13]
    assert set(target.sample(4)["number"].tolist()) <= {10, 11, 12, 13}


class Watched(torch.Tensor):
    """Somebody samples while this is being copied."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            cls.watch()
        return super().__torch_function__(func, types, args, kwargs)


def test_nobody_sees_rows_that_are_being_loaded():
    source = ReplayBuffer(storage=LazyTensorStorage(10))
    target = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    other = pickle.loads(pickle.dumps(target))
    source.extend(rows(100, 10))
    target.extend(rows(0, 10))
    looks = []

    def look():
        looks.append(1)
        with contextlib.suppress(ReplayError):  # nothing is there
            sample = other.sample(50)
            assert (sample["number"].bfloat16() == sample["next", "half"].squeeze(1)).all(), "torn"

    Watched.watch = look
    state = source.state_dict()
    state["storage"]["tensors"] = [t.as_subclass(Watched) for t in state["storage"]["tensors"]]
    target.load_state_dict(state)
    assert len(looks) == 2
    assert other[:]["number"].tolist() == list(range(100, 110))


class Loading(LazyTensorStorage):
    """Another state is loaded while rows are being copied."""

    def gather(self, index, extra):
        data = super().gather(index, extra)
        if self.load:
            self.load.pop()()
        return data

    load = ()


def test_a_reader_notices_that_other_rows_were_loaded_at_the_same_places():
    target, source = (ReplayBuffer(storage=Loading(10), shared=True) for _ in range(2))
    other = pickle.loads(pickle.dumps(target))
    target.extend(rows(0, 10))
    source.extend(rows(100, 10))  # the very same stamps
    target.storage.load = [lambda: other.load_state_dict(source.state_dict())]
    assert target.sample(20)["number"].min() >= 100


def test_loading_again_and_again_wears_nothing_out():
    source = ReplayBuffer(storage=LazyTensorStorage(5))
    source.extend(rows(0, 7))
    for _ in range(50):
        target = ReplayBuffer(storage=LazyTensorStorage(5))
        target.load_state_dict(source.state_dict())
        target.load_state_dict(source.state_dict())
        source = target
    assert source.storage.ring.snapshot()["cursor"] < 10_000
    assert sorted(source[:]["number"].tolist()) == [2, 3, 4, 5, 6]
    assert source.write_count == 7


def test_items_of_lists_come_back_at_their_places():
    source, target = (
        ReplayBuffer(storage=ListStorage(4), sampler=PrioritizedSampler(4, 1.0, 1.0))
        for _ in range(2)
    )
    source.extend(["a", "b", "c"])
    source.extend(["d", "e"])
    source.update_priority(torch.arange(4), torch.tensor([0.0, 0.0, 1.0, 0.0]))
    assert set(source.sample(20)) == {"c"}
    target.load_state_dict(source.state_dict())
    assert set(target.sample(20)) == {"c"}


class Canary:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def damage_text(folder, meta):
    (folder / "meta.json").write_text("{")


def damage_folder(folder, meta):
    describe(folder, {**meta, "folder": "../elsewhere"})


def damage_size(folder, meta):
    (folder / meta["folder"] / "0.bin").write_bytes(b"short")


def damage_shape(folder, meta):
    meta["storage"]["tensors"][0]["shape"] = [2**62, 4]
    describe(folder, meta)


def damage_link(folder, meta):
    path = folder / meta["folder"] / "0.bin"
    path.rename(folder / "moved")
    path.symlink_to(folder / "moved")


def damage_pickle(folder, meta):
    (folder / "meta.json").write_bytes(pickle.dumps(Canary()))


def damage_layout(folder, meta):
    meta["storage"]["layout"] = meta["storage"]["layout"].replace("int64", "load")
    describe(folder, meta)


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


def test_every_bit_that_a_disk_flips_is_noticed(tmp_path):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(5),
        sampler=PrioritizedSampler(5, 0.7, 0.5),
        generator=torch.Generator(),
    )
    rb.extend(rows(0, 3))
    rb.dumps(tmp_path)
    draw = random.Random(5)
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert len(files) > 4
    for path in files:
        data = path.read_bytes()
        for place in draw.sample(range(len(data)), min(24, len(data))):
            changed = bytearray(data)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(ConfigError):
                rb.loads(tmp_path)
        path.write_bytes(data)
    assert rb[:]["number"].tolist() == [0, 1, 2]
    rb.loads(tmp_path)


def test_a_dump_of_an_earlier_version_says_so(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(rows(0, 3))
    rb.dumps(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**meta, "version": 2}))
    with pytest.raises(ConfigError, match="version 2"):
        rb.loads(tmp_path)
