"""Messages that cannot be read, and questions that come at a bad time, harm nobody else."""

import os
import threading

import pytest
import rig
import torch
from torch import nn

from gleanrl import (
    ConfigError,
    GleanError,
    MultiAsyncCollector,
    MultiSyncCollector,
    WeightsError,
    WorkerError,
)
from gleanrl.collectors import AsyncCollector, Collector

HERE = os.getpid()


def only_in(pid):
    if os.getpid() != pid:
        raise ImportError("not in this process")
    return Local(pid)


class Local:
    """Can be pickled anywhere, but loaded in one process only."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return only_in, (self.pid,)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Awkward(rig.Count):
    """An environment with answers that are hard to send."""

    def local(self):
        return Local(os.getpid())

    def mute(self):
        raise Mute

    def echo(self, value):
        return value


@pytest.fixture(params=[MultiSyncCollector, MultiAsyncCollector])
def make(request):
    made = []

    def build(env=Awkward, policy=None, count=2, cls=None, **options):
        options = {"frames_per_batch": 8, **options}
        cls = request.param if cls is None else cls
        made.append(cls([env] * count, policy, **options))
        return made[-1]

    yield build
    while made:
        made.pop().shutdown(raise_on_error=False)


def test_an_answer_that_cannot_be_loaded_is_an_error_of_the_question_alone(make):
    with make(count=1, frames_per_batch=1, total_frames=200) as collector:
        frames = 0
        for batch in collector:
            frames += batch.numel()
            if frames % 20 == 0:
                with pytest.raises(GleanError, match=r"answer of worker 0 .*ImportError"):
                    collector.map_fn("env.local")
        assert frames == 200


def test_a_command_that_cannot_be_loaded_is_an_error_of_the_command_alone(make):
    with make(total_frames=64) as collector:
        frames = 0
        for batch in collector:
            frames += batch.numel()
            with pytest.raises(GleanError, match=r"cannot be loaded in the worker.*ImportError"):
                collector.map_fn("env.echo", [(Local(HERE),)] * 2)
        assert frames == 64
        assert collector.stats()["workers_alive"] == 2


def test_an_error_without_words_does_not_end_the_worker(make):
    with make(total_frames=16) as collector:
        with pytest.raises(WorkerError, match="Mute"):
            collector.cascade_execute("env.mute")
        assert sum(batch.numel() for batch in collector) == 16


def test_several_threads_may_shut_down_at_once(make):
    collector, errors = make(total_frames=-1), []
    next(iter(collector))

    def end():
        try:
            collector.shutdown()
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


WRONG = {
    "complex": torch.ones(4, dtype=torch.complex64),
    "overflow": torch.full((4,), 1e300, dtype=torch.float64),
    "meta": torch.ones(4, device="meta"),
    "text": "abcd",
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_weights_that_cannot_be_copied_are_an_error_in_the_call(make, kind):
    collector = make(policy=rig.Encoded(4), backend="inline")
    with pytest.raises(WeightsError, match="'weight'"):
        collector.update_policy_weights_({"weight": WRONG[kind]})
    assert collector.stats()["policy_version"] == 0
    assert collector.rollout() is not None


def test_a_learners_policy_that_grew_is_an_error_in_the_call(make):
    policy = rig.Encoded(4)
    collector = make(policy=policy)
    policy.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(WeightsError, match="extra"):
        collector.update_policy_weights_()
    assert collector.rollout() is not None


def test_a_state_that_cannot_be_restored_leaves_the_weights(make):
    collector = make(policy=rig.Encoded(4))
    state = collector.state_dict()
    state["worker0"]["policy_state_dict"]["weight"] = torch.full((4,), 5.0)
    worker = state["worker1"]["worker"]
    for name in set(worker) - {"policy_version"}:
        del worker[name]
    with pytest.raises(ConfigError, match="this is no state of such a collector.*'tracker'"):
        collector.load_state_dict(state)
    assert collector.getattr_policy("weight").tolist() == [0.0] * 4


class Mine(Collector):
    """A collector of the user's."""


def test_collectors_in_workers_get_what_was_given_and_own_seeds(make):
    collector = make(cls=MultiSyncCollector, num_envs=2, collector_class=Mine, frames_per_batch=16)
    assert collector.n_env == 4
    assert collector.set_seed(10) == 13
    batch = collector.rollout()
    assert batch["collector", "traj_ids"][..., 0].unique().numel() == 4


def test_arguments_a_collector_class_cannot_take_are_refused(make):
    with pytest.raises(ConfigError, match="preemptive_threshold"):
        make(cls=MultiSyncCollector, collector_class=Mine, preemptive_threshold=0.5)


@pytest.mark.parametrize(
    "wrong",
    [{"weight_sync_schemes": 3}, {"start_timeout": 0}, {"create_env_kwargs": 3}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_of_the_wrong_kind_are_refused(make, wrong):
    with pytest.raises(ConfigError):
        make(backend="inline", **wrong)


def test_numbers_of_workers(make):
    with pytest.warns(UserWarning, match="num_workers .* is ignored"):
        assert make(backend="inline", num_workers=3).num_workers == 2
    with pytest.raises(ConfigError, match="num_workers"):
        AsyncCollector(Awkward, frames_per_batch=4, num_workers=2)
    collector = make(backend="inline", policy=rig.Encoded(4))
    for ids in (torch.tensor([1]), torch.tensor(1), [torch.tensor(0)]):
        collector.update_policy_weights_(worker_ids=ids)
    with pytest.raises(ConfigError):
        collector.update_policy_weights_(worker_ids=[True])
    with pytest.raises(ConfigError, match="reset_idx"):
        collector.reset([0, 1])
    collector.reset([True, False])
