"""Environments that count and fail, and what must not be left behind, for tests with processes."""

import ctypes
import functools
import gc
import os
import re
import resource
import select
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import warm
from tensordict.nn import TensorDictModule
from torch import nn

LIMIT = 5.0
"""Seconds within which every fault surfaces."""


def load():
    """Return how many processes share a core, by which a wait may take longer than alone."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count())


def until(condition, seconds=10.0):
    """Wait for what another thread or process is about to do."""
    end = time.monotonic() + seconds * load()
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        select.select([], [], [], 0.001)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    ctypes.string_at(1)


def leave():
    os._exit(3)


def leave_late():
    time.sleep(0.7)  # the time a slow environment takes
    os._exit(3)


def leave_soon():
    threading.Timer(0.3, leave).start()


def fail():
    raise ArithmeticError("in the simulator")


def hang():
    while True:
        signal.pause()


def hang_quietly():
    threading.Event().wait()  # outside the main thread, too


def hold_the_lock():
    ctypes.PyDLL(None).sleep(1000)  # a foreign function that keeps the interpreter to itself


def quit_python():
    raise SystemExit(4)


class Count(gym.Env):
    """Observes (its number, its steps over all episodes); may do something bad on the way.

    Args:
        number: Told apart by it.
        fault: A function above; or ``"shape"``: observe what was not declared.
        where: ``"build"``, ``"reset"`` or ``"step"``.
        at: The step (over all episodes) at which.
        length: Of an episode.
        pause: Seconds a step takes.
    """

    observation_space = gym.spaces.Box(0, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number=0, fault=None, where="step", at=12, length=5, pause=0.0):
        self.number, self.fault, self.where, self.at = number, fault, where, at
        self.length, self.pause = length, pause
        self.steps = self.inside = 0
        self._maybe("build")

    def _maybe(self, where):
        if self.fault in (None, "shape") or self.where != where:
            return
        if where != "step" or self.steps == self.at:
            self.fault()

    def _observe(self, where):
        wrong = self.fault == "shape" and self.where == where
        if wrong and (where == "reset" or self.steps >= self.at):
            return np.zeros(3)
        return np.array([self.number, self.steps], np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._maybe("reset")
        self.inside = 0
        return self._observe("reset"), {}

    def step(self, action):
        if self.pause:
            time.sleep(self.pause)
        self.steps += 1
        self.inside += 1
        self._maybe("step")
        return self._observe("step"), 1.0, self.inside >= self.length, False, {}

    def pid(self):
        return os.getpid()

    def threads(self):
        return torch.get_num_threads()


class Wide(Count):
    """The same with observations of 16 KB: each number a thousand times."""

    observation_space = gym.spaces.Box(0, 1e6, (2, 1000), np.float64)

    def _observe(self, where):
        return np.repeat(super()._observe(where)[:, None], 1000, 1)


def counting(number=0, **options):
    """Return a function that makes a `Count`."""
    return functools.partial(Count, number, **options)


class Encoded(nn.Module):
    """A policy whose extra output is its weight, a thousand times over."""

    def __init__(self, width=1000):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.register_buffer("shadow", torch.zeros(3))

    def forward(self, observation):
        lead = observation.shape[:-1]
        action = torch.zeros(lead, dtype=torch.int64)
        low, high = self.weight.min(), self.weight.max()
        seen = torch.stack([low, high, self.shadow[0], self.shadow[2]])
        return action, seen.expand(*lead, 4)

    def set(self, value):
        with torch.no_grad():
            self.weight.fill_(value)
            self.shadow.fill_(value)


def encoded(width=1000):
    return TensorDictModule(Encoded(width), in_keys=["observation"], out_keys=["action", "seen"])


def growing():
    from torchrl.testing.mocking_classes import EnvWithDynamicSpec

    return EnvWithDynamicSpec(max_count=4)


def rows(batch):
    """Return (number, steps) of every frame's next observation."""
    return [tuple(map(int, row)) for row in batch["next", "observation"].flatten(0, -2).tolist()]


@contextmanager
def limited(limit, value):
    """Lower a limit of this process."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


# -- what must not be left behind ------------------------------------------------------------------


def _children(pid):
    found = []
    for children in Path(f"/proc/{warm.stands_for(pid)}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            found += [int(child) for child in children.read_text().split()]
    return [warm.stands_for(child) for child in found]


def workers(pid=None):
    """Return the processes that are children of children of ``pid``: workers of its zygote."""
    children = _children(os.getpid() if pid is None else pid)
    return {worker for child in children for worker in _children(child)}.difference(children)


def await_end(pids, seconds=LIMIT):
    """Wait until the processes have ended; raise `AssertionError` if one has not."""
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        await_exit(watched, f"process {pid} is left over", seconds)
        os.close(watched)


def await_exit(pidfd, else_say, seconds=LIMIT):
    """Wait until a process has ended."""
    assert select.select([pidfd], [], [], seconds * load())[0], else_say


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def shared_files():
    """Return what lies in shared memory under a name."""
    # Other programs on the machine may be using multiprocessing, whose semaphores have names. The
    # directories of `gleanrl top`, one for each user, stay.
    others = re.compile(r"sem\.mp-|gleanrl-\d+$")
    return {name for name in os.listdir("/dev/shm") if not others.match(name)}


def await_shared_files(before):
    """Wait until there are no shared files but those, and what other programs use."""
    until(lambda: all(map(_used_by_others, shared_files() - before)), LIMIT)


def _used_by_others(name):
    own, todo = set(), [os.getpid()]
    while todo:
        own.add(todo[-1])
        todo += _children(todo.pop())
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) not in own and f"/dev/shm/{name}" in (entry / "maps").read_text():
                return True
    return False


@contextmanager
def nothing_left_behind():
    """Check that the body leaves no process, no descriptor and no shared memory."""
    others = workers()
    files, shared = _open_files(), shared_files()
    yield
    if _open_files() > files:  # collecting garbage takes longer than most tests
        gc.collect()
    await_end(workers() - others)
    assert _open_files() <= files
    await_shared_files(shared)


@contextmanager
def in_time(seconds=LIMIT):
    """Check that the body takes no longer than that, where it has a core to itself."""
    begin = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - begin
        assert took < seconds * load(), f"it took {took:.1f} s"


class KeepingLearner:
    """Keeps every batch and a copy of it, to tell whether one ever changed in its hands."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.batches = []
        self._copies = []

    def take(self, batch):
        """Keep ``batch`` for good."""
        self.batches.append(batch)
        self._copies.append(batch.clone())

    def check_unchanged(self):
        """Raise `AssertionError` if any batch changed since it was taken."""
        for number, (batch, copy) in enumerate(zip(self.batches, self._copies, strict=True)):
            assert bool((batch == copy).all()), f"batch {number} changed after it was handed over"
