"""What is left after something went wrong, and what users do to batches and collectors."""

import copy
import functools
import gc
import io
import os
import pickle
import signal
import threading
import warnings

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import gleanrl
from gleanrl import (
    ClosedError,
    Collector,
    ConfigError,
    GleanError,
    GymEnv,
    Interruptor,
    SerialEnv,
    WorkerError,
)


class Count(gym.Env):
    """Counts its steps over all episodes of ``length`` steps; can be told to fail."""

    observation_space = gym.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=1000):
        self.length, self.t, self.resets, self.closed = length, 0, 0, False
        self.fail_at, self.fail_reset = None, None

    def reset(self, *, seed=None, options=None):
        if self.resets == self.fail_reset:
            self.fail_reset = None
            raise ArithmeticError("in reset")
        self.resets += 1
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == self.fail_at:
            self.fail_at = None
            raise ArithmeticError("in step")
        return np.full(1, self.t, np.float32), 1.0, self.t >= self.length, False, {}

    def close(self):
        self.closed = True


def times(batch):
    return batch["observation"].flatten().tolist()


def is_continuous(batch):
    """Whether every frame that is no end is followed by its successor."""
    inside = ~batch["next", "done"][:-1, 0]
    return batch["next", "observation"][:-1][inside].equal(batch["observation"][1:][inside])


# -- after a failure -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["rollout", "next", "iterator"])
def test_a_failed_rollout_closes_the_collector(way):
    env = Count()
    with Collector(env, frames_per_batch=5) as collector:
        first = collector.rollout()
        copy, env.fail_at = first.clone(), 8
        ways = {"rollout": collector.rollout, "next": collector.next}
        with pytest.raises(ArithmeticError, match="in step"):
            ways[way]() if way in ways else next(collector.iterator())
        assert collector.closed
        with pytest.raises(gleanrl.ClosedError, match="was shut down"):
            collector.rollout()
    assert (first == copy).all()


def test_rollouts_that_a_failure_of_another_worker_drops_count_as_discarded():
    def failing():
        env = Count()
        env.fail_at = 8
        return env

    with gleanrl.MultiSyncCollector(
        [Count, failing], frames_per_batch=10, backend="inline"
    ) as collector:
        collector.next()
        with pytest.raises(ArithmeticError, match="in step"):
            collector.next()
        stats = collector.stats()
    assert (stats["frames"], stats["frames_discarded"]) == (10, 5)


@pytest.mark.parametrize("how", ["reset", "set_seed"])
def test_a_failed_reset_leaves_no_trajectory_with_two_episodes(how):
    envs = [Count(), Count()]
    with Collector(envs, frames_per_batch=8) as collector:
        first = collector.next()
        envs[1].fail_reset = envs[1].resets
        with pytest.raises(ArithmeticError, match="in reset"):
            getattr(collector, how)(*([3] if how == "set_seed" else []))
        after = collector.next()
    assert after["observation"][:, 0].eq(0).all()
    assert not set(first["collector", "traj_ids"].flatten().tolist()) & set(
        after["collector", "traj_ids"].flatten().tolist()
    )


def collect_elsewhere(env):
    Collector(env, frames_per_batch=3).rollout()


FACES = [lambda: GymEnv(Count()), lambda: SerialEnv(1, Count)]
OTHER_USES = [(make, lambda env: env.rollout(3)) for make in FACES]
OTHER_USES += [(make, collect_elsewhere) for make in [*FACES, Count]]


@pytest.mark.parametrize(("make", "use"), OTHER_USES)
@pytest.mark.parametrize("options", [{}, {"fast": False}])
def test_other_code_that_uses_the_environment_joins_no_two_episodes(make, use, options):
    env = make()
    with Collector(env, frames_per_batch=4, **options) as collector:
        first = collector.rollout()
        use(env)
        with pytest.warns(UserWarning, match="was reset by other code .* of its own") as warned:
            second = collector.rollout()
        third = collector.rollout()  # once is enough
    assert warned[0].filename == __file__
    assert times(first) == [0, 1, 2, 3]
    assert times(second) + times(third) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert second["next", "observation"].sub(second["observation"]).eq(1).all()
    ids = [batch["collector", "traj_ids"].unique().tolist() for batch in (first, second, third)]
    assert ids[0] != ids[1] == ids[2]


def test_a_collector_that_takes_the_place_of_another_has_its_environment_to_itself():
    env = GymEnv(Count())
    collector = Collector(env, frames_per_batch=4)
    collector = Collector(env, frames_per_batch=4, max_frames_per_traj=3)
    state = collector.state_dict()
    for use in (lambda: None, collector.reset, lambda: collector.load_state_dict(state)):
        use()
        assert times(collector.rollout()) == [0, 1, 2, 0]


