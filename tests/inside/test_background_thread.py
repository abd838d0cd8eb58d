"""The thread that collects: steps, pauses, the end."""

import os
import signal
import threading

import pytest

from gleanrl import CollectorTimeout, Evaluator
from gleanrl.collectors.background import Background


def begun(step, active=bool):
    background = Background()
    background.begin(step, active)
    return background


class Steps:
    """Notes how it is called; each step waits to be let through."""

    def __init__(self, under_way=0):
        self.calls, self.active = [], []
        self.under_way = under_way
        self.gate = threading.Semaphore(0)
        self.called = threading.Semaphore(0)

    def __call__(self, feed):
        self.calls.append(feed)
        self.called.release()
        assert self.gate.acquire(timeout=10)
        if feed:
            self.under_way = 2
            return True
        self.under_way = max(0, self.under_way - 1)
        return self.under_way > 0

    def let(self, count=1):
        for _ in range(count):
            self.gate.release()

    def seen(self):
        assert self.called.acquire(timeout=10)


def test_a_pause_waits_for_what_is_under_way_and_feeds_nothing():
    steps = Steps()
    background = begun(steps, steps.active.append)
    steps.seen()
    entered = threading.Event()
    leave = threading.Event()

    def pause():
        with background.suspended(10):
            entered.set()
            assert leave.wait(10)

    other = threading.Thread(target=pause)
    other.start()
    while not background._paused:
        pass
    assert not entered.is_set()
    steps.let(3)  # the step that was being taken, and two that bring in what is under way
    assert entered.wait(10)
    assert steps.calls == [True, False, False]
    assert steps.active == [True, False]
    leave.set()
    other.join(10)
    for _ in range(3):
        steps.seen()
    assert steps.calls[3] is True
    steps.let(100)
    background.halt(10)
    assert not background.running
    assert steps.active == [True, False, True, False]
    assert steps.under_way == 0


def test_a_pause_that_takes_too_long_is_an_error_and_leaves_it_running():
    steps = Steps()
    background = begun(steps)
    steps.seen()
    with pytest.raises(CollectorTimeout, match="within 0.01 s"), background.suspended(0.01):
        pass
    steps.let(1)
    steps.seen()
    assert background.running
    steps.let(100)
    background.halt(10)


def test_a_step_that_fails_ends_it_and_the_error_stays():
    def step(feed):
        raise ArithmeticError

    ended = []
    background = begun(step, ended.append)
    assert background.join(10)
    assert ended == [True, False]
    assert not background.running
    with pytest.raises(ArithmeticError), background.suspended(10):
        pass
    background.halt(10)


def test_stopping_wakes_a_wait_and_a_pause():
    waiting = threading.Event()

    def step(feed):
        if feed:
            waiting.set()
            background.wait(60)
        return feed

    ready = threading.Event()
    background = begun(lambda feed: ready.wait(10) and step(feed))
    ready.set()
    assert waiting.wait(10)
    background.halt(10)
    waiting.clear()
    background = begun(lambda feed: ready.wait(10) and step(feed))
    assert waiting.wait(10)
    with background.suspended(10):
        background.halt(10)
    assert not background.running


def ends_in_a_child(lock, end):
    """Tell whether ``end`` returns in a child that was forked while another thread held a lock."""
    release, held = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        end()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    release.set()
    holder.join()
    return code == 0


def test_a_forked_child_has_no_thread_to_stop():
    release = threading.Event()
    background = begun(lambda feed: release.wait(10) and False)
    assert ends_in_a_child(background._state, lambda: background.halt(5))
    release.set()
    background.halt(10)


def test_a_forked_child_does_not_wait_for_the_evaluator_of_its_parent():
    def lean(observation):
        return (observation[..., 2] > 0).long()

    with Evaluator("CartPole-v1", lean) as evaluator:
        evaluator.evaluate()
        assert ends_in_a_child(evaluator._player._lock, evaluator.shutdown)
        evaluator.evaluate()


def test_stopping_something_that_hangs_is_a_named_error():
    release = threading.Event()
    background = begun(lambda feed: release.wait(10) and False)
    with pytest.raises(CollectorTimeout, match="did not end within 0.01 s"):
        background.halt(0.01)
    release.set()
    background.halt(10)
