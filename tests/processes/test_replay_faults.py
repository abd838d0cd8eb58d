"""Shared buffers whose processes are stopped, fork, or open them in several threads at once."""

import os
import pathlib
import pickle
import signal
import threading
import time

import pytest
import rig
import torch
from tensordict import TensorDict
from test_replay_shared import finish, start

from gleanrl import (
    Collector,
    CollectorTimeout,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RateLimiter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)


def rows(first, count):
    number = torch.arange(first, first + count)
    data = {"number": number, "twice": number * 2, "last": torch.zeros(count, dtype=torch.bool)}
    return TensorDict(data, [count])


def forked(body, seconds=30):
    """Run ``body`` in a forked child; return its process id."""
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            body()
        except BaseException as err:
            os.write(2, f"{err!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def ended_well(child):
    return os.waitpid(child, 0)[1] == 0


def test_a_process_stopped_inside_is_named_and_blocks_nobody_for_ever(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), shared=True, lock_timeout=0.4)
    rb.extend(rows(0, 10))
    sampler = SliceSampler(slice_len=2, end_key="last")
    slices = ReplayBuffer(storage=rb.storage, sampler=sampler, batch_size=50)

    def stop():
        with rb.storage.ring.append(3, 3):
            os.kill(os.getpid(), signal.SIGSTOP)

    child = forked(stop)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    for blocked in (lambda: rb.extend(rows(10, 5)), rb.share, lambda: rb.dumps(tmp_path)):
        with pytest.raises(CollectorTimeout, match=f"process {child} "):
            blocked()
    assert rb.sample(50)["number"].max() < 10  # whoever only reads does not wait
    assert slices.sample()["number"].max() < 10
    os.kill(child, signal.SIGCONT)
    assert ended_well(child)
    rb.extend(rows(10, 5))
    assert len(rb) == 18


def test_a_writer_that_waits_comes_before_one_that_comes_back():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), shared=True)
    rb.extend(rows(0, 1))
    reading, writing = os.pipe()
    child = forked(lambda: (os.read(reading, 1), rb.extend(rows(1, 1))))
    with rb.storage.ring.section():
        os.write(writing, b"!")
        rig.until(lambda: f" {child} " in pathlib.Path("/proc/locks").read_text())
    rb.extend(rows(2, 1))
    assert ended_well(child)
    assert rb[:]["number"].tolist() == [0, 1, 2]
    for end in (reading, writing):
        os.close(end)


class Held(LazyTensorStorage):
    """Copying rows takes until it is told to end."""

    def gather(self, index, extra):
        self.copying.set()
        assert self.leave.wait(60)
        return super().gather(index, extra)


@pytest.mark.covering
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_child_can_sample_though_a_thread_was_sampling_when_it_was_forked(prefetch, leaves):
    rb = ReplayBuffer(
        storage=Held(20), sampler=SamplerWithoutReplacement(), batch_size=5, prefetch=prefetch
    )
    rb.storage.copying, rb.storage.leave = threading.Event(), threading.Event()
    rb.extend(rows(0, 20))
    thread = threading.Thread(target=rb.sample)
    thread.start()
    assert rb.storage.copying.wait(30)
    if leaves:  # within the fork's patience
        threading.Timer(0.2, rb.storage.leave.set).start()

    def sample():
        rb.storage.leave.set()
        rb.extend(rows(20, 5))
        numbers = [number for batch in rb for number in batch["number"].tolist()]
        assert sorted(numbers) == list(range(5, 25)), numbers

    child = forked(sample)
    rb.storage.leave.set()
    thread.join()
    assert ended_well(child)
    rb.extend(rows(20, 5))  # nobody is locked out here, either


@pytest.mark.parametrize("shared", [False, True])
def test_children_forked_at_any_moment_work(shared):
    sampler = PrioritizedSampler(64, 1.0, 1.0)
    rb = ReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, shared=shared)
    rb.extend(rows(0, 64))
    done = threading.Event()

    def work():
        first = 64
        while not done.wait(0.001):  # children get their turn, too: processes do not queue
            rb.extend(rows(first, 7))
            rb.update_priority(torch.arange(10), torch.rand(10))
            rb.sample(16)
            first += 7

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()

    def check():
        for first in range(0, 128, 16):
            rb.extend(rows(first, 16))
            sample = rb.sample(32)
            assert (sample["twice"] == 2 * sample["number"]).all()

    try:
        assert all([ended_well(forked(check)) for _ in range(10)])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    rb.extend(rows(0, 64))
    assert len(rb) == 64


