"""Several processes write and read one buffer while writers are killed: nothing torn, lost, twice.

``GLEANRL_REPLAY_SECONDS=60`` runs the stress test that long.
"""

import gc
import multiprocessing as mp
import os
import pickle
import random
import select
import signal
import sys
import textwrap
import time

import pytest
import torch
from tensordict import TensorDict

from gleanrl import (
    ConfigError,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayError,
    SliceSampler,
    TensorDictReplayBuffer,
)

ONCE = [{"compact": True}, {"stacks": {"wide": 16}}]
"""Storages whose rows have parts in common: "wide" is a stack of 16 frames of 3 numbers."""
SECONDS = float(os.environ.get("GLEANRL_REPLAY_SECONDS", "0.5"))
WIDTH = 48
PROCESSES = mp.get_context("forkserver")
PROCESSES.set_forkserver_preload(["gleanrl.collectors"])


def rows(writer, first, count):
    """Every field of a row is a function of who wrote it and its number."""
    number = torch.arange(first, first + count) + writer * 10**9
    return TensorDict(
        {
            "number": number,
            "wide": number.unsqueeze(1) * 3 + torch.arange(WIDTH),
            "collector": {"traj_ids": torch.full((count,), writer)},
            "next": {"number": number + 1, "wide": after(number)},
        },
        [count],
    )


def after(number):
    """What follows "wide": that of the next number, but at the ends of episodes."""
    wide = (number + 1).unsqueeze(1) * 3 + torch.arange(WIDTH)
    return torch.where((number % 7 == 0).unsqueeze(1), -wide, wide)


def check(batch):
    """Raise unless every row is whole."""
    number = batch["number"]
    assert (batch["wide"] == number.unsqueeze(1) * 3 + torch.arange(WIDTH)).all(), "torn"
    assert (batch["next", "number"] == number + 1).all(), "torn"
    assert (batch["next", "wide"] == after(number)).all(), "torn"
    assert (batch["collector", "traj_ids"] == number // 10**9).all(), "torn"


def run(rb, body, names, answer):
    """Runs in the child: ``body`` with ``rb`` and ``names``; ``say`` answers."""
    torch.set_num_threads(1)
    mp.set_executable(sys.executable)  # its own children start as it did
    exec(textwrap.dedent(body), {**globals(), **names, "rb": rb, "say": answer.send})


def start(rb, body, **names):
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run, args=(rb, body, names, there))
    process.start()
    there.close()
    process.answer = here
    return process


def finish(process):
    process.join(60)
    assert process.exitcode == 0
    try:
        return process.answer.recv()
    except EOFError:  # it had nothing to say
        return None


WRITE = """
first, rng = 0, random.Random(writer)
ready = os.open(acknowledged, os.O_WRONLY | os.O_APPEND)
while first < limit:
    count = rng.choice([1, 3, 17, 64, 200])
    data = rows(writer, first, count)
    rb.add(data[0]) if count == 1 else rb.extend(data)
    first += count
    os.write(ready, b"%d %d\\n" % (first - count, count))
"""
READ = """
end, samples, seen = time.monotonic() + seconds, 0, 0
while time.monotonic() < end or samples < 100:
    if len(rb) < 2000:
        continue
    batch = rb.sample(128)
    check(batch)
    if slices:
        parts = batch["number"].view(-1, 8)
        assert (parts[:, 1:] == parts[:, :-1] + 1).all(), "a slice crosses a gap"
    samples += 1
    seen = max(seen, rb.write_count)
say((samples, seen))
"""


@pytest.mark.slow
@pytest.mark.timeout(max(120, 3 * SECONDS))
@pytest.mark.parametrize("once", [{}, *ONCE], ids=["plain", "compact", "stacks"])
def test_rows_are_whole_while_writers_are_killed(tmp_path, once):
    size = 6000
    rb = ReplayBuffer(storage=LazyTensorStorage(size, **once), shared=True)
    sliced = ReplayBuffer(storage=rb.storage, sampler=SliceSampler(slice_len=8))
    readers = [
        start(buffer, READ, seconds=SECONDS, slices=buffer is sliced) for buffer in (rb, sliced)
    ]
    rng = random.Random(0)
    logs, writers, kills, serial = [], {}, 0, 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or kills < 10 or any(reader.is_alive() for reader in readers):
        while len(writers) < 4:
            serial += 1
            logs.append(tmp_path / f"{serial}")
            logs[-1].touch()
            writers[serial] = start(
                rb, WRITE, writer=serial, limit=10**8, acknowledged=str(logs[-1])
            )
        victim = rng.choice(sorted(writers))
        # Only what has begun to write is worth killing; the pause lets it be in the middle.
        if logs[victim - 1].stat().st_size:
            end_process(writers.pop(victim))
            kills += 1
        select.select([], [], [], rng.uniform(0.0, 0.05))
    for writer in writers.values():
        end_process(writer)
    reads = []
    for reader in readers:
        samples, seen = finish(reader)
        reads.append(f"{samples:,} samples")
        assert seen <= rb.write_count
    with rb.storage.ring.section():  # who comes next finishes what a killed writer was at
        pass
    check_losses(rb, logs, size)
    rb.extend(rows(0, 0, size))  # Nobody wedged anything: the whole ring is writable
    ring = rb.storage.ring
    gaps = (ring.sequence <= 0).nonzero()[0]
    assert len(rb) == size, (gaps[:9], ring.sequence[gaps[:9]])
    sys.stderr.write(f"{serial} writers, {kills} killed, {rb.write_count:,} rows, {reads}\n")


