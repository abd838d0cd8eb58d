"""Whatever goes wrong in a worker or the learner surfaces soon, is named, and leaves nothing."""

import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import rig
import torch
import warm
from tensordict import TensorDict
from torch import nn

from gleanrl import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    DistributedCollector,
    EnvError,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    ReplayBuffer,
    WeightsError,
    WorkerDied,
    WorkerError,
)
from gleanrl.transport.process import zygote

KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}


pytestmark = pytest.mark.usefixtures("tidy_workers")


@pytest.fixture(params=sorted(KINDS))
def make(request):
    made = []

    def build(*envs, policy=None, per_worker=8, **options):
        frames = per_worker * len(envs) if request.param == "sync" else per_worker
        made.append(KINDS[request.param](list(envs), policy, frames_per_batch=frames, **options))
        return made[-1]

    yield build
    while made:
        made.pop().shutdown(raise_on_error=False)


@contextmanager
def no_gaps():
    """Open files until no number below the highest one is free; yield how many are open."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with ExitStack() as opened:
        while opened.enter_context(open(os.devnull)).fileno() <= highest:
            pass
        yield len(os.listdir("/proc/self/fd")) - 1  # without that of the folder


class Unclosable(rig.Count):
    def close(self):
        rig.hang()


def close_in_no_time():
    collector = MultiSyncCollector([Unclosable], frames_per_batch=4, total_frames=-1)
    collector.next()
    collector.shutdown(timeout=0.1)


def test_a_shutdown_that_raises_lets_go_of_the_collector():
    zygote()
    with (
        rig.nothing_left_behind(),
        pytest.raises(CollectorTimeout, match="did not end"),
    ):
        close_in_no_time()


@pytest.mark.parametrize("left", [0, 3, 6])
def test_a_limit_of_open_files_is_named(left):
    zygote()  # has files of its own
    gc.collect()  # or files of earlier tests are closed meanwhile
    with no_gaps() as taken, rig.nothing_left_behind():
        for build in (
            lambda: MultiSyncCollector(["CartPole-v1"] * 4, frames_per_batch=8),
            lambda: ParallelEnv(4, "CartPole-v1").reset(),
        ):
            with (
                rig.limited(resource.RLIMIT_NOFILE, taken + left),
                pytest.raises(ConfigError, match=rf"RLIMIT_NOFILE .* is {taken + left} .*raise it"),
            ):
                build()


def test_a_limit_of_memory_is_named():
    rb = ReplayBuffer(storage=LazyTensorStorage(1 << 20), shared=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    rows = TensorDict({"observation": torch.zeros(1, 64)}, [1])
    with (
        rig.limited(resource.RLIMIT_AS, pages * resource.getpagesize() + (100 << 20)),
        pytest.raises(ConfigError, match=r"RLIMIT_AS .*raise it"),
    ):
        rb.extend(rows)
    rb.extend(rows)
    assert len(rb) == 1


def until_error(collector):
    """Iterate for good; return what was delivered, as it was then, and the error."""
    kept, then = [], []
    try:
        with rig.in_time():
            for batch in collector:
                kept.append(batch)
                then.append(rig.rows(batch))
    except Exception as err:
        assert [rig.rows(batch) for batch in kept] == then
        return then, err
    raise AssertionError("nothing was raised")


# -- while collecting ------------------------------------------------------------------------------

DEATHS = {
    "killed": (rig.kill, "was killed by signal 9"),
    "segfault": (rig.segfault, "was killed by signal 11"),
    "exit": (rig.leave, "exited with code 3"),
    "sys.exit": (rig.quit_python, "exited with code 4"),
}


@pytest.mark.parametrize("how", DEATHS)
def test_a_worker_that_dies_is_named_and_what_it_delivered_stays(make, how):
    fault, message = DEATHS[how]
    collector = make(rig.counting(0), rig.counting(1, fault=fault))
    delivered, error = until_error(collector)
    assert isinstance(error, WorkerDied)
    assert error.worker == 1
    assert "worker 1" in str(error)
    assert message in str(error)
    # The first eight steps of the worker that died were delivered, and nothing torn.
    assert [row for batch in delivered for row in batch if row[0] == 1] == [
        (1, step) for step in range(1, 9)
    ]
    assert collector.closed
    with pytest.raises(ClosedError, match="shut down"):
        collector.next()


def run_dry():
    raise StopIteration("no more data")


@pytest.mark.parametrize("inference", ["workers", "central"])
def test_an_environment_that_runs_dry_is_named_with_its_worker(make, inference):
    collector = make(rig.counting(0), rig.counting(1, fault=run_dry), inference=inference)
    error = until_error(collector)[1]
    assert type(error) is WorkerError
    assert "worker 1 raised StopIteration: no more data" in str(error)
    assert any("worker 1: environment 0 raised this" in note for note in error.__notes__)


def raising(observation):
    if observation[..., 1].max() >= 10:
        raise LookupError("no such weight")
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize("what", ["step", "reset", "policy"])
def test_what_a_worker_raises_is_its_own_class_with_the_remote_traceback(make, what):
    class Late(rig.Count):
        def reset(self, **options):
            if self.steps >= 10:
                rig.fail()
            return super().reset(**options)

    kind, text = ArithmeticError, "in the simulator"
    if what == "policy":
        collector = make(rig.counting(1), rig.counting(1), policy=raising)
        kind, text = LookupError, "no such weight"
    elif what == "reset":
        collector = make(rig.counting(0), lambda: Late(1))
    else:
        collector = make(rig.counting(0), rig.counting(1, fault=rig.fail))
    delivered, error = until_error(collector)
    assert isinstance(error, kind)
    assert isinstance(error, WorkerError)
    assert isinstance(error, RuntimeError)
    assert f"{kind.__name__}: {text}" in str(error)
    assert "Traceback in worker" in str(error)
    assert {"step": "in fail", "reset": "in reset", "policy": "in raising"}[what] in str(error)
    if what != "policy":
        assert str(error).startswith("worker 1 raised")
        assert [r for batch in delivered for r in batch if r[0] == 1] == [
            (1, step) for step in range(1, 9)
        ]


def test_a_shape_that_was_not_declared_is_an_error_of_that_worker(make):
    collector = make(rig.counting(0), rig.counting(1, fault="shape"))
    _, error = until_error(collector)
    assert isinstance(error, EnvError)
    assert "worker 1 raised" in str(error)
    assert "(3,)" in str(error)


@pytest.mark.parametrize("fault", [rig.hang, rig.hold_the_lock])
def test_a_worker_that_hangs_is_named_when_time_is_up(make, fault):
    collector = make(rig.counting(0), rig.counting(1, fault=fault), timeout=1.0)
    delivered, error = until_error(collector)
    assert isinstance(error, CollectorTimeout)
    assert "workers [1]" in str(error)
    assert [r for batch in delivered for r in batch if r[0] == 1] == [
        (1, step) for step in range(1, 9)
    ]


def test_a_hanging_worker_is_found_by_a_learner_that_always_has_work():
    collector = MultiAsyncCollector(
        [rig.counting(0), rig.counting(1, fault=rig.hang, at=1)],
        frames_per_batch=8,
        timeout=0.5,
        total_frames=8 * 200,
    )
    with rig.in_time(), pytest.raises(CollectorTimeout, match=r"workers \[1\]"):  # noqa: PT012
        for batch in collector:
            assert rig.rows(batch)[0][0] == 0
            time.sleep(0.02)  # learning; worker 0 is always ahead of it
    assert collector.closed


def test_an_error_does_not_wait_for_a_worker_that_hangs(make):
    """Worker 0 never ends its rollout, and no timeout was given."""
    collector = make(
        rig.counting(0, fault=rig.hang), rig.counting(1, fault=rig.fail), per_worker=20
    )
    _, error = until_error(collector)
    assert isinstance(error, ArithmeticError)


def test_a_policy_of_which_the_workers_have_no_room_for_copies_is_refused(monkeypatch):
    monkeypatch.setattr("gleanrl.memory.shared.available_memory", lambda: 200_000_000)
    policy = nn.Sequential(nn.Linear(2, 10**6), nn.Linear(10**6, 1))
    with pytest.raises(
        ConfigError, match=r"copies of policy .* for 8 workers need .* fewer workers"
    ):
        MultiAsyncCollector([rig.counting()] * 8, policy, frames_per_batch=8)
    assert not rig.workers()


@pytest.mark.parametrize("kind", [MultiSyncCollector, DistributedCollector])
def test_workers_start_though_more_than_1024_descriptors_are_open(kind):
    options = {} if kind is MultiSyncCollector else {"launcher": "mp", "tcp_port": 0}
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with kind([rig.counting(3)], frames_per_batch=4, **options) as collector:
            assert rig.rows(collector.next()) == [(3, step) for step in range(1, 5)]
    finally:
        for fd in held:
            os.close(fd)


def test_frames_that_workers_stored_count_though_another_worker_failed():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = MultiSyncCollector(
        [rig.counting(0), rig.counting(1, fault=rig.fail, at=12)],
        frames_per_batch=16,
        replay_buffer=buffer,
    )
    next(collector.iterator())
    with pytest.raises(ArithmeticError):
        next(collector.iterator())
    assert collector.stats()["frames"] == len(buffer) > 16
    collector.shutdown()


def test_rollouts_that_had_arrived_are_delivered_before_the_death():
    env = rig.counting(7, fault=rig.leave_soon, at=17)
    collector = MultiAsyncCollector([env], frames_per_batch=8)
    seen = rig.rows(collector.next())
    rig.await_end(rig.workers())  # it has made two more rollouts, and died while it was idle
    delivered, error = until_error(collector)
    seen += [row for batch in delivered for row in batch]
    assert seen == [(7, step) for step in range(1, 25)]
    assert isinstance(error, WorkerDied)


def test_rollouts_of_others_are_delivered_before_the_death():
    collector = MultiAsyncCollector(
        [rig.counting(0, fault=rig.hang, at=1), rig.counting(1), rig.counting(2)],
        frames_per_batch=8,
        total_frames=8 * 6,
    )
    dying = collector.map_fn("env.pid")[0]
    iterator = collector.iterator()
    seen = []
    while {worker for worker, _ in seen} < {1, 2}:
        seen += rig.rows(next(iterator))
    os.kill(dying, signal.SIGKILL)
    rig.await_end([dying])
    with pytest.raises(WorkerDied, match="worker 0"):  # noqa: PT012
        while True:
            seen += rig.rows(next(iterator))
    for number in (1, 2):
        steps = [step for worker, step in seen if worker == number]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= 8  # all that had arrived
    collector.shutdown(raise_on_error=False)


# -- at construction -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["build", "reset"])
def test_an_environment_that_fails_at_construction_is_raised_there(make, where):
    with rig.in_time(), pytest.raises(ArithmeticError, match="worker 1 raised") as caught:
        make(rig.counting(0), rig.counting(1, fault=rig.fail, where=where))
    assert isinstance(caught.value, WorkerError)
    assert "in the simulator" in str(caught.value)
    assert "in fail" in str(caught.value)


@pytest.mark.parametrize("how", sorted(DEATHS))
def test_a_worker_that_dies_at_construction_is_named(make, how):
    fault, message = DEATHS[how]
    with rig.in_time(), pytest.raises(WorkerDied, match=f"worker 1 .*{message}"):
        make(rig.counting(0), rig.counting(1, fault=fault, where="build"))


def test_a_shape_that_was_not_declared_is_found_at_construction(make):
    with rig.in_time(), pytest.raises(EnvError, match=r"worker 1 raised(.|\n)*\(3,\)"):
        make(rig.counting(0), rig.counting(1, fault="shape", where="reset"))


@pytest.mark.parametrize("fault", [rig.hang, rig.hold_the_lock])
def test_workers_that_do_not_come_up_in_time_are_named(make, fault):
    with rig.in_time(), pytest.raises(CollectorTimeout, match=r"workers \[1\]"):
        make(rig.counting(0), rig.counting(1, fault=fault, where="build"), start_timeout=1.0)


def test_an_error_at_construction_does_not_wait_for_the_others(make):
    with rig.in_time(), pytest.raises(ArithmeticError, match="worker 1 raised"):
        make(
            rig.counting(0, fault=rig.hang, where="build"),
            rig.counting(1, fault=rig.fail, where="build"),
        )


def failing_factory():
    raise LookupError("no checkpoint")


def test_policies_and_hooks_that_fail_at_construction(make):
    envs = [rig.counting(0), rig.counting(1)]
    with pytest.raises(LookupError, match="worker 1 raised LookupError: no checkpoint"):
        make(*envs, policy_factory=[lambda: raising, failing_factory])
    with pytest.raises(LookupError, match="worker . raised LookupError: no checkpoint"):
        make(*envs, init_fn=failing_factory)
    with pytest.raises(ZeroDivisionError, match="worker . raised ZeroDivisionError"):
        make(*envs, policy=lambda observation: 1 // 0)


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.lock = threading.Lock()

    def forward(self, observation):
        return observation


@pytest.mark.parametrize("backend", ["process", "inline"])
def test_what_cannot_be_sent_is_named(make, backend):
    lock = threading.Lock()
    weight = torch.ones(2, requires_grad=True) * 2
    good = rig.counting(0)

    def caught(*envs, **options):
        with rig.in_time(), pytest.raises(ConfigError, match="cannot be sent") as error:
            make(*envs, backend=backend, **options)
        return str(error.value)

    assert "worker 1" in caught(good, lambda: lock and rig.Count())
    assert "create_env_fn captures lock" in caught(good, lambda: lock and rig.Count())
    assert ": policy.inner.lock (" in caught(good, good, policy=Locked())
    assert "policy captures weight" in caught(good, good, policy=lambda obs: obs * weight)
    assert "gradient" in caught(good, good, policy=lambda obs: obs * weight)
    assert "create_env_kwargs['handle']" in caught(good, good, create_env_kwargs={"handle": lock})
    assert "policy_factory" in caught(good, good, policy_factory=lambda: lock)
    assert "init_fn" in caught(good, good, init_fn=lambda: lock)


# -- commands to workers that are dead, or die -----------------------------------------------------

COMMANDS = {
    "update_policy_weights_": lambda c: c.update_policy_weights_(),
    "state_dict": lambda c: c.state_dict(),
    "set_seed": lambda c: c.set_seed(1),
    "reset": lambda c: c.reset(),
    "map_fn": lambda c: c.map_fn("env.pid"),
    "load_state_dict": None,
    "next": lambda c: [c.next() for _ in range(6)],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_to_a_dead_worker_name_it(make, command):
    collector = make(rig.counting(0), rig.counting(1), policy=rig.Encoded(4), timeout=3.0)
    collector.next()
    state = collector.state_dict()
    dead = collector.map_fn("env.pid")[1]
    os.kill(dead, signal.SIGKILL)
    rig.await_end([dead])
    act = COMMANDS[command] or (lambda c: c.load_state_dict(state))
    with rig.in_time(), pytest.raises(WorkerDied, match="worker 1 .* was killed by signal 9"):
        act(collector)
    assert collector.stats(workers="both")["worker_1/alive"] is False
    with rig.in_time():
        collector.shutdown()


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"load_state_dict", "next"}))
def test_a_worker_that_dies_while_commands_wait_for_it(command):
    collector = MultiAsyncCollector(
        [rig.counting(0), rig.counting(1, fault=rig.leave_late, at=1)],
        rig.Encoded(4),
        frames_per_batch=8,
    )
    collector.next()
    message = "worker 1 .* exited with code 3"
    with rig.in_time(), pytest.raises(WorkerDied, match=message):  # noqa: PT012
        while True:  # a worker that has not begun its rollout answers the first of them
            COMMANDS[command](collector)
            collector.state_dict()  # commands that do not wait for workers leave it to the next
    with rig.in_time():
        collector.shutdown()


def test_wrong_weights_are_the_callers_error_and_change_nothing(make):
    policy = rig.Encoded(4)
    collector = make(rig.counting(0), rig.counting(1), policy=policy)
    collector.next()
    policy.weight.data = torch.ones(5)
    with pytest.raises(WeightsError, match=r"weight.*\(5,\)"):
        collector.update_policy_weights_()
    for lacking in ({"shadow": torch.zeros(3)}, {}, torch.nn.Identity(), {0: {}}):
        with pytest.raises(WeightsError, match="missing"):
            collector.update_policy_weights_(lacking)
    with pytest.raises(KeyError, match=r"env\.nothing"):
        collector.update_policy_weights_(weights_dict={"env.nothing": {"x": torch.zeros(1)}})
    assert collector.stats()["policy_version"] == 0
    assert collector.next() is not None


# -- the learner -----------------------------------------------------------------------------------


def test_an_exception_in_the_loop_leaves_a_collector_that_goes_on(make):
    collector = make(rig.counting(0), rig.counting(1))
    with pytest.raises(KeyError, match="mine"):  # noqa: PT012
        for _ in collector:
            raise KeyError("mine")
    assert not collector.closed
    assert collector.next() is not None
    with pytest.raises(KeyError, match="mine"), collector:  # noqa: PT012
        for _ in collector:
            raise KeyError("mine")
    assert collector.closed


def test_shutdown_twice_and_from_its_own_loop(make):
    collector = make(rig.counting(0), rig.counting(1))
    with rig.in_time():
        kept = []
        with pytest.raises(ClosedError):  # noqa: PT012
            for batch in collector:
                kept.append(batch)
                collector.shutdown()
        collector.shutdown()
        collector.async_shutdown()
    assert rig.rows(kept[0])[:8] in [[(w, s) for s in range(1, 9)] for w in (0, 1)]
    with pytest.raises(ClosedError):
        collector.state_dict()


def test_shutdown_does_not_wait_for_a_worker_that_hangs():
    collector = MultiAsyncCollector(
        [rig.counting(0), rig.counting(1, fault=rig.hang, at=1)], frames_per_batch=8
    )
    collector.next()
    with rig.in_time():
        collector.shutdown(timeout=1.0, raise_on_error=False)


def test_letting_go_of_a_collector_ends_its_workers(make):
    before = rig.workers()
    options = {"frames_per_batch": 8}
    collector = MultiAsyncCollector([rig.counting(0), rig.counting(1)], **options)
    collector.next()
    pids = rig.workers() - before
    assert len(pids) == 2
    del collector
    rig.await_end(pids)


SCRIPT = """
    import os, sys, time
    import gymnasium as gym
    import numpy as np
    from gleanrl import {kind}

    class Own(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (3,))
        action_space = gym.spaces.Discrete(2)
        steps = 0
        def reset(self, **options):
            return np.zeros(3, np.float32), {{}}
        def step(self, action):
            self.steps += 1
            if self.steps > 20:
                {stuck}
            return np.zeros(3, np.float32), 0.0, False, False, {{}}
        def pid(self):
            return os.getpid()

    collector = {kind}([lambda: Own()] * 2, frames_per_batch=16)
    print(*collector.map_fn("env.pid"), flush=True)
    for batch in collector:
        {body}
