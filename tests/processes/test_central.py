"""Central inference: the data of a Collector in this process, from environments in workers."""

import itertools
import os
import select
import signal
import sys
import time
from functools import partial

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import rig
import torch
from central_rig import (
    ENVS,
    POLICIES,
    SIZES,
    Counting,
    greedy,
    same,
    sampling,
    transformed,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.covering import ALL
from torch import nn
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv

from gleanrl import (
    Collector,
    CollectorTimeout,
    ConfigError,
    Interruptor,
    MultiAsyncCollector,
    MultiSyncCollector,
    PolicyError,
    WeightsError,
    WorkerDied,
)
from gleanrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from gleanrl.envs import ParallelEnv

# Workers that need not import this file start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def collected(collector, seed, rounds=None):
    torch.manual_seed(99)
    try:
        collector.set_seed(seed)
        found = []
        for batch in collector:
            found.append(batch.clone())
            if len(found) == rounds:
                break
        return found
    finally:
        collector.shutdown()


PAIRS = {
    *(("id", policy) for policy in POLICIES),
    ("function", "recurrent"),
    ("function", "random"),
    ("TensorDict environment", "sampling"),
    ("TensorDict environment", "on TensorDicts"),
    ("TorchRL's, transformed", "greedy"),
    ("TorchRL's, transformed", "keeping"),
}


@pytest.mark.parametrize(
    ("env", "policy"),
    [pair for pair in itertools.product(ENVS, POLICIES) if ALL or pair in PAIRS],
)
def test_data_are_those_of_a_collector_in_this_process_bit_for_bit(env, policy):
    make, act = ENVS[env], partial(POLICIES[policy], *SIZES[env])

    @settings(
        max_examples=4
        if ALL
        else 1
        if make is transformed
        else 2,  # TorchRL's take a second to make
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(
        workers=st.integers(2, 3),
        each=st.integers(1, 2),
        steps=st.integers(1, 7),
        apart=st.booleans(),
        options=st.fixed_dictionaries(
            {},
            optional={
                "max_frames_per_traj": st.integers(2, 5),
                "compact_obs": st.booleans(),
                "reset_at_each_iter": st.booleans(),
                "split_trajs": st.booleans(),
                "init_random_frames": st.just(9),
            },
        ),
    )
    def check(workers, each, steps, apart, options):
        count = workers * each
        if make is transformed:  # which counts steps itself
            options.pop("max_frames_per_traj", None)
        options |= {"frames_per_batch": steps * count, "total_frames": 4 * steps * count}
        apart = apart and make is not transformed  # one import of TorchRL more
        central = {"inference": "central", "policy_process": apart}
        found = MultiSyncCollector([make] * workers, act(), num_envs=each, **central, **options)
        expected = Collector([make] * count, act(), **options)
        one, two = collected(found, 5), collected(expected, 5)
        assert len(one) == len(two)
        assert all(same(a, b) for a, b in zip(one, two, strict=True))

    check()


class OwnSeed(gym.Wrapper):
    """Seeds its first reset, so that a reset more or less shows."""

    def __init__(self, seed):
        super().__init__(gym.make("CartPole-v1"))
        self._first = seed

    def reset(self, *, seed=None, options=None):
        seed, self._first = self._first if seed is None else seed, None
        return self.env.reset(seed=seed, options=options)


def own_seed(seed, in_torchrl):
    env = OwnSeed(seed)
    if not in_torchrl:
        return env
    return TransformedEnv(GymWrapper(env, categorical_action_encoding=True), StepCounter())


@pytest.mark.parametrize("in_torchrl", [False, True])
def test_environments_are_reset_as_often_as_in_this_process(in_torchrl):
    makes = [partial(own_seed, seed, in_torchrl) for seed in range(4)]
    found = []
    for kind, options in ((MultiSyncCollector, {"inference": "central"}), (Collector, {})):
        with kind(makes, greedy(4, 2), frames_per_batch=40, total_frames=120, **options) as data:
            found.append([batch.clone() for batch in data])
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_two_groups_give_the_data_of_two_collectors(policy):
    act = partial(POLICIES[policy], 4, 2)
    options = {"total_frames": 240, "max_frames_per_traj": 7, "track_traj_ids": False}
    grouped = MultiSyncCollector(
        "CartPole-v1",
        act(),
        num_workers=2,
        num_envs=4,
        env_groups=2,
        inference="central",
        frames_per_batch=48,
        **options,
    )
    both = collected(grouped, 5)
    options["total_frames"] = 120
    parts = [
        collected(Collector("CartPole-v1", act(), num_envs=4, frames_per_batch=24, **options), seed)
        for seed in (5, 9)
    ]
    assert len(both) == 5
    for batch, *halves in zip(both, *parts, strict=True):
        assert same(batch, torch.cat(halves, 0))


class Constant(nn.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.full((1,), value))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 1) + 0


def constant(value):
    return TensorDictModule(Constant(value), ["observation"], ["action"])


def beside_a_factory(kind, policy, factory, **options):
    options = {"num_workers": 2, "policy_process": False, "frames_per_batch": 4, **options}
    return kind("Pendulum-v1", policy, policy_factory=factory, inference="central", **options)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_beside_a_factory_the_policy_of_the_learner_is_the_source_of_weights(kind, apart):
    policy = constant(0.0)
    options = {"policy_process": apart, "total_frames": -1, "track_policy_version": True}
    collector = beside_a_factory(kind, policy, partial(constant, 2.0), **options)
    acted = {}
    for batch in itertools.islice(collector, 6):
        if not acted:
            with torch.no_grad():
                policy.module.value += 1
            collector.update_policy_weights_()
        for version in batch["policy_version"].unique().tolist():
            own = batch["action"][batch["policy_version"] == version]
            acted.setdefault(version, set()).update(own.unique().tolist())
    collector.shutdown()
    assert acted == {0: {0.0}, 1: {1.0}}


def test_trained_weights_that_never_reach_the_policy_of_a_factory_are_a_warning():
    policy = constant(0.0)
    factory = partial(constant, 0.0)
    collector = beside_a_factory(
        MultiSyncCollector, policy, factory, num_workers=1, total_frames=12
    )
    collector.next()
    with torch.no_grad():
        policy.module.value += 1
    with pytest.warns(UserWarning, match="never sent"):
        list(collector)
    collector.shutdown()


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_lazy_layers_of_a_factory_get_the_weights_of_the_learner_after_their_first_call(kind):
    def lazy():
        return TensorDictModule(nn.LazyLinear(1), ["observation"], ["action"])

    layer = nn.Linear(3, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, 0.5)
    policy = TensorDictModule(layer, ["observation"], ["action"])
    collector = beside_a_factory(kind, policy, lazy, total_frames=4)
    assert collector.next()["action"].unique().tolist() == [0.5]
    collector.shutdown()


def test_a_factory_whose_policy_cannot_take_the_weights_is_an_error():
    with pytest.raises(WeightsError, match="is a function, not an nn.Module"):
        MultiSyncCollector(
            "Pendulum-v1",
            constant(0.0),
            num_workers=1,
            inference="central",
            policy_factory=lambda: lambda observation: observation[..., :1],
            frames_per_batch=4,
        )


def test_the_policy_of_the_learner_acts_and_needs_no_update():
    policy = constant(0.0)
    collector = MultiSyncCollector(
        "Pendulum-v1",
        policy,
        num_workers=2,
        num_envs=2,
        env_groups=2,
        inference="central",
        frames_per_batch=8,
        total_frames=24,
        track_policy_version=True,
    )
    seen = []
    for batch in collector:
        seen.append((batch["action"].unique().tolist(), batch["policy_version"].unique().tolist()))
        with torch.no_grad():
            policy.module.value += 1
        collector.update_policy_weights_()
    assert seen == [([0.0], [0]), ([1.0], [1]), ([2.0], [2])]
    collector.shutdown()


def test_a_replay_buffer_is_filled_with_the_same_rows():
    rows = []
    for make in (
        partial(MultiSyncCollector, ["CartPole-v1"] * 2, inference="central"),
        partial(Collector, ["CartPole-v1"] * 2),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        collector = make(greedy(4, 2), frames_per_batch=10, total_frames=40, replay_buffer=buffer)
        collector.set_seed(3)
        assert list(collector) == [None] * 4
        collector.shutdown()
        rows.append(buffer[:])
    assert same(*rows)


@pytest.mark.parametrize("apart", [False, True])
def test_a_buffer_that_is_filled_step_by_step_has_an_element_per_step(apart):
    rows = []
    for make in (
        partial(MultiSyncCollector, ["CartPole-v1"] * 2, inference="central", policy_process=apart),
        partial(Collector, ["CartPole-v1"] * 2),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        options = {"frames_per_batch": 10, "replay_buffer": buffer, "extend_buffer": False}
        with make(greedy(4, 2), total_frames=40, **options) as collector:
            collector.set_seed(3)
            assert list(collector) == [None] * 4
        rows.append(buffer[:])
    assert rows[0].shape == (20, 2)
    assert same(*rows)


@pytest.mark.filterwarnings("ignore:collection waits|policy process was replaced")
def test_a_policy_in_a_process_of_its_own_collects_in_the_background_and_survives():
    options = {"frames_per_batch": 40, "policy_process": True, "on_failure": "relaunch"}
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000))
    make = partial(MultiSyncCollector, ["CartPole-v1"] * 2, inference="central", **options)
    with make(greedy(4, 2), replay_buffer=buffer) as collector, rig.in_time():
        collector.set_seed(3)
        collector.start()
        rig.until(lambda: len(buffer) >= 200)
        collector.update_policy_weights_()
        os.kill(collector.stats("per_worker")["policy_process/pid"], signal.SIGKILL)
        rig.until(lambda: collector.stats()["relaunches"] == 1)
        rows = len(buffer)
        rig.until(lambda: len(buffer) >= rows + 200)
    with Collector(["CartPole-v1"] * 2, greedy(4, 2), frames_per_batch=200) as expected:
        expected.set_seed(3)
        wanted = expected.next()
    first = buffer[:200].reshape(5, 2, 20)
    observations = first["observation"].transpose(0, 1).reshape(2, 100, 4)
    assert torch.equal(observations, wanted["observation"])


def test_a_state_is_continued_by_another_collector():
    def make():
        return MultiSyncCollector(
            "CartPole-v1",
            sampling(4, 2),
            num_workers=2,
            num_envs=2,
            env_groups=2,
            inference="central",
            frames_per_batch=16,
            total_frames=-1,
        )

    one = make()
    one.set_seed(4)
    one.rollout()
    state = one.state_dict()
    found = [one.rollout()["collector", "traj_ids"].clone()]
    one.shutdown()
    for _ in range(2):
        other = make()
        other.load_state_dict(state)
        assert other.stats()["frames"] == 16
        found.append(other.rollout()["collector", "traj_ids"].clone())
        other.shutdown()
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_transforms_of_torchrl_are_stepped_by_their_parts_in_workers():
    collector = MultiSyncCollector(
        [transformed] * 2, inference="central", num_envs=2, frames_per_batch=4, total_frames=4
    )
    assert "4 x TransformedEnv in 2 workers" in collector.cascade_execute("explain")[0]
    collector.shutdown()


def test_actions_of_another_dtype_reach_torchrls_environments_as_they_are_written():
    make, policy = partial(TorchRLGymEnv, "CartPole-v1"), nn.Linear(4, 2)
    scores = TensorDictModule(policy, ["observation"], ["action"])  # a one-hot vector is expected
    options = {"frames_per_batch": 64, "total_frames": 128}
    (made, reference) = (
        collected(collector, 0)
        for collector in (
            MultiSyncCollector([make] * 2, scores, inference="central", **options),
            Collector([make] * 2, scores, fast=False, **options),
        )
    )
    for batch, other in zip(made, reference, strict=True):
        assert batch["action"].dtype == torch.float32
        assert same(batch, other)


def writing(dtype, *shape):
    """Return a policy whose actions are ones of another dtype or shape than specs have."""
    return TensorDictModule(
        lambda observation: torch.ones(*observation.shape[:-1], *shape).to(dtype),
        ["observation"],
        ["action"],
    )


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.int64, (1,)), (torch.float64, (1,)), (torch.float32, (2,))]
)
def test_random_frames_are_never_cast_to_the_actions_of_the_policy(kind, dtype, shape):
    make, policy = partial(TorchRLGymEnv, "Pendulum-v1"), writing(dtype, *shape)
    options = {"frames_per_batch": 8, "inference": "central", "policy_process": False}
    with pytest.raises(PolicyError, match="its spec has torch.float32 of shape .*random frames"):
        kind([make] * 2, policy, init_random_frames=8, **options)
    collector = kind([make] * 2, policy, total_frames=8, **options)
    (batch,) = collected(collector, 0)
    assert batch["action"].dtype == dtype
    assert (batch["action"] == 1).all()


