"""The examples learn: their losses and returns move within a tiny budget."""

import json
import math
import os
import runpy
import signal
import subprocess
from pathlib import Path

import pytest
import rig
import torch
from tools import curves

EXAMPLES = Path(__file__).parent.parent / "examples"
# Frames for each example, and what its return does within them: "improves", "moves" or nothing,
# where no episode ends.
BUDGETS = {
    "ppo": (12_000, "improves"),
    "ppo_continuous": (4_000, ""),
    "sac": (560, "moves"),
    "dqn": (5_000, "moves"),  # workers store some thousands before the first sample
    "recurrent_ppo": (6_144, "improves"),
    "impala": (20_480, "improves"),
    "ippo": (3_200, "moves"),
    "ppo_torchrl_losses": (6_144, "improves"),
    "evaluate": (8_192, "moves"),
}
OTHERWISE = {"resume", "ppo_ray"}  # below, and in tests/distributed/test_ray.py, where a Ray is


@pytest.fixture
def _torch_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_torch_threads")
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in BUDGETS), ("impala", {"central": True})]
)
def test_loss_and_return_of_an_example_move(name, options, monkeypatch):
    monkeypatch.setenv("TCP_PORT", "0")  # the usual one may be another collector's: a warning
    frames, expected = BUDGETS[name]
    train = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["train"]
    rows = list(train(frames=frames, seed=0, **options))
    losses, returns = ([row[column] for row in rows] for column in ("loss", "return"))
    assert 0 < rows[-1]["frames"] <= 2 * frames
    assert all(map(math.isfinite, losses))
    assert len(set(losses)) > 1
    assert all(math.isfinite(x) for x in returns) == bool(expected)
    assert not expected or len(set(returns)) > 1
    assert expected != "improves" or returns[-1] > returns[0]


@pytest.mark.slow
def test_training_goes_on_after_sigterm(python, tmp_path):
    command = [python, str(EXAMPLES / "resume.py"), "--checkpoint", str(tmp_path / "ppo.pt")]
    begun = subprocess.Popen([*command, "--frames", "1024000"], stdout=subprocess.PIPE, text=True)
    with begun:
        rows = printed(begun.stdout)
        learnt = next(row for row in rows if row["return"] > 50)
        end(begun)
        frames = [learnt, *rows][-1]["frames"]  # batches that were under way count
    assert begun.returncode == 0
    done = subprocess.run(
        [*command, "--frames", str(frames + 12_288)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    again = list(printed(done.stdout.splitlines()))
    first = again[0]["frames"]  # a batch may have been learnt from whose row was not printed
    assert first - frames in {2048, 4096}
    assert [row["frames"] for row in again] == list(range(first, frames + 12_289, 2048))
    assert again[-1]["return"] > 40, "that of an untrained policy is 22"


@pytest.mark.slow
def test_training_that_was_killed_prints_the_same_numbers(python, tmp_path):
    source = (EXAMPLES / "resume.py").read_text()
    often = source.replace("\nEVERY = 20 ", "\nEVERY = 6 ")
    assert often != source
    program = tmp_path / "resume.py"
    program.write_text(often)
    command = [python, str(program), "--frames", str(11 * 2048), "--checkpoint"]

    def run(name):
        line = [*command, str(tmp_path / name)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=True)
        return list(printed(done.stdout.splitlines()))

    expected, killed = run("whole.pt"), []
    line = [*command, str(tmp_path / "killed.pt")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        for row in printed(process.stdout):
            killed.append(row)
            if len(killed) == 7 + int(expected[0]["loss"] * 1000) % 2:  # after the only save
                process.kill()
                break
    assert killed == expected[: len(killed)]
    assert run("killed.pt") == expected[6:]


def end(process):
    """Send SIGTERM to a process and its workers, as the end of a cluster's job does."""
    workers = rig.workers(process.pid)
    assert len(workers) == 2
    process.terminate()
    for worker in workers:
        os.kill(worker, signal.SIGTERM)


def printed(lines):
    """Yield the rows that an example prints."""
    for line in lines:
        words = line.split()
        yield {"frames": int(words[0]), "return": float(words[3]), "loss": float(words[5])}


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*BUDGETS, *OTHERWISE}


def test_the_page_shows_what_the_curves_hold():
    page = curves.PAGE.read_text()
    found = [json.loads(path.read_text()) for path in curves.CURVES.glob("*.json")]
    assert found
    for doc in found:
        assert curves.summary(doc) in page, f"python -m tools.curves {doc['example']} --plot-only"
        assert curves.CURVES.joinpath(f"{doc['example']}.png").stat().st_size < 60_000
