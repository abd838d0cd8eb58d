"""Transforms around TorchRL's ParallelEnv are recorded; its workers step as they do for TorchRL."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from functools import partial
from typing import Any

import pytest
import torch
from tests.unit.torchrl_rig import (
    SEEN,
    assert_equal,
    assert_like_torchrl,
    collected,
    policy,
    toy,
    unchanged,
)
from tests.zoo.laws import Outcome, differences, quiet
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    GymEnv,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)

from gleanrl import Collector

# Workers are forked: those that TorchRL spawns take seconds to import it.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
BY_PARTS = "whose workers are told to step without TensorDicts"


def counting() -> Any:
    return TransformedEnv(toy(), Compose(StepCounter(4), RewardSum()))


def parallel(make: Any = toy, **options: Any) -> Any:
    return ParallelEnv(2, make, mp_start_method="fork", **options)


def around() -> Any:
    norm = ObservationNorm(0.1, 3.0, in_keys=SEEN)
    return TransformedEnv(
        parallel(), Compose(InitTracker(), StepCounter(5), DoubleToFloat(), RewardSum(), norm)
    )


def stateful() -> Any:
    cat = CatFrames(2, -1, in_keys=SEEN, out_keys=["two"])
    with quiet():
        return TransformedEnv(parallel(counting), Compose(VecNorm(in_keys=SEEN), cat))


def moved(env: Any, collector: Any) -> None:
    env.transform[4].loc += 0.5


@pytest.mark.parametrize(("build", "change"), [(around, moved), (stateful, unchanged)])
def test_recorded_steps_are_those_of_the_environment(build, change):
    explained = assert_equal(build, change=change, actor=policy)
    assert all(BY_PARTS in text for text in explained)
    assert "in a worker: 1 x GymWrapper, the Gymnasium environment in it stepped" in explained[0]


def both() -> Any:
    return TransformedEnv(parallel(counting), ObservationNorm(0.1, 3.0, in_keys=SEEN))


@pytest.mark.parametrize("build", [parallel, lambda: parallel(counting), both])
def test_workers_that_a_collector_starts_step_by_parts(build):
    def collect(fast: bool) -> tuple[Any, str]:
        env = build()
        with Collector(env, policy(), frames_per_batch=14, total_frames=-1, fast=fast) as made:
            made.set_seed(5)
            first = next(iter(made)).clone()
            alone = env.rollout(9, break_when_any_done=False)  # also beyond the end of episodes
            made.reset()
            return Outcome([first, alone, next(iter(made)).clone()]), made.explain()

    fast, explained = collect(fast=True)
    assert BY_PARTS in explained
    assert "in a worker: 1 x GymWrapper, the Gymnasium environment in it stepped" in explained
    assert not differences(collect(fast=False)[0], fast)


def renamed_sums() -> Any:
    norm = ObservationNorm(1.0, 2.0, in_keys=["episode_reward"])
    return TransformedEnv(parallel(counting), norm)


@pytest.mark.parametrize("build", [lambda: parallel(counting), renamed_sums])
def test_a_step_in_a_worker_begins_where_the_parent_says(build):
    def collect(fast: bool) -> Outcome:
        env = build()
        with Collector(env, policy(), frames_per_batch=14, total_frames=-1, fast=fast) as made:
            made.set_seed(5)
            found = [next(iter(made)).clone()]
            one = env.reset()
            two = env.step(env.full_action_spec.zero().update(one))
            again = two.select(*one.keys(True, True)).update(two["next"])
            again["step_count"] += 1
            again["episode_reward"] += 100
            for start in (one, again, one):  # also one step back
                found.append(env.step(start.clone()).clone())
            return Outcome([*found, next(iter(made)).clone()])

    assert not differences(collect(fast=False), collect(fast=True))


@pytest.mark.parametrize("build", [around, lambda: parallel(counting)])
def test_it_gives_what_torchrls_collector_gives(build):
    assert_like_torchrl(build)


def remembering() -> Any:
    def act(tensordict: Any) -> Any:
        calls = tensordict.get("calls", torch.zeros(tensordict.shape, dtype=torch.int64))
        tensordict.set("calls", calls + 1).set("_calls", calls + 1)
        return tensordict.set("action", torch.sin(calls)[..., None].expand(*calls.shape, 2))

    return act


def continuing() -> Any:
    def act(tensordict: Any) -> Any:
        last = tensordict.get("action", torch.zeros(*tensordict.shape, 2))
        return tensordict.set("action", torch.cos(last))

    return act


@pytest.mark.parametrize("actor", [remembering, continuing])
@pytest.mark.parametrize("build", [around, parallel, lambda: parallel(counting)])
def test_a_bare_parallel_env_keeps_nothing_that_the_policy_wrote_but_actions(build, actor):
    assert_like_torchrl(build, actor=actor)
    assert_equal(build, actor=actor)


def without_gleanrl() -> Any:
    """Return an environment in a process that cannot import GleanRL."""
    if multiprocessing.parent_process() is not None:
        sys.modules.update(gleanrl=None)  # type: ignore[dict-item]  # Python's way to say so
    return toy()


def test_a_worker_without_gleanrl_calls_its_environment():
    explained = assert_equal(lambda: parallel(without_gleanrl))
    assert "in a worker: called as it is" in explained[0]


def test_workers_that_were_spawned_before_step_by_parts():
    env = ParallelEnv(1, partial(GymEnv, "CartPole-v1"), mp_start_method="spawn")
    env.set_seed(0)
    with Collector(env, frames_per_batch=8, total_frames=8) as collector:
        assert next(iter(collector))["observation"].shape == (1, 8, 4)
        assert "in a worker: 1 x GymEnv, the Gymnasium environment in it" in collector.explain()


@pytest.mark.parametrize("wrapped", [False, True])
def test_cut_episodes_are_reset_alone(wrapped):
    def build() -> Any:
        return TransformedEnv(parallel(), RewardSum()) if wrapped else parallel()

    explained = assert_equal(build, actor=None, max_frames_per_traj=3)
    assert (BY_PARTS in explained[0]) == wrapped


def patched() -> Any:
    env = around()
    env.base_env._step = env.base_env._step.__get__(env.base_env)
    env.base_env._reset = lambda *a, **k: type(env.base_env)._reset(env.base_env, *a, **k)
    return env


@pytest.mark.parametrize(
    "build", [patched, lambda: TransformedEnv(parallel(use_buffers=False), RewardSum())]
)
def test_a_parallel_env_that_works_otherwise_is_called_as_it_is(build):
    outcome, explained = collected(build, fast=True, rounds=1)
    assert outcome.error is None
    assert BY_PARTS not in explained[0]


def test_an_explanation_that_comes_too_late_answers_no_other_question(monkeypatch):
    monkeypatch.setattr("gleanrl.envs.torchrl_members._EXPLAIN_S", 0.1)
    env = parallel()
    with Collector(env, policy(), frames_per_batch=14, total_frames=-1) as collector:
        collector.next()
        state, stopped = env.state_dict(), env._workers[0].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert "worker 0 did not say" in collector.explain()
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert env.state_dict().keys() == state.keys()
        monkeypatch.undo()
        assert "in a worker: 1 x GymWrapper" in collector.explain()


def test_a_lost_worker_is_torchrls_error():
    def kill(env: Any, collector: Any) -> None:
        os.kill(env.base_env._workers[1].pid, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="worker 1 dead|process failed"):
        collected(around, fast=True, change=kill)
