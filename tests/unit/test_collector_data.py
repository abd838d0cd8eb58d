"""What the in-process collector delivers, against environments stepped by hand."""

import functools
import gc
import random
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.covering import examples
from torch import nn

from gleanrl import (
    Collector,
    ConfigError,
    EnvError,
    Interruptor,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    MultiSyncCollector,
    ReplayBuffer,
)


class Countdown(gym.Env):
    """Ends after ``length`` steps; the observation counts up, the info entry down."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, truncates=False):
        self.length, self.truncates, self.t = length, truncates, 0
        self.buffer = np.zeros(1, np.float32)  # one buffer for ever: what is not copied is lost

    def _observe(self):
        self.buffer[0] = self.t
        return self.buffer, {"left": self.length - self.t}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe()

    def step(self, action):
        self.t += 1
        over = self.t >= self.length
        observation, info = self._observe()
        dead, late = over and not self.truncates, over and self.truncates
        return observation, float(self.t), dead, late, info


def mlp(inputs=4, outputs=2):
    torch.manual_seed(0)
    return TensorDictModule(
        nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)),
        in_keys=["observation"],
        out_keys=["action"],
    )


def by_sign(observation):
    """A deterministic policy for CartPole."""
    return (observation[..., 2] > 0).long()


def cat(collector, batches):
    found = [batch for _, batch in zip(range(batches), collector, strict=False)]
    return torch.cat(found, -1)


def by_hand(env, seed, steps):
    """Step one environment as a person would, with the policy `by_sign`."""
    rows = []
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = int(by_sign(torch.from_numpy(observation)))
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append((observation, action, after, reward, terminated, truncated))
        observation = env.reset()[0] if terminated or truncated else after
    return rows


def test_a_single_environment_gives_a_time_dimension_only():
    with Collector("CartPole-v1", frames_per_batch=10, total_frames=10) as collector:
        batch = next(iter(collector))
    assert batch.shape == (10,)
    assert batch.names == ["time"]
    assert batch["observation"].shape == (10, 4)
    assert batch["action"].shape == (10,)
    assert batch["next", "reward"].shape == (10, 1)
    assert batch["next", "reward"].dtype == torch.float32
    assert batch["collector", "traj_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    "source",
    [
        {"create_env_fn": "CartPole-v1", "num_envs": 3},
        {"create_env_fn": lambda: gym.make("CartPole-v1"), "num_envs": 3},
        {"create_env_fn": ["CartPole-v1"] * 3},
        {"create_env_fn": [lambda: gym.make("CartPole-v1")] * 3},
    ],
    ids=["id", "factory", "ids", "factories"],
)
def test_several_environments_give_one_row_each(source):
    with Collector(**source, frames_per_batch=12, total_frames=12) as collector:
        batch = next(iter(collector))
    assert batch.shape == (3, 4)
    assert batch.names == [None, "time"]


def test_the_stream_equals_environments_stepped_by_hand():
    with Collector("CartPole-v1", by_sign, num_envs=3, frames_per_batch=60) as collector:
        assert collector.set_seed(7) == 9
        data = cat(collector, 20)
    for i in range(3):
        for t, row in enumerate(by_hand(gym.make("CartPole-v1"), 7 + i, 400)):
            observation, action, after, reward, terminated, truncated = row
            frame = data[i, t]
            assert np.array_equal(frame["observation"].numpy(), observation)
            assert int(frame["action"]) == action
            assert np.array_equal(frame["next", "observation"].numpy(), after)
            assert float(frame["next", "reward"]) == reward
            assert bool(frame["next", "terminated"]) == terminated
            assert bool(frame["next", "truncated"]) == truncated
            assert bool(frame["next", "done"]) == (terminated or truncated)
    assert data["next", "done"].any()
    assert not data["done"].any()


@given(splits=st.lists(st.integers(1, 40), min_size=2, max_size=5))
@examples(20)
def test_batch_boundaries_do_not_change_the_stream(splits):
    def stream(steps):
        with Collector("CartPole-v1", num_envs=2, frames_per_batch=2 * steps) as collector:
            collector.set_seed(3)
            return cat(collector, -(-120 // steps))[:, :120]

    reference = stream(120)
    for steps in splits:
        assert (stream(steps) == reference).all()


class Shared(gym.Env):
    """Counts; all members return one dict, of the class, or an info that is one dict."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(count=gym.spaces.Box(0, 100, (1,), np.float64))
    shown, info = {}, {}

    def __init__(self, number, shares):
        self.number, self.shares, self.steps = number, shares, 0

    def _show(self):
        count = np.array([10.0 * self.number + self.steps])
        shown = Shared.shown if self.shares == "observation" else {}
        info = Shared.info if self.shares == "info" else {}
        shown["count"] = count
        info["seen"] = float(count[0])
        return shown, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._show()

    def step(self, action):
        self.steps += 1
        shown, info = self._show()
        return shown, 0.0, self.steps == 3, False, info


