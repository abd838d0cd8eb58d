"""Observations stored once: what is sampled is what a plain buffer holds, bit for bit."""

import copy
import functools
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples

from gleanrl import (
    Collector,
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiSyncCollector,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
)

SIZE = 32


def episode(env, number, first, lengths):
    """Rows of one environment: observations say where they are from, ends are the true ones."""
    parts = []
    for length in lengths:
        steps = torch.arange(first, first + length + 1).double()
        seen = (env * 1e6 + number * 1e3 + steps).unsqueeze(1) + torch.arange(4) / 8
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        parts.append(
            TensorDict(
                {
                    "observation": seen[:-1],
                    "small": steps[:-1].to(torch.uint8).unsqueeze(1),
                    "collector": {"traj_ids": torch.full((length,), number * 8 + env)},
                    "next": {
                        "observation": seen[1:],
                        "small": steps[1:].to(torch.uint8).unsqueeze(1),
                        "done": done,
                        "reward": steps[1:].float().unsqueeze(1),
                    },
                },
                [length],
            )
        )
        number, first = number + 1, 0
    return torch.cat(parts)


@functools.cache
def episodes(env):
    """All rows of one environment; they are read only, and making them takes longer than a test."""
    return episode(env, 0, 0, [7, 1, 1, 3, 11, 2] * 40)


class Envs:
    """Goes on with the episodes of several environments over many batches."""

    def __init__(self, count):
        self.data = [episodes(env) for env in range(count)]
        self.at = [0] * count

    def take(self, env, steps):
        first = self.at[env]
        self.at[env] += steps
        return self.data[env][first : first + steps]

    def block(self, steps):
        return torch.stack([self.take(env, steps) for env in range(len(self.data))])


def same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


def compare(plain, compact):
    assert len(plain) == len(compact)
    assert plain.write_count == compact.write_count
    if not len(plain):
        return
    same(plain[:], compact[:])
    for seed in range(2):
        samples = []
        for rb in (plain, compact):
            torch.default_generator.manual_seed(seed)
            samples.append(rb.sample(16, return_info=True))
        assert torch.equal(samples[0][1]["index"], samples[1][1]["index"])
        same(samples[0][0], samples[1][0])


WRITES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 1, 2, 3, 5, 9, 17, 40])),
    min_size=1,
    max_size=14,
)
KINDS = [
    lambda size, **given: LazyTensorStorage(size, **given),
    lambda size, **given: LazyMemmapStorage(size, **given),
]


@pytest.mark.parametrize("kind", KINDS, ids=["memory", "file"])
@examples(60)
@given(size=st.integers(1, SIZE), writes=WRITES, shared=st.booleans(), way=st.integers(0, 3))
def test_rows_are_those_of_a_plain_buffer(kind, size, writes, shared, way):
    buffers = [
        ReplayBuffer(storage=kind(size, compact=compact), shared=shared)
        for compact in (False, True)
    ]
    envs = Envs(3)
    for number, (env, steps) in enumerate(writes):
        if way == 3 and number == len(writes) // 2:
            for rb in buffers:
                rb.empty(False)
        # Environments one by one, several end to end, steps of several side by side.
        data = envs.take(env, steps) if way == 0 else envs.block(steps).reshape(-1)
        data = data[torch.randperm(len(data))] if way == 2 else data
        for rb in buffers:
            if steps == 1 and way == 0:
                rb.add(data[0])
            else:
                rb.extend(data)
        compare(*buffers)


@examples(40)
@given(
    size=st.integers(3, SIZE),
    steps=st.lists(st.integers(1, 15), min_size=1, max_size=10),
    envs=st.integers(1, 3),
    shared=st.booleans(),
    first=st.sampled_from([0, 1]),
)
def test_so_are_those_of_env_time_storages(size, steps, envs, shared, first):
    buffers = [
        ReplayBuffer(
            storage=LazyTensorStorage(size, ndim=2, compact=compact),
            shared=shared,
            dim_extend=first,
        )
        for compact in (False, True)
    ]
    source = Envs(envs)
    for number in steps:
        data = source.block(number)
        for rb in buffers:
            rb.extend(data if first else data.transpose(0, 1).contiguous())
        compare(*buffers)