def end_process(process):
    process.kill()
    process.join(30)
    process.close()


def check_losses(rb, logs, size):
    """Every acknowledged row was counted, and none of the latest is missing or there twice."""
    everything = rb[:]
    check(everything)
    numbers = everything["number"].tolist()
    assert len(numbers) == len(set(numbers)) == len(rb), "twice"
    acknowledged = 0
    for writer, log in enumerate(logs, 1):
        done = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
        acknowledged += sum(count for _, count in done)
        mine = sorted(number - writer * 10**9 for number in numbers if number // 10**9 == writer)
        if done and mine:
            # A writer's rows leave in the order they came: from its oldest row on, all are there.
            last = max(done[-1][0] + done[-1][1], mine[-1] + 1)
            assert mine == list(range(mine[0], last)), "lost"
            assert last - (done[-1][0] + done[-1][1]) in (0, 1, 3, 17, 64, 200)
    # A writer may die between committing and saying so: one batch each.
    assert acknowledged <= rb.write_count <= acknowledged + 200 * len(logs)


def test_the_handle_of_a_process_that_ended_is_a_named_error():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    handle = finish(start(rb, "say(pickle.dumps(rb))"))
    with pytest.raises(ReplayError, match="has ended or dropped it"):
        pickle.loads(handle)


def test_a_private_buffer_cannot_be_sent():
    with pytest.raises(ReplayError, match="shared=True"):
        pickle.dumps(ReplayBuffer(storage=LazyTensorStorage(10)))


def test_a_list_cannot_be_shared():
    with pytest.raises(ConfigError, match="LazyTensorStorage"):
        ReplayBuffer(storage=ListStorage(10), shared=True)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_first_writer_decides_what_rows_are(kind):
    rb = ReplayBuffer(storage=kind(100), shared=True)
    finish(start(rb, "rb.extend(rows(1, 0, 30))"))
    assert len(rb) == 30
    check(rb.sample(64))
    assert rb.write_count == 30


def test_a_child_hands_the_buffer_on():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    body = """
    finish(start(rb, "rb.extend(rows(1, 0, 30)); rb.extend(rows(1, 30, 5))"))
    rb.extend(rows(2, 0, 7))
    """
    finish(start(rb, body))
    assert rb.write_count == len(rb) == 42


def test_share_takes_along_what_is_stored():
    rb = ReplayBuffer(storage=LazyTensorStorage(50))
    rb.extend(rows(1, 0, 60))
    before = rb[:]
    rb.share()
    assert (rb[:] == before).all()
    assert rb.write_count == 60
    finish(start(rb, "check(rb.sample(20)); rb.extend(rows(1, 60, 10))"))
    assert rb[:]["number"].max() == 10**9 + 69


DIE_COPYING = """
storage = rb.storage
values, count = storage.prepare(rows(7, 0, 10), 0)
with storage.ring.append(count, count) as first:
    storage.write(first, 6, values, 0)
    os.kill(os.getpid(), 9)
"""


def test_rows_of_a_writer_killed_while_it_copied_are_skipped_and_written_again():
    rb = ReplayBuffer(storage=LazyTensorStorage(40), shared=True)
    rb.extend(rows(1, 0, 20))
    process = start(rb, DIE_COPYING)
    process.join(60)
    assert process.exitcode == -9
    assert len(rb) == 20
    for _ in range(20):
        assert rb.sample(16)["number"].max() < 10**9 + 20
    places = rb.extend(rows(1, 20, 30))
    assert places.tolist() == [*range(30, 40), *range(20)]
    rb.extend(rows(1, 50, 40))
    assert len(rb) == 40
    assert rb.write_count == 90


class Mortal:
    """Words of shared memory, in a process that ends before its ``left``-th store into them."""

    def __init__(self, words, left):
        self.words, self.left = words, left

    def __getitem__(self, word):
        return self.words[word]

    def __setitem__(self, word, value):
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        self.words[word] = value


class Ramp:
    """Numbers for new rows: who looks at them, before any old row is gone, dies."""

    def __len__(self):
        return 1000

    def __getitem__(self, part):
        os.kill(os.getpid(), signal.SIGKILL)


def survives(change, rb, step=None):
    """Run ``change(rb)`` in a fork that dies before a store; tell whether it came to its end.

    Without ``step``, it dies when it has said what it will write, before it changes any row.
    """
    child = os.fork()
    if child == 0:
        storage = rb.storage
        if step is None:
            storage.ring._ramp = Ramp()
        else:
            storage.ring._h = Mortal(storage.ring._h, step)
            for part in storage._parts:
                part.places._words = Mortal(part.places._words, step // 5)
        try:
            change(rb)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


def numbers(rb):
    return rb[:]["number"].tolist() if len(rb) else []


OLD, NEW = [10**9 + n for n in range(12)], [7 * 10**9 + n for n in range(8)]
OTHER = ReplayBuffer(storage=LazyTensorStorage(16))
OTHER.extend(rows(3, 0, 5))
CHANGES = {
    "extend": (
        lambda rb: rb.extend(rows(7, 0, 8)),
        [(OLD[4:], 12), (NEW[4:] + OLD[4:] + NEW[:4], 20)],
    ),
    "empty": (lambda rb: rb.empty(), [([], 0)]),
    "load": (lambda rb: rb.load_state_dict(OTHER.state_dict()), [([], 0), (numbers(OTHER), 5)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_death_inside_the_lock_is_repaired_by_the_next(change):
    """Killed before every store into the header, in turn: rows and counters agree afterwards."""
    act, outcomes = CHANGES[change]
    for step in range(40):
        rb = ReplayBuffer(storage=LazyTensorStorage(16), shared=True)
        rb.extend(rows(1, 0, 12))
        survived = survives(act, rb, step)
        with rb.storage.ring.section():  # the next process inside
            pass
        outcome = numbers(rb), rb.write_count
        assert outcome in ([(OLD, 12), *outcomes] if not survived else outcomes[-1:])
        rb.extend(rows(1, 12, 2))
        check(rb[:])
        assert numbers(pickle.loads(pickle.dumps(rb))) == numbers(rb)
        rb.extend(rows(1, 14, 16))
        assert len(rb) == 16
        assert (rb.storage.ring.sequence > 0).all()
        if survived:
            return
    raise AssertionError("it never got to the end")


class Overtaken(LazyTensorStorage):
    """A writer begins to overwrite the oldest row while a reader looks for complete rows."""

    writing = None

    def frames_of(self, slots):
        if self.writing is None:
            self.writing = self.ring.append(1, 1)
            self.writing.__enter__()
        return super().frames_of(slots)


def test_all_rows_are_those_that_no_writer_has_begun_to_overwrite():
    rb = ReplayBuffer(storage=Overtaken(4), shared=True)
    rb.extend(rows(1, 0, 4))
    assert rb[:]["number"].tolist() == rows(1, 1, 3)["number"].tolist()
    rb.storage.writing.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("once", ONCE, ids=["compact", "stacks"])
def test_a_death_while_parts_are_stored_is_repaired(once):
    for step in range(0, 200, 3):
        rb = ReplayBuffer(storage=LazyTensorStorage(20, **once), shared=True)
        rb.extend(rows(1, 0, 12))
        survived = survives(lambda rb: rb.extend(rows(1, 12, 15)), rb, step)
        for first in range(100, 200, 10):
            rb.extend(rows(2, first, 10))
            check(rb[:])
        assert len(rb) == 20
        if survived:
            return
    raise AssertionError("it never got to the end")


@pytest.mark.parametrize("once", ONCE, ids=["compact", "stacks"])
def test_a_death_before_old_rows_are_gone_leaves_none_without_their_parts(once):
    rb = ReplayBuffer(storage=LazyTensorStorage(20, **once), shared=True)
    rb.extend(rows(1, 1, 25))
    assert not survives(lambda rb: rb.extend(rows(1, 26, 3)), rb)
    for first in range(100, 130, 3):
        rb.extend(rows(2, first, 3))
        check(rb[:])
        assert rb[:]["number"].min() >= 10**9 + 9


def test_what_other_processes_wrote_gets_the_default_priority():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64), sampler=PrioritizedSampler(64, 1.0, 0.5), shared=True
    )
    rb.extend(rows(1, 0, 20))
    rb.update_priority(torch.arange(20), 0.0)
    rb.update_priority(3, 1.0)
    assert set(rb.sample(32)["index"].tolist()) == {3}
    finish(start(rb, "rb.extend(rows(2, 0, 10))"))
    assert set(rb.sample(400)["index"].tolist()) == {3, *range(20, 30)}


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_nothing_is_left_behind(kind):
    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = left()
    for _ in range(3):
        rb = ReplayBuffer(storage=kind(100), shared=True)
        rb.extend(rows(1, 0, 10))
        again = pickle.loads(pickle.dumps(rb))
        again.extend(rows(1, 10, 10))
        assert rb.write_count == 20
    del rb, again
    assert left() == before


def test_a_forked_child_is_another_author():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=3), shared=True
    )
    body = """
    rb.extend(rows(1, 0, 2))
    child = os.fork()
    if child == 0:
        rb.extend(rows(1, 2, 2))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    """
    finish(start(rb, body))
    assert len(rb) == 4
    with pytest.raises(ReplayError, match="longest: 2"):
        rb.sample(3)
