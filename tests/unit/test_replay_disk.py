"""Disks that are full or fill up: an error, never the end of the process or of the last dump."""

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import shutil
import subprocess
import threading

import pytest
import torch
from tensordict import TensorDict

from gleanrl import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from gleanrl.cli.dataset import Dataset, DatasetWriter
from gleanrl.memory.tensor_files import TensorFileError

MB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system of some bytes."""
    mounted = []

    def mount(nbytes):
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        options = f"size={nbytes}"
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(command).returncode:
            pytest.skip("mounting a small file system takes root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def rows(first, count, width=1000):
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "wide": number.unsqueeze(1).expand(-1, width)}, [count])


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


def test_a_dump_leaves_alone_what_another_is_writing_and_removes_what_the_dead_left(tmp_path):
    dead, alive = tmp_path / ("data-" + "0" * 32), tmp_path / ("data-" + "1" * 32)
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "0.bin").write_bytes(b"part")
    fd = os.open(alive, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        buffer(10).dumps(tmp_path)
    finally:
        os.close(fd)
    assert alive.exists()
    assert not dead.exists()
    assert numbers(tmp_path) == list(range(10))


def survives(body):
    """Run ``body`` in a forked child, which a signal may end; return what it returned as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(body()).encode())
            os._exit(0)
        except BaseException as err:
            os.write(writing, repr(err).encode())
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        said = answer.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == 0, (status, said)
    return said


def fill(disk):
    with (
        (disk / "other").open("wb", buffering=0) as other,
        pytest.raises(OSError, match="No space"),
    ):
        list(map(other.write, itertools.repeat(bytes(65536))))


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


def test_a_dataset_whose_disk_fills_up_is_whole(small_disk):
    disk = small_disk(4 * MB)

    def body():
        writer = DatasetWriter(disk / "data", 300)
        for first in range(0, 300, 10):
            writer.write(rows(first, 10), dict)
            if not first:
                fill(disk)
        writer.finish("complete", {})
        return writer.frames

    assert survives(body) == "300"
    dataset = Dataset(disk / "data")
    assert (dataset.metadata.status, dataset.metadata.frames) == ("complete", 300)
    assert dataset.read(("number",)).tolist() == list(range(300))
    assert TensorDict.load_memmap(disk / "data").shape == (300,)


def test_a_dataset_that_does_not_fit_is_refused_before_any_frame(small_disk, monkeypatch):
    disk = small_disk(MB)
    status = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: status)  # others take it meanwhile
    writer = DatasetWriter(disk / "data", 300)
    with pytest.raises(TensorFileError, match="cannot be reserved.*No space left"):
        writer.write(rows(0, 10), dict)
    writer.finish("failed", {})
    assert list(disk.iterdir()) == []
