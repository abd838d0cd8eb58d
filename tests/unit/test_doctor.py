"""`gleanrl doctor`: on this machine, and on one where much is broken."""

import json
import os
import subprocess

import warm
from cli_rig import run

TOOL = '#!/bin/sh\necho "slurm_load_partitions: Unable to contact slurm controller" >&2\nexit 1\n'


def test_a_machine_that_runs_the_suite_is_fit(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a cluster that another test left is not meant
    code, out, _ = run(capsys, "doctor", "--json")
    results = json.loads(out)
    assert all(list(each) == ["name", "status", "found", "fix"] for each in results)
    assert [each for each in results if each["status"] == "wrong"] == []
    assert code == 0
    found = {each["name"]: each for each in results}
    assert (
        found["worker"]["status"] == found["threads"]["status"] == found["gloo"]["status"] == "ok"
    )
    assert "torch " in found["packages"]["found"]
    assert {"processors", "memory", "open files", "processes", "CUDA", "Ray", "Slurm"} < set(found)


def test_every_fault_of_a_broken_machine_is_found_in_one_run(tmp_path):
    """Without torch, too, and though the first of the faults would end other commands."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    (tmp_path / "sinfo").write_text(TOOL)
    (tmp_path / "sinfo").chmod(0o700)
    broken = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "TCP_PORT": "many",
        "RAY_ADDRESS": "127.0.0.1:1",
        "CXX": "no-such-compiler",
    }
    limited = ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", warm.PYTHON, "-m", "gleanrl"]
    done = subprocess.run(
        [*limited, "doctor"], env=os.environ | broken, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    for status, begin, words, fix in [
        ("wrong", "torch", "libcudart.so.12: cannot open", "pip install --force-reinstall torch"),
        ("wrong", "worker", "libcudart.so.12: cannot open", "gleanrl collect CartPole-v1"),
        ("wrong", "open files", "100 (ulimit -n)", "nofile=65536"),
        ("wrong", "port", "'many'", "unset TCP_PORT"),
        ("wrong", "Ray", "no cluster answers at 127.0.0.1:1", "unset RAY_ADDRESS"),
        ("wrong", "Slurm", "Unable to contact slurm controller", "scontrol ping"),
        ("note", "compiler", "no-such-compiler", "apt-get install g++"),
    ]:
        at = next(i for i, line in enumerate(lines) if line[-1].startswith(begin))
        assert lines[at][0] == status
        assert words in lines[at][1]
        assert lines[at + 1][0] == "fix:"
        assert fix in lines[at + 1][1]
