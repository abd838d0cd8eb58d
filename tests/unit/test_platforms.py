"""Other platforms, as far as a process of Linux can act one."""

import subprocess

NOTHING_IMPORTED = """
import sys
for name in [name for name in sys.modules if name.startswith("gleanrl")]:
    del sys.modules[name]
"""
WINDOWS = "sys.platform = 'win32'; import gleanrl"
MACOS = """
import builtins, io, os
import gymnasium, tensordict, torch  # which are made for the platform they are on
sys.platform = "darwin"
for name in ("memfd_create", "eventfd", "pidfd_open", "sched_getaffinity"):
    delattr(os, name)
opened = io.open
def without_proc(path, *args, **kwargs):
    if str(path).startswith(("/proc", "/dev/shm")):
        raise FileNotFoundError(path)
    return opened(path, *args, **kwargs)
builtins.open = io.open = without_proc

from gleanrl import *
rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
for _ in Collector("CartPole-v1", frames_per_batch=16, total_frames=32, replay_buffer=rb):
    print(*rb.sample().shape)
options = {"frames_per_batch": 16, "total_frames": 32}
for needs_processes in (
    lambda: MultiSyncCollector("CartPole-v1", num_workers=2, **options),
    lambda: DistributedCollector(["CartPole-v1"] * 2, launcher="manual", **options),
    lambda: ParallelEnv(2, lambda: GymEnv("CartPole-v1")).reset(),
    lambda: ReplayBuffer(storage=LazyTensorStorage(100), shared=True),
):
    try:
        needs_processes()
    except GleanError as error:
        print(str(error).partition(";")[0])
"""


def run(python, program):
    command = [python, "-c", NOTHING_IMPORTED + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_on_macos_what_needs_no_worker_processes_works_and_the_rest_says_so(python):
    done = run(python, MACOS)
    assert done.stdout.splitlines() == [
        "8",
        "8",
        *["workers in other processes need Linux, not darwin"] * 3,
        "shared replay buffers need Linux, not darwin",
    ], done.stderr


def test_on_windows_the_import_says_what_to_use(python):
    done = run(python, WINDOWS)
    assert done.stderr.splitlines()[-1].startswith("ImportError: GleanRL does not run on Windows")
