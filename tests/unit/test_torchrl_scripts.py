"""Scripts of TorchRL's run in a copy that imports GleanRL's collector, and are metered."""

import subprocess
from pathlib import Path

import pytest
import warm
from benchmarks.processes import session
from tools.torchrl_scripts import Script, run

COLLECTS = """
from __future__ import annotations
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

frames = 1_000_000
env = GymEnv("CartPole-v1")
collector = Collector(env, env.rand_step, frames_per_batch=10, total_frames=frames)
assert type(collector).__module__.startswith("gleanrl")
for batch in collector:
    pass
"""


@pytest.fixture(autouse=True)
def _warm(python):
    """Have scripts started in no time."""


def checkout(tmp_path, text):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "script.py").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_frames_after_the_first_batch_are_counted(tmp_path):
    path = checkout(tmp_path, COLLECTS)
    result = run(Script("examples/script.py", constants={"frames": "50"}), path, "gleanrl", 60.0)
    assert (result.ended, result.error) == ("finished", "")
    assert result.frames == 40
    assert result.collecting > 0


@pytest.mark.slow
def test_a_failure_is_told_by_its_error(tmp_path):
    path = checkout(tmp_path, "raise ValueError('no such thing')\n")
    result = run(Script("examples/script.py"), path, "gleanrl", 1.0)
    assert not result.ran
    assert result.error == "ValueError: no such thing"


def test_a_budget_that_does_not_fit_the_script_is_an_error(tmp_path):
    path = checkout(tmp_path, "frames = 1\n")
    with pytest.raises(ValueError, match="assigns steps nowhere"):
        run(Script("examples/script.py", constants={"steps": "2"}), path, "gleanrl", 1.0)


def test_programs_that_are_killed_leave_no_semaphores():
    text = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(60)
"""
    with session([warm.PYTHON, "-c", text], stdout=subprocess.PIPE) as process:
        file = Path(f"/dev/shm/sem.{process.stdout.readline().decode().strip().removeprefix('/')}")
        assert file.exists()
    process.stdout.close()
    assert process.returncode == -9
    assert not file.exists()
