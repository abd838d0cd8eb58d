"""Nodes that schedulers, torchrun or people start. Real processes, on this machine."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import rig
from launch_rig import HERE, SOON, TORCHRUN_SCRIPT, collect, private

from gleanrl import CollectorTimeout, ConfigError, WorkerDied
from gleanrl.cli.main import main as command_line
from gleanrl.collectors import DistributedCollector
from gleanrl.collectors.distributed import submitit_delayed_launcher

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:port .* is taken")]


@pytest.fixture(autouse=True)
def _warm(python):
    """Have jobs and ranks started in no time."""


class Noted(gym.Env):
    """Says in a folder who it is and when it was closed; one step may take long.

    Forks a child and terminates it, as simulators do; that concerns nobody else.
    """

    observation_space = gym.spaces.Box(0, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder, stuck_at=None):
        self.folder, self.stuck_at, self.steps = Path(folder), stuck_at, 0
        child = os.fork()
        if child == 0:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        (self.folder / "pid").write_text(str(os.getpid()))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.stuck_at:
            (self.folder / "stuck").touch()
            time.sleep(100)
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def close(self):
        (self.folder / "closed").touch()


def running(folder):
    """Return processes that have ``folder`` in their command line, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in words and int(path.parent.name) != os.getpid():
            found.append(words)
    return found


# -- submitit --------------------------------------------------------------------------------------


def test_submitit_nodes_deliver_and_nothing_is_left_but_logs(tmp_path):
    shapes = collect("submitit", slurm_kwargs={**HERE, "folder": tmp_path})
    assert shapes == [(2, 8), (2, 8)]
    assert not running(tmp_path)
    left = {path.name.split("_", 1)[1] for path in private(tmp_path).iterdir()}
    assert left == {"0_log.err", "0_log.out", "0_result.pkl"}


def test_a_job_that_ends_before_it_joins_is_named_at_once(tmp_path):
    ended = r"worker 0 \(local job \d+, log .*err\) ended, state"
    with rig.in_time(), pytest.raises(WorkerDied, match=ended):
        collect("submitit", 1, slurm_kwargs={**HERE, "folder": tmp_path, "local_setup": ["exit 3"]})


def test_a_node_that_is_terminated_says_so_and_closes_its_environment(tmp_path):
    with DistributedCollector(
        [lambda: Noted(tmp_path)],
        frames_per_batch=8,
        launcher="submitit",
        slurm_kwargs={**HERE, "folder": tmp_path / "jobs"},
        tcp_port=0,
    ) as collector:
        batches = iter(collector)
        next(batches)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        told = r"worker 0 on node .* SIGTERM \(local job \d+: "
        with rig.in_time():
            with pytest.raises(WorkerDied, match=told):
                for _ in batches:
                    pass
            rig.until((tmp_path / "closed").exists)


def test_a_node_that_is_terminated_inside_a_step_says_so_at_once(tmp_path):
    with DistributedCollector(
        [lambda: Noted(tmp_path, stuck_at=12)],
        frames_per_batch=8,
        launcher="submitit",
        slurm_kwargs={**HERE, "folder": tmp_path / "jobs"},
        tcp_port=0,
    ) as collector:
        batches = iter(collector)
        next(batches)
        rig.until((tmp_path / "stuck").exists)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGUSR2)  # submitit's announcement
        with rig.in_time(), pytest.raises(WorkerDied, match="SIGUSR2"):
            for _ in batches:
                pass
    assert not running(tmp_path)


