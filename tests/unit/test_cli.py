"""The command line in one process: collecting, data on disk, display, errors."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys

import pytest
import warm
from cli_rig import card_of, lines_of, run
from tensordict import TensorDict

from gleanrl.cli.main import main


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A dataset of 100 frames, as `collect` writes it."""
    path = tmp_path_factory.mktemp("written") / "data"
    arguments = ["--frames", "100", "--frames-per-batch", "50", "--seed", "1", "--out", str(path)]
    assert main(["collect", "CartPole-v1", *arguments]) == 0
    return path


@pytest.fixture
def collected(written, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(written, tmp_path / "data")


def edit_card(path, change):
    card = card_of(path)
    change(card)
    (path / "card.json").write_text(json.dumps(card))


def test_inspect_writes_a_page_that_loads_nothing_and_runs_nothing(collected, tmp_path, capsys):
    edit_card(collected, lambda card: card.update(env="<script>alert(1)</script>"))
    path = tmp_path / "page.html"
    code, out, _ = run(capsys, "inspect", collected, "--html", path)
    assert code == 0
    assert lines_of(out)["page"] == str(path)
    text = path.read_text()
    assert "<title>&lt;script&gt;alert(1)&lt;/script&gt;</title>" in text
    assert not re.search(r"<script|<link|<img|https?:|url\(|@import", text)
    titles = re.findall(r"<figcaption>([^<]+)", text)
    assert titles[:3] == ["Returns", "Distribution of returns", "Lengths of episodes"]
    episodes = int(lines_of(out)["episodes"])
    assert f"<dt>episodes</dt><dd>{episodes}</dd>" in text
    assert 1 <= len(re.findall(r"M\d+ \d+h0", text)) <= 2 * episodes
    code, _, err = run(capsys, "inspect", collected, "--html", tmp_path / "nowhere" / "page.html")
    assert code == 1
    assert "nowhere/page.html cannot be written: No such file or directory" in err


def observation(name, value):
    def change(card):
        next(entry for entry in card["keys"] if entry["key"] == ["observation"])[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (observation("file", "../secret"), "must be within the dataset"),
        (observation("file", "/etc/passwd"), "must be within the dataset"),
        (observation("file", "next/../../secret"), "must be within the dataset"),
        (observation("file", "C:\\secret"), "must be within the dataset"),
        (observation("file", "link.memmap"), "leads out of the dataset"),
        (observation("file", "next"), "has no file 'next'"),
        (observation("file", "missing.memmap"), "has no file"),
        (observation("file", "\ud800"), "must be within the dataset"),
        (observation("shape", [3]), r"has 1,600 bytes; 100 rows of 'observation' take 1,200"),
        (observation("shape", [-3]), "must list whole numbers"),
        (observation("shape", [2**62, 2**62]), "take"),
        (observation("shape", "3"), "must list whole numbers"),
        (observation("dtype", "object"), "dtype of .* is not known"),
        (observation("dtype", ["float32"]), "dtype of .* is not known"),
        (observation("dtype", "qint32"), "dtype of .* is not known"),
        (observation("key", []), "must be a list of strings"),
        (lambda card: card["keys"].append(3), "is not an object"),
        (lambda card: card.update(keys={}), "'keys' must be a list"),
        (lambda card: card.update(frames=101), "has 1,600 bytes; 101 rows"),
        (lambda card: card.update(frames=-1), "'frames' .* must be a whole number"),
        (lambda card: card.update(frames=True), "'frames' .* must be a whole number"),
        (lambda card: card.update(frames=2**80), "'frames' .* must be a whole number"),
        (lambda card: card.update(data="zip"), "'data' .* is none of"),
        (lambda card: card.update(status="fine"), "'status'"),
        (lambda card: card.update(format="zip"), "is not the card of a dataset"),
        (lambda card: card.update(format_version=2), "format version 2"),
    ],
)
def test_a_card_that_lies_is_refused(collected, tmp_path, capsys, change, message):
    (tmp_path / "secret").write_bytes(bytes(1600))
    (collected / "link.memmap").symlink_to(tmp_path / "secret")
    edit_card(collected, change)
    code, out, err = run(capsys, "inspect", collected)
    assert (code, out) == (1, "")
    assert re.search(message, err)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\udc80"])
