"""The examples run, with a tiny budget."""

import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "ppo.py": ["--frames", "4096"],
    "dqn.py": ["--frames", "3000"],
    "appo.py": ["--frames", "10240"],
}


@pytest.mark.slow
def test_examples_run(python):
    running = {
        path.name: subprocess.Popen(
            [python, str(path), *ARGUMENTS.get(path.name, [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in sorted(EXAMPLES.glob("*.py"))
    }
    assert set(ARGUMENTS) <= set(running)
    try:
        for name, process in running.items():
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, f"{name}: {err}"
            assert out, name
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