@examples(40)
@given(
    data=st.data(),
    size=st.integers(6, SIZE),
    count=st.integers(1, 30),
)
def test_writes_of_several_writers_that_fail_leave_nothing(data, size, count):
    buffers = [
        ReplayBuffer(storage=LazyTensorStorage(size, compact=compact), shared=True)
        for compact in (False, True)
    ]
    envs = Envs(3)
    for rb in buffers:
        rb.extend(envs.data[0][:1])
    for _ in range(count):
        rows = envs.take(data.draw(st.integers(0, 2)), data.draw(st.integers(1, size // 3)))
        fails = data.draw(st.booleans())
        for rb in buffers:
            storage = rb.storage
            values, number = storage.prepare(rows, 0)
            with suppress(KeyboardInterrupt), storage.ring.append(number, number) as first:
                storage.write(first, number, values, 0)
                if fails:
                    raise KeyboardInterrupt
        if len(buffers[0]):
            compare(*buffers)


@examples(25)
@given(writes=WRITES, size=st.integers(16, SIZE), seed=st.integers(0, 99))
def test_slices_too(writes, size, seed):
    buffers = [
        ReplayBuffer(
            storage=LazyTensorStorage(size, compact=compact),
            sampler=SliceSampler(slice_len=4, strict_length=False),
        )
        for compact in (False, True)
    ]
    envs = Envs(3)
    for env, steps in writes:
        data = envs.take(env, steps)
        samples = []
        for rb in buffers:
            rb.extend(data)
            torch.default_generator.manual_seed(seed)
            samples.append(rb.sample(16))
        same(*samples)


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_compact_buffer_comes_back(tmp_path, way, ndim):
    source = Envs(2)
    saved = ReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim, compact=True))
    loaded = ReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim, compact=True), shared=True)
    for steps in (3, 9, 5, 4):
        data = source.block(steps)
        saved.extend(data if ndim == 2 else data.reshape(-1))
    if way == "dumps":
        saved.dumps(tmp_path)
        loaded.loads(tmp_path)
    else:
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    same(saved[:], loaded[:])
    for _ in range(4):  # what was loaded goes on as any other
        data = source.block(3)
        loaded.extend(data if ndim == 2 else data.reshape(-1))
        _consistent(loaded)


def _consistent(rb):
    rows = rb[:].reshape(-1)
    assert torch.equal(rows["next", "observation"], rows["observation"] + 1)


def test_sharing_takes_successors_along():
    source = Envs(2)
    buffers = [
        ReplayBuffer(storage=LazyTensorStorage(20, compact=compact)) for compact in (False, True)
    ]
    for steps in (4, 7, 3):
        data = source.block(steps).reshape(-1)
        for rb in buffers:
            rb.extend(data)
    for rb in buffers:
        rb.share()
    compare(*buffers)
    for steps in (4, 7, 3):
        data = source.block(steps).reshape(-1)
        for rb in buffers:
            rb.extend(data)
        compare(*buffers)


def test_images_take_half_the_memory():
    frames = torch.randint(0, 255, (2001, 32, 32), dtype=torch.uint8)
    data = TensorDict(
        {
            "pixels": frames[:-1],
            "next": {"pixels": frames[1:].clone(), "done": torch.zeros(2000, 1).bool()},
        },
        [2000],
    )
    sizes = []
    for compact in (False, True):
        rb = ReplayBuffer(storage=LazyTensorStorage(1000, compact=compact))
        for part in data.split(50):
            rb.extend(part)
        sizes.append(rb.storage.nbytes)
    assert sizes[1] < 0.55 * sizes[0]


def test_the_order_of_rows_does_not_matter():
    data = Envs(1).take(0, 16)[torch.arange(15, -1, -1)]
    rb = ReplayBuffer(storage=LazyTensorStorage(16, compact=True))
    for _ in range(5):
        rb.extend(data)
        same(rb[:], data)
    assert rb.storage.ring.table(0)[0] < 8  # places of frames beyond one per row


def test_nan_and_negative_zero_are_compared_as_bits():
    one = torch.tensor([[float("nan")] * 3, [0.0] * 3, [-0.0] * 3, [1.0] * 3])
    data = TensorDict({"observation": one, "next": {"observation": one.roll(-1, 0)}}, [4])
    data["next", "observation"][1] = torch.tensor([0.0] * 3)  # the next row has -0.0
    data["next", "observation"][0] = torch.tensor([0.0] * 3)
    rb = ReplayBuffer(storage=LazyTensorStorage(4, compact=["observation"]))
    rb.extend(data)
    for key in ("observation", ("next", "observation")):
        assert torch.equal(rb[:][key].view(torch.int32), data[key].view(torch.int32))