def test_a_card_that_is_not_json_is_refused(tmp_path, capsys, content):
    (tmp_path / "card.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    code, _, err = run(capsys, "inspect", tmp_path)
    assert code == 1
    assert re.search(r"cannot be read as JSON|is not the card", err)
    (tmp_path / "card.json").unlink()
    os.mkfifo(tmp_path / "card.json")
    code, _, err = run(capsys, "inspect", tmp_path)
    assert code == 1
    assert "has no card.json" in err


class Bomb:
    def __reduce__(self):
        return (os._exit, (3,))


def test_inspecting_unpickles_nothing(collected, capsys):
    for name in ("other.pickle", "observation.pickle", "meta.json", "next/meta.json"):
        (collected / name).write_bytes(pickle.dumps(Bomb()))
    code, out, _ = run(capsys, "inspect", collected)
    assert code == 0
    assert lines_of(out)["return"].startswith(f"mean {card_of(collected)['returns']['mean']:.1f}, ")


POLICIES = """
import torch
from dataclasses import dataclass

class Always(torch.nn.Module):
    def __init__(self, action=1):
        super().__init__()
        self.action = action
    def forward(self, observation):
        return torch.tensor(self.action)

def act(observation):
    return torch.tensor(1)

def make():
    return Always()

def make_with(action=1):
    return Always(action)

def variadic(*args):
    return torch.tensor(1)

@dataclass
class Thing:
    n: int = 1
    def __call__(self, observation):
        return torch.tensor(self.n)

module = Always(1)
number = 3
"""


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    file = tmp_path / "some_policies.py"
    file.write_text(POLICIES)
    return file


@pytest.mark.parametrize(
    "name", ["act", "variadic", "make", "make_with", "Thing", "module", "Always"]
)
def test_policies_are_made_by_what_makes_them_and_taken_as_they_are_otherwise(
    capsys, tmp_path, policy_file, name
):
    arguments = ("--policy", f"{policy_file}:{name}", "--frames", 50, "--out", tmp_path / "data")
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert (code, err) == (0, "")
    assert (TensorDict.load_memmap(tmp_path / "data")["action"] == 1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("greedy", "neither 'random' nor FILE.py:NAME"),
        ("{}", "neither 'random' nor FILE.py:NAME"),
        ("{}:not a name", "neither 'random' nor FILE.py:NAME"),
        ("nowhere.py:act", "there is no file 'nowhere.py'"),
        ("{}:absent", "does not define 'absent'"),
        ("{}:number", "an? int cannot be called"),
    ],
)
def test_policies_that_cannot_be_found_are_named(capsys, policy_file, text, message):
    code, _, err = run(capsys, "collect", "CartPole-v1", "--policy", text.format(policy_file))
    assert code == 2
    assert re.search(message, err)


def test_what_the_file_of_a_policy_raises_names_the_option(capsys, tmp_path):
    (tmp_path / "p.py").write_text("act = 1 / 0")
    code, _, err = run(capsys, "collect", "CartPole-v1", "--policy", f"{tmp_path}/p.py:act")
    assert code == 1
    assert re.search("division by zero; --policy '.*p.py:act' raised this when it was made", err)


def test_a_terminal_gets_a_bar_and_a_table(monkeypatch, capsys, tmp_path, policy_file):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("TERM", "xterm")
    odd = shutil.copy(policy_file, tmp_path / "[bold]odd.py")
    arguments = ("--frames", 1000, "--policy", f"{odd}:act")
    code, out, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert code == 0
    assert "CartPole-v1" in err
    *_, last = re.findall(r"\d+%  [^\r\n\x1b]*", err)
    assert re.fullmatch(r"100%  [\d,]+ frames/s  return 9\.\d  ETA 0:00", last)
    assert f"{odd}:act" in out


