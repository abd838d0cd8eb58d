"""Replay buffers: what is stored, where, and what comes back."""

import threading
from itertools import chain

import pytest
import torch
import torchrl.data as theirs
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tests.covering import examples

import gleanrl
from gleanrl import (
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayError,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def rows(first, count):
    """Rows that can be told apart in every field."""
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "observation": number.float().unsqueeze(1) + torch.tensor([0.0, 0.25, 0.5]),
            "action": number,
            "flag": (number % 2 == 0).unsqueeze(1),
            "next": {"reward": number.float().unsqueeze(1), "deep": {"half": number.bfloat16()}},
        },
        [count],
    )


def grid(first, envs, steps):
    """``[env, time]`` data whose every frame tells environment and step."""
    number = torch.arange(first, first + steps) + 1000 * torch.arange(envs).unsqueeze(1)
    return TensorDict({"number": number, "next": {"row": number.unsqueeze(2)}}, [envs, steps])


STORAGES = [LazyTensorStorage, LazyMemmapStorage]


@examples(60)
@given(
    size=st.integers(1, 12),
    writes=st.lists(st.integers(0, 15), min_size=1, max_size=12),
    shared=st.booleans(),
)
def test_contents_are_those_of_a_model_ring(size, writes, shared):
    rb = ReplayBuffer(storage=LazyTensorStorage(size), shared=shared)
    model, cursor, written = {}, 0, 0
    for count in writes:
        if count == 1:
            places = [rb.add(rows(written, 1)[0])]
        else:
            places = rb.extend(rows(written, count)).tolist()
        stored = range(max(0, count - size), count)
        expected = [(cursor + n) % size for n in range(len(stored))]
        assert places == expected
        model.update(zip(expected, (written + n for n in stored), strict=True))
        cursor += len(stored)
        written += count
        assert len(rb) == len(model)
        assert rb.write_count == written
        if model:
            numbers = [model[place] for place in sorted(model)]
            everything = rb[:]
            assert (everything == torch.cat([rows(n, 1) for n in numbers])).all()
            sample, info = rb.sample(20, return_info=True)
            assert sample["action"].tolist() == [model[n] for n in info["index"].tolist()]
            assert (sample == torch.cat([rows(n, 1) for n in sample["action"].tolist()])).all()


@given(writes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
@examples(25)
def test_contents_and_places_are_those_of_torchrl(writes):
    ours = ReplayBuffer(storage=LazyTensorStorage(12))
    peer = theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(12))
    first = 0
    for count in writes:
        data = rows(first, count)
        assert ours.extend(data).tolist() == peer.extend(data).tolist()
        first += count
    assert (ours[:] == peer[:]).all()
    assert (len(ours), ours.write_count) == (len(peer), peer.write_count)


@pytest.mark.parametrize("kind", STORAGES)
def test_env_time_storages_keep_steps_of_every_environment(kind):
    rb = ReplayBuffer(storage=kind(12, ndim=2))
    assert rb.extend(grid(0, 2, 4)).tolist() == [[t, e] for t in range(4) for e in range(2)]
    assert (rb[:] == grid(0, 2, 4)).all()
    rb.extend(grid(4, 2, 4))
    assert (len(rb), rb.write_count) == (12, 16)
    assert rb[:]["number"].tolist()[1] == [1006, 1007, 1002, 1003, 1004, 1005]
    sample, info = rb.sample(50, return_info=True)
    assert info["index"].shape == (50, 2)
    step, env = info["index"].unbind(1)
    assert (rb[:]["number"][env, step] == sample["number"]).all()
    assert sample["next", "row"].shape == (50, 1)
    place = rb.add(grid(8, 2, 1)[:, 0])
    assert (place, len(rb)) == (2, 12)


def test_time_can_come_first():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    rb.extend(grid(0, 2, 4).transpose(0, 1))
    assert (rb[:] == grid(0, 2, 4)).all()


