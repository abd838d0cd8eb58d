"""Deep copies of buffers have everything and share nothing; what makes a storage is a storage."""

import copy
import functools
from contextlib import suppress

import pytest
import torch
from tensordict import TensorDict

from gleanrl import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)


def rows(first, count):
    number = torch.arange(first, first + count)
    wide = number.unsqueeze(1) * 3 + torch.arange(4)
    ids = {"traj_ids": number // 10}
    return TensorDict(
        {"number": number, "wide": wide, "collector": ids, "next": {"wide": wide + 3}}, [count]
    )


STORAGES = [
    LazyTensorStorage,
    LazyMemmapStorage,
    functools.partial(LazyTensorStorage, compact=True),
    functools.partial(LazyMemmapStorage, compact=True),
]


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("written", [0, 15, 25])
def test_a_deep_copy_has_all_rows_and_goes_its_own_way(kind, shared, written):
    rb = ReplayBuffer(storage=kind(20), shared=shared)
    if written:
        rb.extend(rows(0, written))
        with suppress(KeyboardInterrupt), rb.storage.ring.append(3, 3):
            raise KeyboardInterrupt  # a gap
    twin = copy.deepcopy(rb)
    assert (twin.shared, len(twin), twin.write_count) == (shared, len(rb), rb.write_count)
    if written:
        before = rb[:]
        assert (twin[:] == before).all()
        assert twin.extend(rows(100, 4)).tolist() == [
            (rb.storage.ring.snapshot()["cursor"] + n) % 20 for n in range(4)
        ]
        assert (rb[:] == before).all()
    twin.extend(rows(200, 20))
    assert sorted(twin[:]["number"].tolist()) == list(range(200, 220))
    assert (twin[:]["next", "wide"] == twin[:]["wide"] + 3).all()
    rb.extend(rows(50, 1))
    assert 50 in rb[:]["number"]


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize(
    "make", [RandomSampler, SamplerWithoutReplacement, functools.partial(SliceSampler, slice_len=4)]
)
def test_a_deep_copy_samples_what_the_original_would(make, prefetch):
    generator = torch.Generator().manual_seed(0)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=make(), prefetch=prefetch, generator=generator
    )
    rb.extend(rows(0, 30))
    first = rb.sample(8)["number"].tolist()
    twin = copy.deepcopy(rb)
    if prefetch is None:
        assert twin.sample(8)["number"].tolist() == rb.sample(8)["number"].tolist()
    elif make is SamplerWithoutReplacement:  # up to two samples were made ahead
        assert len({*first, *twin.sample(6)["number"].tolist()}) == 14
    twin.sampler.restart()
    twin.empty()
    assert len(rb.sample(4)) == 4


def test_a_deep_copy_has_the_priorities():
    rb = ReplayBuffer(storage=LazyTensorStorage(5000), sampler=PrioritizedSampler(5000, 1.0, 1.0))
    rb.extend(rows(0, 4000))
    rb.update_priority(torch.arange(4000), 0.0)
    rb.update_priority(7, 1.0)
    twin = copy.deepcopy(rb)
    twin.update_priority(9, 5.0)
    twin.update_priority(7, 0.0)
    assert set(rb.sample(50)["number"].tolist()) == {7}
    assert set(twin.sample(50)["number"].tolist()) == {9}


def test_buffers_over_one_storage_stay_so_in_a_deep_copy():
    one = ReplayBuffer(storage=LazyTensorStorage(20))
    other = ReplayBuffer(storage=one.storage)
    one.extend(rows(0, 5))
    twins = copy.deepcopy({"one": one, "other": other})
    twins["one"].extend(rows(5, 5))
    assert (len(twins["other"]), len(other)) == (10, 5)


def test_a_deep_copy_of_a_list_copies_its_items():
    rb = ReplayBuffer(storage=ListStorage(3))
    rb.extend([["a"], ["b"]])
    twin = copy.deepcopy(rb)
    twin[0].append("c")
    twin.add(["d"])
    assert rb[:] == [["a"], ["b"]]
    assert twin[:] == [["a", "c"], ["b"], ["d"]]


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritized_buffers_take_what_makes_a_storage(kind):
    rb = kind(alpha=0.7, beta=0.9, storage=functools.partial(LazyTensorStorage, 7), batch_size=3)
    rb.extend(rows(0, 9))
    assert (len(rb), rb.sampler.max_capacity, len(rb.sample())) == (7, 7, 3)
    assert kind(alpha=0.7, beta=0.9).storage.max_size == 1000
