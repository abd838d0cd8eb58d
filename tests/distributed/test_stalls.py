"""A node that stops in the middle of sending a rollout: waits stay bounded, others go on."""

import fcntl
import os
import signal
import termios
import threading
import time
import warnings
from contextlib import contextmanager, suppress

import gymnasium as gym
import numpy as np
import pytest
import rig
from node_rig import nodes

from gleanrl import CollectorTimeout, WorkerDied

pytestmark = pytest.mark.usefixtures("tidy_nodes")
SIZE, STEPS = 1 << 22, 4
"""A rollout is larger than what lies between two processes on its way."""
ROLLOUTS = 6
"""That the second node has begun to send when it stops: the last one is only partly on its way."""


class Stops(gym.Env):
    """Observes its number and its steps in a large array; stops the process at one step."""

    observation_space = gym.spaces.Box(0, 255, (SIZE,), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, number, at=None):
        self.number, self.at, self.steps = number, at, 0

    def _observe(self):
        observation = np.full(SIZE, self.steps % 256, np.uint8)
        observation[0] = self.number
        return observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._observe(), 1.0, False, False, {}

    def pid(self):
        return os.getpid()


def stopping(*others, **options):
    """Return a collector whose first node stops while a rollout of its is on its way."""
    # The first step of a rollout comes right after the one before has begun to be sent, once all
    # memory it uses is there.
    functions = [lambda: Stops(0, at=ROLLOUTS * STEPS + 1), *others]
    return nodes(*functions, per_node=STEPS, total_frames=-1, **options)


class Delivered:
    """The batches of a collector, checked to be whole and in order."""

    def __init__(self, collector):
        self.collector = collector
        self.rollouts = {0: 0, 1: 0}
        self.stops = collector.map_fn("env.pid")[0]

    def next(self):
        batch = self.collector.rollout()  # which an interrupt does not end
        seen = batch["next", "observation"].reshape(STEPS, SIZE)
        number = int(seen[0, 0])
        done = self.rollouts[number]
        self.rollouts[number] += 1
        for step, row in enumerate(seen, STEPS * done + 1):
            assert row[0] == number
            assert (row[1::4099] == step % 256).all()  # quick: the nodes must not wait for this
            assert row[-1] == step % 256

    def until(self, number, rollouts):
        while self.rollouts[number] < rollouts:
            self.next()

    def until_error(self):
        with rig.in_time():
            while True:
                self.next()


@contextmanager
def alarm(seconds):
    """Do after that time what Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_comes_through_and_closes_the_collector():
    with stopping(heartbeat=60.0) as collector:
        delivered = Delivered(collector)
        delivered.until(0, ROLLOUTS - 1)
        with rig.in_time(), alarm(0.5), pytest.raises(KeyboardInterrupt):
            delivered.until_error()
        assert collector.closed


def test_others_are_not_held_up():
    with stopping(lambda: Stops(1), heartbeat=60.0) as collector:
        delivered = Delivered(collector)
        delivered.until(0, ROLLOUTS - 1)
        delivered.until(1, delivered.rollouts[1] + 8)
        os.kill(delivered.stops, signal.SIGCONT)


def test_the_deadline_of_rollouts_counts():
    collector = stopping(heartbeat=60.0, timeout=0.5)
    with collector, pytest.raises(CollectorTimeout, match=r"workers \[0\]"):
        Delivered(collector).until_error()


def test_the_heartbeat_counts():
    collector = stopping(heartbeat=1.0)
    with collector, pytest.raises(WorkerDied, match=r"worker 0.*(no sign of life|rollout)"):
        Delivered(collector).until_error()


def test_a_rollout_that_was_cut_short_is_not_delivered():
    for _ in range(5):
        with stopping(heartbeat=60.0) as collector:
            delivered = Delivered(collector)
            delivered.until(0, ROLLOUTS - 1)
            whole = delivered.rollouts[0]
            os.kill(delivered.stops, signal.SIGKILL)
            with pytest.raises(WorkerDied, match="worker 0"):
                delivered.until_error()
        if delivered.rollouts[0] < ROLLOUTS:
            break  # else a busy machine had sent the last one before the process stopped
    assert delivered.rollouts[0] == whole


# -- synchronous batches ---------------------------------------------------------------------------


def unsent():
    """Return the most bytes that wait in one socket of this process for room on the other side."""
    most = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket
            waiting = fcntl.ioctl(int(fd), termios.TIOCOUTQ, bytes(4))
            most = max(most, int.from_bytes(waiting, "little"))
    return most


class Cut(Stops):
    """Sends its process a signal in the middle of sending a rollout, but not for the first one.

    Once only: a file tells that it has happened.
    """

    def __init__(self, number, how, happened):
        super().__init__(number)
        self.how, self.happened = how, happened

    def step(self, action):
        if self.steps == 2 * STEPS and not self.happened.exists():
            threading.Thread(target=self.cut, daemon=True).start()
        return super().step(action)

    def cut(self):
        while unsent() < 1 << 18:
            pass
        self.happened.touch()
        end = os._exit
        # So that it sends on for a while when it runs again, although its learner has let go of it.
        os._exit = lambda code: time.sleep(0.5) or end(code)
        os.kill(os.getpid(), self.how)


def cutting(how, happened, **options):
    """Return a collector whose second node is lost in the middle of a rollout; its process."""
    makers = [lambda: Stops(0), lambda: Cut(1, how, happened)]
    options["timeout"] = 0.5 * rig.load() if how == signal.SIGSTOP else None
    collector = nodes(*makers, per_node=STEPS, sync=True, total_frames=-1, **options)
    return collector, collector.map_fn("env.pid")[1]


def steps_of(part, number):
    """Return the steps of one node's part of a batch, after a check that each is whole."""
    seen = part["next", "observation"]
    steps = seen[:, 1]
    assert seen[:, 0].eq(number).all()
    assert seen[:, 1::4099].eq(steps[:, None]).all()
    assert seen[:, -1].eq(steps).all()
    return steps.tolist()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rollout_that_was_cut_short_is_made_by_a_replacement(how, tmp_path):
    happened = tmp_path / "happened"
    collector, _ = cutting(how, happened, on_failure="relaunch")
    lives = [[]]
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(60):
            batch = collector.next()
            assert steps_of(batch[0], 0) == list(
                range(number * STEPS + 1, (number + 1) * STEPS + 1)
            )
            steps = steps_of(batch[1], 1)
            if steps[0] == 1 and lives[-1]:
                lives.append([])
            lives[-1] += steps
            if len(lives[-1]) > 2 * STEPS and len(lives) == 2:
                break
        assert collector.stats()["relaunches"] == 1
    assert [life == list(range(1, len(life) + 1)) for life in lives] == [True, True]


def test_the_rest_of_a_rollout_that_was_given_up_lands_nowhere(tmp_path):
    collector, pid = cutting(signal.SIGSTOP, tmp_path / "happened", on_failure="continue")
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while (batch := collector.next())["collector", "mask"].all():
            steps_of(batch[1], 1)
        last = steps_of(batch[0], 0)[-1]
        os.kill(pid, signal.SIGCONT)
        rig.await_end([pid])
        assert not batch["next", "observation"][1].any()
        assert batch["collector", "traj_ids"][1].eq(-1).all()
        for number in range(1, 4):
            later = collector.next()
            assert steps_of(later[0], 0)[0] == last + 1 + STEPS * (number - 1)
            assert not later["next", "observation"][1].any()