def test_observations_that_are_bits_are_stored_once_and_flags_are_not():
    bits, flags = torch.rand(5, 32) < 0.5, torch.zeros(4, 32, dtype=torch.bool)
    after = {"observation": bits[1:], "done": flags}
    data = TensorDict({"observation": bits[:-1], "done": flags, "next": after}, [4])
    rb = ReplayBuffer(storage=LazyTensorStorage(4, compact=True))
    rb.extend(data)
    assert rb.storage.rows.layout.once == [("observation",)]
    same(rb[:], data)


def test_entries_can_be_chosen():
    data = Envs(1).take(0, 8)
    for compact, once in ((["small"], [("small",)]), (True, [("observation",)])):
        rb = ReplayBuffer(storage=LazyTensorStorage(8, compact=compact))
        rb.extend(data)
        assert rb.storage.rows.layout.once == once
        same(rb[:], data)


def test_observations_that_are_smaller_than_their_places_stay_as_they_are():
    seen = torch.randn(9, 4)
    data = TensorDict({"seen": seen[:-1], "next": {"seen": seen[1:]}}, [8])
    rb = ReplayBuffer(storage=LazyTensorStorage(8, compact=True))
    rb.extend(data)
    assert rb.storage.rows.layout.once == []
    same(rb[:], data)


def test_what_cannot_be_compact_is_named():
    data = Envs(1).take(0, 8)
    without = data.exclude(("next", "observation"))
    cases = [
        (True, without, "compact_obs=False"),
        (["observation"], without, "no .'next', 'observation'."),
        (["missing"], data, "compact names 'missing'"),
        (True, torch.zeros(3, 4), "compact_obs=False"),
    ]
    for compact, rows, message in cases:
        rb = ReplayBuffer(storage=LazyTensorStorage(8, compact=compact))
        with pytest.raises(ConfigError, match=message):
            rb.extend(rows)
    rb = ReplayBuffer(storage=LazyTensorStorage(8, compact=True))
    rb.extend(data)
    ranked = TensorDictMaxValueWriter("small")
    with pytest.raises(ConfigError, match="compact=False"):
        ReplayBuffer(storage=LazyTensorStorage(8, compact=True), writer=ranked).extend(data)
    plain = ReplayBuffer(storage=LazyTensorStorage(8))
    with pytest.raises(ConfigError, match="compact"):
        plain.load_state_dict(rb.state_dict())


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_collectors_do_not_leave_out_what_a_compact_buffer_needs(kind):
    rb = ReplayBuffer(storage=LazyTensorStorage(64, compact=True))
    make, envs = (
        (Collector, "CartPole-v1") if kind == "single" else (MultiSyncCollector, ["CartPole-v1"])
    )
    with pytest.raises(ConfigError, match="compact_obs"):
        make(envs, frames_per_batch=8, total_frames=16, replay_buffer=rb, compact_obs=True)


def test_a_collector_fills_it():
    buffers = []
    for compact in (False, ["observation"]):
        rb = ReplayBuffer(storage=LazyTensorStorage(300, compact=compact))
        torch.manual_seed(0)
        with Collector(
            "CartPole-v1", num_envs=2, frames_per_batch=80, total_frames=400, replay_buffer=rb
        ) as collector:
            collector.set_seed(0)
            for _ in collector:
                pass
        buffers.append(rb)
    compare(*buffers)


def test_a_state_whose_lost_rows_point_to_nothing_loads():
    """Rows that a writer overwrote while they were copied may point beyond what was copied."""
    source, target = (ReplayBuffer(storage=LazyTensorStorage(8, compact=True)) for _ in range(2))
    after = torch.arange(1, 7).unsqueeze(1).expand(-1, 4)
    source.extend(TensorDict({"observation": after - 1, "next": {"observation": after}}, [6]))
    state = source.state_dict()
    *_, pointers, _ = state["storage"]["tensors"]
    pointers[2] = 15
    state["storage"]["stamps"][2] = 0
    target.load_state_dict(state)
    same(target[:], source[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize(
    "seen",
    [torch.zeros(5, 0), torch.randn(5, 8, dtype=torch.complex64).conj()],
    ids=["empty", "conjugate"],
)
def test_entries_without_bits_of_their_own(seen):
    data = TensorDict({"seen": seen[:-1], "next": {"seen": seen[1:]}}, [4])
    rb = ReplayBuffer(storage=LazyTensorStorage(4, compact=["seen"]))
    rb.extend(data)
    assert (rb[:] == data).all()
