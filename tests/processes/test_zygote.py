"""The process that forks workers: none is hurt by what its owner or another worker goes through."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import rig

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.engine.backends import process
from gleanrl.engine.backends.process import ProcessBackend
from gleanrl.engine.backends.zygote import Zygote
from gleanrl.engine.engine import Engine
from gleanrl.testing import StampedSource


def make(how=lambda: None, workers=1):
    def build(worker):
        how()
        return StampedSource(worker)

    return Engine(lambda _: ProcessBackend(1), [build] * workers)


def answers(engine):
    return len(engine.request_all(m.GetState())) == engine.workers


def run(program, cwd=None, **options):
    """Run a program of its own; return what it printed."""
    path = os.pathsep.join(filter(None, [str(Path(rig.__file__).parent), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )
    return done.stdout


@pytest.fixture
def zygote():
    """A zygote of the test's own that is up."""
    own = Zygote()
    ours, theirs = socket.socketpair()
    pid = own.fork([theirs.fileno()] * 3, 60.0)
    theirs.close()
    ours.close()  # the worker ends: there is nobody to serve
    assert own.exit_status(pid, 10.0) is not None
    yield own
    own.close()


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def forked(zygote, connection, timeout=10.0):
    return zygote.fork([connection[1].fileno()] * 3, timeout)


def without_output():
    sys.stdout = None
    sys.stderr.close()


def test_a_worker_without_output_ends_alone():
    other, mute = make(), make(without_output, workers=2)
    pids = mute.backend.pids
    with rig.in_time():
        mute.close(5.0)
        rig.await_end(pids)
    assert answers(other)
    other.close(5.0)


def test_a_fork_that_was_given_up_does_not_answer_for_the_next(zygote, connection):
    os.kill(zygote._process.pid, signal.SIGSTOP)
    with pytest.raises(CollectorTimeout, match="did not answer in 0"):
        forked(zygote, connection, 0.0)
    os.kill(zygote._process.pid, signal.SIGCONT)
    first, second = forked(zygote, connection), forked(zygote, connection)
    # The one given up was forked before them, and killed though its connection is open.
    children = set(rig._children(zygote._process.pid))
    assert first != second
    rig.await_end(children - {first, second})
    for pid in (first, second):
        assert zygote.exit_status(pid, 0.0) is None
        zygote.kill(pid)
        assert zygote.exit_status(pid, 10.0) == -signal.SIGKILL


def test_ctrl_c_in_a_fork_leaves_the_zygote_in_step(zygote, connection, monkeypatch):
    real = socket.send_fds

    def interrupted(*args):
        monkeypatch.setattr(socket, "send_fds", real)
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forked(zygote, connection)
    pid = forked(zygote, connection)
    zygote.kill(pid)
    assert zygote.exit_status(pid, 10.0) == -signal.SIGKILL


def test_a_collector_may_be_finalized_in_the_middle_of_a_fork(zygote, connection, monkeypatch):
    old = forked(zygote, connection)
    real, statuses = socket.send_fds, []

    def collecting(*args):
        monkeypatch.setattr(socket, "send_fds", real)
        real(*args)
        zygote.kill(old)  # what a finalizer does, run by the garbage collector
        statuses.append(zygote.exit_status(old, 10.0))

    monkeypatch.setattr(socket, "send_fds", collecting)
    with rig.in_time():
        new = forked(zygote, connection)
    assert statuses == [-signal.SIGKILL]
    assert zygote.exit_status(new, 0.0) is None


def in_child(body):
    """Run ``body`` in a forked child; return what it returned, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(body()).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], 10.0)[0], "the child hangs"
        return os.read(read, 4096).decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)


def test_a_forked_child_can_neither_use_nor_end_the_workers():
    engine = make(workers=2)

    def body():
        try:
            answers(engine)
        except ClosedError as err:
            said = str(err)
        engine.close(5.0)
        process.zygote().owner  # noqa: B018
        return said

    assert f"belong to process {os.getpid()}" in in_child(body)
    assert engine.backend.stop_byte[0] == 0
    assert answers(engine)
    engine.close(5.0)


def test_a_forked_child_that_exits_leaves_the_workers_alone():
    said = run(
        """
        import os, sys
        from gleanrl import MultiSyncCollector
        collector = MultiSyncCollector("CartPole-v1", frames_per_batch=8, num_workers=2)
        batches = iter(collector)
        next(batches)
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(next(batches).numel())
        collector.shutdown()
        """
    )
    assert said.split() == ["8"]


def test_a_zygote_ends_at_once_though_a_forked_child_lives(zygote):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # holds all descriptors until told
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    with rig.in_time(4.0):
        zygote.close()
    os.close(write)
    os.waitpid(pid, 0)
    os.close(read)


def test_files_in_the_working_directory_do_not_shadow_modules(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')\n")
    said = run(
        """
        import os, pathlib, sys
        here = os.getcwd()
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
        sys.path.append(pathlib.Path("/"))
        from gleanrl.engine.backends.process import zygote
        import socket
        ours, theirs = socket.socketpair()
        print(zygote().fork([theirs.fileno()] * 3, 60.0) > 0)
        """,
        cwd=tmp_path,
    )
    assert said.split() == ["True"]


def test_pandas_is_imported_once_and_starts_no_thread():
    pytest.importorskip("pandas")
    engine = make()
    assert answers(engine)  # it is up
    own = Path(f"/proc/{process.zygote()._process.pid}")
    assert "pandas/_libs" in (own / "maps").read_text()
    assert len(list((own / "task").iterdir())) == 1
    engine.close(5.0)


def test_a_connection_that_breaks_is_a_death(zygote, connection):
    os.kill(zygote._process.pid, signal.SIGSTOP)
    with pytest.raises(CollectorTimeout):
        forked(zygote, connection, 0.0)
    zygote._process.kill()  # with requests unread: the connection is reset
    zygote._process.wait()
    with pytest.raises(WorkerDied, match="ended with code -9"):
        forked(zygote, connection)


def test_threads_that_come_first_together_share_a_zygote(monkeypatch):
    made, inside = [], threading.Event()

    class Slow:
        alive = True

        def __init__(self):
            made.append(self)
            inside.wait(0.2)  # room for the other thread to come in

        def close(self):
            pass

    monkeypatch.setattr(process, "Zygote", Slow)
    monkeypatch.setattr(process, "_zygote", None)
    threads = [threading.Thread(target=process.zygote) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_backend_without_zygote_leaves_no_descriptors(monkeypatch):
    def fail():
        raise OSError("no more processes")

    monkeypatch.setattr(process, "zygote", fail)
    gc.collect()
    with rig.nothing_left_behind(), pytest.raises(OSError, match="no more processes"):
        ProcessBackend(1)
