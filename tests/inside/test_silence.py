"""Users are told of workers that say nothing; a question has a deadline."""

import functools
import queue
import time
import warnings

import pytest
import rig

from gleanrl import (
    Collector,
    CollectorTimeout,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
)
from gleanrl.core import messages as m
from gleanrl.engine import pipeline, session


@pytest.fixture
def told(monkeypatch):
    """Have users told of silent workers after half a second; return what warnings say."""
    monkeypatch.setattr(session, "_NOTICE_S", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        texts = queue.SimpleQueue()
        monkeypatch.setattr(warnings, "showwarning", lambda text, *_: texts.put(str(text)))
        yield texts


SILENT = "still waiting for workers [1], which live"


def test_a_silent_worker_is_named_while_others_reply(told):
    envs = [rig.counting(0), rig.counting(1, fault=rig.hang, at=1)]
    collector = MultiAsyncCollector(envs, frames_per_batch=8, total_frames=-1)
    for _ in range(2):
        with rig.in_time(2 * rig.LIMIT):
            while told.empty():
                collector.next()
        assert told.get().startswith(SILENT)
    collector.shutdown(timeout=0.1, raise_on_error=False)


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
def test_a_silent_worker_is_named_in_the_background(told, kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=8)
    envs = [rig.counting(0), rig.counting(1, fault=rig.hang, at=1)]
    collector = kind(envs, frames_per_batch=8, total_frames=-1, replay_buffer=buffer)
    collector.start()
    assert told.get(timeout=2 * rig.LIMIT).startswith(SILENT)
    collector.shutdown(timeout=0.1, raise_on_error=False)


def test_nobody_is_named_because_the_learner_was_away(told):
    envs = [rig.counting(0), rig.counting(1)]
    with MultiAsyncCollector(envs, frames_per_batch=8, total_frames=-1) as collector:
        for _ in range(2):
            collector.next()
            time.sleep(0.7)  # learning: longer than what a silent worker gets
    assert told.empty()


class Hanging(rig.Count):
    """Hangs when it is asked."""

    def hang(self):
        rig.hang()


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_questions_have_a_deadline_of_their_own_while_rollouts_are_queued(kind, pause):
    # Without a pause the question overtakes rollouts; with one it waits for the one under way.
    envs = [functools.partial(Hanging, pause=pause)] * 2
    collector = kind(envs, frames_per_batch=8, total_frames=-1)
    next(iter(collector))
    with rig.in_time(10), pytest.raises(CollectorTimeout, match="did not answer Call"):
        collector._engine.request(0, m.Call("env.hang"), 0.5)
    collector.shutdown(0.5, raise_on_error=False)


@pytest.mark.parametrize(("length", "batches"), [(10**9, 0), (12, 3)])
def test_trajectories_that_do_not_end_are_noticed_once(monkeypatch, length, batches):
    monkeypatch.setattr(pipeline, "_NOTICE_S", 0.0)
    long = functools.partial(rig.Count, length=length)
    options = {"frames_per_batch": 4, "trajs_per_batch": 1, "total_frames": 40}
    with (
        Collector(long, **options) as collector,
        pytest.warns(UserWarning, match="set max_frames_per_traj") as told,
    ):
        assert len(list(collector)) == batches
    assert len(told) == 1
