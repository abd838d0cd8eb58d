"""What holds for every test."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from multiprocessing import resource_tracker

import pytest
import warm
from hypothesis import settings
from tests.covering import pytest_collection_modifyitems as pytest_collection_modifyitems

# Processes started with SIGINT ignored (`nohup ... &`) hand that on: tests of Ctrl-C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that run side by side, and their workers, have a core each at most.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples each time; `--hypothesis-profile default` looks for others.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
_skipped: Counter[str] = Counter()
# Garbage collections would take a quarter of the time of imports, and find nothing.
gc.disable()

# Dozens of processes import everything; nobody wants each of them to compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config):
    """Where tests run side by side, have all Python programs started in no time."""
    if config.getoption("numprocesses", None):
        gc.enable()
        warm.open_door()  # it imports while tests are collected
    elif hasattr(config, "workerinput"):
        _start_warm(pytest.MonkeyPatch())


def _start_warm(patch):
    resource_tracker.ensure_running()  # a plain one, which outlives the door
    patch.setattr(sys, "executable", str(warm.START))
    patch.setattr("multiprocessing.spawn._python_exe", os.fsencode(warm.START))
    patch.setenv("PATH", str(warm.FOLDER), prepend=os.pathsep)


def pytest_collection_finish():
    """Leave what imports made out of garbage collections: each would look at 400,000 objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Leave what earlier tests keep out of garbage collections, above all at the exit of forks."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Note why tests are skipped; where tests run side by side, the process that reports does."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.longrepr[-1].removeprefix("Skipped: ")] += 1


def pytest_unconfigure(config):
    """Print, last of all, how many tests were skipped, and why."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and reporter.stats:
        reasons = "; ".join(f"{count} where {why}" for why, count in _skipped.most_common())
        reporter.write_line(f"{_skipped.total()} skipped{': ' if reasons else ''}{reasons}")


@pytest.fixture(scope="module")
def python():
    """The path of an executable that runs Python programs for which everything is imported.

    It is ``python`` and `sys.executable` meanwhile.
    """
    warm.open_door()
    with pytest.MonkeyPatch.context() as patch:
        _start_warm(patch)
        yield str(warm.START)


@pytest.fixture(scope="module")
def _warm_workers(python):
    """Have the zygote up: it stays for the life of the process."""
    import rig

    from gleanrl import MultiSyncCollector

    MultiSyncCollector([rig.counting()], frames_per_batch=4).shutdown()


@pytest.fixture
def tidy_workers(_warm_workers):
    """Nothing that worker processes used is left behind by a test."""
    import rig

    with rig.nothing_left_behind():
        yield


@pytest.fixture(scope="module")
def _warm_nodes(python):
    """Have the zygote and all that torch opens once per process up."""
    import rig
    from node_rig import nodes

    nodes(rig.counting()).shutdown()


@pytest.fixture
def tidy_nodes(_warm_nodes):
    """Nothing that nodes of this machine used is left behind by a test."""
    import rig

    with rig.nothing_left_behind():
        yield


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system of some bytes."""
    mounted = []

    def mount(nbytes):
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        options = f"size={nbytes}"
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(command).returncode:
            pytest.skip("mounting a small file system takes root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def as_rank(monkeypatch):
    """The environment of a rank, with a store that this process keeps."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5.0))

    def become(rank, size):
        env = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        return store

    return become