@pytest.mark.parametrize("num_envs", [1, 3])
def test_collect_reports_every_episode(capsys, tmp_path, num_envs):
    path = tmp_path / "a b"
    arguments = ("--frames", "3e3", "--num-envs", num_envs, "--seed", 3, "--out", path)
    code, out, _ = run(capsys, "collect", "CartPole-v1", *arguments)
    assert code == 0
    card = card_of(path)
    data = TensorDict.load_memmap(path)
    assert data.shape == (card["frames"],)
    assert card["frames"] >= 3000
    assert card["episodes"] == int(data["next", "done"].sum()) > 50
    assert card["returns"]["mean"] == card["lengths"]["mean"]
    assert (card["status"], card["seed"], card["env"]) == ("complete", 3, "CartPole-v1")
    assert ("collector", "mask") not in data.keys(True, True)
    assert card["command"].startswith("gleanrl collect CartPole-v1 --frames 3e3 ")
    assert card["command"].endswith(f"--seed 3 --out '{path}'")
    assert card["versions"]["torch"]
    facts = lines_of(out)
    assert facts["episodes"] == str(card["episodes"])
    assert facts["frames"].startswith(f"{card['frames']:,} in ")


def test_a_relative_directory_is_where_the_command_was_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = os.path.join("data", "cartpole")
    arguments = ("collect", "CartPole-v1", "--frames", 50, "--out", where)
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert lines_of(out)["data"].startswith(f"{where} (")
    assert card_of(tmp_path / "data" / "cartpole")["frames"] == 50
    assert run(capsys, "inspect", where)[0] == 0


def test_a_collection_that_fails_at_once_can_be_tried_again(
    capsys, tmp_path, monkeypatch, policy_file
):
    monkeypatch.chdir(tmp_path)
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(3,)").replace(
            "signal.raise_signal(signal.SIGINT)", "raise OverflowError('too much')"
        )
    )
    arguments = ("collect", "CartPole-v1", "--frames", 50, "--out", "data")
    assert run(capsys, *arguments, "--policy", f"{policy_file}:act")[0] == 1
    assert not (tmp_path / "data").exists()
    assert run(capsys, *arguments)[0] == 0


def test_inspect_finds_the_episodes_that_collect_counted(capsys, tmp_path):
    path = tmp_path / "data"
    _, collected, _ = run(
        capsys, "collect", "CartPole-v1", "--frames", 2000, "--num-envs", 2, "--out", path
    )
    code, out, err = run(capsys, "inspect", path)
    assert (code, err) == (0, "")
    for name in ("episodes", "return", "length", "seed", "policy"):
        assert lines_of(out)[name] == lines_of(collected)[name]
    assert "next.reward  float32 [1]" in out
    assert (path / "returns.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_frames(capsys, tmp_path):
    for name in ("one", "two"):
        arguments = ("--frames", 200, "--seed", 7, "--out", tmp_path / name)
        assert run(capsys, "collect", "CartPole-v1", *arguments)[0] == 0
    one, two = (TensorDict.load_memmap(tmp_path / name) for name in ("one", "two"))
    assert (one == two).all()


INTERRUPTING = """
import signal
import torch

steps = 0

def act(observation):
    global steps
    steps += 1
    if steps in {at}:
        signal.raise_signal(signal.SIGINT)
    return torch.tensor(0)
"""


def test_ctrl_c_keeps_every_step_taken(capsys, tmp_path, policy_file):
    policy_file.write_text(INTERRUPTING.replace("{at}", "(131,)"))
    path = tmp_path / "data"
    arguments = ("--frames", 1000, "--frames-per-batch", 100, "--out", path)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = run(
        capsys, "collect", "CartPole-v1", "--policy", f"{policy_file}:act", *arguments
    )
    assert (code, err) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before
    assert "frames were left" in lines_of(out)["interrupted"]
    card = card_of(path)
    assert card["status"] == "interrupted"
    assert card["frames"] in (130, 131)
    assert TensorDict.load_memmap(path).shape == (card["frames"],)
    assert lines_of(run(capsys, "inspect", path)[1])["status"] == "interrupted"


def test_a_second_ctrl_c_stops_at_once_and_keeps_whole_batches(capsys, tmp_path, policy_file):
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(131,)").replace(
            "signal.raise_signal(signal.SIGINT)",
            "[signal.raise_signal(signal.SIGINT) for _ in 'ab']",
        )
    )
    path = tmp_path / "data"
    arguments = ("--frames", 1000, "--frames-per-batch", 100, "--out", path)
    code, _, err = run(
        capsys, "collect", "CartPole-v1", "--policy", f"{policy_file}:act", *arguments
    )
    assert (code, err) == (130, "gleanrl: error: interrupted\n")
    card = card_of(path)
    assert (card["status"], card["frames"]) == ("interrupted", 100)
    assert run(capsys, "inspect", path)[0] == 0