def test_a_child_forked_in_the_middle_of_a_rollout_ends_at_once():
    stepping, leave = threading.Event(), threading.Event()

    def policy(observation):
        if threading.current_thread() is not threading.main_thread():
            stepping.set()
            assert leave.wait(60)
        return torch.zeros(1)

    rb = ReplayBuffer(storage=LazyTensorStorage(20))
    with Collector("Pendulum-v1", policy, frames_per_batch=20, replay_buffer=rb) as collector:
        thread = threading.Thread(target=collector.next)
        thread.start()
        assert stepping.wait(60)
        try:
            assert ended_well(forked(collector.shutdown, 10))
        finally:
            leave.set()
            thread.join()


def test_a_child_forked_while_a_worker_fills_a_buffer_lets_go_of_it():
    rb = ReplayBuffer(storage=LazyTensorStorage(10_000))
    with Collector("Pendulum-v1", None, frames_per_batch=20, replay_buffer=rb) as collector:
        collector.start()
        rig.until(lambda: rb.write_count > 0)
        assert ended_well(forked(collector.shutdown, 10))
        count = rb.write_count
        rig.until(lambda: rb.write_count > count)


def test_a_child_forked_while_a_list_was_written_can_write_it():
    rb = ReplayBuffer(storage=ListStorage(10))
    inside, leave = threading.Event(), threading.Event()

    def write():
        with rb.storage.ring.append(4, 4):
            inside.set()
            assert leave.wait(60)
            rb.storage.items.extend(range(4))

    thread = threading.Thread(target=write)
    thread.start()
    assert inside.wait(30)

    def fill():
        rb.extend(list(range(10)))
        assert sorted(rb[:]) == list(range(10))

    child = forked(fill)
    leave.set()
    thread.join()
    assert ended_well(child)


OPEN_TWICE = """
import gleanrl.memory.shared as shared, threading, contextlib
both, opened = threading.Barrier(2), []
open_file = shared.FileAddress.open

def slow(self):
    with contextlib.suppress(threading.BrokenBarrierError):
        both.wait(2)  # both threads get here, unless one waits for the other
    return open_file(self)

shared.FileAddress.open = slow
threads = [threading.Thread(target=lambda: opened.append(pickle.loads(blob))) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
one, other = opened
one.extend(rows(1, 0, 3))
other.extend(rows(1, 3, 3))
assert len(one) == len(other) == 6
say(one.storage.ring.lock is other.storage.ring.lock)
"""


def test_threads_that_open_one_buffer_at_once_share_one_lock():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), shared=True)
    assert finish(start(rb, OPEN_TWICE, blob=pickle.dumps(rb)))
    assert rb.write_count == 6


def test_samples_do_not_wait_for_a_collector_whose_process_was_killed():
    limiter = RateLimiter(max_samples_per_insert=1, timeout=60)
    rb = ReplayBuffer(storage=LazyTensorStorage(20), shared=True, limiter=limiter)
    rb.extend(rows(0, 10))
    rb.sample(4)
    storage = rb.storage
    limiter.running(storage, True)  # one that runs on in this process
    reading, writing = os.pipe()

    def collect():
        limiter.running(storage, True)
        os.write(writing, b"!")
        signal.pause()

    child = forked(collect)
    os.read(reading, 1)
    limiter.running(storage, False)
    with storage.ring.section():
        assert storage.ring.lock.collecting
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for end in (reading, writing):
        os.close(end)
    begun = time.monotonic()
    rb.sample(4)  # ahead of what was inserted: with a collector it would wait
    assert time.monotonic() - begun < 30


class Seen:
    """The words of a ring; somebody looks after each one that is written."""

    def __init__(self, words, look):
        self.words, self.look = words, look

    def __getitem__(self, place):
        return self.words[place]

    def __setitem__(self, place, value):
        self.words[place] = value
        self.look()


def test_a_buffer_that_is_being_emptied_has_rows_or_none_at_every_moment():
    rb = ReplayBuffer(storage=LazyTensorStorage(20), shared=True)
    rb.extend(rows(0, 15))
    reader, tops = pickle.loads(pickle.dumps(rb)), []
    ring = rb.storage.ring
    ring._h = Seen(ring._h, lambda: tops.append(reader.storage.ring.top))
    rb.empty()
    assert len(tops) > 5
    assert min(tops) == 0
    assert not len(reader)
