"""Samplers: slices that never cross anything, each row once, in proportion to priorities."""

import contextlib
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import (
    ConfigError,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayError,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def steps(numbers, ids, ends=()):
    """Steps of trajectories: consecutive ones of a trajectory have consecutive numbers."""
    number = torch.tensor(numbers)
    done = torch.tensor([n in ends for n in numbers]).unsqueeze(1)
    return TensorDict(
        {
            "number": number,
            "collector": {"traj_ids": torch.tensor(ids)},
            "next": {"done": done, "truncated": torch.zeros_like(done)},
        },
        [len(numbers)],
    )


def check_slices(sample, length, strict=True):
    ends = sample["next", "truncated"].squeeze(1).nonzero().squeeze(1)
    assert ends[-1] == len(sample) - 1
    assert (sample["next", "done"] >= sample["next", "truncated"]).all()
    start = 0
    for end in ends.tolist():
        part = sample[start : end + 1]
        assert len(part) == length if strict else len(part) <= length
        assert (part["number"].diff() == 1).all()
        assert part["collector", "traj_ids"].unique().numel() == 1
        start = end + 1


def fail_to_write(rb, count):
    with contextlib.suppress(KeyboardInterrupt), rb.storage.ring.append(count, count):
        raise KeyboardInterrupt


WRITES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=14,
)


@pytest.mark.slow
@examples(80)
@given(
    size=st.integers(18, 30),
    writes=WRITES,
    length=st.integers(1, 5),
    by_flags=st.booleans(),
    shared=st.booleans(),
)
def test_slices_cross_neither_ends_nor_gaps_nor_the_cursor(size, writes, length, by_flags, shared):
    """Numbers jump wherever a slice must not go; both buffers see the same rows."""
    key = {"end_key": ("next", "done")} if by_flags else {}
    strict = ReplayBuffer(
        storage=LazyTensorStorage(size),
        sampler=SliceSampler(slice_len=length, **key),
        shared=shared,
    )
    loose = ReplayBuffer(
        storage=strict.storage, sampler=SliceSampler(num_slices=4, strict_length=False, **key)
    )
    number, traj = 0, 0
    for count, ending, fails in writes:
        if fails and strict.storage.ring.ready:
            fail_to_write(strict, min(count, 3))
            # The stored trajectory goes on behind the gap, with other numbers.
            number += 100
            continue
        ends = {number + count - 1} if ending == 0 else set()
        strict.extend(steps(list(range(number, number + count)), [traj] * count, ends))
        number += count
        if ending == 0:
            number, traj = number + 100, traj + 1
        check_slices(loose.sample(4 * length), length, strict=False)
        with contextlib.suppress(ReplayError):  # there may be no slice that long
            sample = strict.sample(6 * length)
            check_slices(sample, length)
            assert len(sample) == 6 * length


def test_every_slice_of_a_trajectory_is_drawn_and_trajectories_equally():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(slice_len=3),
        generator=torch.Generator().manual_seed(0),
    )
    ids = [0] * 4 + [1] * 20 + [2] * 2
    rb.extend(steps(list(range(26)), ids))
    sample = rb.sample(3 * 3000)
    starts = sample["number"].view(-1, 3)[:, 0]
    assert set(starts.tolist()) == {0, 1, *range(4, 22)}
    assert 0.45 < (starts < 4).float().mean() < 0.55


def test_slices_run_on_where_the_ring_wraps():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=10))
    rb.extend(steps(list(range(14)), [7] * 14))
    for _ in range(3):
        assert rb.sample(10)["number"].tolist() == list(range(4, 14))
    rb.extend(steps([14, 15], [7] * 2))
    assert rb.sample(10)["number"].tolist() == list(range(6, 16))