def test_env_time_data_has_two_dimensions():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    with pytest.raises(ConfigError, match=r"batch size \[3\]"):
        rb.extend(rows(0, 3))
    rb.extend(grid(0, 2, 3))
    with pytest.raises(ConfigError, match="3 environments for a storage of 2"):
        rb.extend(grid(0, 3, 3))


def test_rows_may_have_batch_dimensions_of_their_own():
    rb = ReplayBuffer(storage=LazyTensorStorage(6))
    rb.extend(grid(0, 2, 4))
    sample = rb.sample(5)
    assert sample.batch_size == (5, 4)
    assert sample["next"].batch_size == (5, 4)


def test_samples_are_copies_on_the_storages_device():
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(rows(0, 4))
    sample = rb.sample(4)
    sample["action"].fill_(-1)
    assert rb[:]["action"].tolist() == [0, 1, 2, 3]
    assert sample.device == torch.device("cpu")
    assert sample["next", "deep", "half"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.exclude("action"), "missing 'action'; new none"),
        (lambda d: d.set("more", d["action"]), "missing none; new 'more'"),
        (lambda d: d.set("action", d["action"].int()), "'action' is torch.int32"),
        (lambda d: d.set(("next", "reward"), d["action"].float()), r"\('next', 'reward'\) is"),
    ],
)
def test_data_unlike_the_first_is_named(change, message):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(rows(0, 3))
    with pytest.raises(ConfigError, match=message):
        rb.extend(change(rows(3, 3)))
    assert rb.write_count == 3


UNEVEN = lazy_stack([TensorDict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(1), "b": 1})])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TensorDict({"a": torch.zeros(3), "s": "x"}, [3]), "'s' is NonTensorData.*ListStorage"),
        (TensorDict({"a": torch.zeros(2), "s": ["x", "y"]}, [2]), "'s' is NonTensorStack"),
        (UNEVEN, "only some rows of the data have 'b'"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, "different numbers of rows"),
        ({"a": torch.eye(3).to_sparse()}, "'a' is a torch.sparse_coo tensor"),
        ({"a": torch.zeros(3, dtype=torch.uint3)}, "'a' is .* torch.uint3"),
        ({"a": 1.0}, "'a' is float"),
    ],
)
def test_data_that_rows_cannot_hold_are_refused_and_change_nothing(data, message):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    for store in (rb.extend, rb.extend if message != "'a' is float" else rb.add):
        with pytest.raises(ConfigError, match=message):
            store(data)
    rb.extend(rows(0, 3))
    assert len(rb) == 3


def test_the_keys_of_a_mapping_are_no_items_of_a_list():
    with pytest.raises(ConfigError, match="mapping"):
        ReplayBuffer(storage=ListStorage(10)).extend({"a": torch.zeros(3)})


def test_one_row_may_be_a_nested_mapping():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.add({"a": torch.ones(2), "next": {"a": torch.zeros(2)}})
    assert rb[0]["next", "a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LazyTensorStorage(0),
        lambda: LazyTensorStorage(5, ndim=3),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), batch_size=0),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2.5),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), prefetch=-1),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), generator=5),
        lambda: ReplayBuffer(storage=theirs.LazyTensorStorage(5)),
        lambda: SliceSampler(num_slices=2.5),
        lambda: PrioritizedSampler(5, alpha=float("nan"), beta=1.0),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), dim_extend=1),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), dim_extend="0"),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), limiter=4),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), collate_fn=[]),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), transform=4),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5)).append_transform(4),
        lambda: ReplayBuffer(storage=LazyTensorStorage(5), lock_timeout="x"),
    ],
)
def test_wrong_arguments(make):
    with pytest.raises(ConfigError):
        make()