@pytest.mark.parametrize("options", [{}, {"fast": False}])
def test_a_reset_that_failed_is_no_use_by_other_code(options):
    inner = Count(2)
    with Collector(GymEnv(inner), frames_per_batch=6, **options) as collector:
        collector.rollout()
        inner.fail_reset = inner.resets
        with pytest.raises(ArithmeticError, match="in reset"):
            collector.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert times(collector.rollout()) == [0, 1] * 3


def test_next_says_why_instead_of_ending_quietly():
    env = Count()
    env.fail_at = 3
    collector = Collector(env, frames_per_batch=5)
    with pytest.raises(ArithmeticError):
        collector.next()
    for _ in range(2):
        with pytest.raises(ClosedError, match="was shut down"):
            collector.next()


def test_state_can_be_saved_after_a_failure():
    env = Count()
    collector = Collector(env, frames_per_batch=5)
    collector.next()
    env.fail_at = 8
    with pytest.raises(ArithmeticError):
        collector.next()
    assert collector.state_dict()["frames"] == 5
    assert collector.stats()["closed"]


def test_a_constructor_that_fails_closes_what_it_made():
    made = []

    def make():
        made.append(Count())
        return made[-1]

    with pytest.raises(ConfigError, match="bytes of memory, which cannot be reserved"):
        Collector(make, frames_per_batch=10**16)
    assert made[0].closed


def test_a_bad_seed_is_refused_and_forgotten():
    with Collector("CartPole-v1", frames_per_batch=50) as collector:
        for seed, message in ((-1, "must not be negative"), (1.5, "whole"), ("abc", "whole")):
            with pytest.raises(ConfigError, match=message):
                collector.set_seed(seed)
        assert collector.next().shape == (50,)
        assert collector.set_seed(np.int64(3)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"postproc": 3}, r"postproc \(3\) must be callable"),
        ({"policy_factory": 3}, "policy_factory"),
        ({"pre_collect_hook": "x"}, "pre_collect_hook"),
        ({"exploration_type": "random"}, "must be an ExplorationType"),
        ({"timeout": "x"}, "positive number of seconds"),
        ({"timeout": float("inf")}, r"\(inf\) must be a positive number .* at most 2,000,000"),
        ({"inference": "central"}, "for environments in several workers"),
        ({"env_groups": 2}, r"env_groups \(2\) needs inference='central'"),
        ({"max_ahead": 2}, r"max_ahead \(2\) needs asynchronous central inference"),
        ({"return_same_td": True, "split_trajs": True}, "batches of one shape"),
        ({"set_truncated": True, "trajs_per_batch": 2}, "delivers whole ones"),
    ],
)
def test_bad_arguments_fail_before_anything_is_built(options, message):
    def make():
        raise AssertionError("an environment was built")

    with pytest.raises(ConfigError, match=message):
        Collector(make, frames_per_batch=5, **options)


