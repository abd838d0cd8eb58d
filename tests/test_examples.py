"""The examples run, with a tiny budget."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "ppo.py": ["--frames", "4096"],
    "dqn.py": ["--frames", "3000"],
    "appo.py": ["--frames", "10240"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_example_runs(path):
    done = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS.get(path.name, [])],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