@pytest.mark.parametrize(
    ("env", "dtype", "shape"),
    [
        ("Pendulum-v1", torch.float16, (1,)),
        ("Pendulum-v1", torch.int64, (1,)),
        ("Pendulum-v1", torch.float32, (1, 1)),
        ("CartPole-v1", torch.float32, (2,)),
        ("CartPole-v1", torch.bool, (2,)),
        ("CartPole-v1", torch.int64, ()),
    ],
)
def test_a_parallel_env_takes_the_same_actions_in_rows_and_by_its_own_methods(env, dtype, shape):
    def outcome(fast):
        envs, policy = ParallelEnv(2, partial(TorchRLGymEnv, env)), writing(dtype, *shape)
        options = {"frames_per_batch": 8, "total_frames": 8, "fast": fast}
        try:
            collector = Collector(envs, policy, **options)
        except PolicyError as err:
            return str(err)
        (batch,) = collected(collector, 0)
        return batch["action"].dtype, batch["action"].sum().item(), batch["next", "reward"].tolist()

    assert outcome(fast=True) == outcome(fast=False)


def test_how_data_are_stored_reaches_workers():
    collector = MultiSyncCollector(
        "CartPole-v1",
        num_workers=2,
        inference="central",
        observation_dtype=torch.float64,
        categorical_action_encoding=False,
        frames_per_batch=4,
        total_frames=4,
    )
    (batch,) = collected(collector, 0)
    assert batch["observation"].dtype == torch.float64
    assert batch["action"].shape == (2, 2, 2)


