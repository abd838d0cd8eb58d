"""Stacks whose frames are stored once: samples are those of a plain buffer, bit for bit."""

import copy
import pickle
from contextlib import suppress

import ale_py
import gymnasium as gym
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.covering import examples
from tests.zoo import gym_toys
from torchrl.envs import CatFrames, GymWrapper, SerialEnv, TransformedEnv

from gleanrl import (
    Collector,
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStep,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)

SIZE = 3
"""Frames in a stack."""


class Frames:
    """Rows of several environments, whose observations are stacks of the last frames.

    Few values are possible, so frames are often equal by chance.
    """

    def __init__(self, seed, envs=2, shape=(2, 3), padding=True, last=False):
        self.random = torch.Generator().manual_seed(seed)
        self.shape, self.padding, self.last = shape, padding, last
        self.number = 0
        self.stacks = [self.reset() for _ in range(envs)]

    def frame(self):
        return torch.randint(0, 3, (1, *self.shape), generator=self.random, dtype=torch.uint8)

    def reset(self):
        frame = self.frame()
        before = frame if self.padding else torch.zeros_like(frame)
        return torch.cat([before] * (SIZE - 1) + [frame])

    def chance(self, share):
        return bool(torch.rand(1, generator=self.random) < share)

    def steps(self, env, count):
        roots, after, done = [], [], []
        for _ in range(count):
            roots.append(self.stacks[env])
            after.append(torch.cat([roots[-1][1:], self.frame()]))
            done.append([self.chance(0.2)])
            self.stacks[env] = self.reset() if done[-1][0] else after[-1]
        return self.rows(torch.stack(roots), torch.stack(after), torch.tensor(done))

    def rows(self, roots, after, done):
        number = torch.arange(self.number, self.number + len(roots))
        self.number += len(roots)
        if self.last:
            roots, after = roots.movedim(1, -1), after.movedim(1, -1)
        wide = number.unsqueeze(1).expand(-1, 3)
        inner = {"pixels": after.contiguous(), "wide": wide + 1, "done": done}
        return TensorDict(
            {"pixels": roots.contiguous(), "number": number, "wide": wide, "next": inner},
            [len(roots)],
        )

    def block(self, count):
        return torch.stack([self.steps(env, count) for env in range(len(self.stacks))])

    def no_stacks(self, count):
        roots, after = (torch.cat([self.frame() for _ in range(SIZE * count)]) for _ in range(2))
        shape = (count, SIZE, *self.shape)
        return self.rows(roots.view(shape), after.view(shape), torch.zeros(count, 1).bool())


def same(one, other):
    assert one.batch_size == other.batch_size
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


def stored_once(size, kind=LazyTensorStorage, **options):
    return kind(size, stacks={"pixels": SIZE}, **options)


def write(source, kind, count):
    """Return rows as one `extend` gets them."""
    if kind == "steps":
        return source.steps(0, count)
    if kind == "block":
        return source.block(count).reshape(-1)
    if kind == "time first":
        return source.block(count).transpose(0, 1).reshape(-1)
    if kind == "holes":
        rows = source.block(count).reshape(-1)
        return rows[torch.rand(len(rows), generator=source.random) < 0.7]
    if kind == "any order":
        rows = source.block(count).reshape(-1)
        return rows[torch.randperm(len(rows), generator=source.random)]
    return source.no_stacks(count)


WRITES = st.lists(
    st.tuples(
        st.sampled_from(["steps", "block", "block", "time first", "holes", "any order", "none"]),
        st.sampled_from([1, 1, 2, 5, 13]),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage], ids=["memory", "file"])
@examples(40)
@given(
    size=st.integers(1, 24),
    writes=WRITES,
    shared=st.booleans(),
    seed=st.integers(0, 99),
    shape=st.sampled_from([(2, 3), (2, 4)]),
    padding=st.booleans(),
    last=st.booleans(),
    compact=st.booleans(),
)
def test_samples_are_those_of_a_plain_buffer(
    kind, size, writes, shared, seed, shape, padding, last, compact
):
    plain = ReplayBuffer(storage=kind(size))
    once = ReplayBuffer(storage=stored_once(size, kind, compact=compact), shared=shared)
    source = Frames(seed, shape=shape, padding=padding, last=last)
    for number, (way, count) in enumerate(writes):
        data = write(source, way, count)
        if number == 9:
            plain.empty()
            once.empty()
        for rb in (plain, once):
            rb.extend(data) if len(data) != 1 else rb.add(data[0])
        if len(plain):
            same(plain[:], once[:])
            sample, info = once.sample(8, return_info=True)
            same(plain[info["index"]], sample)