def test_slices_stay_in_their_environment():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(36, ndim=2),
        sampler=SliceSampler(slice_len=4, end_key=("next", "done")),
    )
    for first in (0, 5, 10):
        number = torch.arange(first, first + 5) + 1000 * torch.arange(3).unsqueeze(1)
        done = (number % 1000 == 7).unsqueeze(2)
        data = {"number": number, "next": {"done": done}}
        rb.extend(TensorDict(data, [3, 5]))
    sample = rb.sample(400)
    parts = sample["number"].view(-1, 4)
    assert (parts.diff(dim=1) == 1).all()
    firsts = set((parts[:, 0] % 1000).tolist())
    assert firsts == {3, 4, 8, 9, 10, 11}
    assert set((parts[:, 0] // 1000).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "size", "message"),
    [
        ({"slice_len": 4}, 10, "not divisible by slice_len"),
        ({"num_slices": 3}, 10, "not divisible by num_slices"),
        ({"slice_len": 5}, 10, "no trajectory has 5 steps in a row .the longest: 4"),
        ({"slice_len": 5, "traj_key": "id"}, 10, "no 'id' is stored"),
    ],
)
def test_slices_that_cannot_be(arguments, size, message):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(**arguments))
    rb.extend(steps([0, 1, 2, 3], [0] * 4))
    with pytest.raises((ConfigError, ReplayError), match=message):
        rb.sample(size)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SliceSampler(slice_len=2),
        lambda: SliceSamplerWithoutReplacement(slice_len=2),
        lambda: SamplerWithoutReplacement(),
        lambda: PrioritizedSampler(10, 0.7, 0.5),
    ],
)
def test_who_asks_too_early_can_ask_again(make, shared):
    rb = ReplayBuffer(storage=LazyTensorStorage(10), sampler=make(), shared=shared)
    with pytest.raises(ReplayError):
        rb.sample(4)
    rb.extend(steps([0, 1, 2, 3], [0] * 4))
    assert set(rb.sample(4)["number"].tolist()) <= {0, 1, 2, 3}


def test_slice_arguments_exclude_each_other():
    for arguments in ({}, {"slice_len": 1, "num_slices": 1}, {"slice_len": 0}):
        with pytest.raises(ConfigError, match="slice_len"):
            SliceSampler(**arguments)


def test_every_trajectory_once_per_epoch():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSamplerWithoutReplacement(slice_len=3),
        batch_size=6,
    )
    rb.extend(steps(list(range(50)), [n // 5 for n in range(50)]))
    for _ in range(2):
        ids = torch.cat([batch["collector", "traj_ids"][::3] for batch in rb])
        assert sorted(ids.tolist()) == list(range(10))


@examples(40)
@given(rows=st.integers(1, 30), batch=st.integers(1, 9), shared=st.booleans(), drop=st.booleans())
def test_without_replacement_gives_every_row_once(rows, batch, shared, drop):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=SamplerWithoutReplacement(drop_last=drop),
        batch_size=batch,
        shared=shared,
    )
    rb.extend(steps(list(range(rows)), [0] * rows))
    present = list(range(max(0, rows - 20), rows))
    if drop and len(present) < batch:
        with pytest.raises(ReplayError, match="no whole batch"):
            next(iter(rb))
        return
    batches = [sample["number"].tolist() for sample in rb]
    seen = list(chain(*batches))
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(present)
    assert len(seen) == (len(present) // batch * batch if drop else len(present))
    assert all(len(numbers) == batch for numbers in batches[:-1])


def test_rows_that_come_during_an_epoch_belong_to_the_next():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(shuffle=False)
    )
    rb.extend(steps([0, 1, 2, 3], [0] * 4))
    assert rb.sample(3)["number"].tolist() == [0, 1, 2]
    rb.extend(steps([4, 5], [0] * 2))
    assert rb.sample(3)["number"].tolist() == [3]
    assert rb.sample(9)["number"].tolist() == [0, 1, 2, 3, 4, 5]


def test_priorities_decide_what_is_drawn_and_weights_correct_it():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.5,
        beta=0.8,
        eps=0.0,
        storage=LazyTensorStorage(8),
        generator=torch.Generator().manual_seed(0),
    )
    rb.extend(steps(list(range(6)), [0] * 6))
    rb.update_priority(torch.arange(6), torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0, 0.0]))
    sample = rb.sample(20_000)
    assert (sample["number"] == sample["index"]).all()
    shares = torch.bincount(sample["index"], minlength=6) / 20_000
    assert torch.allclose(shares, torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.0]), atol=0.015)
    weights = (1 / sample["index"].float()) ** 0.8
    assert torch.allclose(sample["_weight"], weights)
    assert torch.equal(sample["_weight"], sample["priority_weight"])


def test_weights_are_those_of_the_formula_torchrl_uses():
    """(p / min p) ** -beta with p = (priority + eps) ** alpha, over all rows."""
    rb = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(50))
    rb.extend(steps(list(range(50)), [0] * 50))
    priority = torch.rand(50) + 0.1
    rb.update_priority(torch.arange(50), priority)
    sample, info = rb.sample(64, return_info=True)
    p = (priority.double() + 1e-8) ** 0.7
    expected = ((p / p.min()) ** -0.9).float()[info["index"]]
    assert torch.allclose(sample["_weight"], expected)


