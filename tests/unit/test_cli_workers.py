"""The command line over worker processes, and what ``bench`` makes of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

import pytest
from cli_rig import card_of, lines_of, run
from tensordict import TensorDict

MODES = pytest.mark.parametrize("mode", [(), ("--async",)], ids=["sync", "async"])


def finished(data):
    """Return the lengths of the trajectories that ended, counted frame by frame."""
    ids, done = data["collector", "traj_ids"] + 0, (data["next", "done"] + 0).squeeze(-1).bool()
    return [int((ids == traj).sum()) for traj in ids[done].tolist()]


@MODES
@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_episode_of_every_worker_is_reported_right(capsys, tmp_path, mode, num_envs):
    path = tmp_path / "data"
    arguments = ("--workers", 2, *mode, "--num-envs", num_envs, "--frames-per-batch", 60)
    code, out, err = run(
        capsys, "collect", "CartPole-v1", *arguments, "--frames", 1500, "--seed", 3, "--out", path
    )
    assert (code, err) == (0, "")
    card, data = card_of(path), TensorDict.load_memmap(path)
    lengths = finished(data)
    assert data.shape == (card["frames"],) == (1500,)
    assert card["episodes"] == len(lengths) > 20
    assert card["lengths"]["mean"] == card["returns"]["mean"]
    assert card["lengths"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert card["lengths"]["max"] == max(lengths) > 60 // (2 * num_envs)
    assert (card["workers"], card["async"], card["num_envs"]) == (2, bool(mode), 2 * num_envs)
    kind = "asynchronous workers" if mode else "workers"
    assert lines_of(out)["setting"].startswith(f"2 {kind} with {num_envs} environment")
    inspected = lines_of(run(capsys, "inspect", path)[1])
    assert (inspected["workers"], inspected["episodes"]) == ("2", str(card["episodes"]))


def test_the_same_seed_gives_the_same_frames_over_workers(capsys, tmp_path):
    for name in ("one", "two"):
        arguments = ("--workers", 2, "--frames", 200, "--seed", 7, "--out", tmp_path / name)
        assert run(capsys, "collect", "CartPole-v1", *arguments)[0] == 0
    one, two = (TensorDict.load_memmap(tmp_path / name) for name in ("one", "two"))
    assert (one == two).all()


POLICY = """
import os
import signal
import torch

steps = 0

def act(observation):
    global steps
    steps += 1
    if steps % 131 == 0:
        {at_131}
    return torch.ones(observation.shape[:-1], dtype=torch.int64)

def interrupt():
    try:  # one worker does it, once
        os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(int(os.environ["LEARNER"]), signal.SIGINT)
