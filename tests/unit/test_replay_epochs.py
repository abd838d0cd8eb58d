"""Epochs hold every row once, whoever writes meanwhile and however samples are made ahead."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)


def rows(first, count):
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "collector": {"traj_ids": number // 5}}, [count])


class Disturbed(LazyTensorStorage):
    """Somebody else writes while rows are being copied."""

    def gather(self, index, extra):
        data = super().gather(index, extra)
        if self.disturb:
            self.disturb.pop(0)()
        return data

    disturb = ()


def disturbed(size, sampler, **arguments):
    """Return a shared buffer, and another view of it for the one who writes meanwhile."""
    rb = ReplayBuffer(storage=Disturbed(size), sampler=sampler, shared=True, **arguments)
    return rb, pickle.loads(pickle.dumps(rb))


@examples(50)
@given(
    writes=st.lists(st.integers(0, 4), max_size=12),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 2),
)
def test_a_row_is_in_an_epoch_once_or_was_overwritten(writes, batch, shuffle, prefetch):
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    rb, other = disturbed(20, sampler, batch_size=batch, prefetch=prefetch)
    rb.extend(rows(0, 20))
    written, samples = iter(range(20, 1000)), iter(rb)
    seen = next(samples)["number"].tolist()  # the epoch has begun
    rb.storage.disturb = [
        lambda count=count: [other.extend(rows(next(written), 1)) for _ in range(count)]
        for count in writes
    ]
    seen += [number for sample in samples for number in sample["number"].tolist()]
    left = rb[:]["number"].tolist()
    assert len(seen) == len(set(seen)), "a row came twice"
    assert set(range(20)) & set(left) <= set(seen), "a row was lost"
    assert set(seen) <= set(range(20)), "rows that come during an epoch belong to the next"


def test_a_slice_of_every_trajectory_comes_once_whoever_writes_meanwhile():
    sampler = SliceSamplerWithoutReplacement(slice_len=3, shuffle=False)
    rb, other = disturbed(50, sampler, batch_size=6)
    rb.extend(rows(0, 50))
    samples = iter(rb)
    seen = [next(samples)]  # the epoch has begun
    # One row at each copy: of the next trajectories, only the rest can still be sampled.
    rb.storage.disturb = [lambda n=n: other.extend(rows(50 + n, 1)) for n in range(12)]
    seen = torch.cat([sample["number"].view(-1, 3) for sample in [*seen, *samples]])
    ids = (seen // 5).unique_consecutive(dim=1)
    assert ids.shape[1] == 1, "a slice crosses trajectories"
    assert ids.flatten().tolist() == list(range(10))


@pytest.mark.parametrize("batch", [5, 3])
def test_an_epoch_ends_though_its_rest_was_overwritten(batch):
    rb, other = disturbed(10, SamplerWithoutReplacement(), batch_size=batch)
    rb.extend(rows(0, 10))
    seen = []
    for sample in rb:
        seen.append(sample["number"])
        other.extend(rows(100, 10))
    assert len(seen) == 1
    assert sorted(rb.sample(10)["number"].tolist()) == list(range(100, 110))


def test_batches_of_an_epoch_are_full_where_the_last_is_dropped():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(drop_last=True)
    )
    rb.extend(rows(0, 10))
    assert len(rb.sample(4)) == 4
    rb.extend(rows(10, 7))  # fewer than four are left of the epoch
    assert len(rb.sample(4)) == 4


@pytest.mark.parametrize("kind", ["state_dict", "dumps"])
def test_samples_made_ahead_are_drawn_and_each_row_comes_once_at_most(tmp_path, kind):
    def make(prefetch):
        sampler = SamplerWithoutReplacement()
        return ReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, prefetch=prefetch)

    source, target = make(3), make(None)
    source.extend(rows(0, 30))
    seen = source.sample(4)["number"].tolist()
    if kind == "dumps":
        source.dumps(tmp_path)
        target.loads(tmp_path)
    else:
        target.load_state_dict(source.state_dict())
    # Up to three samples were made ahead: the loaded epoch begins after them.
    rest = target.sample(14)["number"].tolist()
    assert len({*seen, *rest}) == 18
    source.append_transform(lambda data: data)  # drops what was made ahead
    again = source.sample(5)["number"].tolist()
    assert len({*seen, *again}) == 9


def test_errors_of_samples_made_ahead_are_not_those_of_now():
    sampler = SliceSampler(slice_len=4)
    rb = ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=8, prefetch=3)
    rb.extend(rows(0, 3))
    for _ in range(2):
        with pytest.raises(ReplayError, match="no trajectory has 4 steps"):
            rb.sample()
    rb.extend(rows(5, 5))
    assert len(rb.sample()) == 8


def test_errors_of_transforms_come_once():
    failing = [True]

    def transform(data):
        if failing[0]:
            raise OSError("no such file")

    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=3, transform=transform)
    rb.extend(rows(0, 20))
    with pytest.raises(OSError, match="no such file"):
        rb.sample()
    failing[0] = False
    assert len(rb.sample()) == 8
