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
import warm
from backend_rig import StampedSource

from gleanrl import ClosedError, CollectorTimeout, MultiSyncCollector, WorkerDied
from gleanrl.core import messages as m
from gleanrl.engine.engine import Engine
from gleanrl.transport import process
from gleanrl.transport.process import ProcessBackend
from gleanrl.transport.zygote import Zygote


@pytest.fixture(scope="module", autouse=True)
def _warm(python):
    """Have zygotes up in no time."""


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


def own_pid(zygote):
    return warm.stands_for(zygote._process.pid)


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
    os.kill(own_pid(zygote), signal.SIGSTOP)
    with pytest.raises(CollectorTimeout, match="did not answer in 0"):
        forked(zygote, connection, 0.0)
    os.kill(own_pid(zygote), signal.SIGCONT)
    first, second = forked(zygote, connection), forked(zygote, connection)
    # The one given up was forked before them, and killed though its connection is open.
    children = set(rig._children(own_pid(zygote)))
    assert first != second
    rig.await_end(children - {first, second})
    for pid in (first, second):
        assert zygote.exit_status(pid, 0.0) is None
        zygote.kill(pid)
        assert zygote.exit_status(pid, 10.0) == -signal.SIGKILL


def test_a_thread_that_waits_for_a_worker_sees_the_handle_closed(zygote, connection, monkeypatch):
    pid, real = forked(zygote, connection), select.poll

    class Closes:
        """Has another thread close the handle while this one waits."""

        def __init__(self):
            self.register = (poll := real()).register
            self._poll = poll.poll

        def poll(self, timeout):
            closing = threading.Thread(target=zygote.close)
            closing.start()
            closing.join()
            return self._poll(timeout)

    monkeypatch.setattr(select, "poll", Closes)
    assert zygote.exit_status(pid, 10.0) is None


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