def test_collector_with_num_collectors_takes_it():
    collector = Collector(
        "CartPole-v1",
        num_collectors=2,
        sync=True,
        inference="central",
        frames_per_batch=4,
        total_frames=8,
    )
    assert isinstance(collector, MultiSyncCollector)
    assert [batch.shape for batch in collected(collector, 0)] == [(2, 2)] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inference": "middle"}, ConfigError, "must be 'workers' or 'central'"),
        ({"env_groups": 2}, ConfigError, r"env_groups \(2\) must divide .* worker \(1\)"),
        ({"env_groups": 2, "num_envs": 3}, ConfigError, r"env_groups \(2\) must divide"),
        ({"env_groups": 17, "num_envs": 17}, ConfigError, "at most 16"),
        ({"preemptive_threshold": 0.5}, ConfigError, "same steps"),
        ({"cat_results": 0}, ConfigError, "one batch already"),
        ({"backend": "inline"}, ConfigError, "workers are processes"),
        ({"policy_device": ["cpu", "cpu"]}, ConfigError, "one policy"),
        ({"min_batch_size": 2}, ConfigError, "needs asynchronous central inference"),
        ({"inference": "workers", "env_groups": 2}, ConfigError, "needs inference='central'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(options, error, message):
    with pytest.raises(error, match=message):
        MultiSyncCollector(
            ["CartPole-v1"] * 2, frames_per_batch=4, **{"inference": "central", **options}
        )


class Choosy(Counting):
    """Allows one action."""

    def __init__(self):
        super().__init__()
        self.action_spec = Categorical(5, mask=torch.arange(5) == 3)


class Drawing(Counting):
    """Draws one action."""

    def rand_action(self, tensordict=None):
        drawn = TensorDict(action=torch.tensor(3.0))
        return drawn if tensordict is None else tensordict.update(drawn)


@pytest.mark.parametrize("env", [Choosy, Drawing])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_random_actions_are_those_that_the_environments_draw_or_are_refused(kind, env):
    def allowed(tensordict):
        return tensordict.set("action", torch.full(tensordict.shape, 3).to(dtype))

    dtype = env().action_spec.dtype
    options = {"frames_per_batch": 8, "num_workers": 2}
    for policy, inference in ((None, "workers"), (allowed, "central")):
        with kind(env, policy, inference=inference, **options) as collector:
            assert (collector.next()["action"] == 3).all()
    for policy, frames in ((None, 0), (allowed, 8)):
        with (
            kind(env, policy, inference="central", init_random_frames=frames, **options) as it,
            pytest.raises(ConfigError, match="inference='workers'"),
        ):
            it.next()


@pytest.mark.parametrize("env", [Choosy, Drawing])
def test_a_parallel_env_does_not_draw_what_only_workers_could_draw(env):
    several = ParallelEnv(2, env)
    with pytest.raises(ConfigError, match="act by a policy"):
        several.rollout(2)
    several.close()


def test_an_environment_that_is_several_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="made a SyncVectorEnv.*inference='workers'"):
        MultiSyncCollector(
            lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"),
            num_workers=1,
            inference="central",
            frames_per_batch=4,
        )


