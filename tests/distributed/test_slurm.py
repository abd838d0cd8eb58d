"""A real Slurm, if one runs on this machine: its jobs as nodes, and the ways in which it ends them.

It needs ``slurmctld`` and ``slurmd`` with some idle processors, and the right to end jobs.
"""

import os
import shutil
import subprocess
import sys
import threading
import warnings

import pytest
import rig
import torch
from launch_rig import collect
from node_rig import collect_for_ever

from gleanrl import Collector, DistributedCollector, WorkerDied
from gleanrl.collectors.distributed import submitit_delayed_launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.filterwarnings("ignore:port .* is taken"),
]
PATIENT = {"start_timeout": 100.0}
TOLD = r"worker 1 .* was told to end by {} \(slurm job \d+_1: .*\) and left"


def slurm(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    if not shutil.which("sinfo"):
        pytest.skip("no Slurm runs")
    states = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, timeout=60, check=False
    )
    if not {"idle", "mixed"} & set(states.stdout.split()):
        pytest.skip("no Slurm runs")


@pytest.fixture
def conf(tmp_path):
    """Parameters of this test's jobs, of which none is left behind."""
    name = f"t{os.getpid()}-{tmp_path.name}"
    yield {"cluster": "slurm", "folder": tmp_path, "name": name, "timeout_min": 3}
    rig.until(lambda: not jobs(name), 20.0)


def jobs(name):
    """Return the jobs that run or wait, of each array task its own, in their order."""
    return sorted(slurm("squeue", "-h", "-r", "-o", "%i", "-n", name).split())


def nodes(conf, how="raise", **extra):
    return DistributedCollector(
        [rig.counting(0), rig.counting(1)],
        frames_per_batch=16,
        sync=True,
        launcher="submitit",
        slurm_kwargs={**conf, **extra},
        on_failure=how,
        host="127.0.0.1",
        tcp_port=0,
        total_frames=-1,
        **PATIENT,
    )


def until_replaced(collector, end):
    """Collect; have ``end`` called after three batches; return the steps of both nodes."""
    steps = {0: [], 1: []}

    def more():
        for number, part in enumerate(collector.next()):
            steps[number] += part["next", "observation"][:, 1].tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            more()
        ender = threading.Thread(target=end)
        ender.start()
        while not collector.stats()["relaunches"]:
            more()
        ender.join()
        for _ in range(3):
            more()
    return steps


def check_replaced(steps):
    assert steps[0] == list(range(1, len(steps[0]) + 1))
    second = len(steps[1]) - 1 - steps[1][::-1].index(1)
    assert steps[1] == [*range(1, second + 1), *range(1, len(steps[1]) - second + 1)]
    assert second


def test_nodes_are_jobs(conf):
    assert collect("submitit", slurm_kwargs=conf, host="127.0.0.1", **PATIENT) == [(2, 8), (2, 8)]


def test_a_delayed_main_job_meets_its_nodes(conf):
    @submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
    def main():
        return collect("submitit_delayed", 2, host="127.0.0.1", **PATIENT)

    assert main() == [(2, 8), (2, 8)]


def test_a_job_that_is_cancelled_says_so(conf):
    with nodes(conf) as collector:
        collector.next()
        slurm("scancel", jobs(conf["name"])[1])
        with pytest.raises(WorkerDied, match=TOLD.format("SIGTERM")):
            collect_for_ever(collector)


def test_a_job_that_is_cancelled_is_replaced_by_another(conf):
    with nodes(conf, "relaunch") as collector:
        check_replaced(until_replaced(collector, lambda: slurm("scancel", jobs(conf["name"])[1])))


def test_a_job_that_is_requeued_is_replaced(conf):
    extra = {"slurm_additional_parameters": {"requeue": True}}
    with nodes(conf, "relaunch", **extra) as collector:
        check_replaced(
            until_replaced(collector, lambda: slurm("scontrol", "requeue", jobs(conf["name"])[1]))
        )


def test_a_job_that_comes_to_its_time_limit_is_replaced(conf):
    with nodes(conf, "relaunch", slurm_signal_delay_s=60) as collector:

        def limit():
            slurm("scontrol", "update", f"job={jobs(conf['name'])[1]}", "TimeLimit=1")

        check_replaced(until_replaced(collector, limit))


TRAIN = """
import signal, sys, threading
from pathlib import Path
import torch
from gleanrl import Collector, Preempted

folder, told = Path(sys.argv[1]), threading.Event()
state, learnt = folder / "state", []
with Collector(
    "CartPole-v1",
    num_envs=2,
    frames_per_batch=40,
    total_frames=240,
    preemption_path=state,
    grace=25,
) as collector:
    saves = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *given: (saves(*given), told.set()))
    collector.set_seed(1)
    if state.exists():
        learnt = torch.load(folder / "learnt")
        collector.load(state)
    try:
        for batch in collector:
            learnt.append(batch["observation"].clone())
            if len(learnt) == 3 and not state.exists():
                (folder / "reached").touch()
                told.wait()
    except Preempted:
        torch.save(learnt, folder / "learnt")
        raise
torch.save(learnt, folder / "draft")
(folder / "draft").rename(folder / "done")
"""
JOB = """#!/bin/bash
#SBATCH --time=5 --signal=TERM@60 --requeue --open-mode=append --mem=1500
srun {} train.py .
if [ $? -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


@pytest.mark.parametrize(
    "end", [("scancel", "--signal=TERM"), ("scontrol", "requeue")], ids=["signal", "requeue"]
)
def test_a_learner_that_is_told_to_end_is_requeued_and_continues_bit_for_bit(end, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job").write_text(JOB.format(sys.executable))
    line = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/log"]
    job = slurm(*line, str(tmp_path / "job")).strip()
    try:
        rig.until((tmp_path / "reached").exists, 60)
        slurm(*end, job)
        rig.until(lambda: "PENDING" in slurm("squeue", "-h", "-j", job, "-o", "%T"), 60)
        # Slurm waits for two minutes; a job that begins in the second of its end is refused.
        slurm("scontrol", "update", f"job={job}", "StartTime=now+3")
        rig.until((tmp_path / "done").exists, 60)
    finally:
        slurm("scancel", job)
    expected = Collector("CartPole-v1", num_envs=2, frames_per_batch=40, total_frames=240)
    with expected:
        expected.set_seed(1)
        batches = [batch["observation"].clone() for batch in expected]
    found = torch.load(tmp_path / "done")
    assert len(found) == 6
    torch.testing.assert_close(found, batches, rtol=0, atol=0)
    assert len(torch.load(tmp_path / "learnt")) == 3
