"""Real processes: the same data as inline, deaths that are named, nothing left behind."""

import gc
import os
import select
import signal
import subprocess
import textwrap
from pathlib import Path

import gymnasium as gym
import pytest
import rig
import torch
from backend_rig import StampedSource, collect, running
from torch import nn

from gleanrl import ConfigError, WorkerDied, WorkerError
from gleanrl.core import messages as m
from gleanrl.core.options import SourceOptions
from gleanrl.engine.engine import Engine
from gleanrl.rollout.source_builder import SourceBuilder
from gleanrl.transport import pickling
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.process import ProcessBackend


def act(observation):
    logits = observation[..., :2]
    return torch.distributions.Categorical(logits=logits).sample()


def builder(worker, workers, policy=act):
    options = {"num_envs": 3, "policy": policy, "max_frames_per_traj": 30}
    return SourceBuilder(SourceOptions(create_env_fn=lambda: gym.make("CartPole-v1"), **options))


def seeded(make_backend, factories):
    engine = running(make_backend, factories, 16)
    engine.request_each({w: m.Seed(5 + 3 * w) for w in range(len(factories))})
    return engine


def test_processes_give_the_data_of_inline_workers_bit_for_bit():
    factories = [builder(worker, 2) for worker in range(2)]
    remote = seeded(lambda _: ProcessBackend(torch.get_num_threads()), factories)
    local = seeded(InlineBackend, factories)
    for _ in range(6):
        one = collect(remote)
        two = collect(local)
        assert (one == two).all()
    assert one["next", "done"].any()
    remote.close(5.0)


class Deadly(StampedSource):
    """Worker 1 ends in its second rollout, the way it is told to."""

    def __init__(self, worker, how):
        super().__init__(worker)
        self._how = how

    def collect(self, window, steps, stop, random):
        if self._worker == 1 and self._rollouts == 1:
            self._how()
        return super().collect(window, steps, stop, random)


def by_signal():
    os.kill(os.getpid(), signal.SIGKILL)


def by_segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def by_exit():
    os._exit(3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (by_signal, "worker 1 .* was killed by signal 9"),
        (by_segfault, "worker 1 .* was killed by signal 11"),
        (by_exit, "worker 1 .* exited with code 3"),
    ],
)
def test_a_worker_that_ends_is_named_with_how(how, message):
    def make(worker):
        return Deadly(worker, how)

    engine = running(lambda _: ProcessBackend(), [make] * 2, 4)
    kept = collect(engine)
    with pytest.raises(WorkerDied, match=message):
        collect(engine)
    assert kept["stamp"][1].eq(10**6).all()
    engine.close(5.0)


def test_an_error_is_its_own_class_and_a_worker_error_with_the_remote_traceback():
    class Own(ValueError):
        def __init__(self, code, reason):
            super().__init__(f"{code}: {reason}")
            self.code = code

    class Raising(StampedSource):
        def collect(self, window, steps, stop, random):
            raise Own(7, "in the simulator")

    engine = running(lambda _: ProcessBackend(), [Raising], 4)
    with pytest.raises(ValueError, match="worker 0 raised .*Own: 7: in the simulator") as caught:
        collect(engine)
    assert isinstance(caught.value, WorkerError)
    assert "in collect" in str(caught.value)
    engine.close(5.0)


def test_what_cannot_be_sent_is_named():
    lock = __import__("threading").Lock()

    class Locked(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = lock

        def forward(self, observation):
            return observation

    with pytest.raises(ConfigError, match=r"cannot be sent to a process: policy\.lock .*TypeError"):
        Engine(lambda _: ProcessBackend(), [builder(0, 1, Locked())])


def test_buffers_travel_from_any_device_and_captured_tensors_do_not(monkeypatch):
    monkeypatch.setattr(pickling, "_ANYWHERE", ("cpu",))  # where meta stands for a GPU

    class Policy(nn.BatchNorm1d):
        captured = None

    policy = Policy(3, device="meta")
    assert pickling.pickled(0, builder(0, 1, policy))
    policy.captured = torch.zeros(3, device="meta")
    with pytest.raises(ConfigError, match=r"policy\.captured .* on meta: move it"):
        pickling.pickled(0, builder(0, 1, policy))


SCRIPT = """
    import os, sys, time
    from gleanrl.transport.process import ProcessBackend
    from gleanrl.core.options import FrameLimits
    from gleanrl.engine.batch_delivery import BatchOptions
    from gleanrl.engine.gather import FrameCounts
    from gleanrl.engine.engine import Engine
    from backend_rig import StampedSource, collect, running

    class Stuck(StampedSource):  # lives in __main__, is never importable there
        def collect(self, window, steps, stop, random):
            if self._rollouts == 1:
                while True:
                    pass
            return super().collect(window, steps, stop, random)

    backend = ProcessBackend()
    engine = Engine(lambda _: backend, [Stuck] * 2)
    limits = FrameLimits(frames_per_batch=16, total_frames=None)
    counts = engine.plan(limits, [8, 8], BatchOptions(stacked=True))
    engine.collect(counts)
    print(*backend.pids, flush=True)
    engine.collect(counts)
"""


@pytest.mark.slow
def test_workers_end_with_a_learner_that_is_terminated(python):
    with subprocess.Popen(
        [python, "-c", textwrap.dedent(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parent,  # where the rig is
    ) as learner:
        pids = [int(word) for word in learner.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        learner.send_signal(signal.SIGTERM)
        learner.wait(20)
    for fd in watched:
        assert select.select([fd], [], [], 5.0)[0], "a worker outlived its learner"
        os.close(fd)
    assert len(pids) == 2


def test_nothing_is_left_behind():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    def run():
        engine = running(lambda _: ProcessBackend(), [StampedSource] * 2, 4)
        collect(engine)
        engine.close(5.0)

    run()
    before, shared = open_files(), rig.shared_files()
    for _ in range(5):
        run()
    gc.collect()
    assert open_files() <= before
    rig.await_shared_files(shared)