def test_arguments_about_processes_reach_them():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    collector = MultiSyncCollector(
        ["CartPole-v1"] * 2,
        inference="central",
        frames_per_batch=4,
        num_threads=1,
        replay_buffer=ReplayBuffer(storage=LazyTensorStorage(9)),
    )
    try:
        assert torch.get_num_threads() == 1
        with pytest.raises(ConfigError, match="policy_process=True"):
            collector.start()
    finally:
        collector.shutdown()
        assert torch.get_num_threads() == 2
        torch.set_num_threads(before)

    def slow():
        time.sleep(60)

    with rig.in_time(), pytest.raises(CollectorTimeout, match=r"within 0\.5 s"):
        MultiSyncCollector([slow], inference="central", frames_per_batch=4, start_timeout=0.5)


def test_a_limit_bounds_steps_and_not_rollouts():
    collector = MultiSyncCollector(
        [[rig.counting(pause=0.05)] * 2],
        lambda observation: torch.zeros(observation.shape[:-1], dtype=torch.int64),
        inference="central",
        env_groups=2,
        frames_per_batch=30,
        total_frames=30,
        timeout=0.7,
    )
    assert [batch.shape for batch in collector] == [(2, 15)]
    collector.shutdown()


def test_a_single_collector_refuses_it_by_name():
    with pytest.raises(ConfigError, match="several workers"):
        Collector("CartPole-v1", frames_per_batch=4, inference="central")


