"""`gleanrl top`: how collections of other terminals are."""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import gymnasium as gym
import pytest

from gleanrl.cli.main import main
from gleanrl.collectors import Collector, MultiSyncCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer

NOBODY = 1
"""Exit code if nothing runs that could be watched."""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder of the status files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"gleanrl-{os.getuid()}"


def top(capsys, *arguments):
    code = main(["top", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def make(**more):
    return Collector("CartPole-v1", num_envs=2, frames_per_batch=20, total_frames=40, **more)


def test_collections_are_listed_with_their_state_until_they_end(runtime, capsys):
    first, second = make(), make()
    list(first)
    code, out, _ = top(capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["stats"]["frames"] for one in found] == [40, 0]
    assert {one["pid"] for one in found} == {os.getpid()}
    assert [one["stats"]["completed"] for one in found] == [True, False]
    assert runtime.stat().st_mode & 0o777 == 0o700
    first.shutdown()
    code, out, _ = top(capsys, str(os.getpid()), "--once")
    assert code == 0
    assert "0 of 40 frames (0 %)" in out
    assert "40 of 40" not in out
    assert {"env", "policy", "transfer", "wait", "lag"} <= set(out.split())
    del second
    gc.collect()
    code, out, err = top(capsys)
    assert (code, out) == (NOBODY, "")
    assert "no collector of yours is running on this machine" in err
    assert list(runtime.iterdir()) == []


def test_another_process_is_not_meant(runtime, capsys):
    with make():
        code, _, err = top(capsys, "1", "--once")
    assert code == NOBODY
    assert "in process 1" in err


def test_the_environment_can_forbid_it(runtime, capsys, monkeypatch):
    monkeypatch.setenv("GLEANRL_TOP", "0")
    with make():
        assert not runtime.exists()


def test_files_of_dead_processes_are_removed_by_the_next_collector_and_by_top(runtime, capsys):
    for remove in (make, lambda: top(capsys)):
        with make():
            (own,) = runtime.iterdir()
            ended = [own.with_name(name) for name in ("1-1-0", f"{os.getpid()}-1-0", ".1-1-0")]
            for path in ended:
                path.write_text(own.read_text())
            other = own.with_name("notes")
            other.touch()
            assert len({own, other, *ended} & set(runtime.iterdir())) == 5
            remove()
            assert {own, other} == {path for path in (own, other, *ended) if path.exists()}
            other.unlink()


def test_a_status_that_is_old_says_so(runtime, capsys):
    with make():
        (path,) = runtime.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        os.utime(path, (0, time.time() + 1000))  # whatever the machine is busy with
        assert "ago" not in top(capsys, "--once")[1]
        os.utime(path, (0, time.time() - 75))
        assert re.search(r"as it was (7[5-9]|[89]\d) seconds ago", top(capsys, "--once")[1])


def test_a_status_of_version_0_2_says_so(runtime, capsys):
    with make():
        (file,) = runtime.iterdir()
        status = json.loads(file.read_text()) | {"hosts": ["here", "here"]}
        file.write_text(json.dumps(status))
        code, out, _ = top(capsys, "--once")
    assert code == 0
    assert "another version" in out


def test_a_failure_in_the_background_is_shown(runtime, capsys):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = make(replay_buffer=buffer, pre_collect_hook=lambda: 1 / 0)
    collector.start()
    with pytest.raises(ZeroDivisionError), collector.pause():
        pass
    assert "failed" in top(capsys, "--once")[1]
    collector.shutdown(raise_on_error=False)


def test_collectors_in_workers_are_shown_as_part_of_the_one_around_them(runtime, capsys):
    def make_env():
        env = gym.make("CartPole-v1")
        env.unwrapped.made_by = os.getpid()
        return env

    with MultiSyncCollector(
        [make_env], collector_class=Collector, frames_per_batch=10, total_frames=20
    ) as collector:
        list(collector)
        (pid,) = collector.get_distant_attr("env.unwrapped.made_by")
        assert collector.stats("per_worker")["worker_0/pid"] == pid != os.getpid()
        (found,) = json.loads(top(capsys, "--json")[1])
        assert re.search(f"(?m)^0 +{pid} ", top(capsys, "--once")[1])
    assert found["collector"].startswith("MultiSyncCollector")


def test_a_runtime_folder_that_cannot_be_used_costs_no_collection(runtime, capsys, monkeypatch):
    with make() as collector:
        shutil.rmtree(runtime)
        assert len(list(collector)) == 2
        monkeypatch.setattr("tempfile.tempdir", os.devnull)
        with make() as other:
            assert len(list(other)) == 2
            code, _, err = top(capsys)
    assert code == NOBODY
    assert "no collector of yours is running on this machine" in err


def test_a_folder_that_somebody_removed_is_made_again(runtime, capsys):
    with make() as collector:
        shutil.rmtree(runtime)
        list(collector)
        (found,) = json.loads(top(capsys, "--json")[1])
        assert found["stats"]["frames"] == 40
    assert list(runtime.iterdir()) == []


def test_a_folder_that_others_can_enter_is_not_used(runtime, capsys):
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o755)
    with make() as collector:
        assert len(list(collector)) == 2
        assert list(runtime.iterdir()) == []
        code, _, err = top(capsys)
    assert code == NOBODY
    assert "mode drwxr-xr-x" in err


def test_a_forked_child_neither_takes_the_file_along_nor_keeps_it(runtime, capsys):
    collector = make()
    asked, ask = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        collector.shutdown()
        del collector
        gc.collect()
        os.write(tell, b"!")
        os.read(asked, 1)  # it outlives the parent's collector
        os._exit(0)
    try:
        assert os.read(told, 1) == b"!"
        assert len(json.loads(top(capsys, "--json")[1])) == 1
        collector.shutdown()
        assert top(capsys)[0] == NOBODY
    finally:
        os.write(ask, b"!")
        os.waitpid(child, 0)


def test_the_live_table_says_when_the_collection_ends(runtime):
    collector = make()
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "gleanrl", "top", "--every", "0.05"]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ) as watching:
        os.close(terminal)
        assert "q quits" in read_until(screen, "q quits")
        collector.shutdown()
        shown = read_until(screen, "has ended")
        assert watching.wait(20) == 0
    os.close(screen)
    assert f"The collection in process {os.getpid()} has ended." in shown


def read_until(screen, text):
    shown = ""
    deadline = time.monotonic() + 30
    while text not in shown and select.select([screen], [], [], deadline - time.monotonic())[0]:
        try:
            shown += os.read(screen, 1 << 16).decode(errors="replace")
        except OSError:  # the program has ended
            break
    return shown
