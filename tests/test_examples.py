"""The examples learn: their losses and returns move within a tiny budget."""

import math
import runpy
import subprocess
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
# Frames for each example, and whether the return improves within them.
BUDGETS = {
    "ppo": (12_288, True),
}
SCRIPTS = {"dqn": ["--frames", "3000"], "appo": ["--frames", "10240"], "evaluate": []}


@pytest.fixture
def _torch_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.parametrize("name", BUDGETS)
def test_loss_and_return_of_an_example_move(name):
    frames, improves = BUDGETS[name]
    train = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["train"]
    rows = list(train(frames=frames, seed=0))
    losses, returns = ([row[column] for row in rows] for column in ("loss", "return"))
    assert frames <= rows[-1]["frames"] <= 2 * frames
    assert all(math.isfinite(x) for x in losses + returns)
    assert len(set(losses)) > 1
    assert len(set(returns)) > 1
    assert not improves or returns[-1] > returns[0]


@pytest.mark.slow
def test_examples_run_as_scripts(python):
    running = {
        name: subprocess.Popen(
            [python, str(EXAMPLES / f"{name}.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, arguments in SCRIPTS.items()
    }
    try:
        for name, process in running.items():
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, f"{name}: {err}"
            assert out, name
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*BUDGETS, *SCRIPTS}
