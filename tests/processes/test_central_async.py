"""Asynchronous central inference: environments go on at their own pace, a call acts for several."""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from functools import partial

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
import warm
from central_rig import ENVS, POLICIES, SIZES, Counting, greedy, recurrent, transformed
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import OrnsteinUhlenbeckProcessModule

from gleanrl import (
    Collector,
    CollectorTimeout,
    ConfigError,
    EnvError,
    MultiAsyncCollector,
    MultiSyncCollector,
    PolicyError,
    WorkerDied,
)
from gleanrl.collectors import AsyncBatchedCollector, Interruptor
from gleanrl.data import LazyTensorStorage, ReplayBuffer
from gleanrl.envs import GymEnv, SerialEnv

# Workers that need not import this file start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
IDS = "collector", "traj_ids"


def streams(batches, envs):
    """Return each environment's frames, in the order of its steps."""
    rows = defaultdict(list)
    for batch in batches:
        flat = batch if batch.ndim > 1 else batch.unsqueeze(0)
        for row in flat:
            ids = row[IDS]
            starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
            for begin, end in itertools.pairwise(starts):
                rows[int(ids[begin]) % envs].append(row[begin:end])
    return {env: torch.cat(parts, 0) for env, parts in rows.items()}


def taken(collector):
    try:
        collector.set_seed(5)
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


class Odd(gym.Env):
    """Observes entries without elements, without dimensions, and of rare dtypes."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(
        empty=gym.spaces.Box(-1, 1, (0,), np.float32),
        scalar=gym.spaces.Box(0, 9, (), np.float32),
        small=gym.spaces.Box(0, 60000, (2,), np.uint16),
        half=gym.spaces.Dict(inner=gym.spaces.Box(0, 9, (2, 2), np.float16)),
        observation=gym.spaces.Box(0, 9, (4,), np.float32),
    )

    def shown(self):
        values = gym.spaces.flatten_space(self.observation_space).shape[0]
        whole = np.full(values, self.count, np.float32)
        return gym.spaces.unflatten(self.observation_space, whole), {}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self.shown()

    def step(self, action):
        self.count += 1 + int(action)
        shown, info = self.shown()
        return shown, float(action), self.count >= 7, False, info


MAKES = ENVS | {"TensorDict methods": Counting, "odd": Odd}
INPUTS = SIZES | {"TensorDict methods": (4, 2), "odd": (4, 2)}


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore:frames_per_batch .* is not a multiple")
@pytest.mark.parametrize("policy", ["greedy", "recurrent", "on TensorDicts"])
@pytest.mark.parametrize("env", MAKES)
def test_each_environment_has_the_stream_that_it_has_in_this_process(env, policy):
    make, act = MAKES[env], partial(POLICIES[policy], *INPUTS[env])

    @settings(
        max_examples=2,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(
        workers=st.integers(2, 3),
        groups=st.integers(1, 2),
        steps=st.integers(1, 7),
        apart=st.booleans(),
        options=st.fixed_dictionaries(
            {},
            optional={
                "max_frames_per_traj": st.integers(2, 5),
                "max_batch_size": st.integers(1, 3),
                "min_batch_size": st.just(1),
                "max_ahead": st.integers(1, 9),
                "transition_chunk_size": st.integers(1, 4),
            },
        ),
    )
    def check(workers, groups, steps, apart, options):
        if make is transformed:  # which counts steps itself
            options.pop("max_frames_per_traj", None)
        count, frames = workers * groups, 12 * steps * workers
        own = {key: value for key, value in options.items() if key == "max_frames_per_traj"}
        found = taken(
            MultiAsyncCollector(
                [make] * workers,
                act(),
                num_envs=groups,
                env_groups=groups,
                inference="central",
                policy_process=None if apart else False,
                frames_per_batch=steps,
                total_frames=frames,
                **options,
            )
        )
        expected = taken(
            Collector(
                [make] * count, act(), frames_per_batch=frames, total_frames=frames * count, **own
            )
        )
        one, two = streams(found, count), streams(expected, count)
        assert sum(map(len, one.values())) >= frames
        for index, stream in one.items():
            # A policy may round otherwise when it acts for another number of environments.
            torch.testing.assert_close(stream.to_dict(), two[index][: len(stream)].to_dict())

    check()


def pair():
    return SerialEnv(2, lambda: GymEnv("CartPole-v1"))


def test_a_worker_may_have_a_batched_environment():
    options = {"frames_per_batch": 12, "total_frames": 240}
    central = {"inference": "central", "policy_process": False, **options}
    found = taken(MultiAsyncCollector([pair, pair], greedy(4, 2), **central))
    expected = taken(Collector([pair, pair], greedy(4, 2), **options))
    assert found[0].shape == (2, 6)
    one, two = (streams([b.flatten(0, -2) for b in each], 4) for each in (found, expected))
    for env, stream in two.items():
        both = min(len(stream), len(one[env]))
        torch.testing.assert_close(one[env][:both].to_dict(), stream[:both].to_dict())


class Value(nn.Module):
    """Acts as its weight says, and may raise."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.weight, self.calls, self.fails_at = nn.Parameter(torch.zeros(1)), 0, fails_at

    def forward(self, observation):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ArithmeticError("in the policy")
        return self.weight.expand(*observation.shape[:-1], 1) + 0


