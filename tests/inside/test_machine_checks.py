"""`gleanrl doctor` on machines that the suite cannot be: small, old, of a cluster; and stuck."""

import json
import math
import threading

import pytest
from cli_rig import run

from gleanrl.cli import doctor_command, machine_checks
from gleanrl.cli.machine_checks import Answer, Finding, Package

MB, GB = 1 << 20, 1 << 30
OLD = "The NVIDIA driver on your system is too old (found version 11040)."
NO_GPU = {"cuda": "12.6", "devices": [], "cuda_problem": OLD}
OLD_RAY = Package("ray", ">=2.40", "2.9", False)
NO_WANDB = Package("wandb", ">=0.17", None, False)
PARTITIONS = Answer(0, "cpu*\ngpu\n")
LATE = Answer(None, err="no answer in 10 s")
COMMAND = ("gleanrl", "collect")

CASES = {
    "a quota": ("processors", (64, 64, 4), "note", "4 of 64 usable, by the quota", "--cpus=N"),
    "an affinity": ("processors", (64, 4, 4), "note", "by its affinity", "--cpus-per-task=N"),
    "all processors": ("processors", (64, 64, 64), "ok", "64, all usable", ""),
    "a small job": ("memory", (GB // 2, [2 * GB]), "wrong", "limited to 2.1 GB", "--mem=8G"),
    "a full machine": ("memory", (GB // 2, []), "wrong", "536.9 MB available", "--sort=-rss"),
    "Docker's shm": (
        "shared_memory",
        (64 * MB, 64 * MB),
        "note",
        "Docker's default of 64 MiB: enough for GleanRL",
        "docker run --shm-size=8g",
    ),
    "a full shm": ("shared_memory", (8 * GB, MB), "note", "1.0 MB free", "ls -lS /dev/shm"),
    "few files": ("open_files", (256, math.inf, 64), "wrong", "up to 640", "ulimit -n 4096"),
    "no more files": ("open_files", (256, 512, 64), "wrong", "raised to 512", "nofile=65536"),
    "few processes": ("processes", (99, 500, 90, [], 4), "wrong", "99 allowed", "ulimit -u 500"),
    "a small group": ("processes", (9e9, 9e9, 90, [5], 4), "wrong", "5 more", "--pids-limit=-1"),
    "room": (
        "processes",
        (math.inf, math.inf, 90, [500], 4),
        "ok",
        "unlimited allowed (ulimit -u); 500 more in its",
        "",
    ),
    "no worker": ("worker", (LATE, 120.0, COMMAND), "wrong", "no answer", "collect --traceback"),
    "a slow disk": ("worker", (Answer(0), 70.0, COMMAND), "note", "70.0 s", "start_timeout=600"),
    "a torch that hangs": ("torch_fails", (LATE,), "wrong", "no answer in 10 s", "-X importtime"),
    "threads": ("threads", (64, 4, {}), "wrong", "no variable sets", "export OMP_NUM_THREADS=4"),
    "a setting": ("threads", (2, 4, {"OMP_NUM_THREADS": "2"}), "ok", "OMP_NUM_THREADS=2", ""),
    "an old driver": ("cuda", (NO_GPU, None, True), "wrong", "is too old", "whl/cu118"),
    "hidden GPUs": ("cuda", (NO_GPU, "", True), "note", "visible", "unset CUDA_VISIBLE_DEVICES"),
    "no GPU": ("cuda", (NO_GPU, None, False), "ok", "no NVIDIA driver", ""),
    "a build for CPUs": (
        "cuda",
        (NO_GPU | {"cuda": None}, None, True),
        "note",
        "this machine has a GPU",
        "pip install --force-reinstall torch",
    ),
    "a GPU": ("cuda", (NO_GPU | {"devices": ["H100"]}, "0", True), "ok", "12.6: H100", ""),
    "no interface": ("gloo", (None, ["lo", "eth0"], "ib0"), "wrong", "'ib0'", "there are eth0, lo"),
    "no loopback": ("gloo", ("refused", ["lo"], None), "wrong", "refused", "ip link set lo up"),
    "no Python.h": (
        "compiler",
        ("g++", Answer(0, "g++ 12\n"), Answer(1, err="Python.h: No such file\n")),
        "note",
        "Python.h: No such file",
        "python3-dev",
    ),
    "an old extra": (
        "packages",
        ("extras", [OLD_RAY, NO_WANDB], "note", "wrong"),
        "wrong",
        "ray 2.9 is not >=2.40, wandb is not installed",
        "pip install 'ray>=2.40' 'wandb>=0.17'",
    ),
    "no extra": ("packages", ("extras", [NO_WANDB], "note", "wrong"), "note", "not inst", "wandb"),
    "no address": ("address", (None, "box"), "note", "box has no address", "/etc/hosts"),
    "a taken port": ("port", ([10003, 10004], 10004), "note", "taken", "export TCP_PORT=10004"),
    "no port": ("port", ([10003, 10004], None), "wrong", "10003 to 10004", "TCP_PORT=20000"),
    "a stale Ray": ("ray", ("h:1", "/tmp/f", "refused"), "wrong", "h:1 of /tmp/f", "rm /tmp/f"),
    "a Ray": ("ray", ("h:1", "RAY_ADDRESS", None), "ok", "answers at h:1", ""),
    "no controller": ("slurm", (LATE, None), "wrong", "sinfo: no answer in 10 s", "scontrol ping"),
    "no account": ("slurm", (PARTITIONS, LATE), "note", "cpu*, gpu; a plain", "slurm_account"),
    "no sbatch": ("slurm", (PARTITIONS, None), "note", "no sbatch", "submitit_delayed_launcher"),
    "a cluster": ("slurm", (PARTITIONS, Answer(0)), "ok", "cpu*, gpu; sbatch takes jobs", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_with_its_fix(case):
    check, read, status, found, fix = CASES[case]
    result = getattr(machine_checks, check)(*read)
    assert result.status == status
    assert found in result.found
    assert fix in result.fix
    assert bool(result.fix) == (status != "ok")


def test_a_check_that_hangs_or_fails_stops_no_other(capsys, monkeypatch):
    ended = threading.Event()

    def hangs():
        yield from [None] * (not ended.wait(60))

    def fails():
        yield Finding("first", "ok", "read")
        raise OSError("no such file")

    checks = {"hangs": (0.01, hangs), "fails": (60, fails)}
    monkeypatch.setattr(doctor_command, "CHECKS", checks)
    code, out, _ = run(capsys, "doctor", "--json")
    ended.set()
    found = {each["name"]: (each["status"], each["found"]) for each in json.loads(out)}
    assert code == 1
    assert found == {
        "hangs": ("wrong", "the check has not ended in 0.01 s: what it reads or calls hangs"),
        "first": ("ok", "read"),
        "fails": ("wrong", "the check failed: OSError: no such file"),
    }