"""


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LEARNER", str(os.getpid()))
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / f"{tmp_path.name}_policies.py"  # workers may know modules of other names

    def write(at_131="pass"):
        file.write_text(POLICY.replace("{at_131}", at_131))
        return f"{file}:act"

    yield write
    sys.modules.pop(file.stem, None)


@MODES
def test_ctrl_c_keeps_what_workers_have_collected(capsys, tmp_path, policy_file, mode):
    path = tmp_path / "data"
    before = signal.getsignal(signal.SIGINT)
    arguments = ("--workers", 2, *mode, "--frames", 100_000, "--frames-per-batch", 200)
    policy = policy_file("interrupt()")
    code, out, err = run(
        capsys, "collect", "CartPole-v1", "--policy", policy, *arguments, "--out", path
    )
    assert (code, err) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before
    assert "frames were left" in lines_of(out)["interrupted"]
    card, data = card_of(path), TensorDict.load_memmap(path)
    assert card["status"] == "interrupted"
    assert 130 <= card["frames"] < 100_000  # all that the worker that interrupted had made
    assert data.shape == (card["frames"],)
    assert (data["action"] == 1).all()
    assert card["episodes"] == len(finished(data))


def test_what_a_worker_raises_is_one_line(capsys, tmp_path, policy_file):
    path = tmp_path / "data"
    policy = policy_file("raise OverflowError('too\\n   much')")
    arguments = ("--policy", policy, "--workers", 1, "--frames-per-batch", 100)
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments, "--out", path)
    assert (code, err) == (
        1,
        "gleanrl: error: worker 0 raised OverflowError: too much; "
        "the policy raised this at step 29 of the rollout\n",
    )
    assert (card_of(path)["status"], card_of(path)["frames"]) == ("failed", 100)
    assert run(capsys, "inspect", path)[0] == 0
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments, "--traceback")
    assert code == 1
    assert "in act" in err


def test_bench_measures_and_says_what_to_use(capsys, tmp_path, policy_file):
    path = tmp_path / "bench.json"
    arguments = ("--seconds", 0.1, "--workers", 1, "--num-envs", "1,2", "--policy", policy_file())
    code, out, err = run(capsys, "bench", "CartPole-v1", *arguments, "--out", path)
    assert code == 0
    content = json.loads(path.read_text())
    tried = [(row["workers"], row["num_envs"], row["async"]) for row in content["settings"]]
    assert tried[:4] == [(0, 1, False), (0, 2, False), (1, 1, False), (1, 2, False)]
    fastest = max(content["settings"][2:4], key=lambda row: row["frames_per_second"])["num_envs"]
    assert tried[4:6] == [(1, fastest, True)] * 2
    central = [row["central"] for row in content["settings"]]
    assert central == [*[None] * 5, 1, *range(1, fastest + 1)]
    assert all(0 < row["shares"]["env"] < 1 for row in content["settings"])
    rates = [row["frames_per_second"] for row in content["settings"]]
    best = content["settings"][content["best"]]
    assert best["frames_per_second"] == max(rates) > 0
    assert best["relative"] == 1.0
    assert all(row["seconds"] >= 0.1 for row in content["settings"])
    assert all(row["frames"] >= row["frames_per_batch"] for row in content["settings"])
    assert content["command"] == lines_of(out)["command"]
    assert f"--policy {policy_file()}" in content["command"]
    marked = [line for line in out.splitlines() if line.startswith("best")]
    assert len(marked) == 1
    assert "100 %" in marked[0]
    total = 6 + fastest
    assert [line.split(":")[0] for line in err.splitlines()] == [
        f"CartPole-v1 {n}/{total if n > 3 else 4}" for n in range(1, total + 1)
    ]


def test_an_interrupted_bench_shows_what_it_has(capsys, policy_file):
    policy = policy_file("os.getpid() == int(os.environ['LEARNER']) or interrupt()")
    arguments = ("--seconds", 1, "--workers", 1, "--num-envs", 1, "--policy", policy)
    code, out, _ = run(capsys, "bench", "CartPole-v1", *arguments)
    assert code == 130
    assert "1 environment in this process" in out
    assert "with 1 environment" not in out


def test_a_terminal_gets_a_bar_and_a_table(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    arguments = ("--seconds", 0.2, "--workers", 1, "--num-envs", 2)
    code, out, err = run(capsys, "bench", "CartPole-v1", *arguments)
    assert code == 0
    assert "CartPole-v1" in err
    assert re.search(r"1 asynchronous worker with 2 environments: [\d,]+ frames/s", err)
    assert "2 environments in this process" in out
    assert "100 %" in out
    assert "gleanrl collect CartPole-v1" in out


def test_a_setting_that_fails_is_a_row_and_the_others_count(capsys, tmp_path, policy_file):
    policy = policy_file("os.getpid() == int(os.environ['LEARNER']) or 1 / 0")
    path = tmp_path / "bench.json"
    arguments = ("--seconds", 0.2, "--workers", 1, "--num-envs", 1, "--policy", policy)
    code, out, err = run(capsys, "bench", "CartPole-v1", *arguments, "--out", path)
    assert code == 0
    assert err.splitlines()[-1] == "CartPole-v1 2/2: 1 worker with 1 environment: failed"
    content = json.loads(path.read_text())
    rates = [row["frames_per_second"] for row in content["settings"]]
    assert (rates[0] > 0, rates[1:], content["best"]) == (True, [None], 0)
    assert "worker 0 raised ZeroDivisionError" in content["settings"][1]["error"]
    assert lines_of(out)["failed"].startswith("1 worker with 1 environment: worker 0 raised")


@MODES
def test_one_policy_for_all_workers_is_a_matter_of_one_option(capsys, tmp_path, policy_file, mode):
    path = tmp_path / "data"
    code, _, err = run(
        capsys, "collect", "CartPole-v1", "--workers", 2, "--num-envs", 2, "--central", 2, *mode,
        "--policy", policy_file(), "--frames", 80, "--frames-per-batch", 40, "--out", path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert card_of(path)["frames"] == 80


INTERRUPTING = """
import signal
import torch

calls = 0

def act(observation):
    global calls
    calls += 1
    if calls == 60:
        signal.raise_signal(signal.SIGINT)
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)
"""


@MODES
def test_ctrl_c_ends_collection_by_one_policy_for_all_workers(capsys, tmp_path, mode):
    path, policy = tmp_path / "data", tmp_path / "policy.py"
    policy.write_text(INTERRUPTING)
    code, out, err = run(
        capsys, "collect", "CartPole-v1", "--workers", 2, "--central", 1, "--policy",
        f"{policy}:act", *mode, "--frames", 10_000, "--frames-per-batch", 40, "--out", path,
    )  # fmt: skip
    assert (code, err) == (130, "")
    assert "frames were left" in lines_of(out)["interrupted"]
    assert 0 < card_of(path)["frames"] == len(TensorDict.load_memmap(path).flatten())


@MODES
def test_nodes_are_a_matter_of_two_options(capsys, tmp_path, mode):
    path = tmp_path / "data"
    code, out, err = run(
        capsys, "collect", "CartPole-v1", "--backend", "distributed", "--nodes", 2, *mode,
        "--num-envs", 2, "--frames", 400, "--frames-per-batch", 40, "--seed", 3, "--out", path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    card = card_of(path)
    assert (card["workers"], card["backend"], card["frames"]) == (2, "distributed", 400)
    assert "distributed nodes with 2 environments each" in lines_of(out)["setting"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nodes", 2), "--backend"),
        (("--backend", "distributed"), "--nodes"),
        (("--backend", "ray", "--nodes", 2, "--workers", 2), "--workers"),
    ],
)
def test_counts_of_the_wrong_kind_are_named(capsys, arguments, says):
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert code != 0
    assert says in err