def test_a_zygote_that_may_still_import_is_not_waited_for(monkeypatch):
    own, calls = Zygote(), []
    kill, wait = own._process.kill, own._process.wait
    monkeypatch.setattr(own._process, "kill", lambda: calls.append("kill") or kill())
    monkeypatch.setattr(own._process, "wait", lambda limit: calls.append("wait") or wait(limit))
    own.close()
    assert calls == ["kill", "wait"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What a zygote shows that imports everything itself, in a folder with a `random.py`."""
    folder = tmp_path_factory.mktemp("shadow")
    (folder / "random.py").write_text("raise RuntimeError('shadowed')\n")
    said = run(
        f"""
        import os, pathlib, socket, sys
        from tensordict import LazyStackedTensorDict, TensorDict
        from gleanrl.transport.process import zygote
        LazyStackedTensorDict.maybe_dense_stack([TensorDict(a=1.0), TensorDict(b=1.0)])
        sys.executable = {warm.PYTHON!r}
        here = os.getcwd()
        sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
        sys.path.append(pathlib.Path("/"))
        ours, theirs = socket.socketpair()
        print(zygote().fork([theirs.fileno()] * 3, 60.0) > 0)
        own = pathlib.Path(f"/proc/{{zygote()._process.pid}}")
        print("pandas/_libs" in (own / "maps").read_text(), len(list((own / "task").iterdir())))
        print("LAZY_LEGACY_OP=None" in (own / "environ").read_text())
        """,
        cwd=folder,
    )
    return said.split()


def test_files_in_the_working_directory_do_not_shadow_modules(plain):
    assert plain[0] == "True"


def test_pandas_is_imported_once_and_starts_no_thread(plain):
    pytest.importorskip("pandas")
    assert plain[1:3] == ["True", "1"]


_LEARNER = f"""
import os, pathlib, sys
from gleanrl import MultiSyncCollector
from gleanrl.transport.process import zygote
for name in [name for name in sys.modules if name.partition(".")[0] == "torchrl"]:
    del sys.modules[name]
sys.executable = {warm.PYTHON!r}  # whose zygote has imported nothing before
def make():
    import gymnasium
    has = sys.modules.get("torchrl.envs")
    print(getattr(has, "found", "torchrl") if has else "none", flush=True)
    return gymnasium.make("CartPole-v1")
def worker():
    MultiSyncCollector([make], frames_per_batch=4, total_frames=4).shutdown()
    print(len(list(pathlib.Path(f"/proc/{{zygote()._process.pid}}/task").iterdir())), flush=True)
    zygote().close()
"""


def test_torchrl_is_imported_once_for_the_workers_of_a_learner_that_has_it():
    assert run(_LEARNER + "import torchrl.envs; worker()").split() == ["torchrl", "1"]


def test_workers_import_torchrl_if_a_zygote_would_not_import_what_the_learner_has(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "torchrl" / "envs").mkdir(parents=True)
        (tmp_path / name / "torchrl" / "__init__.py").write_text("")
        source = f"import os, sys\nfound = '{name}'\n'EXIT' in os.environ and sys.exit(3)\n"
        (tmp_path / name / "torchrl" / "envs" / "__init__.py").write_text(source)
    said = run(
        f"""{_LEARNER}
sys.path.insert(0, {str(tmp_path / "one")!r})
import torchrl.envs
os.environ["EXIT"] = "1"
worker()  # to import it ends the process
del os.environ["EXIT"]
sys.path[0] = {str(tmp_path / "other")!r}
worker()  # it would import another file
"""
    )
    assert said.split() == ["none", "1"] * 2


def test_a_lazy_stack_in_the_learner_leaves_workers_able_to_stack(plain):
    assert plain[3] == "False"


def test_a_connection_that_breaks_is_a_death(zygote, connection):
    os.kill(own_pid(zygote), signal.SIGSTOP)
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


LEARNER = """
    import os, signal
    import rig
    from gleanrl import MultiSyncCollector

    collector = MultiSyncCollector([rig.counting(0), rig.counting(1)], frames_per_batch=8)
    {fork}
    if os.fork() == 0:  # holds all that the learner has open, and outlives it
        os.close(1)
        os.close(2)
        signal.pause()
        os._exit(0)
    print(*collector.map_fn("env.pid"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
FORKS = {"by Python": "", "by foreign code": "import ctypes; os.fork = ctypes.CDLL(None).fork"}


@pytest.mark.parametrize("how", FORKS)
def test_workers_end_with_a_killed_learner_that_has_a_forked_child(how):
    source = textwrap.dedent(LEARNER).format(fork=FORKS[how])
    path = os.pathsep.join(filter(None, [str(Path(rig.__file__).parent), *sys.path]))
    learner = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        out, _ = learner.communicate(timeout=60)
        rig.await_end([int(word) for word in out.split()])
        assert len(out.split()) == 2
    finally:
        os.killpg(warm.stands_for(learner.pid), signal.SIGKILL)  # the child


def test_a_zygote_that_imports_ends_with_a_killed_learner(tmp_path):
    (tmp_path / "pandas.py").write_text("import os\nos.write(1, b'imports')\nwhile True: pass\n")
    source = f"""
        import os, signal, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from gleanrl.transport.process import zygote
        out = os.dup(1)
        read, write = os.pipe()
        os.dup2(write, 1)
        own = zygote()
        os.read(read, 7)
        os.write(out, str(own._process.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        """
    learner = subprocess.run(
        [warm.PYTHON, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, timeout=60
    )
    rig.await_end([int(learner.stdout)])


def test_threads_of_the_learner_that_end_in_a_row_do_not_disturb_a_zygote_that_imports():
    run(
        """
        import os, select, signal
        from gleanrl.transport.zygote import _ending_with

        class Poll:  # the next signal comes while it waits, where Python refuses a second call
            made, real, waits = 0, select.poll, False
            def __init__(self):
                self.own = Poll.real()
            def register(self, *what):
                self.own.register(*what)
            def poll(self, ms):
                assert not self.waits, "concurrent poll() invocation"
                self.waits, Poll.made = True, Poll.made + 1
                if Poll.made < 5:
                    signal.raise_signal(signal.SIGIO)
                self.waits = False
                return self.own.poll(ms)

        select.poll = Poll
        with _ending_with(os.pidfd_open(os.getpid())):
            signal.raise_signal(signal.SIGIO)
        assert Poll.made >= 5
        """
    )


class Forks(rig.Count):
    """Has a child that lives on; is killed at its tenth step."""

    def reset(self, **options):
        if os.fork() == 0:
            signal.alarm(60)  # ends it; children of later resets are not listed in the test
            signal.pause()
            os._exit(0)
        return super().reset(**options)

    def step(self, action):
        if self.steps == 10:
            rig.kill()
        return super().step(action)


def test_the_death_of_a_worker_that_has_a_forked_child_is_noticed():
    before = rig.workers()
    with MultiSyncCollector([Forks], frames_per_batch=8, timeout=None) as collector:
        own = rig._children((rig.workers() - before).pop())
        with rig.in_time(), pytest.raises(WorkerDied, match="signal 9"):
            for _ in collector:
                pass
    for pid in own:
        os.kill(pid, signal.SIGKILL)


NO_MORE = """
import errno, os, pathlib
real = os.fork

def fork():
    flag = pathlib.Path({flag!r})
    if flag.exists():
        flag.unlink()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()

os.fork = fork
"""


def test_a_fork_that_fails_is_an_error_of_that_worker_alone(tmp_path, monkeypatch):
    flag = tmp_path / "full"
    (tmp_path / "sitecustomize.py").write_text(NO_MORE.format(flag=str(flag)))
    monkeypatch.syspath_prepend(tmp_path)  # of the process that forks, which has sys.path
    said = run(
        f"""
        import pathlib
        import rig
        from gleanrl import MultiSyncCollector, WorkerDied
        flag = pathlib.Path({str(flag)!r})
        first = MultiSyncCollector([rig.counting(0)], frames_per_batch=8)
        for inner in ({{}}, {{"num_workers": 1, "collector_class": None}}):
            flag.touch()
            try:
                MultiSyncCollector([rig.counting(0), rig.counting(1)], frames_per_batch=8)
            except WorkerDied as err:
                print(err)
            print(first.next().numel())
        second = MultiSyncCollector([rig.counting(0), rig.counting(1)], frames_per_batch=8)
        print(second.next().numel())
        second.shutdown()
        first.shutdown()
        """
    )
    assert said.count("no process could be started: Resource temporarily unavailable") == 2
    assert [line for line in said.splitlines() if line.isdigit()] == ["8"] * 3