# -- faults ----------------------------------------------------------------------------------------


class Doing(gym.Env):
    """Does something in its third step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, do):
        self.do, self.count = do, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == 3:
            self.do()
        return np.zeros(2, np.float32), 0.0, False, False, {}


def fail():
    raise LookupError("in the simulator")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    while True:
        pass


@pytest.mark.covering
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("do", "error", "message"),
    [
        (fail, LookupError, "(?s)worker 1 raised .*in the simulator"),
        (end, WorkerDied, "worker 1 .* killed by signal 9"),
        (hang, CollectorTimeout, r"workers \[1\] did not finish their step"),
    ],
)
def test_faults_of_workers_are_named_and_leave_nothing(groups, do, error, message):
    makes = [partial(Doing, lambda: None), partial(Doing, do)]
    collector = MultiSyncCollector(
        makes,
        num_envs=2,
        env_groups=groups,
        inference="central",
        frames_per_batch=40,
        timeout=1.0 if do is hang else None,
    )
    pids = rig.workers()
    watched = [os.pidfd_open(pid) for pid in pids]
    assert len(watched) >= 2
    with rig.in_time(), pytest.raises(error, match=message):
        collector.rollout()
    collector.shutdown()
    for fd in watched:
        assert select.select([fd], [], [], rig.LIMIT * rig.load())[0], "a worker was left behind"
        os.close(fd)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_policy_that_fails_says_at_which_step(groups):
    calls = []

    def act(observation):
        calls.append(observation)
        if len(calls) == 6:
            raise LookupError("no idea")
        return torch.zeros(observation.shape[0], dtype=torch.int64)

    with (
        MultiSyncCollector(
            "CartPole-v1",
            act,
            num_workers=2,
            num_envs=2,
            env_groups=groups,
            inference="central",
            frames_per_batch=80,
        ) as collector,
        pytest.raises(LookupError, match="no idea") as caught,
    ):
        collector.rollout()
    assert any("the policy raised this at step" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_is_left_behind(groups):
    def use():
        collector = MultiSyncCollector(
            "CartPole-v1",
            num_workers=2,
            num_envs=2,
            env_groups=groups,
            inference="central",
            frames_per_batch=8,
        )
        collector.rollout()
        collector.shutdown()

    use()
    with rig.nothing_left_behind():
        use()
        use()


def test_batches_that_are_kept_never_change():
    collector = MultiSyncCollector(
        "CartPole-v1",
        num_workers=2,
        num_envs=2,
        env_groups=2,
        inference="central",
        frames_per_batch=16,
        total_frames=160,
    )
    kept = [(batch, batch.clone()) for batch in collector]
    assert all(same(batch, copy) for batch, copy in kept)
    assert isinstance(kept[0][0], TensorDict)
    collector.shutdown()


@pytest.mark.parametrize("kind", ["sync", "async", "parallel", "stopped"])
def test_what_is_built_in_inference_mode_collects_outside_of_it(kind):
    settings = {"frames_per_batch": 20, "total_frames": 60}
    with torch.inference_mode():
        if kind == "parallel":
            env = ParallelEnv(2, partial(TorchRLGymEnv, "CartPole-v1"))
            collector = Collector(env, **settings)
        elif kind == "stopped":
            stop = Interruptor()
            stop.stop_collection()
            collector = Collector("CartPole-v1", interruptor=stop, **settings)
        else:
            multi = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}[kind]
            collector = multi(["CartPole-v1"] * 2, sampling(4, 2), inference="central", **settings)
    with collector:
        assert not any(batch["observation"].is_inference() for batch in collector)