@pytest.mark.parametrize("shares", ["observation", "info"])
def test_environments_that_share_one_dict_are_read_one_by_one(shares):
    with Collector(
        [functools.partial(Shared, number, shares) for number in range(3)],
        frames_per_batch=18,
        info_keys=["seen"],
    ) as collector:
        batch = collector.next()
    expected = [[10 * number + step for step in (1, 2, 3, 1, 2, 3)] for number in range(3)]
    assert batch["next", "count"].squeeze(-1).tolist() == expected
    assert batch["next", "seen"].flatten(1).tolist() == expected


def test_the_final_observation_is_kept_when_the_environment_reuses_its_buffer():
    with Collector([Countdown, lambda: Countdown(3)], frames_per_batch=24) as collector:
        data = cat(collector, 1)
    assert data["observation"][0, :, 0].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert data["next", "observation"][0, :, 0].tolist() == [1, 2, 3, 4, 5] * 2 + [1, 2]
    assert data["next", "observation"][1, :, 0].tolist() == [1, 2, 3] * 4


def test_termination_and_truncation_are_kept_apart():
    envs = [Countdown, lambda: Countdown(truncates=True)]
    with Collector(envs, frames_per_batch=20) as collector:
        data = cat(collector, 1)
    ends = [4, 9]
    assert data["next", "terminated"][0].flatten().nonzero().flatten().tolist() == ends
    assert data["next", "truncated"][1].flatten().nonzero().flatten().tolist() == ends
    assert not data["next", "truncated"][0].any()
    assert not data["next", "terminated"][1].any()
    assert data["next", "done"].sum() == 4


def test_trajectory_ids_are_unique_and_span_batches():
    with Collector([Countdown, lambda: Countdown(3)], frames_per_batch=8) as collector:
        data = cat(collector, 4)
    assert data["collector", "traj_ids"][0].tolist() == [0] * 5 + [2] * 5 + [4] * 5 + [6]
    assert data["collector", "traj_ids"][1].tolist() == [1] * 3 + [3] * 3 + [5] * 3 + [7] * 3 + [
        9
    ] * 3 + [11]


def test_ids_can_be_left_out():
    with Collector(Countdown, frames_per_batch=8, track_traj_ids=False) as collector:
        assert "collector" not in cat(collector, 1).keys()


def test_episodes_are_truncated_after_max_frames_per_traj():
    with Collector(
        [Countdown, lambda: Countdown(3)], frames_per_batch=14, max_frames_per_traj=4
    ) as collector:
        data = cat(collector, 2)
    assert data["next", "truncated"][0].flatten().nonzero().flatten().tolist() == [3, 7, 11]
    assert not data["next", "truncated"][1].any()
    assert data["step_count"][0].flatten().tolist() == [0, 1, 2, 3] * 3 + [0, 1]
    assert data["next", "step_count"][0].flatten().tolist() == [1, 2, 3, 4] * 3 + [1, 2]
    assert data["next", "observation"][0, 3].item() == 4
    assert data["observation"][0, 4].item() == 0


def test_an_end_of_its_own_beats_the_limit_at_the_same_step():
    with Collector(Countdown, frames_per_batch=5, max_frames_per_traj=5) as collector:
        data = cat(collector, 1)
    assert data["next", "terminated"][-1]
    assert not data["next", "truncated"].any()


