"""Disks that are full or fill up: an error, never the end of the process or of the last dump."""

import contextlib
import errno
import fcntl
import os
import resource
import threading

import pytest
import torch
from disk_rig import MB, fill, rows, survives
from tensordict import TensorDict

from gleanrl import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer


def buffer(count, size=200):
    rb = ReplayBuffer(storage=LazyTensorStorage(size))
    rb.extend(rows(0, count))
    return rb


def numbers(path):
    rb = ReplayBuffer(storage=LazyTensorStorage(200))
    rb.loads(path)
    return sorted(rb[:]["number"].tolist())


def test_a_dump_onto_a_full_disk_fails_and_leaves_the_last_one(small_disk):
    disk = small_disk(MB)
    buffer(50).dumps(disk / "rb")
    before = sorted(disk.rglob("*"))
    with pytest.raises(OSError, match="No space left") as caught:
        buffer(120).dumps(disk / "rb")
    assert caught.value.errno == errno.ENOSPC
    assert numbers(disk / "rb") == list(range(50))
    assert sorted(disk.rglob("*")) == before, "what was written in vain is still there"
    buffer(60).dumps(disk / "rb")
    assert numbers(disk / "rb") == list(range(60))


def test_a_dump_beyond_the_limit_of_a_file_fails_and_leaves_the_last_one(tmp_path):
    buffer(10).dumps(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            buffer(120).dumps(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert numbers(tmp_path) == list(range(10))


def test_dumps_at_once_leave_one_whole_dump(tmp_path):
    buffers, errors = [buffer(count) for count in (20, 40, 60)], []
    begin = threading.Barrier(len(buffers))

    def dump(rb):
        try:
            begin.wait(30)
            for _ in range(10):
                rb.dumps(tmp_path)
                assert numbers(tmp_path) in [list(range(count)) for count in (20, 40, 60)]
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=dump, args=(rb,)) for rb in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dump_waits_for_one_that_is_being_written_and_removes_what_the_dead_left(tmp_path):
    dead = tmp_path / ("data-" + "0" * 32)
    dead.mkdir()
    (dead / "0.bin").write_bytes(b"part")
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as another process does while it writes
    thread = threading.Thread(target=buffer(10).dumps, args=(tmp_path,))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert list(tmp_path.iterdir()) == [dead]
    os.close(fd)
    thread.join()
    assert not dead.exists()
    assert numbers(tmp_path) == list(range(10))


def successive(first, count, shift):
    """Rows whose successors are what the next rows begin with if ``shift`` is 1."""
    wide = torch.arange(first, first + count).unsqueeze(1).expand(-1, 1000)
    return TensorDict({"wide": wide, "next": {"wide": wide + shift}}, [count])


@pytest.mark.parametrize(
    ("compact", "shared", "shift", "expected"),
    [
        (False, False, 1, "stored"),
        (False, True, 1, "stored"),
        (True, True, 1, "refused"),
        (True, False, 7, "refused"),
    ],
)
def test_a_disk_that_fills_up_under_a_mapped_storage(small_disk, compact, shared, shift, expected):
    """Rows have their room from the beginning; only surplus successors may not find any."""
    disk = small_disk(8 * MB)

    def body():
        storage = LazyMemmapStorage(400, scratch_dir=disk, compact=compact)
        rb = ReplayBuffer(storage=storage, shared=shared)
        rb.extend(successive(0, 10, shift))
        fill(disk)
        refused = pytest.raises(OSError, match="No space left.*scratch_dir")
        with refused if expected == "refused" else contextlib.nullcontext():
            for first in range(10, 1000, 10):
                rb.extend(successive(first, 10, shift))
        sample = rb.sample(50)
        assert (sample["next", "wide"] == sample["wide"] + shift).all()
        return len(rb)

    stored = int(survives(body))
    assert stored == 400 if expected == "stored" else 10 <= stored < 400


def test_a_storage_larger_than_its_disk_has_left_is_an_error(small_disk, monkeypatch):
    disk = small_disk(MB)
    status = os.statvfs("/")
    monkeypatch.setattr(os, "statvfs", lambda path: status)  # others take the room meanwhile
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=disk))
    for _ in range(2):
        with pytest.raises(OSError, match=f"{disk}.*scratch_dir") as caught:
            rb.extend(rows(0, 10))
        assert caught.value.errno == errno.ENOSPC
    assert len(rb) == 0
    rb.extend(rows(0, 10, width=10))  # rows that have room: nothing of the first try stays
    assert len(rb) == 10