def test_new_rows_get_the_largest_priority():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    rb.extend(steps([0, 1], [0] * 2))
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, 1e-6]))
    rb.extend(steps([2], [0]))
    assert rb.sampler.default_priority == 3.0
    share = (rb.sample(4000)["index"] == 2).float().mean()
    assert 0.45 < share < 0.55


def test_overwritten_rows_lose_their_priority():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(4))
    rb.extend(steps([0, 1, 2, 3], [0] * 4))
    rb.update_priority(torch.arange(4), 0.0)
    rb.extend(steps([4, 5], [0] * 2))
    assert set(rb.sample(100)["number"].tolist()) == {4, 5}
    fail_to_write(rb, 3)
    assert set(rb.sample(100)["number"].tolist()) == {5}


def test_samples_of_rows_that_are_batches_are_batches_in_all_entries():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    for number in range(3):
        rb.add(TensorDict({"number": torch.full((2, 4), number)}, [2, 4]))
    sample = rb.sample(50)
    assert sample.batch_size == (50, 2, 4)
    flat = sample.reshape(-1)
    assert flat["index"].equal(flat["number"])
    assert flat["_weight"].eq(1).all()
    sample["td_error"] = (sample["number"] == 1).float()
    rb.update_tensordict_priority(sample)
    assert set(rb.sample(50)["index"].flatten().tolist()) == {1}


def test_priorities_of_a_batch():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), priority_key="loss"
    )
    data = steps([0, 1, 2], [0] * 3)
    data["loss"] = torch.tensor([[0.0], [0.0], [1.0]])
    rb.extend(data)
    sample = rb.sample(50)
    assert set(sample["index"].tolist()) == {2}
    sample["loss"] = torch.zeros(50, 1)
    rb.update_tensordict_priority(sample)
    rb.update_priority(0, 1.0)
    assert set(rb.sample(50)["index"].tolist()) == {0}
    with pytest.raises(ConfigError, match="'loss'"):
        rb.update_tensordict_priority(sample.exclude("loss"))


def test_priorities_in_env_time_storages():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 1.0)
    )
    rb.extend(TensorDict({"number": torch.arange(8).view(2, 4)}, [2, 4]))
    sample = rb.sample(100)
    rb.update_priority(sample["index"], 0.0)
    rb.update_priority(torch.tensor([[1, 0], [3, 1]]), 5.0)
    assert set(rb.sample(100)["number"].tolist()) == {1, 7}


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf"), 1e160])
def test_priorities_are_not_negative_and_have_a_sum(priority):
    rb = TensorDictPrioritizedReplayBuffer(alpha=2.0, beta=0.9, storage=LazyTensorStorage(5))
    rb.extend(steps([0, 1], [0] * 2))
    values = torch.full((2,), priority, dtype=torch.float64)
    with pytest.raises(ConfigError, match="not negative"):
        rb.update_priority(torch.tensor([0, 1]), values)
    with pytest.raises(ConfigError, match="not negative"):  # before any row is stored
        rb.extend(steps([0, 1], [0] * 2).set("td_error", values))
    assert len(rb) == 2
    with pytest.raises(ConfigError, match="from 0 to 4"):
        rb.update_priority(7, 1.0)
    with pytest.raises(ConfigError, match="2 priorities for 1 rows"):
        rb.update_priority([1], [1.0, 2.0])


def test_a_sample_without_its_index_is_named():
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=0.9, storage=LazyTensorStorage(5))
    with pytest.raises(ConfigError, match="no 'index'"):
        rb.update_tensordict_priority(steps([0], [0]).set("td_error", torch.ones(1)))


def test_rows_that_a_writer_leaves_out_have_no_priority():
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.9, storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("number")
    )
    rb.extend(steps([0, 1, 2], [0] * 3).set("td_error", torch.tensor([9.0, 0.0, 1.0])))
    assert set(rb.sample(50)["number"].tolist()) == {2}


def test_places_without_rows_get_no_priority():
    rb = PrioritizedReplayBuffer(alpha=1.0, beta=0.9, storage=LazyTensorStorage(5))
    rb.extend(steps([0, 1], [0] * 2))
    rb.update_priority([1, 4], 1000.0)
    assert set(rb.sample(50)["number"].tolist()) <= {0, 1}
