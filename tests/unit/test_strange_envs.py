"""Environments that do what nobody expects: replaced methods, reused memory, odd rewards."""

import itertools
import types

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from torchrl.envs import GymEnv as TorchRLGymEnv

from gleanrl import ConfigError, EnvError
from gleanrl.collectors import Collector
from gleanrl.envs import GymEnv, SerialEnv


class Line(gym.Env):
    """Walks 0, 1, 2, ...; ends after five steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.see(), {}

    def step(self, action):
        self.count += 1
        return self.see(), self.reward(), self.count >= 5, False, {}

    def see(self):
        return np.full(2, self.count, np.float32)

    def reward(self):
        return float(self.count)


def collect(env, frames=12, **options):
    collector = Collector(env, None, frames_per_batch=frames, total_frames=frames, **options)
    try:
        return next(iter(collector))
    finally:
        collector.shutdown()


# -- replaced methods ------------------------------------------------------------------------------


class Scaled(GymEnv):
    """Scales rewards in `_step`."""

    def __init__(self, factor=10.0):
        super().__init__(Line)
        self.factor = factor

    def _step(self, tensordict):
        after = super()._step(tensordict)
        return after.set("reward", after["reward"] * self.factor)


class Shifted(GymEnv):
    """Shifts the first observation in `_reset`."""

    def __init__(self):
        super().__init__(Line)

    def _reset(self, tensordict=None, **options):
        root = super()._reset(tensordict, **options)
        return root.set("observation", root["observation"] + 100)


class Outer(GymEnv):
    """Scales rewards in `step`, which is what a caller sees."""

    def __init__(self):
        super().__init__(Line)

    def step(self, tensordict):
        finished = super().step(tensordict)
        finished["next", "reward"] *= 10
        return finished


def patched(name="_step"):
    """Return an environment whose method was replaced on the instance."""
    env = GymEnv(Line)
    plain = getattr(env, name)

    def scaled(self, tensordict):
        out = plain(tensordict)
        key = "reward" if name == "_step" else ("next", "reward")
        return out.set(key, out[key] * 10)

    setattr(env, name, types.MethodType(scaled, env))
    return env


def scaled_rewards(data):
    """Return whether rewards are ten times the count that the observation shows."""
    return torch.equal(data["next", "reward"][..., 0], data["next", "observation"][..., 0] * 10)


SCALING = [Scaled, Outer, patched, lambda: patched("step")]


@pytest.mark.covering
@pytest.mark.parametrize("make", SCALING)
@pytest.mark.parametrize(
    "arrange",
    [
        lambda make: (make, {}),
        lambda make: (make(), {}),
        lambda make: (make, {"num_envs": 3}),
        lambda make: ([make, make], {}),
        lambda make: (SerialEnv(2, make), {}),
        lambda make: (SerialEnv(2, lambda: SerialEnv(2, make)), {}),
    ],
)
def test_replaced_steps_are_taken(make, arrange):
    env, options = arrange(make)
    data = collect(env, frames=24, **options)
    assert scaled_rewards(data)
    assert data["next", "reward"].max() == 50


@pytest.mark.parametrize("env", [Shifted, [Shifted, Shifted], lambda: SerialEnv(2, Shifted)])
def test_replaced_resets_are_taken(env):
    data = collect(env, frames=16)
    firsts = data["observation"][..., 0][data["next", "observation"][..., 0] == 1]
    assert len(firsts) > 2
    assert (firsts == 100).all()


def test_a_mixture_of_replaced_and_plain_environments_is_right():
    data = collect([Scaled, lambda: GymEnv(Line)])
    rewards, shown = data["next", "reward"][..., 0], data["next", "observation"][..., 0]
    assert torch.equal(rewards, shown * torch.tensor([[10.0], [1.0]]))


def test_a_batch_whose_own_step_is_replaced_is_right():
    class Batch(SerialEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("reward", after["reward"] * 10)

    assert scaled_rewards(collect(Batch(2, lambda: GymEnv(Line))))


def test_a_method_replaced_on_the_class_counts(monkeypatch):
    plain = GymEnv._step

    def scaled(self, tensordict):
        after = plain(self, tensordict)
        return after.set("reward", after["reward"] * 10)

    monkeypatch.setattr(GymEnv, "_step", scaled)
    assert scaled_rewards(collect(GymEnv(Line)))


def test_random_actions_are_drawn_by_a_replaced_rand_action():
    class Lazy(GymEnv):
        def __init__(self):
            super().__init__(Line)

        def rand_action(self, tensordict=None):
            return super().rand_action(tensordict).set("action", torch.tensor(2))

    for env in (Lazy, [Lazy, Lazy], SerialEnv(2, Lazy)):
        assert (collect(env)["action"] == 2).all()


def test_closing_is_told_to_a_subclass():
    closed = []

    class Told(GymEnv):
        def _close(self):
            closed.append(self)
            super()._close()

    collect(lambda: Told(Line))
    assert len(closed) == 1


def test_a_subclass_that_replaces_nothing_gives_the_same_data():
    class Named(GymEnv):
        def __init__(self):
            super().__init__("CartPole-v1")
            self.set_seed(3)

        def extra(self):
            return 1

    def plain():
        env = GymEnv("CartPole-v1")
        env.set_seed(3)
        return env

    torch.manual_seed(0)
    first = collect(Named, frames=64)
    torch.manual_seed(0)
    assert (first == collect(plain, frames=64)).all()


@pytest.mark.parametrize("num_envs", [None, 2])
def test_a_step_replaced_between_rollouts_is_taken_from_the_next_on(num_envs):
    made = []

    def make():
        made.append(Line())
        return made[-1]

    collector = Collector(make, None, frames_per_batch=4, total_frames=8, num_envs=num_envs)
    batches = iter(collector)
    next(batches)
    for env in made:
        plain = env.step

        def step(action, plain=plain):
            return (plain(action)[0], -1.0, *plain(action)[2:])

        env.step = step
    assert (next(batches)["next", "reward"] == -1).all()
    collector.shutdown()


def test_a_vector_step_replaced_between_rollouts_is_taken_from_the_next_on():
    env = SyncVectorEnv([Line, Line], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    collector = Collector(env, None, frames_per_batch=4, total_frames=8)
    batches = iter(collector)
    next(batches)
    plain = env.step

    def step(actions):
        observation, _, *rest = plain(actions)
        return observation, np.array([-1.0, -2.0]), *rest

    env.step = step
    assert next(batches)["next", "reward"][..., 0].tolist() == [[-1, -1], [-2, -2]]
    collector.shutdown()


def test_a_step_of_a_tensordict_environment_replaced_between_rollouts_is_taken():
    env = TorchRLGymEnv("CartPole-v1")
    collector = Collector(env, None, frames_per_batch=4, total_frames=8)
    batches = iter(collector)
    next(batches)
    plain = env.step_and_maybe_reset

    def scaled(tensordict):
        finished, root = plain(tensordict)
        finished["next", "reward"].mul_(10)
        return finished, root

    env.step_and_maybe_reset = scaled
    assert (next(batches)["next", "reward"] == 10).all()
    collector.shutdown()


def test_a_step_replaced_where_it_would_not_be_noticed_is_an_error():
    env = GymEnv(Line)
    collector = Collector(env, None, frames_per_batch=4, total_frames=8)
    batches = iter(collector)
    next(batches)
    env._step = lambda tensordict: tensordict
    with pytest.raises(ConfigError, match="was replaced after the collector was built"):
        next(batches)
    collector.shutdown()


def test_a_check_that_the_user_replaced_stays():
    def make():
        env = gym.wrappers.OrderEnforcing(Line())
        plain = env.step

        def step(action):
            observation, reward, *rest = plain(action)
            return observation, reward * 10, *rest

        env.step = step
        return env

    assert scaled_rewards(collect(make))


# -- memory that is used again ---------------------------------------------------------------------


class Reusing(Line):
    """Everything that it returns lies in memory that it uses again."""

    def __init__(self, number=np.float64):
        self.shown = np.zeros(2, np.float32)
        self.paid, self.over = np.zeros((), number), np.zeros((), bool)

    def see(self):
        self.shown[:] = self.count
        return self.shown

    def reward(self):
        self.paid[...] = self.count
        return self.paid

    def step(self, action):
        observation, reward, over, *rest = super().step(action)
        self.over[...] = over
        return observation, reward, self.over, *rest


class Shared(Reusing):
    """The same, in memory that all environments of the class use."""

    shown, paid, over = np.zeros(2, np.float32), np.zeros(()), np.zeros((), bool)

    def __init__(self, offset=0):
        self.offset = offset

    def see(self):
        self.shown[:] = self.count + self.offset
        return self.shown

    def reward(self):
        self.paid[...] = self.count + self.offset
        return self.paid


class InTensors(Line):
    """Rewards in one tensor."""

    def __init__(self):
        self.paid = torch.zeros(())

    def reward(self):
        return self.paid.fill_(self.count)


class LateArray(Line):
    """Plain rewards first, later an array that is used again."""

    paid = np.zeros(())

    def reward(self):
        self.paid[...] = self.count
        return 1.0 if self.count == 1 else self.paid


@pytest.mark.covering
@pytest.mark.parametrize(
    "make", [Reusing, lambda: Reusing(np.int64), InTensors, LateArray, lambda: Shared()]
)
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("around", [lambda make: make, lambda make: lambda: GymEnv(make())])
def test_an_environment_may_use_its_memory_again(make, num_envs, around):
    data = collect(around(make), frames=24, num_envs=num_envs)
    rewards = data["next", "reward"][..., 0]
    assert torch.equal(rewards, data["next", "observation"][..., 0])
    assert rewards.flatten()[:6].tolist() == [1, 2, 3, 4, 5, 1]
    assert torch.equal(data["next", "done"][..., 0], rewards == 5)


@pytest.mark.parametrize(
    "env",
    [
        [lambda: Shared(0), lambda: Shared(100)],
        [lambda: GymEnv(Shared(0)), lambda: GymEnv(Shared(100))],
    ],
)
def test_environments_may_share_their_memory(env):
    data = collect(env, frames=12)
    counted = torch.tensor([1.0, 2, 3, 4, 5, 1])
    assert torch.equal(data["next", "reward"][..., 0], torch.stack([counted, counted + 100]))
    assert torch.equal(data["next", "observation"][..., 0], data["next", "reward"][..., 0])


def test_a_batch_of_ours_may_share_memory():
    class Numbered(Shared):
        made = 0

        def __init__(self):
            super().__init__(100 * Numbered.made)
            Numbered.made += 1

    data = GymEnv(Numbered, num_envs=2).rollout(3)
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3], [101, 102, 103]]


def test_tensors_after_numbers_are_refused():
    class Late(InTensors):
        def reward(self):
            return 1.0 if self.count == 1 else super().reward()

    with pytest.raises(EnvError, match="returned reward tensor.* at step 1; .* was no tensor"):
        collect(Late, frames=4)


# -- odd rewards -----------------------------------------------------------------------------------

ODD = [
    2 + 1j,
    np.complex64(2),
    np.array(2 + 1j),
    "1.5",
    np.str_("1.5"),
    np.array("1.5"),
    b"1.5",
    np.bytes_(b"1"),
    None,
    np.timedelta64(3),
    np.datetime64("2020"),
    np.ones(2),
    [1.0],
    10**400,
    object(),
]


@pytest.mark.covering
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{type(odd).__name__}")
@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize(
    "arrange", [lambda make: make, lambda make: [make, make], lambda make: GymEnv(make())]
)
def test_odd_rewards_are_errors_that_name_them(odd, since, arrange):
    class Odd(Line):
        def reward(self):
            return odd if self.count >= since else 1.0

    with pytest.raises(EnvError, match=f"environment 0 returned reward .* at step {since - 1}"):
        collect(arrange(Odd))


@pytest.mark.parametrize("odd", ODD[:6], ids=lambda odd: f"{type(odd).__name__}")
def test_odd_rewards_in_our_own_environment_are_errors(odd):
    class Odd(Line):
        def reward(self):
            return odd

    with pytest.raises(EnvError, match="environment 0 returned reward"):
        GymEnv(Odd()).rollout(2)


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("odd", [np.array([1j, 2]), np.array(["1.5", "2"]), ["1.5", "2"]])
def test_odd_rewards_of_vector_environments_are_errors(odd, since):
    class Odd(SyncVectorEnv):
        taken = 0

        def step(self, actions):
            observation, reward, *rest = super().step(actions)
            self.taken += 1
            return observation, odd if self.taken > since else reward, *rest

    env = Odd([Line, Line], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    with pytest.raises(EnvError, match=f"rewards of dtype .* at step {since}"):
        collect(env)


@pytest.mark.parametrize("odd", [["no", "no"], [None, None], np.array([False, True], object)])
def test_odd_flags_of_vector_environments_are_errors(odd):
    class Odd(SyncVectorEnv):
        def step(self, actions):
            observation, reward, _, truncated, infos = super().step(actions)
            return observation, reward, odd, truncated, infos

    env = Odd([Line, Line], autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    with pytest.raises(EnvError, match="returned terminated of dtype .* at step 0"):
        collect(env)


@pytest.mark.parametrize(
    "number",
    [
        *(2, True, np.float16(2), np.int8(2), np.array(2), np.bool_(True), torch.tensor(2.0)),
        torch.tensor(2.0, dtype=torch.bfloat16),
    ],
)
def test_numbers_of_any_kind_are_rewards(number):
    class Paid(Line):
        def reward(self):
            return number

    assert (collect(Paid)["next", "reward"] == float(number)).all()


@pytest.mark.parametrize(
    ("flag", "since"),
    [("no", 0), (None, 0), (np.array(["x"]), 0), (2, 0), ("no", 2), (float("nan"), 2), ({1: 2}, 2)],
)
def test_odd_flags_are_errors(flag, since):
    steps = itertools.count()

    class Odd(Line):
        def step(self, action):
            observation, reward, terminated, *rest = super().step(action)
            return observation, reward, flag if next(steps) >= since else terminated, *rest

    with pytest.raises(EnvError, match="environment 0 returned terminated="):
        collect(Odd)


# -- odd names and information ---------------------------------------------------------------------


class Named(Line):
    """Shows what it counts under names of its own."""

    def __init__(self, *names, info=None, flag=None):
        space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = spaces.Dict(dict.fromkeys(names, space))
        self.info, self.flag = info, flag

    def see(self):
        return {name: super(Named, self).see() for name in self.observation_space.spaces}

    def step(self, action):
        shown, paid, over, late, _ = super().step(action)
        return shown, paid, over if self.flag is None else self.flag, late, self.info


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("num_envs", [None, 2])
def test_entries_of_the_environment_called_as_a_collectors_stay(fast, num_envs):
    names = ("is_init", "policy_version", "step_count", "traj_ids", "mask")
    data = collect(lambda: Named(*names), fast=fast, num_envs=num_envs)
    counted = torch.arange(data.shape[-1]) % 5
    for name in names:
        assert torch.equal(data[name], counted[:, None].float().expand(*data.shape, 2))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("env", "options", "error", "message"),
    [
        (Named(1, "1"), {}, ConfigError, r"entries called \['1', '1'\]: names must differ"),
        (Named("_a"), {}, ConfigError, r"entries called \['_a'\]: .* an underscore"),
        (
            Named("policy_version"),
            {"track_policy_version": True},
            ConfigError,
            "track_policy_version delivers 'policy_version', but the environment",
        ),
        (Named("a", flag=[False]), {}, EnvError, r"environment 0 returned terminated=\[False\]"),
        (Named("a"), {"info_keys": ["k"]}, EnvError, "environment 0 returned info None, not a di"),
        (
            Named("a", info={"k": "word"}),
            {"info_keys": ["k"]},
            EnvError,
            r"environment 0 gave info\['k'\] = 'word'; a number of shape \(\)",
        ),
    ],
)
def test_what_could_not_be_delivered_right_is_an_error(env, options, error, message, fast):
    with pytest.raises(error, match=message):
        collect(env, fast=fast, **options)


# -- entries without dimensions --------------------------------------------------------------------


class Indexed(gym.Env):
    """Observes an index, acts by a number without dimensions."""

    observation_space = spaces.Dict(
        {"at": spaces.Discrete(9), "x": spaces.Box(0, 9, (), np.float32)}
    )
    action_space = spaces.Box(-1, 1, (), np.float32)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return self.see(), {}

    def step(self, action):
        assert np.shape(action) == ()
        self.at += 1
        return self.see(), 1.0, self.at == 8, False, {}

    def see(self):
        return {"at": self.at, "x": np.array(self.at, np.float32)}


class Guess(torch.nn.Module):
    """Acts on entries without dimensions."""

    in_keys, out_keys = ("at", "x"), ("action",)

    def forward(self, at, x):
        return torch.tanh(at + x)


def by_tensordict(tensordict):
    """Act, without any keys declared."""
    return tensordict.set("action", torch.tanh(tensordict["x"]))


@pytest.mark.parametrize("policy", [None, Guess(), by_tensordict])
@pytest.mark.parametrize("env", [Indexed, [Indexed, Indexed], lambda: GymEnv(Indexed())])
def test_entries_without_dimensions_are_collected(policy, env):
    collector = Collector(env, policy, frames_per_batch=16, total_frames=32)
    data = list(collector)[-1]
    collector.shutdown()
    assert data["at"].shape == data["action"].shape == data["x"].shape == data.shape
    assert data["at"].flatten()[:8].tolist() == list(range(8))


def test_frozen_lake_is_collected_with_a_policy():
    embedding = torch.nn.Embedding(16, 4)
    collector = Collector(
        "FrozenLake-v1",
        lambda td: td.set("action", embedding(td["observation"]).argmax(-1)),
        frames_per_batch=20,
        total_frames=20,
    )
    assert next(iter(collector))["observation"].shape == (20,)
    collector.shutdown()