@examples(25)
@given(
    size=st.integers(4, 30),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    envs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_so_are_those_of_env_time_storages(size, steps, envs, seed):
    plain = ReplayBuffer(storage=LazyTensorStorage(size, ndim=2))
    once = ReplayBuffer(storage=stored_once(size, ndim=2))
    source = Frames(seed, envs)
    for count in steps:
        data = source.block(count)
        for rb in (plain, once):
            rb.extend(data)
        same(plain[:], once[:])


@examples(25)
@given(
    size=st.integers(6, 24),
    writes=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=2, max_size=20),
    seed=st.integers(0, 99),
)
def test_a_write_that_fails_takes_no_frames_from_others(size, writes, seed):
    """A row that was never completed may have shared frames with one that is still there."""
    plain = ReplayBuffer(storage=LazyTensorStorage(size), shared=True)
    once = ReplayBuffer(storage=stored_once(size), shared=True)
    source = Frames(seed, 1)
    for count, fails in [(1, False), *writes]:
        data = source.steps(0, count)
        for rb in (plain, once):
            storage = rb.storage
            values, number = storage.prepare(data, 0)
            with suppress(KeyboardInterrupt), storage.ring.append(number, number) as first:
                storage.write(first, number, values, 0)
                if fails:
                    raise KeyboardInterrupt
        if len(plain):
            same(plain[:], once[:])


@pytest.mark.parametrize("way", ["state", "files", "copy"])
@pytest.mark.parametrize("compact", [False, True])
def test_saved_buffers_come_back_and_go_on(tmp_path, way, compact):
    source = Frames(0)
    plain = ReplayBuffer(storage=LazyTensorStorage(20))
    once = ReplayBuffer(storage=stored_once(20, compact=compact))
    for count in (4, 1, 6, 9):
        data = source.block(count).reshape(-1)
        for rb in (plain, once):
            rb.extend(data)
    other, reference = (
        ReplayBuffer(storage=stored_once(20, compact=compact), shared=True),
        ReplayBuffer(storage=LazyTensorStorage(20)),
    )
    if way == "files":
        plain.dumps(tmp_path / "plain")
        once.dumps(tmp_path / "once")
        reference.loads(tmp_path / "plain")
        other.loads(tmp_path / "once")
    elif way == "state":
        reference.load_state_dict(plain.state_dict())
        other.load_state_dict(once.state_dict())
    else:
        reference, other = copy.deepcopy(plain), copy.deepcopy(once)
    for count in (1, 1, 3, 5, 2):
        same(reference[:], other[:])
        data = source.block(count).reshape(-1)
        for rb in (reference, other):
            rb.extend(data)
    same(reference[:], other[:])


def test_another_process_has_the_same_stacks():
    plain, once = (ReplayBuffer(storage=s) for s in (LazyTensorStorage(20), stored_once(20)))
    once.share()
    source = Frames(1)
    both = [once, pickle.loads(pickle.dumps(once))]
    for number in range(12):
        data = source.block(1 + number % 4).reshape(-1)
        plain.extend(data)
        both[number % 2].extend(data)
        same(plain[:], both[0][:])
        same(plain[:], both[1][:])


def test_slices_and_priorities_have_whole_stacks():
    rows = Frames(2, 1).steps(0, 40)
    samplers = [
        lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False),
        lambda: PrioritizedSampler(30, 0.7, 0.5),
    ]
    for sampler in samplers:
        rb = TensorDictReplayBuffer(storage=stored_once(30), sampler=sampler())
        rb.extend(rows)
        sample = rb.sample(16)
        expected = rows[sample["number"] - rows["number"][0]]
        assert torch.equal(sample["pixels"], expected["pixels"])
        assert torch.equal(sample["next", "pixels"], expected["next", "pixels"])


def run(steps, side=16):
    """Return the rows of one environment without ends."""
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (steps + 4, side, side), generator=random, dtype=torch.uint8)
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1).contiguous()
    after = {"pixels": stacks[1:], "reward": torch.ones(steps, 1)}
    after |= {name: torch.zeros(steps, 1).bool() for name in ("done", "terminated", "truncated")}
    return TensorDict({"pixels": stacks[:-1], "next": after}, [steps])


def per_row(batches, size):
    """Return the bytes of a row, with all bookkeeping."""
    rb = ReplayBuffer(storage=LazyTensorStorage(size, stacks={"pixels": 4}))
    for part in batches:
        rb.extend(part)
    assert len(rb) == size
    return rb.storage.nbytes / size