def test_a_policy_that_fails_is_one_line_and_the_data_so_far_are_kept(
    capsys, tmp_path, policy_file
):
    policy_file.write_text(
        INTERRUPTING.replace("{at}", "(131,)").replace(
            "signal.raise_signal(signal.SIGINT)", "raise OverflowError('too\\n  much')"
        )
    )
    path = tmp_path / "data"
    arguments = ["--policy", f"{policy_file}:act", "--frames-per-batch", 100, "--out", path]
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments)
    assert (code, err) == (
        1,
        "gleanrl: error: OverflowError: too much; "
        "the policy raised this at step 29 of the rollout\n",
    )
    assert (card_of(path)["status"], card_of(path)["frames"]) == ("failed", 100)
    assert run(capsys, "inspect", path)[0] == 0
    arguments[-1] = tmp_path / "again"
    code, _, err = run(capsys, "collect", "CartPole-v1", *arguments, "--traceback")
    assert code == 1
    assert "Traceback" in err
    assert "in act" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["collect", "CartPol-v1"], "CartPole-v1"),
        (["collect", "CartPole-v1", "--frames", "many"], "'many' is not a whole number"),
        (["collect", "CartPole-v1", "--frames", "0"], "'0' is not a whole number of 1 or more"),
        (["collect", "CartPole-v1", "--workers", "2,4"], "'2,4' is not a whole number"),
        (["collect", "CartPole-v1", "--frames", "10,000"], "'10,000' is not a whole number"),
        (["bench", "CartPole-v1", "--seconds", "inf"], "'inf' is not a positive number"),
        (["collect", "CartPole-v1", "--num-envs", "1.5"], "'1.5' is not a whole number"),
        (["collect", "CartPole-v1", "--seed", "-1"], "expected one argument|'-1' is not a whole"),
        (["collect", "CartPole-v1", "--policy", "nowhere.py:act"], "no file 'nowhere.py'"),
        (["collect", "CartPole-v1", "--out", "/"], "is not empty"),
        (["collect", "CartPole-v1", "--format", "parquet"], "parquet needs --out DIR"),
        (["collect", "CartPole-v1", "--launcher", "submitit"], "needs --backend distributed"),
        (["collect"], "required: ENV"),
        (["inspect", "/nowhere/at/all"], "is not a directory"),
        (["gather"], "there is no command 'gather'"),
        (["colect"], "did you mean collect. .see gleanrl --help"),
        (["collect", "X", "--num-env3=2"], "did you mean --num-envs. .see gleanrl collect --help"),
        (["inspect", "X", "Y"], "'Y' is one argument too many .see gleanrl inspect --help"),
        (["collect", "CartPole-v1", "--num_envs=100000000"], "need 500,000,000,000 bytes"),
        (["bench", "CartPole-v1", "--num-envs", "100000000"], "need 500,000,000,000 bytes"),
        (["collect", "Breakout-v5"], "did you mean 'ALE/Breakout-v5'"),
        (["collect", "CartPole-v1", "--workers", "0"], "'0' is not a whole number of 1 or more"),
        (["collect", "CartPole-v1", "--async"], "say how many with --workers N"),
        (["collect", "CartPol-v1", "--workers", "1"], "error: no environment is .*CartPole-v1"),
        (["bench", "CartPol-v1"], "CartPole-v1"),
        (["collect", "CartPole-v1", "--central", "1"], "--central G needs --workers N"),
        (
            ["collect", "CartPole-v1", "--central", "2", "--workers", "1", "--num-envs", "3"],
            "--central 2 must divide --num-envs 3",
        ),
        (["bench", "CartPole-v1", "--seconds", "0"], "'0' is not a positive number of seconds"),
        (["bench", "CartPole-v1", "--seconds", "soon"], "'soon' is not a positive number"),
        (["bench", "CartPole-v1", "--workers", "1,x"], "'x' is not a whole number"),
        (["bench", "CartPole-v1", "--num-envs", "0"], "'0' is not a whole number of 1 or more"),
        (["bench", "CartPole-v1", "--out", "/"], "exists already"),
        (["bench", "CartPole-v1", "--out", "/nowhere/at/all.json"], "not a directory that can be"),
        (["bench", "CartPole-v1", "--policy", "greedy"], "neither 'random' nor"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("gleanrl")
    assert err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)