def test_too_large_a_buffer_is_refused_before_it_swaps():
    rb = ReplayBuffer(storage=LazyTensorStorage(10**9))
    with pytest.raises(ConfigError, match="lower max_size, or use LazyMemmapStorage"):
        rb.extend(TensorDict({"image": torch.zeros(1, 84, 84, 4, dtype=torch.uint8)}, [1]))


def test_nothing_to_sample():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    for ask in (lambda: rb.sample(2), lambda: rb[:], lambda: rb[0]):
        with pytest.raises(ReplayError, match="nothing to sample"):
            ask()
    rb.extend(rows(0, 3))
    for size in (None, 0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="batch_size"):
            rb.sample(size)
    rb.empty()
    assert (len(rb), rb.write_count) == (0, 0)
    with pytest.raises(ReplayError, match="nothing to sample"):
        rb.sample(2)
    rb.extend(rows(7, 2))
    assert rb[:]["action"].tolist() == [7, 8]


def test_plain_tensors():
    rb = ReplayBuffer(storage=LazyTensorStorage(5))
    rb.extend(torch.arange(8.0).view(4, 2))
    assert rb.sample(3).shape == (3, 2)
    assert rb[1].tolist() == [2.0, 3.0]
    assert rb[-1].tolist() == [6.0, 7.0]
    assert rb[1:3].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert rb[[3, 0]].tolist() == [[6.0, 7.0], [0.0, 1.0]]
    with pytest.raises(IndexError, match="no row is stored"):
        rb[4]


def test_lists_hold_anything():
    rb = ReplayBuffer(storage=ListStorage(3), batch_size=4)
    rb.extend(["a", "b"])
    assert rb.add({"c": 1}) == 2
    rb.add("d")
    assert rb[:] == ["d", "b", {"c": 1}]
    assert len(rb.sample()) == 4
    collated = ReplayBuffer(storage=ListStorage(3), collate_fn=len)
    collated.extend([1, 2])
    assert collated.sample(7) == 7


def test_lists_stack_tensordicts():
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend(rows(0, 5))
    assert (rb[:] == rows(0, 5)).all()
    assert rb.sample(3).batch_size == (3,)


def test_samples_of_lists_of_tensordicts_have_index_and_weights():
    arguments = {"alpha": 1.0, "beta": 1.0, "priority_key": "action", "batch_size": 8}
    rb = TensorDictPrioritizedReplayBuffer(storage=ListStorage(10), **arguments)
    rb.extend(TensorDict({"row": torch.arange(2), "action": torch.tensor([1.0, 3.0])}, [2]))
    batch = rb.sample(200)
    assert torch.equal(batch["index"], batch["row"])
    assert torch.equal(batch["priority_weight"], 1 / batch["action"])
    batch["action"] = 1.0 - batch["row"]  # from now on only row 0
    rb.update_tensordict_priority(batch)
    assert not rb.sample()["row"].any()
    whole = TensorDictReplayBuffer(storage=ListStorage(10))
    whole.extend(TensorDict({"row": torch.zeros(2, 3)}, [2, 3]))
    assert "index" not in whole.sample(4)  # a row is several frames


@pytest.mark.parametrize("shape", [(1, 6), (2, 3), (6, 1)])
def test_priorities_may_have_the_shape_of_a_reshaped_sample(shape):
    arguments = {"alpha": 1.0, "beta": 1.0, "batch_size": 64}
    rb = TensorDictPrioritizedReplayBuffer(storage=LazyTensorStorage(6), **arguments)
    rb.extend(TensorDict({"row": torch.arange(6)}, [6]))
    only = torch.zeros(6)
    for row, set_priorities in ((2, rb.update_priority), (4, None)):
        data = TensorDict({"index": torch.arange(6), "td_error": only.clone()}, [6])
        data["td_error"][row] = 1
        data = data.reshape(shape)
        if set_priorities is None:
            rb.update_tensordict_priority(data)
        else:
            set_priorities(data["index"], data["td_error"])
        assert (rb.sample()["row"] == row).all()