def value(fails_at=None):
    return TensorDictModule(Value(fails_at), ["observation"], ["action"])


def of_values(apart, **options):
    envs = ["Pendulum-v1"] * 3
    options |= {"policy_factory": value, "policy_process": apart}
    return MultiAsyncCollector(envs, inference="central", **options)


def send_next(policy, collector):
    with torch.no_grad():
        policy.module.weight += 1
    collector.update_policy_weights_(policy)


@pytest.mark.covering
@pytest.mark.parametrize("options", [{}, {"max_batch_size": 1}])
@pytest.mark.parametrize("apart", [None, False])
def test_the_version_of_every_frame_is_that_of_the_weights_it_was_made_with(apart, options):
    policy, seen = value(), set()
    options = {**options, "total_frames": -1, "track_policy_version": True}
    with of_values(apart, frames_per_batch=7, **options) as collector:
        for batch in collector:
            versions = batch["policy_version"]
            assert torch.equal(batch["action"][:, 0], versions.float())
            seen |= set(versions.tolist())
            stats = collector.stats()
            assert stats["lag"] == stats["policy_version"] - min(versions)
            if max(seen) >= 30:
                break
            send_next(policy, collector)


@pytest.mark.parametrize("apart", [None, False])
def test_batches_of_older_weights_than_allowed_are_discarded_and_counted(apart):
    policy, learner = value(), 0
    with of_values(apart, frames_per_batch=6, total_frames=240, max_lag=1) as collector:
        for batch in collector:
            assert learner - int(batch["action"].min()) <= 1
            learner += 1
            send_next(policy, collector)
        stats = collector.stats()
    assert stats["frames"] == 240
    assert stats["lag_max"] <= 1
    assert stats["frames_discarded_lag"] > 0
    assert stats["frames_stepped"] == stats["frames"] + stats["frames_discarded_lag"]


class Loaded(Value):
    """Counts how often it was loaded."""

    loads = 0

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        self.loads += 1


class Unclosable(rig.Count):
    def close(self):
        rig.hang()


class Undeclared(Counting):
    """Returns an entry in its steps that its specs lack."""

    def _step(self, tensordict):
        return super()._step(tensordict).set("extra", torch.zeros(1))


def test_an_entry_that_specs_lack_is_named():
    with rig.in_time(), pytest.raises(EnvError, match="other entries now than its specs.*extra"):
        list(
            MultiAsyncCollector(
                [Undeclared, Undeclared],
                POLICIES["greedy"](4, 2),
                inference="central",
                policy_process=False,
                frames_per_batch=4,
                total_frames=16,
            )
        )