"""


def script(kind, stuck="pass", body="pass"):
    source = textwrap.dedent(SCRIPT).format(kind=kind, stuck=stuck, body=body)
    return subprocess.Popen(
        [str(warm.START), "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


BATCH = "print('batch', flush=True)"
ENDS = {
    "killed": ("MultiSyncCollector", "pass", BATCH, signal.SIGKILL),
    "interrupted in its loop": (
        "MultiSyncCollector",
        "pass",
        f"{BATCH}; time.sleep(1000)",
        signal.SIGINT,
    ),
    "interrupted while workers hang": (
        "MultiAsyncCollector",
        "time.sleep(1000)",
        BATCH,
        signal.SIGINT,
    ),
}


@pytest.fixture
def started():
    """Start all scripts side by side: most of their time is that of imports."""
    found = {how: script(*parts) for how, (*parts, _) in ENDS.items()}
    found["at its end"] = script("MultiAsyncCollector", body="print(*batch.shape); break")
    yield found
    for learner in found.values():
        learner.kill()
        learner.communicate()


@pytest.mark.slow
def test_nothing_outlives_a_learner_that_is_killed_or_interrupted_or_just_ends(started):
    for how, (*_, end) in ENDS.items():
        learner = started[how]
        pids = [int(word) for word in learner.stdout.readline().split()]
        assert len(pids) == 2
        assert learner.stdout.readline() == "batch\n"
        with rig.in_time():
            learner.send_signal(end)
            rig.await_end([*pids, learner.pid])
        _, err = learner.communicate(timeout=5)
        if end == signal.SIGINT:
            assert err.rstrip().endswith("KeyboardInterrupt"), how
            assert err.count("Traceback") == 1, f"{how}: {err}"
        else:
            assert err == "", how
    out, err = started["at its end"].communicate(timeout=60)
    pids, *batches = out.splitlines()
    rig.await_end(map(int, pids.split()))
    assert (batches, err, started["at its end"].returncode) == (["16"], "", 0)


def touch_and_hang(mark):
    mark.touch()
    rig.hang()


def test_a_command_that_waits_for_a_rollout_has_the_deadline_of_the_rollout(tmp_path):
    mark = tmp_path / "stepping"
    hangs = rig.counting(1, fault=partial(touch_and_hang, mark), at=1)
    with MultiAsyncCollector(
        [rig.counting(0), hangs], frames_per_batch=8, total_frames=-1, timeout=0.5
    ) as collector:
        collector.next()
        rig.until(mark.exists)  # before its first rollout, worker 1 would answer
        with rig.in_time(), pytest.raises(CollectorTimeout, match=r"workers \[1\] .* 0.5 s"):
            collector.get_distant_attr("env.number")