def test_set_truncated_marks_the_last_step_only():
    with Collector(Countdown, frames_per_batch=5, set_truncated=True) as collector:
        first, second = cat(collector, 1), None
        second = next(iter(collector))
    assert first["next", "terminated"][-1]
    assert not first["next", "truncated"].any()
    assert second["observation"][0].item() == 0
    with Collector(Countdown, frames_per_batch=3, set_truncated=True) as collector:
        data = cat(collector, 2)
    assert data["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    assert data["next", "done"].flatten().tolist() == [False, False, True, False, True, True]
    assert data["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 0]


def test_reset_at_each_iter_starts_every_batch_afresh():
    with Collector(Countdown, frames_per_batch=4, reset_at_each_iter=True) as collector:
        data = cat(collector, 3)
    assert data["observation"].flatten().tolist() == [0, 1, 2, 3] * 3
    assert data["collector", "traj_ids"].tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_random_frames_leave_the_policy_alone_and_its_extras_zero():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, tensordict):
            self.calls += 1
            tensordict["action"] = torch.ones(tensordict.shape, dtype=torch.int64)
            return tensordict.set("extra", torch.ones(*tensordict.shape, 2))

    policy = Policy()
    with Collector(Countdown, policy, frames_per_batch=50, init_random_frames=60) as collector:
        collector.set_seed(0)
        before = policy.calls
        data = cat(collector, 3)
    assert before <= 1
    assert policy.calls == before + 50
    assert set(data["action"][:100].tolist()) == {0, 1}
    assert data["action"][100:].all()
    assert not data["extra"][:100].any()
    assert data["extra"][100:].all()


def test_info_entries_are_delivered_on_request():
    with Collector(Countdown, frames_per_batch=6, info_keys=["left"]) as collector:
        data = cat(collector, 1)
    assert data["left"].tolist() == [5, 4, 3, 2, 1, 5]
    assert data["next", "left"].tolist() == [4, 3, 2, 1, 0, 4]


def test_compact_observations_leave_next_out():
    with Collector(Countdown, frames_per_batch=6, compact_obs=True) as collector:
        data = cat(collector, 1)
    assert "observation" not in data["next"].keys()
    assert data["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 0]


def test_a_stopped_rollout_keeps_its_shape_and_marks_what_is_valid():
    interruptor = Interruptor()

    class Stopping(Countdown):
        def step(self, action):
            result = super().step(action)
            if self.t == 3:
                interruptor.stop_collection()
            return result

    with Collector(
        Stopping,
        frames_per_batch=6,
        interruptor=interruptor,
        set_truncated=True,
        total_frames=12,
    ) as collector:
        batches = iter(collector)
        first = next(batches)
        interruptor.start_collection()
        second = next(batches)
    assert first.shape == (6,)
    assert first["collector", "mask"].tolist() == [True] * 3 + [False] * 3
    assert first["collector", "traj_ids"].tolist() == [0] * 3 + [-1] * 3
    assert first["next", "truncated"].flatten().tolist() == [False, False, True] + [False] * 3
    assert first["next", "observation"].flatten().tolist() == [1, 2, 3, 0, 0, 0]
    assert second["observation"].flatten().tolist()[:2] == [3, 4]
    assert second["collector", "traj_ids"].tolist()[:3] == [0, 0, 1]


def test_only_valid_frames_of_a_stopped_rollout_count():
    interruptor = Interruptor()
    interruptor.stop_collection()
    with Collector(
        Countdown, frames_per_batch=6, interruptor=interruptor, total_frames=12
    ) as collector:
        next(iter(collector))
        assert collector.stats()["frames"] == 1


def test_trajectories_are_split_padded_and_masked():
    with Collector(Countdown, frames_per_batch=8, split_trajs=True) as collector:
        batch = next(iter(collector))
    assert batch.shape == (2, 5)
    assert batch["collector", "mask"].sum(-1).tolist() == [5, 3]


def test_whole_trajectories_come_in_exact_numbers():
    with Collector(
        [Countdown, lambda: Countdown(3)], frames_per_batch=8, trajs_per_batch=3, total_frames=64
    ) as collector:
        batches = list(collector)
    assert all(batch.shape[0] == 3 for batch in batches)
    lengths = torch.cat([batch["collector", "mask"].sum(-1) for batch in batches])
    ids = torch.cat([batch["collector", "traj_ids"][:, 0] for batch in batches])
    assert set(lengths.tolist()) == {3, 5}
    assert len(set(ids.tolist())) == len(ids)


@pytest.mark.parametrize("make", [ListStorage, LazyTensorStorage])
@pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("per_write", [None, 3])
def test_a_loop_that_stores_whole_trajectories_has_one_turn_per_batch(make, kind, per_write):
    """As TorchRL's: a learner that samples once per turn learns as often. Nothing whole is left."""
    buffer = ReplayBuffer(storage=make(100))
    options = {} if kind is Collector else {"backend": "inline"}
    options |= {"trajs_per_batch": 2, "trajs_per_write": per_write, "replay_buffer": buffer}
    makers = [lambda: Countdown(3), lambda: Countdown(9)]
    with kind(makers, frames_per_batch=16, total_frames=48, **options) as collector:
        stored = [len(buffer) for _ in collector]  # eight steps of each environment at a time
    assert stored == [6, 15 + 9, 24 + 18]


def test_n_step_returns_are_a_postproc():
    with Collector(
        Countdown, frames_per_batch=10, postproc=MultiStep(gamma=0.5, n_steps=2)
    ) as collector:
        batch = next(iter(collector))
    assert batch["next", "reward"][0].item() == 1 + 0.5 * 2
    assert batch["next", "reward"][4].item() == 5


def test_hooks_see_every_batch_in_order():
    seen = []
    with Collector(
        Countdown,
        frames_per_batch=5,
        total_frames=10,
        postproc=lambda batch: batch.set("extra", batch["observation"] * 2),
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=lambda batch: seen.append("extra" in batch.keys()),
    ) as collector:
        for _ in collector:
            seen.append("delivered")
    assert seen == ["before", True, "delivered"] * 2


def test_a_batch_never_changes_in_the_users_hands():
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=20) as collector:
        held = [batch for _, batch in zip(range(8), collector, strict=False)]
        copies = [batch.clone() for batch in held]
        for _ in zip(range(8), collector, strict=False):
            pass
    assert all((batch == copy).all() for batch, copy in zip(held, copies, strict=True))


def test_the_same_tensordict_is_returned_when_asked_for():
    with Collector(Countdown, frames_per_batch=3, return_same_td=True) as collector:
        first, second = (batch for _, batch in zip(range(2), collector, strict=False))
    assert first is second
    assert first["observation"].flatten().tolist() == [3, 4, 0]


def test_one_seed_gives_the_same_bits_and_leaves_global_streams_alone():
    def run():
        policy = mlp(outputs=2)
        sampler = TensorDictModule(
            lambda logits: torch.distributions.Categorical(logits=logits).sample(),
            in_keys=["action"],
            out_keys=["action"],
        )
        with Collector(
            "CartPole-v1", nn.Sequential(policy, sampler), num_envs=2, frames_per_batch=40
        ) as collector:
            collector.set_seed(11)
            torch.rand(3)
            return cat(collector, 3)

    assert (run() == run()).all()
    with Collector("CartPole-v1", frames_per_batch=40) as collector:
        collector.set_seed(0)
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        expected = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        next(iter(collector))
        assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == expected


def test_building_a_collector_draws_nothing():
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist()
    torch.manual_seed(5)
    np.random.seed(5)
    Collector("CartPole-v1", frames_per_batch=4).shutdown()
    torch.manual_seed(5)
    Collector("CartPole-v1", by_sign, frames_per_batch=4).shutdown()
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected


def test_before_any_seed_the_global_torch_generator_is_used():
    def actions():
        torch.manual_seed(9)
        with Collector(Countdown, frames_per_batch=64) as collector:
            return next(iter(collector))["action"].tolist()

    assert actions() == actions()


def test_nested_and_discrete_spaces_become_nested_keys():
    class Nested(gym.Env):
        observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
            inner=gym.spaces.Dict(k=gym.spaces.Discrete(5), bits=gym.spaces.MultiBinary(3)),
            pair=gym.spaces.Tuple((gym.spaces.Box(-1, 1, (), np.float64), gym.spaces.Discrete(2))),
        )
        action_space = gym.spaces.Dict(
            move=gym.spaces.Box(-1, 1, (2,), np.float32),
            mode=gym.spaces.MultiDiscrete([2, 3]),
            fire=gym.spaces.Discrete(2, start=4),
        )

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.observation_space.seed(0)
            return self.observation_space.sample(), {}

        def step(self, action):
            assert action in self.action_space
            return self.observation_space.sample(), 1, False, False, {}

    with Collector(Nested, num_envs=2, frames_per_batch=12) as collector:
        batch = next(iter(collector))
    assert batch["image"].shape == (2, 6, 8, 8, 3)
    assert batch["image"].dtype == torch.uint8
    assert batch["inner", "k"].dtype == torch.int64
    assert batch["inner", "bits"].dtype == torch.int8
    assert batch["pair", "0"].dtype == torch.float64
    assert batch["next", "pair", "1"].shape == (2, 6)
    assert batch["action", "move"].shape == (2, 6, 2)
    assert set(batch["action", "fire"].unique().tolist()) <= {0, 1}