def test_a_shutdown_takes_no_longer_than_allowed():
    collector = MultiAsyncCollector(
        [Unclosable],
        inference="central",
        policy_process=False,
        frames_per_batch=4,
        total_frames=4,
    )
    with rig.in_time(3.0):
        collector.shutdown(timeout=0.5, raise_on_error=False)


def test_weights_are_loaded_once_for_all_environments():
    make = partial(TensorDictModule, in_keys=["observation"], out_keys=["action"])
    with MultiAsyncCollector(
        ["Pendulum-v1"] * 3,
        policy_factory=lambda: make(Loaded()),
        inference="central",
        policy_process=False,
        frames_per_batch=4,
        total_frames=-1,
        track_policy_version=True,
    ) as collector:
        next(iter(collector))
        collector.update_policy_weights_(make(Loaded()))
        assert collector.policy.module.loads == 1
        batches = itertools.islice(collector, 9)
        assert all(batch["policy_version"][-1] == 1 for batch in list(batches)[-3:])


@pytest.mark.parametrize("apart", [None, False])
def test_seeds_resets_and_states_between_batches_leave_streams_whole(apart):
    act = recurrent(4, 2)
    with MultiAsyncCollector(
        ["CartPole-v1"] * 3,
        act,
        num_envs=2,
        inference="central",
        policy_process=apart,
        frames_per_batch=16,
        total_frames=-1,
    ) as collector:
        commands = {
            4: lambda: collector.set_seed(3),
            8: collector.reset,
            12: lambda: collector.load_state_dict(collector.state_dict()),
            16: collector.update_policy_weights_,
        }
        for number, batch in enumerate(itertools.islice(collector, 20)):
            commands.get(number, bool)()
            ids, first = batch[IDS], batch["is_init"][..., 0]
            inside = ids[:, 1:] == ids[:, :-1]
            for key in ("observation", "hidden"):
                following = (batch[key][:, 1:] == batch["next", key][:, :-1]).all(-1)
                assert bool(following[inside].all())
            assert not batch["hidden"][first].any()
            assert bool(first[:, 1:][~inside].all())


class Met(rig.Count):
    """While the named pipe ``place`` is there, resets together with one at its other end."""

    def __init__(self, place, mode):
        super().__init__(0, length=10_000)
        self.place, self.mode = place, mode

    def reset(self, *, seed=None, options=None):
        if os.path.exists(self.place):
            open(self.place, self.mode).close()  # waits for the other end
        self.steps = 0
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("apart", [None, False])
def test_environments_of_all_workers_reset_at_the_same_time(tmp_path, apart):
    place = tmp_path / "place"
    with (
        rig.in_time(),
        MultiAsyncCollector(
            [partial(Met, str(place), mode) for mode in "rw"],
            stays,
            inference="central",
            policy_process=apart,
            frames_per_batch=2,
            total_frames=-1,
            timeout=20.0,
        ) as collector,
    ):
        next(iter(collector))
        os.mkfifo(place)
        for command in (collector.reset, partial(collector.set_seed, 3)):
            command()
            place.unlink()
            frames = streams(itertools.islice(collector, 6), 2)
            os.mkfifo(place)
            assert [frames[env]["observation"][0, 1] for env in range(2)] == [0, 0]


@pytest.mark.parametrize("apart", [None, False])
def test_a_reset_does_not_wait_for_rollouts_that_it_discards(apart):
    with MultiAsyncCollector(
        [rig.counting(), rig.counting(1, pause=0.5)],
        stays,
        inference="central",
        policy_process=apart,
        frames_per_batch=1000,
        total_frames=-1,
    ) as collector:
        next(iter(collector))  # that of the slow environment would take 500 seconds
        with rig.in_time(10.0):
            collector.reset()
        assert next(iter(collector)).shape == (1000,)