def test_transforms_see_every_sample_in_order():
    def double(data):
        return data.set("action", data["action"] * 2)

    def note(data):
        data["noted"] = data["action"] + 1

    rb = ReplayBuffer(storage=LazyTensorStorage(5), transform=double, batch_size=3)
    rb.append_transform(note).extend(rows(0, 5))
    sample = rb.sample()
    assert (sample["noted"] == sample["action"] + 1).all()
    assert (sample["action"] % 2 == 0).all()
    assert rb[:]["action"].tolist() == [0, 1, 2, 3, 4]


def test_a_generator_makes_samples_repeatable():
    def numbers(seed, prefetch=None):
        generator = torch.Generator().manual_seed(seed)
        rb = ReplayBuffer(
            storage=LazyTensorStorage(50), generator=generator, batch_size=8, prefetch=prefetch
        )
        rb.extend(rows(0, 50))
        return [rb.sample()["action"].tolist() for _ in range(4)]

    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)
    assert numbers(1, prefetch=3) == numbers(1)


def test_samples_made_ahead_leave_the_generator_of_the_learner_alone():
    def samples(learn):
        torch.manual_seed(0)
        rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=3)
        rb.extend(rows(0, 50))
        found, state = [rb.sample()], torch.get_rng_state()
        for number in range(30):
            found.append(rb.sample())
            assert torch.get_rng_state().equal(state)
            if learn:
                torch.manual_seed(number)
                state = torch.get_rng_state()
        return [sample["action"].tolist() for sample in found]

    assert samples(True) == samples(False)


def test_prefetching_passes_errors_on_and_goes_on():
    rb = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=2)
    with pytest.raises(ReplayError, match="nothing to sample"):
        rb.sample()
    rb.empty()
    rb.extend(rows(0, 20))
    assert len(rb.sample()) == 8
    assert len(rb.sample(5)) == 5


def test_max_value_writer_keeps_the_best():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("action"))

    def keyed(values):
        return TensorDict({"action": torch.tensor(values)}, [len(values)])

    assert (rb.extend(keyed([1, 5, 3])) >= 0).all()
    assert (rb.extend(keyed([2, 4, 0])) >= 0).tolist() == [True, True, False]
    assert sorted(rb[:]["action"].tolist()) == [2, 3, 4, 5]
    assert rb.add(keyed([1])[0]) == -1
    assert rb.add(keyed([9])[0]) >= 0
    assert sorted(rb[:]["action"].tolist()) == [3, 4, 5, 9]
    assert (len(rb), rb.write_count) == (4, 6)
    assert set(rb.sample(100)["action"].tolist()) == {3, 4, 5, 9}


def test_max_value_writer_needs_its_entry():
    rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("rank"))
    with pytest.raises(ConfigError, match="'rank' is no entry"):
        rb.extend(rows(0, 2))


@pytest.mark.parametrize("ndim", [1, 2])
def test_nested_parts_keep_batch_dimensions_of_their_own(ndim):
    agents = TensorDict({"position": torch.zeros(2, 4, 3, 5)}, [2, 4, 3])
    data = TensorDict({"agents": agents}, [2, 4])
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=ndim))
    rb.extend(data if ndim == 2 else data.reshape(-1))
    assert rb.sample(6)["agents"].batch_size == (6, 3)


def test_rows_are_seen_when_all_of_them_are_written():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(rows(0, 8))
    storage = rb.storage
    values, count = storage.prepare(rows(8, 4), 0)
    with storage.ring.append(count, count) as first:
        assert len(rb) == 6  # two of the oldest make room
        assert list(storage.ring.pieces(first, count)) == [(8, 10, 0), (0, 2, 2)]
        storage.write(first, count, values, 0)
        assert set(rb.sample(100)["action"].tolist()) == {2, 3, 4, 5, 6, 7}
        assert rb.write_count == 8
    assert (len(rb), rb.write_count) == (10, 12)
    assert rb[:]["action"].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_rows_whose_writing_failed_are_skipped():
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(rows(0, 4))
    with pytest.raises(KeyboardInterrupt), rb.storage.ring.append(3, 3):
        raise KeyboardInterrupt
    assert rb.extend(rows(4, 2)).tolist() == [7, 8]
    assert set(rb.sample(200)["action"].tolist()) == {0, 1, 2, 3, 4, 5}
    assert len(rb) == rb.write_count == 6


