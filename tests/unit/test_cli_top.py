"""`gleanrl top`: asking collections of other terminals how they are."""

from __future__ import annotations

import gc
import json
import os
import pty
import resource
import select
import socket
import subprocess
import sys
import time

import pytest

from gleanrl.cli.main import main
from gleanrl.collectors import Collector

NOBODY = 1
"""Exit code if nothing runs that could be watched."""


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder of the sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("GLEANRL_TOP", raising=False)  # what workers are told, also in this process
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "gleanrl"


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
    assert "no collection" in err
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


def test_sockets_of_dead_processes_are_removed(runtime, capsys):
    with make():
        dead = runtime / "1-0-0"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(dead))
        listener.listen()
        listener.close()
        assert len(json.loads(top(capsys, "--json")[1])) == 1
        assert not dead.exists()


def test_a_process_that_does_not_answer_is_named(runtime, capsys, monkeypatch):
    monkeypatch.setattr("gleanrl.watch.status._ASK_S", 0.1)
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime / "17-0-0"))
        listener.listen()
        code, out, _ = top(capsys, "--once")
    assert code == 0
    assert "process 17" in out
    assert "no answer" in out


def test_collections_answer_again_after_file_descriptors_ran_out(runtime, monkeypatch):
    monkeypatch.setattr("gleanrl.watch.status._ANSWER_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with make(), socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(0.1)
        (path,) = runtime.iterdir()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no new one may be opened
        try:
            first.connect(str(path))  # takes the descriptor that the waiting `accept` has already
            client.connect(str(path))
            with pytest.raises(TimeoutError):
                client.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(10)
        assert client.recv(1) == b"{"


def test_a_folder_that_others_can_enter_is_not_used(runtime, capsys):
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o755)
    with make():  # listens in the other folder
        assert list(runtime.iterdir()) == []
        code, _, err = top(capsys)
    assert code == NOBODY
    assert "mode 0755" in err


def test_a_forked_child_neither_answers_nor_takes_the_socket_along(runtime, capsys):
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
        shown += os.read(screen, 1 << 16).decode(errors="replace")
    return shown
