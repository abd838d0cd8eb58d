#!/usr/bin/env python3
"""A Slurm of one machine: sbatch, srun, sacct and scancel, by the name it is called.

Jobs are processes. FAKE_SLURM is a folder with a file per job for its process id and its state;
FAKE_SLURM_STATE, if set, is the state that jobs end in at once, without having run.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("FAKE_SLURM", "."))


def sbatch(script):
    text = Path(script).read_text()
    number = str(100000 + os.getpid())  # of no earlier test
    found = re.search(r"--array=0-(\d+)%(\d+)", text)
    tasks = range(int(found[1]) + 1) if found else [None]
    for task in tasks:
        name = number if task is None else f"{number}_{task}"
        (FOLDER / name).write_text(os.environ.get("FAKE_SLURM_STATE", "RUNNING"))
        if "FAKE_SLURM_STATE" in os.environ:
            continue
        env = {**os.environ, "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "FAKE_NAME": name}
        if task is not None:
            env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": str(task)}
        closed = subprocess.DEVNULL
        subprocess.Popen(
            ["bash", script],
            env=env,
            stdin=closed,
            stdout=closed,
            stderr=closed,
            start_new_session=True,
        )
    (FOLDER / f"script-{number}").write_text(text)
    sys.stdout.write(f"Submitted batch job {number}\n")


def srun(*arguments):
    name = os.environ["FAKE_NAME"]
    (FOLDER / f"pid-{name}").write_text(str(os.getpid()))
    main, _, task = name.partition("_")
    rest = list(arguments)
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            path = rest.pop(0)
            for mark, value in {"%A": main, "%a": task, "%j": name, "%t": "0"}.items():
                path = path.replace(mark, value)
            fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(fd, 1 if option == "--output" else 2)
    code = subprocess.run(rest, check=False).returncode
    if (FOLDER / name).read_text() == "RUNNING":
        (FOLDER / name).write_text("FAILED" if code else "COMPLETED")


def sacct(*arguments):
    sys.stdout.write("JobID|State|NodeList\n")
    for flag, number in itertools.pairwise(arguments):
        if flag == "-j":
            for path in sorted(FOLDER.glob(f"{number}*")):
                sys.stdout.write(f"{path.name}|{path.read_text()}|here\n")


def scancel(name):
    (FOLDER / name).write_text("CANCELLED by 0")
    pid = FOLDER / f"pid-{name}"
    if pid.exists():
        os.killpg(os.getpgid(int(pid.read_text())), signal.SIGTERM)


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](*sys.argv[1:])