class Interrupted(LazyTensorStorage):
    """Calls ``handle`` in the middle of a write, as a signal handler may be."""

    handle = staticmethod(lambda: None)

    def write(self, *args):
        self.handle()
        super().write(*args)


@pytest.mark.parametrize("shared", [False, True])
def test_a_handler_samples_in_the_middle_of_extend_and_cannot_write(shared):
    rb = ReplayBuffer(storage=Interrupted(10), shared=shared)
    rb.extend(rows(0, 8))
    seen = []

    def handle():
        seen.extend(rb.sample(50)["action"].tolist())
        for write in (lambda: rb.extend(rows(0, 1)), rb.empty):
            with pytest.raises(ReplayError, match="already writing"):
                write()

    rb.storage.handle = handle
    rb.extend(rows(8, 4))
    assert set(seen) == {2, 3, 4, 5, 6, 7}
    assert rb[:]["action"].tolist() == [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
    assert rb.write_count == 12


def test_threads_write_and_sample_at_once():
    rb = ReplayBuffer(storage=LazyTensorStorage(64))
    rb.extend(rows(0, 64))
    errors, done = [], threading.Event()

    def read():
        try:
            while not done.is_set():
                sample = rb.sample(32)
                assert (sample == torch.cat([rows(n, 1) for n in sample["action"].tolist()])).all()
        except BaseException as err:
            errors.append(err)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        rb.extend(rows(int(torch.randint(100, ())), 17))
    done.set()
    reader.join()
    assert not errors
    assert rb.write_count == 64 + 200 * 17


def test_iterating_is_an_epoch():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=6
    )
    rb.extend(rows(0, 14))
    for _ in range(2):
        batches = [batch["action"].tolist() for batch in rb]
        assert [len(batch) for batch in batches] == [6, 6, 2]
        assert sorted(chain(*batches)) == list(range(14))


def test_a_collector_fills_it():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=16)
    collector = gleanrl.Collector(
        "CartPole-v1", frames_per_batch=64, total_frames=256, num_envs=2, replay_buffer=rb
    )
    assert all(batch is None for batch in collector)
    collector.shutdown()
    assert (len(rb), rb.write_count) == (256, 256)
    sample = rb.sample()
    assert sample["observation"].shape == (16, 4)
    assert (rb[sample["index"]]["observation"] == sample["observation"]).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_stored_in_every_way(dtype):
    number = torch.arange(8).unsqueeze(1).expand(8, 16)
    flags = {"done": torch.arange(8).unsqueeze(1) % 3 == 2, "reward": number[:, :1].float()}
    after = {"observation": (number + 1).to(dtype), **flags}
    data = TensorDict({"observation": number.to(dtype), "next": after}, [8])
    writer = TensorDictMaxValueWriter(("next", "reward"))
    for storage, options in (
        (LazyTensorStorage(8, compact=True), {}),
        (LazyTensorStorage(4), {"writer": writer}),
    ):
        rb = ReplayBuffer(storage=storage, **options)
        rb.extend(data[:4])
        rb.extend(data[4:])
        rows = rb[:]
        assert rows["observation"].dtype == dtype
        found = rows["next", "observation"].to(torch.int64)
        assert (found == rows["observation"].to(torch.int64) + 1).all()
        assert sorted(rows["next", "reward"].flatten().tolist()) == list(range(8))[-len(rows) :]