def test_a_call_acts_for_no_more_environments_than_allowed():
    with MultiAsyncCollector(
        ["CartPole-v1"] * 4,
        greedy(4, 2),
        inference="central",
        frames_per_batch=8,
        total_frames=320,
        max_batch_size=2,
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 320
        calls, rows = collector.calls_of_policy(reset=True)
        assert 320 <= rows <= 2 * calls
        assert collector.calls_of_policy() == (0, 0)


def test_the_policy_waits_for_enough_environments():
    with MultiAsyncCollector(
        ["CartPole-v1"] * 3,
        greedy(4, 2),
        inference="central",
        policy_process=False,
        frames_per_batch=10,
        total_frames=300,
        min_batch_size=3,
        max_wait_s=60.0,
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 300
        calls, rows = collector.calls_of_policy()
        assert rows >= 3 * (calls - 2)  # the last rollouts end one by one


@pytest.mark.parametrize("apart", [None, False])
def test_a_batch_joins_rollouts_of_the_first_environments(apart):
    with pytest.warns(UserWarning, match="batches hold 24 frames"):
        collector = MultiAsyncCollector(
            "CartPole-v1",
            greedy(4, 2),
            num_workers=3,
            inference="central",
            policy_process=apart,
            frames_per_batch=20,
            transition_chunk_size=8,
            total_frames=48,
        )
    with collector:
        assert collector.fake_tensordict().shape == (24,)
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(24,)] * 2
    for batch in batches:
        for chunk in batch.split(8):
            inside = chunk[IDS][1:] == chunk[IDS][:-1]
            following = chunk["observation"][1:] == chunk["next", "observation"][:-1]
            assert bool(following.all(-1)[inside].all())


def test_an_unprocessed_batch_is_as_long_as_others():
    with MultiAsyncCollector(
        "CartPole-v1",
        greedy(4, 2),
        num_workers=3,
        inference="central",
        policy_process=False,
        frames_per_batch=24,
        transition_chunk_size=8,
        total_frames=96,
    ) as collector:
        shapes = [next(iter(collector)).shape, collector.rollout().shape]
        collector.reset()
        assert shapes + [batch.shape for batch in collector] == [(24,)] * 4


@pytest.mark.covering
@pytest.mark.parametrize("apart", [None, False])
@pytest.mark.parametrize("kind", ["hook", "buffer"])
def test_hooks_and_buffers_get_as_many_frames_as_the_user(apart, kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    options = {"replay_buffer": buffer} if kind == "buffer" else {"post_collect_hook": id}
    with MultiAsyncCollector(
        ["CartPole-v1"] * 3,
        greedy(4, 2),
        inference="central",
        policy_process=apart,
        frames_per_batch=5,
        total_frames=20,
        **options,
    ) as collector:
        batches = list(collector)
        assert collector.stats()["frames"] == 20
    assert len(batches) == 4
    assert len(buffer) in (0, 20)


def test_random_frames_come_first_and_a_buffer_is_filled_in_the_background():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = MultiAsyncCollector(
        ["CartPole-v1"] * 2,
        greedy(4, 2),
        inference="central",
        frames_per_batch=10,
        init_random_frames=40,
        total_frames=200,
        replay_buffer=buffer,
    )
    collector.start()
    rig.until(lambda: len(buffer) >= 200)
    collector.shutdown()
    assert buffer[:20]["action"].unique().tolist() == [0, 1]


class Third(gym.Env):
    """Calls a function in its third step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, do=None):
        self.do, self.count = do, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.do is not None and self.count == 3:
            self.do()
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.covering
@pytest.mark.parametrize("apart", [None, False])
@pytest.mark.parametrize(
    ("do", "error", "message"),
    [(rig.fail, ArithmeticError, "worker"), (rig.kill, WorkerDied, "killed by signal 9")],
)
def test_a_fault_of_an_environment_is_named(apart, do, error, message):
    with rig.in_time(), pytest.raises(error, match=message):
        list(
            MultiAsyncCollector(
                [Third, partial(Third, do)],
                value(),
                inference="central",
                policy_process=apart,
                frames_per_batch=4,
                total_frames=400,
            )
        )


@pytest.mark.parametrize("apart", [None, False])
def test_a_first_reset_that_hangs_is_given_up_at_the_end_of_the_start_timeout(apart):
    # Then the process that starts workers runs, whose own start takes longer.
    MultiAsyncCollector([rig.counting()], frames_per_batch=4).shutdown()
    with rig.in_time(10.0), pytest.raises(CollectorTimeout, match="within 1.5 s"):
        MultiAsyncCollector(
            [rig.counting(), rig.counting(fault=rig.hang, where="reset")],
            inference="central",
            policy_process=apart,
            frames_per_batch=4,
            total_frames=4,
            start_timeout=1.5,
        )


def stays(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


@pytest.mark.parametrize(
    ("fault", "options", "error"),
    [(rig.kill, {}, WorkerDied), (rig.hang, {"timeout": 0.5}, CollectorTimeout)],
)
def test_a_lost_worker_is_noticed_while_others_go_on(fault, options, error):
    collector = MultiAsyncCollector(
        [rig.counting(), rig.counting(fault=fault, at=99)],
        stays,
        inference="central",
        policy_process=False,
        frames_per_batch=4,
        total_frames=-1,
        **options,
    )
    with pytest.raises(error):
        list(itertools.islice(collector, 5000))


def test_the_time_of_a_step_does_not_count_those_of_other_groups():
    with MultiAsyncCollector(
        [[rig.counting(pause=0.1)] * 16],
        stays,
        inference="central",
        policy_process=False,
        env_groups=16,
        frames_per_batch=1,
        total_frames=16,
        timeout=1.0,
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 16


@pytest.mark.parametrize("apart", [None, False])
def test_neither_new_weights_nor_new_windows_wait_for_a_slow_environment(apart):
    collector = MultiAsyncCollector(
        [rig.counting(fault=partial(time.sleep, 3.0), at=3), rig.counting(1)],
        greedy(2, 2),
        inference="central",
        policy_process=apart,
        observation_dtype=torch.float32,
        frames_per_batch=4,
        total_frames=-1,
    )
    for batch in itertools.islice(collector, 20):
        assert bool((batch["observation"][:, 0] == 1).all())
        collector.update_policy_weights_()
    collector.shutdown(0.1, raise_on_error=False)


def test_a_limit_of_steps_does_not_make_fast_environments_wait():
    with MultiAsyncCollector(
        [rig.counting(), rig.counting(1, pause=0.2)],
        stays,
        inference="central",
        policy_process=False,
        frames_per_batch=4,
        total_frames=-1,
        timeout=60.0,
    ) as collector:
        numbers = [batch["observation"][0, 0] for batch in itertools.islice(collector, 12)]
    assert sum(numbers) < 3


@pytest.mark.parametrize("apart", [None, False])
def test_an_error_of_the_policy_is_raised(apart):
    with rig.in_time(), pytest.raises(ArithmeticError, match="in the policy") as caught:
        list(
            MultiAsyncCollector(
                [Third] * 2,
                value(fails_at=9),
                inference="central",
                policy_process=apart,
                frames_per_batch=4,
                total_frames=400,
                min_batch_size=2,
                max_wait_s=60.0,
            )
        )
    said = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value)
    assert said.count("the policy raised this at step") == 1


def test_the_death_of_the_process_of_the_policy_is_named_and_leaves_nothing():
    collector = MultiAsyncCollector(
        [Third] * 2, value(), inference="central", frames_per_batch=4, total_frames=-1
    )
    batches = iter(collector)
    next(batches)
    stats = collector.stats("per_worker")
    assert not any("worker_0" in name for name in stats)
    os.kill(stats["policy_process/pid"], signal.SIGKILL)
    with rig.in_time(), pytest.raises(WorkerDied, match="^policy process .* signal 9") as caught:
        list(itertools.islice(batches, 1000))
    assert caught.value.worker is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 2, "min_batch_size": 3}, "must be at most max_batch_size"),
        ({"min_batch_size": 2}, "at most the 1 environments"),
        ({"transition_chunk_size": 0}, "transition_chunk_size"),
        ({"transition_chunk_size": 2, "compact_obs": True}, "exclude each other"),
        ({"max_wait_s": -1.0}, "max_wait_s"),
        ({"max_ahead": 0}, "max_ahead"),
        ({"interruptor": Interruptor()}, "needs policy_process=False"),
        ({"inference": "workers", "policy_process": False}, "needs inference='central'"),
        ({"inference": "workers", "max_batch_size": 2}, "needs asynchronous central"),
        ({"inference": "workers", "max_ahead": 2}, "needs asynchronous central"),
        ({"policy_process": False, "driver_affinity": [0]}, "needs a process of its own"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MultiAsyncCollector(
            ["CartPole-v1"], frames_per_batch=4, **{"inference": "central", **options}
        )


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
def test_an_entry_that_differs_between_environments_is_named(kind):
    makes, policy = (
        ["CartPole-v1", "Acrobot-v1"],
        lambda td: td.set("action", td["done"][..., 0].long()),
    )
    with pytest.raises(ConfigError, match=r"'observation' is \S+ of shape \(6,\) instead"):
        kind(makes, policy, frames_per_batch=4, inference="central", policy_process=False)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
def test_environments_with_other_actions_are_named(kind, groups):
    def make(high):
        return partial(gym.wrappers.RescaleAction, gym.make("Pendulum-v1"), 0.0, high)

    makes = [[make(1.0), make(2.0)]] * 2
    with pytest.raises(ConfigError, match=r"(?s)do not declare the same data: 'action' is .*2\.0"):
        kind(makes, frames_per_batch=4, inference="central", env_groups=groups)


def test_policies_that_need_the_tensordict_of_the_step_before_are_refused():
    def changes(tensordict):
        tensordict["observation"] = tensordict["observation"] + 1
        return tensordict.set("action", torch.zeros(tensordict.shape, dtype=torch.int64))

    with pytest.raises(PolicyError, match="inference='workers'"):
        MultiAsyncCollector(
            ["CartPole-v1"],
            changes,
            frames_per_batch=4,
            inference="central",
            policy_process=False,
        )


@pytest.mark.filterwarnings("ignore:The tensordict passed to Ornstein")
def test_noise_whose_state_is_at_the_root_is_that_of_each_environment():
    noisy = OrnsteinUhlenbeckProcessModule(
        spec=Bounded(-2.0, 2.0, (1,)), theta=1.0, mu=1.0, sigma=0.0, dt=0.25, annealing_num_steps=10
    )
    still = TensorDictModule(lambda angle: angle[..., :1] * 0, ["observation"], ["action"])
    options = {"frames_per_batch": 5, "total_frames": 60, "inference": "central"}
    policy = TensorDictSequential(still, noisy)
    found = taken(MultiAsyncCollector(["Pendulum-v1"] * 3, policy, policy_process=False, **options))
    steps = torch.arange(1, 61)[:, None]
    for stream in streams(found, 3).values():
        torch.testing.assert_close(stream["action"], 1 - 0.75 ** steps[: len(stream)])


class Echo(Third):
    """Has a number, and observes it and how many steps it took."""

    def __init__(self, number=0):
        super().__init__()
        self.number = number

    def step(self, action):
        after, *others = super().step(action)
        return after + np.float32([self.number, self.count]), *others


def begun(last, like):
    return torch.zeros_like(like[..., :1]) if last is None else last


def on_tensors(observation, last):
    now = begun(last, observation) + 1
    return now, now


def on_tensordicts(tensordict):
    """Remember in a way that differs from call to call: nothing new, other shapes, other dtypes."""
    seen = tensordict["observation"]
    now = begun(tensordict.get("_last", None), seen)
    odd = int(seen.flatten()[-1]) % 3
    last = {0: {}, 1: {"_last": now[..., :1] + 1}, 2: {"_last": (now + 1).double().repeat(1, 2)}}
    return TensorDict({"action": now[..., :1].float(), **last[odd]}, tensordict.shape)


def remembers_later(module, args, out):
    last = begun(out.get("_last", None), out["observation"])
    out.set("_last", last + 1).set("action", last)


@pytest.mark.parametrize(
    ("policy", "hook"),
    [
        (TensorDictModule(on_tensors, ["observation", "_last"], ["action", "_last"]), None),
        (TensorDictModule(on_tensors, ["observation", "action"], ["action", "_now"]), None),
        (on_tensordicts, None),
        (TensorDictModule(partial(begun, None), ["observation"], ["action"]), remembers_later),
    ],
    ids=["its own output", "its last action", "a new TensorDict", "a hook that comes later"],
)
def test_a_policy_acts_as_on_one_tensordict_of_each_environment(policy, hook):
    def kept(collector):
        added = policy.register_forward_hook(hook) if hook else None
        try:
            return taken(collector)
        finally:
            if added:
                added.remove()

    options = {"frames_per_batch": 5}
    found = kept(
        MultiAsyncCollector(
            [partial(Echo, number) for number in range(3)],
            policy,
            inference="central",
            policy_process=False,
            max_batch_size=1,
            total_frames=120,
            **options,
        )
    )
    for env, stream in streams(found, 3).items():
        wanted = kept(Collector([partial(Echo, env)], policy, total_frames=60, **options))
        actions = torch.cat(wanted, -1)["action"][0]
        assert actions.unique().numel() > 9
        assert torch.equal(stream["action"][:60], actions[: len(stream)])


def test_an_object_that_a_policy_begins_to_remember_is_an_error():
    def act(tensordict):
        if tensordict["observation"][0, 1] > 2:
            tensordict.set_non_tensor("_last", "words")
        return tensordict.set("action", torch.zeros(1, 1))

    options = {"frames_per_batch": 4, "inference": "central", "policy_process": False}
    with (
        MultiAsyncCollector([Echo], act, total_frames=8, **options) as collector,
        pytest.raises(PolicyError, match="'_last'.*inference='workers'"),
    ):
        list(collector)


def test_private_entries_that_the_same_call_reads_are_its_own_affair():
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["_features"]),
        TensorDictModule(lambda features: features.argmax(-1), ["_features"], ["action"]),
    )
    options = {"frames_per_batch": 4, "inference": "central", "policy_process": False}
    with MultiAsyncCollector(["CartPole-v1"], policy, **options) as collector:
        batch = collector.next()
    assert torch.equal(batch["action"], policy(batch.select("observation"))["action"])


def test_a_policy_that_changes_its_outputs_is_told_what_to_do():
    dtypes = itertools.chain([torch.int64] * 3, itertools.repeat(torch.int32))

    def changes(observation):
        return torch.zeros(observation.shape[:-1], dtype=next(dtypes))

    with pytest.raises(PolicyError, match="torch.int32.*inference='workers'"):
        list(
            MultiAsyncCollector(
                ["CartPole-v1"],
                changes,
                frames_per_batch=4,
                total_frames=8,
                inference="central",
                policy_process=False,
            )
        )


# -- TorchRL's name and arguments ------------------------------------------------------------------


@pytest.mark.parametrize("by_factory", [False, True])
def test_torchrls_arguments_give_batches_of_several_environments(by_factory):
    policy = {"policy_factory": partial(greedy, 4, 2)} if by_factory else {"policy": greedy(4, 2)}
    collector = AsyncBatchedCollector(
        ["CartPole-v1", lambda: gym.make("CartPole-v1")] * 2,
        frames_per_batch=24,
        total_frames=72,
        envs_per_worker=2,
        transition_chunk_size=8,
        max_batch_size=4,
        **policy,
    )
    batches = list(collector)
    stats = collector.server_stats()
    collector.shutdown()
    assert [batch.shape for batch in batches] == [(24,)] * 3
    assert batches[0]["policy_version"].shape == (24,)
    assert stats["requests"] >= 72
    assert 1 <= stats["avg_batch_size"] <= 4


def whole_trajectories(total_frames=30, **options):
    return AsyncBatchedCollector(
        [Counting] * 2,
        frames_per_batch=7,
        total_frames=total_frames,
        yield_completed_trajectories=True,
        policy_version_key=None,
        **options,
    )


def test_whole_trajectories_are_delivered_until_total_frames():
    collector = whole_trajectories(policy_factory=partial(greedy, 4, 2))
    batches = [next(iter(collector)), collector.next(), *collector]
    assert list(collector) == []
    assert collector.next() is None
    collector.shutdown()
    assert [len(batch) for batch in batches] == [10] * 3
    assert batches[0]["next", "done"][:, 0].tolist() == ([False] * 4 + [True]) * 2
    assert "policy_version" not in batches[0].keys()


@pytest.mark.filterwarnings("ignore:environments=False")
@pytest.mark.parametrize("environments", [False, True])
def test_whole_trajectories_end_at_total_frames_after_a_load_too(environments):
    with whole_trajectories(policy=greedy(4, 2)) as collector:
        collector.next()
        state = collector.state_dict()
    with whole_trajectories(policy=greedy(4, 2)) as collector:
        collector.load_state_dict(state, environments=environments)
        assert [len(batch) for batch in collector] == [10] * 2
        assert collector.stats()["completed"]


def test_whole_trajectories_are_endless_without_total_frames():
    with whole_trajectories(policy=greedy(4, 2), total_frames=None) as collector:
        assert [len(batch) for batch in itertools.islice(collector, 4)] == [10] * 4


@pytest.mark.parametrize(
    "options", [{"policy": greedy(4, 2)}, {"policy_factory": partial(greedy, 4, 2)}]
)
def test_whole_trajectories_go_into_a_buffer(options):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    collector = whole_trajectories(replay_buffer=buffer, transition_chunk_size=10, **options)
    if "policy" in options:
        assert list(collector) != []
    else:
        collector.start()
        rig.until(lambda: not collector.is_running() or len(buffer) >= 25)
    collector.shutdown()
    assert len(buffer) >= 25
    assert buffer[:25]["next", "done"][:, 0].tolist() == ([False] * 4 + [True]) * 5


@pytest.mark.parametrize(
    ("envs", "options", "error", "message"),
    [
        (["CartPole-v1"], {}, TypeError, "must be provided"),
        (["CartPole-v1"], {"policy": len, "policy_factory": list}, TypeError, "exclusive"),
        ("CartPole-v1", {"policy": len}, TypeError, "must be a list"),
        ([], {"policy": len}, ConfigError, "empty"),
        (["CartPole-v1"], {"policy": len, "env_backend": "ray"}, ConfigError, "RayCollector"),
        (["CartPole-v1"], {"policy": len, "driver_affinity": [0]}, ConfigError, "of its own"),
        (["CartPole-v1"], {"policy": len, "policy_version": 3}, ConfigError, "must be 0"),
        (["CartPole-v1"], {"policy": len, "track_policy_version": False}, TypeError, "takes no"),
        (
            ["CartPole-v1"],
            {"policy": len, "transition_chunk_size": "a"},
            ConfigError,
            "whole number",
        ),
        (
            ["CartPole-v1"],
            {"policy": len, "total_frames": "a", "yield_completed_trajectories": True},
            ConfigError,
            "total_frames",
        ),
        (["CartPole-v1"], {"policy": len, "server_timeout": 0}, ConfigError, "server_timeout"),
    ],
)
def test_wrong_arguments_are_named(envs, options, error, message):
    with pytest.raises(error, match=message):
        AsyncBatchedCollector(envs, frames_per_batch=8, **options)


SCRIPT = """
    import builtins
    import gleanrl
    collector = gleanrl.MultiAsyncCollector(
        ["CartPole-v1"] * 2, inference="central", policy_process=False, frames_per_batch=16
    )
    batch = next(iter(collector))
    builtins.kept = gleanrl, collector  # until modules were taken apart
"""


@pytest.mark.slow
def test_a_collector_that_is_alive_at_exit_says_nothing():
    command = [warm.PYTHON, "-W", "ignore", "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Traceback" not in done.stderr, done.stderr[-1500:]