ORDERS = {
    "one long batch": lambda rows: [rows],
    "single rows": lambda rows: rows.split(1),
    "two environments side by side": lambda rows: [rows.view(2, -1).transpose(0, 1).reshape(-1)],
    "any order": lambda rows: [rows[torch.randperm(len(rows))]],
    "n-step": lambda rows: [
        MultiStep(0.9, 3)(part.unsqueeze(0)).squeeze(0) for part in rows.split(100)
    ],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_frame_is_stored_once_in_whatever_order_rows_come(order):
    rows = run(1000)
    batches = ORDERS[order](rows)
    frame, entries = 16 * 16, sum(v[0].nbytes for v in batches[0].values(True, True))
    others = entries - 2 * 4 * frame
    bookkeeping = 8 * 8 + 8
    assert per_row(batches, len(rows)) <= 1.04 * frame + others + bookkeeping


def test_a_ring_that_is_full_needs_no_more_memory_however_often_it_is_overwritten():
    rb = ReplayBuffer(storage=LazyTensorStorage(100, stacks={"pixels": 4}))
    sizes = []
    for part in run(2000).split(7):
        rb.extend(part)
        sizes.append(rb.storage.nbytes)
    assert sizes[-1] == sizes[20]


def test_data_that_are_no_stacks_are_kept_whole():
    source = Frames(0, shape=(8, 8))
    rb = ReplayBuffer(storage=stored_once(40))
    for _ in range(3):
        data = source.no_stacks(40)
        rb.extend(data)
        same(rb[:], data)


@pytest.mark.parametrize(
    ("shape", "size"), [((12, 5, 5), 4), ((4, 5, 5), 4), ((5, 5, 4), 4), ((6,), 2)]
)
def test_frames_may_have_channels_and_come_first_or_last(shape, size):
    pixels = torch.randint(0, 255, (6, *shape), dtype=torch.uint8)
    rb = ReplayBuffer(storage=LazyTensorStorage(6, stacks={"pixels": size}))
    rb.extend(TensorDict({"pixels": pixels}, [6]))
    assert torch.equal(rb[:]["pixels"], pixels)


def test_floats_are_compared_as_bits():
    pixels = torch.tensor([[[0.0, 1.0], [-0.0, 1.0]], [[float("nan"), 1.0], [0.0, 1.0]]])
    rb = ReplayBuffer(storage=LazyTensorStorage(2, stacks={"pixels": 2}))
    rb.extend({"pixels": pixels})
    assert torch.equal(rb[:]["pixels"].view(torch.int32), pixels.view(torch.int32))


def test_what_cannot_be_stored_once_is_named():
    rows = Frames(0).steps(0, 4)
    for stacks, message in [
        ({"missing": 3}, "stacks names 'missing'"),
        ({"pixels": 4}, "stack of 4 frames"),
        ({"pixels": 1}, "stack of 1 frames"),
        ({"number": 2}, "stack of 2 frames"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ReplayBuffer(storage=LazyTensorStorage(8, stacks=stacks)).extend(rows)
    with pytest.raises(ConfigError, match="mapping"):
        LazyTensorStorage(8, stacks=["pixels"])
    with pytest.raises(ConfigError, match="one frame each"):
        ReplayBuffer(storage=stored_once(8)).extend(rows.reshape(2, 2))
    ranked = ReplayBuffer(storage=stored_once(8), writer=TensorDictMaxValueWriter("number"))
    with pytest.raises(ConfigError, match="no stacks"):
        ranked.extend(rows)


@pytest.mark.parametrize("way", ["state", "files"])
def test_rows_of_another_kind_of_storage_are_refused_and_nothing_changes(tmp_path, way):
    rows, other = Frames(0).steps(0, 4), Frames(1).steps(0, 3)
    kinds = [LazyTensorStorage(8), LazyTensorStorage(8, compact=["pixels"]), stored_once(8)]
    for source in kinds:
        for target in kinds:
            saved, loaded = (ReplayBuffer(storage=copy.deepcopy(kind)) for kind in (source, target))
            saved.extend(rows)
            loaded.extend(other)
            if way == "files":
                saved.dumps(tmp_path)
            load = loaded.loads if way == "files" else loaded.load_state_dict
            state = tmp_path if way == "files" else saved.state_dict()
            if source is target:
                load(state)
                same(loaded[:], rows)
                continue
            with pytest.raises(ConfigError, match="store them by extend"):
                load(state)
            same(loaded[:], other)


def pong():
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def test_a_transition_of_atari_takes_the_memory_of_one_frame():
    buffers = [
        ReplayBuffer(storage=LazyTensorStorage(300)),
        ReplayBuffer(storage=LazyTensorStorage(300, stacks={"observation": 4})),
    ]
    for rb in buffers:
        with Collector(
            [pong, pong], frames_per_batch=32, total_frames=384, replay_buffer=rb
        ) as collector:
            collector.set_seed(0)
            for _ in collector:
                pass
    same(*(rb[:] for rb in buffers))
    assert buffers[1].storage.nbytes / 300 <= 7_400


@pytest.mark.parametrize("inside", [True, False])
def test_frames_of_torchrls_serial_env_are_stored_once(inside):
    def stacked(env):
        return TransformedEnv(env, CatFrames(4, -3, in_keys=["observation"]))

    def member():
        env = GymWrapper(gym_toys.Pictures())
        return stacked(env) if inside else env

    serial = SerialEnv(3, member)
    env = serial if inside else stacked(serial)
    buffers = [
        ReplayBuffer(storage=LazyTensorStorage(240, stacks=stacks))
        for stacks in (None, {"observation": 4})
    ]
    with Collector(env, frames_per_batch=60, total_frames=240) as collector:
        for batch in collector:
            for rb in buffers:
                rb.extend(batch.reshape(-1))
    same(*(rb[:] for rb in buffers))
    assert buffers[1].storage.nbytes <= 0.35 * buffers[0].storage.nbytes
