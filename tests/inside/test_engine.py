"""The engine over scripted workers: whole batches, memory that is never written under a learner."""

import functools

import pytest
import rig
import torch
from backend_rig import Act, Die, Fail, ScriptedBackend, StampedSource, check_stamps, running
from hypothesis import given
from hypothesis import strategies as st
from tests.covering import examples

from gleanrl import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core import messages as m
from gleanrl.core.options import FrameLimits
from gleanrl.engine.gather import FrameCounts
from gleanrl.transport.inline import InlineBackend


def collect(engine, timeout=None):
    counts = FrameCounts(FrameLimits(frames_per_batch=1, total_frames=None))
    batch, _ = engine.collect(counts, timeout)
    return batch


def make_engine(script=None, workers=2, steps=8, **options):
    backend = functools.partial(ScriptedBackend, script=script or {})
    return running(backend, [StampedSource] * workers, steps, **options)


def test_a_batch_holds_one_whole_rollout_per_worker():
    engine = make_engine(workers=3)
    batch = collect(engine)
    assert batch.shape == (3, 2, 8)
    assert batch.names == [None, None, "time"]
    assert check_stamps(batch) == [0, 10**6, 2 * 10**6]


@given(
    delays=st.lists(st.floats(0, 3), min_size=24, max_size=24),
    keep=st.lists(st.booleans(), min_size=8, max_size=8),
)
@examples(40)
def test_no_batch_is_torn_or_changes_in_the_learners_hands(delays, keep):
    script = {(w, n): Act(after=delays[8 * w + n]) for w in range(3) for n in range(8)}
    engine = make_engine(script, workers=3)
    learner = rig.KeepingLearner()
    for number in range(8):
        batch = collect(engine)
        assert check_stamps(batch) == [w * 10**6 + number for w in range(3)]
        if keep[number]:
            learner.take(batch)
    learner.check_unchanged()


def test_a_learner_that_keeps_everything_gets_copies_and_is_never_waited_for():
    engine = make_engine()
    learner = rig.KeepingLearner()
    for _ in range(10):
        learner.take(collect(engine))
    learner.check_unchanged()
    assert engine.gather.copies == 8
    assert [check_stamps(batch)[0] for batch in learner.batches] == list(range(10))


def test_a_learner_that_lets_go_gets_no_copies():
    engine = make_engine()
    for _ in range(10):
        batch = collect(engine)
    assert engine.gather.copies == 0
    assert check_stamps(batch)[0] == 9


def test_a_slice_or_a_numpy_view_keeps_the_memory():
    engine = make_engine()
    view = collect(engine)["next", "wide"][0, 0, 3].numpy()
    part = collect(engine)["stamp"][1, 1]
    for _ in range(5):
        collect(engine)
    assert set(view.tolist()) == {0}
    assert set(part.tolist()) == {10**6 + 1}


def test_batches_outlive_the_engine():
    engine = make_engine()
    batch = collect(engine)
    engine.close(1.0)
    del engine
    assert check_stamps(batch) == [0, 10**6]


def test_a_late_worker_is_named_when_the_deadline_passes():
    engine = make_engine({(1, 0): Act(after=10)})
    with pytest.raises(CollectorTimeout, match=r"workers \[1\] did not deliver"):
        collect(engine, timeout=5.0)


def test_nothing_is_asked_of_a_worker_that_missed_its_deadline():
    engine = make_engine({(1, 0): Act(after=10)})
    with pytest.raises(CollectorTimeout):
        collect(engine, timeout=5.0)
    with pytest.raises(CollectorTimeout, match=r"workers \[1\]"):
        collect(engine, timeout=20.0)
    with pytest.raises(CollectorTimeout, match=r"workers \[1\]"):
        engine.request(1, m.Get("num_envs"), timeout=20.0)
    assert engine.request(0, m.Get("num_envs"), timeout=20.0) == 2


def test_a_repeated_reply_changes_nothing():
    engine = make_engine({(0, 0): Act(copies=3)})
    assert check_stamps(collect(engine)) == [0, 10**6]
    assert check_stamps(collect(engine)) == [1, 10**6 + 1]


def test_what_a_worker_raises_comes_through_unchanged():
    error = ZeroDivisionError("in step")
    engine = make_engine({(0, 1): Fail(error)})
    collect(engine)
    with pytest.raises(ZeroDivisionError, match="in step") as caught:
        collect(engine)
    assert caught.value is error


def test_after_a_failure_the_other_workers_have_a_moment_to_end_their_rollouts():
    script = {(0, 1): Fail(ZeroDivisionError()), (1, 1): Act(after=1), (2, 1): Act(after=9)}
    engine = make_engine(script, workers=3)
    collect(engine)
    with pytest.raises(ZeroDivisionError):
        collect(engine)
    assert engine.alive == [0, 1]


def test_after_an_update_that_fails_in_a_worker_all_rollouts_are_heard_out():
    engine = make_engine({(0, 1): Fail(ZeroDivisionError()), (1, 1): Act(after=0.5)})
    collect(engine)
    engine.post({0: m.GetState()})
    with pytest.raises(ZeroDivisionError):
        collect(engine)
    assert engine.backend.now == 0.5
    assert check_stamps(collect(engine)) == [2, 10**6 + 2]


def test_a_dead_worker_is_named():
    engine = make_engine({(1, 0): Die(after=1.0)})
    with pytest.raises(WorkerDied, match="worker 1 died"):
        collect(engine)


def test_a_closed_engine_says_so():
    engine = make_engine()
    engine.close(1.0)
    engine.close(1.0)
    with pytest.raises(ClosedError, match="was shut down"):
        collect(engine)


def test_control_commands_return_values_and_raise_errors():
    engine = make_engine({(0, 0): Fail(KeyError("nothing there"))})
    with pytest.raises(KeyError, match="nothing there"):
        engine.request(0, m.GetState())
    collect(engine)
    assert engine.request_all(m.GetState()) == [{"rollouts": 1}, {"rollouts": 1}]


def test_inline_workers_run_in_the_order_they_were_asked():
    engine = running(InlineBackend, [StampedSource] * 2, 8, device=torch.device("cpu"))
    batch = collect(engine)
    assert check_stamps(batch) == [0, 10**6]
    assert batch.device == torch.device("cpu")
    engine.close(1.0)


@pytest.mark.parametrize("quick", [0, 1])
def test_a_command_has_only_those_rollouts_made_again_that_came_before_it(quick):
    slow = 1 - quick
    engine = make_engine({(slow, 0): Act(after=10.0)})
    counts = FrameCounts(FrameLimits(frames_per_batch=1, total_frames=None))
    for _ in range(2):  # begins a batch; takes in what has come of it
        assert not engine.ready(counts, feed=True, timeout=None)
    command = m.SetState({"rollouts": 100})
    engine.restart({0: command, 1: command}, counts, timeout=None)
    batch, _ = engine.collect(counts)
    stamps = check_stamps(batch)
    assert stamps[quick] == quick * 10**6 + 100
    assert stamps[slow] == slow * 10**6  # the slow one came to it after the command
    assert engine.discards.total() == 16
    assert (counts.delivered, counts.under_way) == (32, 0)
    assert check_stamps(engine.collect(counts)[0])[quick] == quick * 10**6 + 101
