"""Memory is what the machine has left, or the container that the process is in."""

import os
import platform
import runpy
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gleanrl import ConfigError, LazyTensorStorage, ReplayBuffer
from gleanrl.memory import shared
from gleanrl.memory.shared import available_memory, check_memory

GB = 1 << 30


def system(root, own, groups):
    """Lay out what the kernel shows of the control groups of a process."""
    files = {
        "proc/meminfo": f"MemTotal: {64 * GB >> 10} kB\nMemAvailable: {32 * GB >> 10} kB\n",
        "proc/self/cgroup": own,
    }
    for group, values in groups.items():
        files |= {f"sys/fs/cgroup/{group}/{name}": str(text) for name, text in values.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def two(limit, used, cache=0):
    stat = f"anon {used}\ninactive_file {cache}\nactive_file 0\n"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def one(limit, used, cache=0):
    stat = f"cache 5\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


CASES = {
    "no group": ("", {}, 32 * GB),
    "v2 container": ("0::/\n", {".": two(4 * GB, GB)}, 3 * GB),
    "v2 no limit": ("0::/\n", {".": two("max", GB)}, 32 * GB),
    "v2 job of a node": (
        "0::/slurm/job_7/step_0\n",
        {"slurm/job_7": two(2 * GB, GB), "slurm/job_7/step_0": two("max", GB)},
        GB,
    ),
    "v2 files are given up": (
        "0::/\n",
        {".": two(4 * GB, 4 * GB, cache=3 * GB)},
        3 * GB,
    ),
    "v1 container": (
        "4:memory:/docker/abc\n",
        {"memory": one(2 * GB, GB, cache=GB // 2)},
        3 * GB // 2,
    ),
    "v1 job beside v2": (
        "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
        {"memory": one(2**63 - 4096, 0), "memory/job": one(GB, 0)},
        GB,
    ),
    "used beyond the limit": ("0::/\n", {".": two(GB, 2 * GB)}, 0),
    "a path from outside": ("0::/../../x\n", {".": two(GB, 0)}, GB),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_bound_counts(tmp_path, case, monkeypatch):
    own, groups, expected = CASES[case]
    free = available_memory(system(tmp_path, own, groups))
    assert free == expected
    monkeypatch.setattr(shared, "available_memory", lambda: free)
    check_memory(expected, "batches", "take fewer")
    with pytest.raises(ConfigError, match="batches need .*; take fewer"):
        check_memory(expected + 1, "batches", "take fewer")


def test_a_system_that_tells_nothing_bounds_nothing(tmp_path, monkeypatch):
    assert available_memory(tmp_path) is None
    monkeypatch.setattr(shared, "available_memory", lambda: None)
    check_memory(2**60, "batches", "take fewer")


def test_a_buffer_beyond_its_container_is_refused(tmp_path):
    """In a real group, if this process may make one."""
    top = Path("/sys/fs/cgroup/memory")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"]
    group = top / (own[0] if own else "").lstrip("/") / f"gleanrl-test-{os.getpid()}"
    if not own or not os.access(group.parent, os.W_OK):
        pytest.skip("making a control group takes root and version 1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(GB // 4))
        child = os.fork()
        if child == 0:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            try:
                rb = ReplayBuffer(storage=LazyTensorStorage(400_000))
                rb.extend(TensorDict({"wide": torch.zeros(1, 1024, dtype=torch.uint8)}, [1]))
            except ConfigError as err:
                os._exit(7 if "container" in str(err) and "max_size" in str(err) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        group.rmdir()


@pytest.mark.parametrize(("machine", "name"), [("aarch64", "lock_fence"), ("x86_64", "no_fence")])
def test_processors_that_reorder_get_a_fence(monkeypatch, machine, name):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    fence = runpy.run_path(shared.__file__)["fence"]
    assert fence.__name__ == name
    fence()