def test_one_hot_actions_on_request():
    with Collector(Countdown, frames_per_batch=6, categorical_action_encoding=False) as collector:
        batch = next(iter(collector))
    assert batch["action"].shape == (6, 2)
    assert (batch["action"].sum(-1) == 1).all()


@pytest.mark.parametrize("sizes", [[2, 3], [1, 1]])
def test_several_one_hot_actions_on_request(sizes):
    class Twice(Countdown):
        action_space = gym.spaces.MultiDiscrete(sizes, start=[0, 5])
        taken = []

        def step(self, action):
            assert action in self.action_space
            self.taken.append(action.tolist())
            return super().step(int(action[0]))

    env = Twice()
    with Collector(lambda: env, frames_per_batch=6, categorical_action_encoding=False) as collector:
        batch = next(iter(collector))
        assert batch["action"].shape == (6, sum(sizes))
        parts = batch["action"].split(sizes, -1)
        assert all((part.sum(-1) == 1).all() for part in parts)
        indices = torch.stack([part.argmax(-1) for part in parts], -1)
        assert (indices + torch.tensor([0, 5])).tolist() == env.taken


def test_wide_observations_are_written_directly():
    class Pixels(Countdown):
        observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)

        def _observe(self):
            return np.full((64, 64, 3), self.t, np.uint8), {}

    with Collector([Pixels, lambda: Pixels(2)], frames_per_batch=16) as collector:
        data = cat(collector, 1)
    assert data["observation"][0, :, 5, 5, 1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert data["next", "observation"][1, :, 63, 63, 2].tolist() == [1, 2] * 4


def test_observations_keep_their_dtype_unless_cast():
    with Collector("HalfCheetah-v5", frames_per_batch=4) as collector:
        assert next(iter(collector))["observation"].dtype == torch.float64
    with Collector(
        "HalfCheetah-v5", frames_per_batch=4, observation_dtype=torch.float32
    ) as collector:
        assert next(iter(collector))["observation"].dtype == torch.float32


@pytest.mark.parametrize("field", ["observation", "reward"])
def test_nan_is_caught_on_request(field):
    class Broken(Countdown):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            if self.t == 3 and field == "observation":
                observation = np.full(1, np.nan, np.float32)
            return observation, float("nan") if self.t == 3 else reward, *rest

    with Collector(Broken, frames_per_batch=6) as collector:
        next(iter(collector))
    with (
        Collector(Broken, num_envs=2, frames_per_batch=12, check_finite=True) as collector,
        pytest.raises(EnvError, match=r"environment 0 returned \[nan\].*step 2"),
    ):
        next(iter(collector))


def test_a_reward_that_overflows_is_an_error():
    class Rich(Countdown):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, 1e300, *rest

    with (
        Collector(Rich, frames_per_batch=6) as collector,
        pytest.raises(EnvError, match="reward 1e\\+300 at step 0, which overflows"),
    ):
        next(iter(collector))


def test_the_layout_can_be_seen_without_collecting():
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=12, total_frames=12) as collector:
        fake = collector.fake_tensordict()
        real = next(iter(collector))
    assert isinstance(fake, TensorDict)
    assert fake.shape == real.shape
    assert fake.names == real.names
    assert set(fake.keys(True, True)) == set(real.keys(True, True))
    assert not fake["observation"].any()


def test_step_count_of_the_environment_is_not_overwritten():
    class Counting(Countdown):
        observation_space = gym.spaces.Dict(step_count=gym.spaces.Discrete(9))

        def _observe(self):
            return {"step_count": self.t}, {}

    with pytest.raises(ConfigError, match="already delivers 'step_count'"):
        Collector(Counting, frames_per_batch=4, max_frames_per_traj=3)


class Picture(Countdown):
    """Shows 84 x 84 bytes, which are copied straight from the environment's array."""

    observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def _observe(self):
        return np.full((84, 84), self.t, np.uint8), {}


@pytest.mark.parametrize(
    "make",
    [Countdown, Picture, lambda: gym.vector.SyncVectorEnv([Countdown, Countdown])],
    ids=["one", "picture", "vector"],
)
def test_a_dropped_collector_keeps_nothing_for_the_garbage_collector(make):
    env = make()
    gone = weakref.ref(env)
    gc.collect()
    gc.disable()
    try:
        with Collector(env, frames_per_batch=8) as collector:
            collector.next()
        del collector, env
        assert gone() is None
    finally:
        gc.enable()