def test_the_debug_executor_is_refused_with_a_reason(tmp_path):
    with pytest.raises(ConfigError, match="debug.*in this very process.*use 'local'"):
        collect("submitit", slurm_kwargs={"cluster": "debug", "folder": tmp_path})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks_per_node": 2}, "tasks_per_node.*must be 1"),
        ({"partition": "gpu"}, "partition"),
        ({"folder": "/proc/nowhere"}, "no folder can be made"),
        ({"folder": "logs/%j"}, "must have no %"),
    ],
)
def test_parameters_of_jobs_that_cannot_be_are_named(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        collect("submitit", slurm_kwargs={**HERE, "folder": tmp_path, **wrong})


def test_without_submitit_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'gleanrl\[submitit\]'"):
        collect("submitit")
    with pytest.raises(ConfigError, match=r"pip install 'gleanrl\[submitit\]'"):
        submitit_delayed_launcher(2)


# -- Slurm, as far as one can without it -----------------------------------------------------------


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands of Slurm, and the folder with the states of jobs."""
    commands, states = tmp_path / "bin", tmp_path / "states"
    commands.mkdir()
    states.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel"):
        shutil.copy(Path(__file__).parent / "fake_slurm.py", commands / name)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(states))
    return states


def test_slurm_nodes_are_one_array_that_all_runs_at_once(slurm, tmp_path):
    kwargs = {"folder": tmp_path / "jobs", "slurm_partition": "cpu"}
    shapes = collect("submitit", slurm_kwargs=kwargs, host="127.0.0.1")
    assert shapes == [(2, 8), (2, 8)]
    (script,) = slurm.glob("script-*")
    flags = set(re.findall(r"^#SBATCH --(\S+)", script.read_text(), re.M))
    assert {"array=0-1%2", "no-requeue", "partition=cpu", "time=10", "signal=USR2@30"} <= flags
    rig.until(lambda: not running(tmp_path))


def test_a_job_at_its_time_limit_is_named_with_its_state(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SLURM_STATE", "TIMEOUT")
    with (
        rig.in_time(10.0),
        pytest.raises(WorkerDied, match=r"slurm job \d+_0, log .*TIMEOUT.*timeout_min"),
    ):
        collect("submitit", slurm_kwargs={"folder": tmp_path / "jobs"}, host="127.0.0.1")


def test_jobs_that_have_not_started_are_cancelled(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SLURM_STATE", "PENDING")
    with pytest.raises(CollectorTimeout, match="did not join"):
        collect(
            "submitit",
            slurm_kwargs={"folder": tmp_path / "jobs"},
            host="127.0.0.1",
            start_timeout=0.5,
        )
    states = [path.read_text() for path in slurm.glob("[0-9]*")]
    assert states == ["CANCELLED by 0"] * 2


# -- submitit_delayed ------------------------------------------------------------------------------


def test_delayed_nodes_serve_one_collector(tmp_path):
    conf = {**HERE, "folder": tmp_path}

    @submitit_delayed_launcher(3, submitit_main_conf=conf, submitit_collection_conf=conf)
    def main():
        with pytest.raises(ConfigError, match=r"4 entries, .* has submitted 3 nodes; num_jobs="):
            collect("submitit_delayed", 4)
        shapes = collect("submitit_delayed", 2)
        with pytest.raises(ConfigError, match="is for one collector of a main job"):
            collect("submitit_delayed", 1)
        return shapes

    assert main() == [(2, 8), (2, 8)]
    assert not running(tmp_path)
    assert {stat.S_IMODE(run.stat().st_mode) for run in tmp_path.iterdir()} == {0o700}
    assert not list(tmp_path.glob("*/*invitations*"))


def test_nodes_of_a_main_job_without_collector_end_with_it(tmp_path):
    conf = {**HERE, "folder": tmp_path}

    @submitit_delayed_launcher(1, submitit_main_conf=conf, submitit_collection_conf=conf)
    def main():
        return "nothing to collect"

    assert main() == "nothing to collect"
    assert not running(tmp_path)
    assert len(list(tmp_path.glob("*/*_result.pkl"))) == 2  # the node was not cancelled


def test_a_main_job_that_fails_is_named_and_its_nodes_end(tmp_path):
    conf = {**HERE, "folder": tmp_path}

    @submitit_delayed_launcher(1, submitit_main_conf=conf, submitit_collection_conf=conf)
    def main():
        raise ArithmeticError("no learner today")

    with pytest.raises(WorkerDied, match="main job .* failed: ArithmeticError: no learner today"):
        main()
    assert not running(tmp_path)


def test_a_delayed_collector_outside_of_a_main_job_is_refused():
    with pytest.raises(ConfigError, match="submitit_delayed_launcher decorates"):
        collect("submitit_delayed")


# -- torchrun --------------------------------------------------------------------------------------


def test_ranks_of_torchrun_become_learner_and_nodes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(2, 8), (2, 8)]"
    assert "timed out" not in done.stderr  # torch prints a warning for waits that were in vain
    assert not running(script)


def test_more_or_fewer_ranks_than_nodes_are_refused(as_rank):
    as_rank(0, 4)
    with pytest.raises(ConfigError, match="started 4 ranks.*create_env_fn has 2; start 3 ranks"):
        collect("torchrun")


def test_a_rank_waits_only_so_long_for_the_learner(as_rank):
    as_rank(1, 2)
    with pytest.raises(CollectorTimeout, match="rank 0 has built no collector"):
        collect("torchrun", 1, start_timeout=0.2)


def test_torchrun_without_torchrun_is_an_error_that_says_so(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="for scripts started by torchrun: RANK"):
        collect("torchrun")


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "env", "code", "message"),
    [
        (["nowhere", "--node", "0"], {}, 2, "is not HOST:PORT"),
        (["127.0.0.1:9", "--node", "0"], {}, 2, "GLEANRL_SECRET is not in the environment"),
        (["127.0.0.1:9"], {"GLEANRL_SECRET": "x" * 32}, 2, "which node is this"),
        (["127.0.0.1:9", "--node", "0"], {"GLEANRL_SECRET": "x"}, 2, "guessed too easily"),
        (["127.0.0.1:9"], {"GLEANRL_SECRET": "x" * 32, "PMI_RANK": "two"}, 2, "must be a number"),
        (
            ["127.0.0.1:9", "--node", "0", "--wait", "0.1"],
            {"GLEANRL_SECRET": "x" * 32},
            1,
            "no learner answers at 127.0.0.1:9",
        ),
    ],
)
def test_the_node_command_says_what_is_wrong(monkeypatch, capsys, words, env, code, message):
    monkeypatch.delenv("GLEANRL_SECRET", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert command_line(["node", *words]) == code
    assert message in capsys.readouterr().err


def test_the_number_of_a_node_comes_from_what_started_it(monkeypatch):
    monkeypatch.setenv("GLEANRL_SECRET", "x" * 32)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    answer = bytearray()

    def learner():
        with listener.accept()[0] as connection:
            connection.sendall(b"gleanrl2" + bytes(32))
            answer.extend(connection.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = threading.Thread(target=learner)
        asking.start()
        assert command_line(["node", f"127.0.0.1:{listener.getsockname()[1]}"]) == 1
        asking.join(SOON)
    assert int.from_bytes(answer[32:36], sys.byteorder) == 3


def test_a_secret_that_is_too_short_is_refused(monkeypatch):
    monkeypatch.setenv("GLEANRL_SECRET", "short")
    with pytest.raises(ConfigError, match="openssl rand"):
        collect("mp")


def test_an_unknown_launcher_is_an_error_that_names_those_there_are():
    with pytest.raises(ConfigError, match="'mp', 'submitit', .*'torchrun', 'manual'"):
        collect("slurm")