def test_inspecting_a_directory_without_card_exits_with_1(capsys, tmp_path):
    code, out, err = run(capsys, "inspect", tmp_path)
    assert (code, out) == (1, "")
    assert err == (
        f"gleanrl: error: {tmp_path} has no card.json, so neither 'gleanrl collect --out' nor a "
        "Recorder wrote it\n"
    )


def test_inspect_draws_where_it_is_told_to(collected, capsys, tmp_path):
    code, out, _ = run(capsys, "inspect", collected, "--plot", tmp_path / "here.png")
    assert code == 0
    assert lines_of(out)["plot"] == str(tmp_path / "here.png")
    assert (tmp_path / "here.png").exists()
    assert not (collected / "returns.png").exists()
    target = tmp_path / "no" / "here.png"
    code, _, err = run(capsys, "inspect", collected, "--plot", target)
    assert (code, err) == (
        1,
        f"gleanrl: error: {target} cannot be written: No such file or directory\n",
    )


def test_a_link_in_a_dataset_does_not_choose_what_the_plot_overwrites(collected, capsys, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (collected / "returns.png").symlink_to(tmp_path / "precious")
    code, out, _ = run(capsys, "inspect", collected)
    assert code == 0
    assert "is not an ordinary file" in lines_of(out)["plot"]
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_matplotlib_inspect_says_what_to_install(collected, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = run(capsys, "inspect", collected)
    assert code == 0
    assert lines_of(out)["plot"].endswith("pip install 'gleanrl[plot]'")
    code, _, err = run(capsys, "inspect", collected, "--plot", tmp_path / "x.png")
    assert code == 1
    assert "pip install 'gleanrl[plot]'" in err


def test_help_shows_examples_and_version_is_printed(capsys):
    for arguments in (["--help"], *([name, "--help"] for name in ("collect", "bench", "inspect"))):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert "Examples:\n  gleanrl " in out
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("gleanrl 0.")
    code, out, _ = run(capsys)
    assert code == 0
    assert "Examples:" in out


def test_collect_ends_with_a_histogram_that_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "collect", "CartPole-v1", "--frames", "500", "--num_envs", "2")
    title, *rows, how = out.partition("\n\n")[2].splitlines()
    assert code == 0
    assert re.fullmatch(r"returns of \d+ episodes", title)
    episodes = int(title.split()[2])
    assert sum(int(row.split()[-1]) for row in rows) == episodes
    assert max(map(len, rows)) == 80
    assert how.endswith("--out DIR, then: gleanrl inspect DIR")


@pytest.mark.parametrize(
    ("argument", "code"), [("--version", 0), ("--help", 0), ("colect", 2)], ids=str
)
def test_nothing_heavy_is_imported_before_a_command_needs_it(argument, code):
    done = subprocess.run(
        [warm.PYTHON, "-X", "importtime", "-m", "gleanrl", argument],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == code
    assert {name for name in imported if name.startswith("gleanrl")} == {
        "gleanrl", "gleanrl.core", "gleanrl.core.errors", "gleanrl.core.lazy",
        "gleanrl.core.platforms", "gleanrl.core.version",
        "gleanrl.cli", "gleanrl.cli.main", "gleanrl.cli.command_options",
        "gleanrl.recording", "gleanrl.recording.formats",
    }  # fmt: skip
    assert not imported & {"torch", "tensordict", "gymnasium", "numpy", "rich", "rich.console"}
    assert "gleanrl" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("env", "closed", "code"), [("CartPole-v1", ["out"], 0), ("Nope-v1", ["out", "err"], 2)]
)
def test_output_that_the_shell_has_closed_is_not_missed(monkeypatch, env, closed, code):
    for name in closed:  # what Python makes of ">&-" and "2>&-"
        monkeypatch.setattr(sys, f"std{name}", None)
    assert main(["collect", env, "--frames", "100"]) == code
    for name in closed:
        getattr(sys, f"std{name}").close()


OWN_ENVIRONMENT = """
import gymnasium
gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=5)
"""


def test_an_environment_of_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_module_of_a_test.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    code, out, err = run(capsys, "collect", "own_module_of_a_test:Own-v0", "--frames", "50")
    assert code == 0, err
    assert "episodes" in out
