"""Stacks whose frames are stored once: what is sampled is what a plain buffer holds, bit for bit."""

import copy
import pickle

import ale_py
import gymnasium as gym
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from gleanrl import (
    Collector,
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStep,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

SIZE = 3
"""Frames in a stack."""
KEYS = ["pixels", ("next", "pixels"), "number", ("next", "done")]


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
        inner = {"pixels": after.contiguous(), "done": done}
        return TensorDict(
            {"pixels": roots.contiguous(), "number": number, "next": inner}, [len(roots)]
        )

    def block(self, count):
        return torch.stack([self.steps(env, count) for env in range(len(self.stacks))])

    def no_stacks(self, count):
        roots, after = (torch.cat([self.frame() for _ in range(SIZE * count)]) for _ in range(2))
        shape = (count, SIZE, *self.shape)
        return self.rows(roots.view(shape), after.view(shape), torch.zeros(count, 1).bool())


def same(one, other):
    assert one.batch_size == other.batch_size
    for key in KEYS:
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


def stored_once(size, kind=LazyTensorStorage, **options):
    return kind(size, compact=True, stacks={"pixels": SIZE}, **options)


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
@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 24),
    writes=WRITES,
    shared=st.booleans(),
    seed=st.integers(0, 99),
    shape=st.sampled_from([(2, 3), (2, 4)]),
    padding=st.booleans(),
    last=st.booleans(),
)
def test_samples_are_those_of_a_plain_buffer(
    kind, size, writes, shared, seed, shape, padding, last
):
    plain = ReplayBuffer(storage=kind(size))
    once = ReplayBuffer(storage=stored_once(size, kind), shared=shared)
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


@settings(max_examples=25, deadline=None)
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


@settings(max_examples=25, deadline=None)
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
            try:
                with storage.ring.append(number, number) as first:
                    storage.write(first, number, values, 0)
                    if fails:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
        if len(plain):
            same(plain[:], once[:])


@pytest.mark.parametrize("way", ["state", "files", "copy"])
@pytest.mark.parametrize("to", [7, 20])
def test_saved_buffers_come_back_and_go_on(tmp_path, way, to):
    source = Frames(0)
    plain = ReplayBuffer(storage=LazyTensorStorage(20))
    once = ReplayBuffer(storage=stored_once(20))
    for count in (4, 1, 6, 9):
        data = source.block(count).reshape(-1)
        for rb in (plain, once):
            rb.extend(data)
    other, reference = (
        ReplayBuffer(storage=stored_once(to), shared=True),
        ReplayBuffer(storage=LazyTensorStorage(to)),
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


def long_run(steps, batch):
    """Return a full buffer of one environment without ends, written by batches of some size."""
    frames = torch.randint(0, 255, (steps + 4, 16, 16), dtype=torch.uint8)
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1).contiguous()
    rb = ReplayBuffer(storage=LazyTensorStorage(steps // 2, compact=True, stacks={"pixels": 4}))
    data = TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:]}}, [steps])
    for part in data.split(batch):
        rb.extend(part)
    assert torch.equal(rb[:]["pixels"].flatten(1).sort(0)[0], data[-len(rb) :]["pixels"].flatten(1).sort(0)[0])
    return rb


@pytest.mark.parametrize("batch", [1, 8, 100])
def test_a_stack_takes_the_memory_of_a_frame_however_small_the_batches(batch):
    rb = long_run(2000, batch)
    assert rb.storage.nbytes / len(rb) < 1.08 * 256 + 150


def test_data_that_is_no_stack_takes_more_memory_and_is_kept_whole():
    source = Frames(0, shape=(8, 8))
    rb = ReplayBuffer(storage=stored_once(50))
    for _ in range(5):
        data = source.no_stacks(40)
        rb.extend(data)
        same(rb[:][-40:].apply(lambda x: x) if False else rb[rb[:]["number"].argsort()[-40:]], data)
