"""SIGTERM: the state is saved between two batches, the process ends, and a later one continues."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import rig
import torch

from gleanrl import Collector, ConfigError, MultiSyncCollector, ReplayBuffer

PROGRAM = str(Path(__file__).with_name("preempted.py"))
CODE = 143


@pytest.fixture
def run(python):
    def run(kind, folder, *end):
        folder.mkdir(exist_ok=True)
        line = [python, PROGRAM, kind, str(folder), *map(str, end)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == (CODE if end else 0), done.stderr
        assert done.stdout == ("told\n" if end else "")  # by the handler from before
        return done.stderr

    return run


@pytest.mark.parametrize("kind", ["one", "sync", "buffer"])
def test_a_run_that_was_ended_continues_bit_for_bit(run, kind, tmp_path):
    run(kind, tmp_path / "ended", 3)
    before = torch.load(tmp_path / "ended" / "learner")
    assert len(before) == 3
    run(kind, tmp_path / "ended")
    run(kind, tmp_path / "whole")
    found, expected = (torch.load(tmp_path / name / "learner") for name in ("ended", "whole"))
    assert len(expected) == 6
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_background_collection_is_saved_while_the_learner_does_something_else(run, tmp_path):
    run("background", tmp_path, 1)
    run("background", tmp_path, 2)  # continues with the rows that were stored


def test_a_process_that_does_not_end_in_time_is_killed_when_the_state_is_saved(run, tmp_path):
    said = run("hanging", tmp_path, 1)
    assert "did not end within grace=2.0 s of SIGTERM" in said
    assert "its collector was saved" in said
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=40) as collector:
        collector.load(tmp_path / "state")
        assert collector.stats()["frames"] == 40


def small(path, **options):
    return Collector("CartPole-v1", frames_per_batch=8, preemption_path=path, **options)


def test_the_handler_from_before_comes_back(tmp_path):
    usual = signal.getsignal(signal.SIGTERM)
    with small(tmp_path / "a") as one:
        handlers = [signal.getsignal(signal.SIGTERM)]
        assert handlers != [usual]
        with small(tmp_path / "b"):
            assert signal.getsignal(signal.SIGTERM) not in (usual, *handlers)
        assert [signal.getsignal(signal.SIGTERM)] == handlers
        one.next()
    assert signal.getsignal(signal.SIGTERM) == usual
    dropped = small(tmp_path / "c")
    assert signal.getsignal(signal.SIGTERM) != usual
    del dropped
    assert signal.getsignal(signal.SIGTERM) == usual
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_could_not_be_kept_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="in a directory that exists"):
        small(tmp_path / "none" / "state")
    with pytest.raises(ConfigError, match="grace"):
        small(tmp_path / "state", grace=0)
    with pytest.raises(ConfigError, match="ReplayBuffer of tensors.*ListStorage"):
        small(tmp_path / "state", replay_buffer=ReplayBuffer())
    (tmp_path / "folder").mkdir()
    for path in ("", "a\0b"):
        with pytest.raises(ConfigError, match="in a directory that exists"):
            small(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(ConfigError, match="must be a file"):
            small(tmp_path / name)
    with pytest.raises(ConfigError, match="nothing can be written to /proc"):
        small("/proc/state")
    errors = []

    def make():
        try:
            small(tmp_path / "state")
        except ConfigError as err:
            errors.append(str(err))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_workers_leave_sigterm_to_the_learner():
    with MultiSyncCollector("CartPole-v1", num_workers=2, frames_per_batch=8) as collector:
        collector.next()
        for pid in rig.workers():
            os.kill(pid, signal.SIGTERM)
        assert collector.next().numel() == 8


SEVERAL = """
import os, signal, sys
from gleanrl import Collector
one, other = (
    Collector("CartPole-v1", frames_per_batch=8, preemption_path=f"{sys.argv[1]}/{name}")
    for name in "ab"
)
for batch in one:
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_one_signal_saves_the_states_of_all_collectors(python, tmp_path):
    line = [python, "-c", SEVERAL, str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == CODE, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
