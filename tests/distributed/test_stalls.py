"""A node that stops in the middle of sending a rollout: waits stay bounded, others go on."""

import os
import signal
from contextlib import contextmanager

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