@pytest.mark.parametrize("copied", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_a_collector_that_is_copied_says_that_it_cannot_be(copied):
    with (
        Collector("CartPole-v1", frames_per_batch=5) as collector,
        pytest.raises(TypeError, match=r"a Collector cannot be pickled or copied.*state_dict\(\)"),
    ):
        copied(collector)


def test_a_postproc_that_returns_nothing_is_named():
    with (
        Collector(Count, frames_per_batch=5, postproc=lambda batch: None) as collector,
        pytest.raises(ConfigError, match="must return a TensorDict, it returned None"),
    ):
        collector.next()


def test_a_state_of_another_size_is_refused_before_anything_changes():
    with (
        Collector(Count, num_envs=2, frames_per_batch=4) as two,
        Collector(Count, num_envs=3, frames_per_batch=6) as three,
    ):
        two.next()
        with pytest.raises(ConfigError, match="that of 2 environments, this source has 3"):
            three.load_state_dict(two.state_dict())
        assert three.next()["collector", "traj_ids"][:, 0].tolist() == [0, 1, 2]


def test_a_state_dict_survives_saving_without_unpickling_code():
    with Collector("CartPole-v1", frames_per_batch=20) as collector:
        collector.set_seed(1)
        collector.next()
        file = io.BytesIO()
        torch.save(collector.state_dict(), file)
        file.seek(0)
        collector.load_state_dict(torch.load(file, weights_only=True))
        assert collector.stats()["frames"] == 20


# -- batches ---------------------------------------------------------------------------------------


def test_batches_can_be_saved_and_only_take_their_own_bytes():
    with Collector("CartPole-v1", num_envs=4, frames_per_batch=4096) as collector:
        batch = collector.next()
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    assert (torch.load(file, weights_only=False) == batch).all()
    file = io.BytesIO()
    torch.save(batch["next", "done"], file)
    assert len(file.getvalue()) < 8192


def test_a_forked_process_sees_a_held_batch_unchanged():
    with Collector(Count, frames_per_batch=6) as collector:
        batch = collector.next()
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(ready, 1)
            os._exit(0 if times(batch) == [0, 1, 2, 3, 4, 5] else 1)
        del batch
        for _ in range(4):
            collector.next()
        os.write(go, b".")
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_only_valid_frames_go_into_a_buffer():
    class Rows:
        def __init__(self):
            self.found = []

        def extend(self, rows):
            self.found += rows["observation"].flatten().tolist()

        def add(self, row):
            self.found += row["observation"].flatten().tolist()

    for options in ({"split_trajs": True}, {"trajs_per_batch": 2}):
        buffer = Rows()
        with Collector(
            [lambda: Count(3), lambda: Count(5)],
            frames_per_batch=30,
            total_frames=30,
            replay_buffer=buffer,
            **options,
        ) as collector:
            list(collector)
        whole = [0, 1, 2] * 5 + [0, 1, 2, 3, 4] * 3
        assert sorted(buffer.found) == sorted(whole)
    interruptor = Interruptor()
    interruptor.stop_collection()
    for extend in (True, False):
        buffer = Rows()
        with Collector(
            Count,
            frames_per_batch=5,
            replay_buffer=buffer,
            extend_buffer=extend,
            interruptor=interruptor,
        ) as collector:
            collector.next()
        assert buffer.found == [0]


@pytest.mark.parametrize("option", [{"split_trajs": True}, {"postproc": lambda batch: batch}])
def test_storing_step_by_step_excludes_work_on_whole_batches(option):
    with pytest.raises(TypeError, match="excludes split_trajs"):
        Collector(Count, frames_per_batch=5, replay_buffer=[], extend_buffer=False, **option)


def test_frames_taken_by_rollout_are_never_missing_inside_a_trajectory():
    with Collector(lambda: Count(7), frames_per_batch=4, trajs_per_batch=1) as collector:
        collector.rollout()
        whole = [batch for _, batch in zip(range(3), collector, strict=False)]
        collector.rollout()
        whole += [batch for _, batch in zip(range(3), collector, strict=False)]
        frames = (
            4 + sum(batch.numel() for batch in whole) + 4 + collector.stats()["frames_discarded"]
        )
        assert frames <= collector.stats()["frames"] < frames + 7
    assert all(times(batch) == [0, 1, 2, 3, 4, 5, 6] for batch in whole)


@pytest.mark.parametrize("count", [2, 3])
def test_a_reset_of_some_leaves_no_other_trajectory_without_its_beginning(count):
    makers = [functools.partial(Count, 5 + env) for env in range(count)]
    with Collector(makers, frames_per_batch=3 * count, trajs_per_batch=1) as collector:
        whole = []
        for env in (0, 1, 0):
            whole += [batch for _, batch in zip(range(2), collector, strict=False)]
            collector.reset([env])
        whole += [batch for _, batch in zip(range(9), collector, strict=False)]
    assert all(times(batch) == list(range(batch.shape[-1])) for batch in whole)
    assert all(batch.shape[-1] >= 5 for batch in whole)


def test_trajectories_that_never_fit_are_noticed():
    with (
        Collector(
            Count, frames_per_batch=4, trajs_per_batch=1, reset_at_each_iter=True, total_frames=800
        ) as collector,
        pytest.warns(UserWarning, match="held no whole trajectory"),
    ):
        assert list(collector) == []


def test_whole_trajectories_have_no_layout_beforehand():
    with (
        Collector(Count, frames_per_batch=4, trajs_per_batch=1) as collector,
        pytest.raises(NotImplementedError, match="longest trajectory"),
    ):
        collector.fake_tensordict()


# -- life ------------------------------------------------------------------------------------------


def test_a_deleted_collector_is_gone_at_once_after_next_too():
    env = Count()
    gc.disable()
    try:
        collector = Collector(env, frames_per_batch=4)
        collector.next()
        del collector
        assert env.closed
    finally:
        gc.enable()


def test_using_the_collector_from_inside_its_rollout_is_refused():
    class Meddling(Count):
        def step(self, action):
            collector.set_seed(0)
            return super().step(action)

    collector = Collector(Meddling, frames_per_batch=4)
    with pytest.raises(GleanError, match="from inside its own rollout"):
        collector.next()


def test_hooks_may_use_the_collector():
    seen = []
    with Collector(
        Count,
        frames_per_batch=4,
        post_collect_hook=lambda batch: seen.append(collector.state_dict()["frames"]),
    ) as collector:
        collector.next()
    assert seen == [4]


def test_threads_take_turns():
    with Collector(lambda: Count(50), frames_per_batch=100, total_frames=4000) as collector:
        found, errors = [], []

        def work():
            try:
                for batch in collector:
                    found.append(batch.clone())
                    collector.state_dict()
            except Exception as err:
                errors.append(err)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not errors
    assert len(found) == 40
    assert all(is_continuous(batch) for batch in found)
    assert isinstance(found[0], TensorDict)


def test_versions_are_counted_between_rollouts():
    class Counted(Count):
        def step(self, action):
            if self.t == 4:
                threads[0].start()
                threads[0].join(0.05)  # it has to wait for the end of this rollout
            return super().step(action)

    with Collector(Counted, frames_per_batch=10, track_policy_version=True) as collector:
        threads = [threading.Thread(target=collector.increment_version)]
        for version in (0, 1):
            assert collector.next()["policy_version"].tolist() == [version] * 10
            threads[0].join(60)


def test_shutting_down_from_another_thread_ends_a_rollout_after_its_step():
    begun, env = threading.Event(), Count(10**9)

    class Slow(Count):
        def step(self, action):
            begun.set()
            return super().step(action)

    env = Slow(10**9)
    collector = Collector(env, frames_per_batch=200_000)

    def collect():
        with pytest.raises(ClosedError, match="while it collected"):  # no batch with a stale tail
            collector.next()

    thread = threading.Thread(target=collect)
    thread.start()
    assert begun.wait(30)
    collector.shutdown()
    thread.join(30)
    assert not thread.is_alive()
    assert env.closed
    assert env.t < 200_000


def test_a_signals_handler_may_shut_down_in_the_middle_of_a_rollout():
    class Signals(Count):
        def step(self, action):
            if self.t == 3:
                signal.raise_signal(signal.SIGTERM)
            return super().step(action)

    env = Signals(50)
    collector = Collector(env, frames_per_batch=20)
    usual = signal.signal(signal.SIGTERM, lambda *_: collector.shutdown())
    try:
        with pytest.raises(ClosedError, match="while it collected"):
            collector.next()
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert (env.t, env.closed, collector.closed) == (4, True, True)


@pytest.mark.parametrize("delivered", [0, 1, 2])
@pytest.mark.parametrize("kind", [{}, {"num_collectors": 2, "sync": True}])
def test_iterating_a_closed_collector_is_an_error(kind, delivered):
    collector = Collector("CartPole-v1", frames_per_batch=8, total_frames=16, **kind)
    for _ in range(delivered):
        collector.next()
    collector.shutdown()
    for collect in (list, lambda closed: closed.next(), lambda closed: next(iter(closed))):
        with pytest.raises(gleanrl.ClosedError, match="was shut down"):
            collect(collector)
    assert issubclass(gleanrl.ClosedError, RuntimeError)


def test_shutting_down_at_the_last_batch_ends_the_loop():
    collector = Collector("CartPole-v1", frames_per_batch=8, total_frames=16)
    for number, _ in enumerate(collector):
        if number == 1:
            collector.shutdown()


def test_a_stop_iteration_of_user_code_says_whose_it_is():
    class Runs(torch.nn.Module):
        left = 2

        def forward(self, observation):
            self.left -= 1
            if self.left < 0:
                raise StopIteration("out of actions")
            return torch.zeros((), dtype=torch.int64)

    empty = Runs()
    empty.left = 0
    with pytest.raises(StopIteration, match="out of actions"):
        Collector("CartPole-v1", empty, frames_per_batch=8, fast=False)
    with pytest.raises(WorkerError, match="StopIteration: out of actions") as raised:
        list(Collector("CartPole-v1", Runs(), frames_per_batch=8, fast=False))
    assert isinstance(raised.value.__cause__, StopIteration)


class Stuck(gym.Env):
    """Waits for an event in its third step."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, goes_on):
        self.goes_on, self.steps = goes_on, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            self.wait_for_the_simulator()
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def wait_for_the_simulator(self):
        assert self.goes_on.wait(20)


def test_a_rollout_in_this_thread_that_is_late_is_named_with_its_stack():
    goes_on = threading.Event()
    told = []

    def show(message, *args, **kwargs):
        told.append(str(message))
        goes_on.set()

    with (
        warnings.catch_warnings(),
        Collector(lambda: Stuck(goes_on), frames_per_batch=8, total_frames=16, timeout=0.5) as c,
    ):
        warnings.simplefilter("always")
        warnings.showwarning = show
        assert [batch.numel() for batch in c] == [8, 8]
    assert len(told) == 1
    assert "more than 0.5 s (timeout=), in step 2 of the rollout" in told[0]
    assert "wait_for_the_simulator" in told[0]
