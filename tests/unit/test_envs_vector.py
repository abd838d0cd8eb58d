"""Vectorised environments: what they return is what a batch holds, or an error says why not."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from clocks_rig import Clock, Plain, clocks
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from gleanrl import ConfigError, EnvError
from gleanrl.collectors import Collector
from gleanrl.data import Categorical

MODES = ["SameStep", "Disabled", "NextStep"]
DENSE = ["SameStep", "Disabled"]


class Everything(gym.Env):
    """Observes the last action, which is a tuple of every kind of space, and ends in turn."""

    parts = spaces.Tuple(
        (
            spaces.Discrete(3, start=4),
            spaces.Box(-1, 1, (2, 2), np.float64),
            spaces.MultiDiscrete([2, 3], start=[1, 0]),
            spaces.MultiBinary(3),
        )
    )
    action_space = parts
    observation_space = spaces.Dict({"echo": parts, "t": spaces.Discrete(100)})

    def __init__(self, length=4):
        self.length, self.t = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        nothing = (np.int64(4), np.zeros((2, 2)), np.array([1, 0]), np.zeros(3, np.int8))
        return {"echo": nothing, "t": 0}, {}

    def step(self, action):
        assert action in self.action_space
        self.t += 1
        return {"echo": action, "t": self.t}, 0.5, self.t == self.length, False, {}


class Native(VectorEnv):
    """A natively vectorised environment that returns what it is told, or what a callable says."""

    def __init__(self, mode, envs=3, space=None, **returns):
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = envs
        self.single_observation_space = space or spaces.Box(-9, 9, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, envs)
        self.action_space = batch_space(self.single_action_space, envs)
        self.seen = np.zeros((envs, 2), self.single_observation_space.dtype)
        self.given = returns
        self.reset_with = []
        self.actions = []

    def reset(self, *, seed=None, options=None):
        self.reset_with.append((seed, options))
        return self.seen, {}

    def step(self, actions):
        self.actions.append(actions)
        nobody = np.zeros(self.num_envs, bool)
        usual = {
            "observation": self.seen,
            "reward": np.ones(self.num_envs),
            "terminated": nobody,
            "truncated": nobody,
            "infos": {},
        }
        now = len(self.actions) - 1
        given = {name: v(now) if callable(v) else v for name, v in self.given.items()}
        return tuple({**usual, **given}.values())


def collect(env, policy=None, steps=1, batches=1, **options):
    """Return ``batches`` batches of ``steps`` steps each, as one."""
    frames = env.num_envs * steps
    with Collector(env, policy, frames_per_batch=frames, **options) as collector:
        return torch.cat([collector.next() for _ in range(batches)], 1)


def always(*action):
    """Return a policy that takes these actions."""
    return lambda td: td.set("action", torch.tensor(action))


def everything(mode, **kwargs):
    return SyncVectorEnv(
        [lambda n=n: Everything(n) for n in (2, 3, 5)], autoreset_mode=mode, **kwargs
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_every_kind_of_space_goes_in_and_comes_out(mode, copy):
    got = collect(everything(mode, copy=copy), steps=5, batches=2)
    # Actions are stored as indices from zero, whatever the space starts at.
    offsets = {"0": 4, "1": 0, "2": torch.tensor([1, 0]), "3": 0}
    for name, offset in offsets.items():
        echo, action = got["next", "echo", name], got["action", name]
        assert torch.equal(echo, (action + offset).to(echo.dtype))
    t = got["t"]
    assert torch.equal(got["next", "t"], t + 1)
    done = got["next", "done"][..., 0]
    assert torch.equal(done, got["next", "t"] == torch.tensor([2, 3, 5])[:, None])
    assert torch.equal(t[:, 1:], torch.where(done[:, :-1], 0, t[:, :-1] + 1))
    assert not got["echo", "1"][t == 0].any()
    going = ~done[:, :-1]
    assert torch.equal(got["echo", "1"][:, 1:][going], got["action", "1"][:, :-1][going])


@pytest.mark.parametrize("mode", DENSE)
@pytest.mark.parametrize("copy", [True, False])
def test_final_observation_is_the_true_one(mode, copy):
    got = collect(clocks([(2,), (3,), (1,)], mode, copy=copy), steps=4, batches=2)
    before, after = got["observation"], got["next", "observation"]
    assert torch.equal(after[..., 2], before[..., 2] + 1)
    assert torch.equal(after[..., 1], before[..., 1])


@pytest.mark.parametrize("mode", MODES)
def test_numeric_info_entries_stand_beside_the_observation(mode):
    env = clocks([(2,), (5,)], mode)
    with pytest.warns(
        UserWarning, match=r"no info .* has 'nothing'.*there were \[.*'left'"
    ) as seen:
        got = collect(env, steps=5, batches=2, info_keys=["left", "nothing"])
    assert len(seen) == 1
    lengths = torch.tensor([[2.0], [5.0]])
    assert torch.equal(got["left"], lengths - got["observation"][..., 2])
    assert torch.equal(got["next", "left"], lengths - got["next", "observation"][..., 2])
    assert not got["nothing"].any()
    assert got["left"].dtype == torch.float32


def test_info_entries_only_some_environments_give_are_zero_for_the_others():
    infos = {"score": np.array([5.0, 6.0, 7.0]), "_score": np.array([True, False, True])}
    env = Native(AutoresetMode.DISABLED, infos=infos)
    got = collect(env, steps=2, info_keys={"score": ((), torch.float64)})
    assert got["next", "score"][:, 0].tolist() == [5.0, 0.0, 7.0]
    assert got["score"][:, 1].tolist() == [5.0, 0.0, 7.0]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("value", "dtype"), [(300, "uint8"), (1.5, "int64"), (0.5, "bool"), (1e39, "float32")]
)
def test_an_info_entry_is_never_cut_to_its_dtype(value, dtype, single):
    class Told(gym.Wrapper):
        def step(self, action):
            return *super().step(action)[:4], {"cost": value}

    def make():
        return Told(gym.make("CartPole-v1"))

    env = make() if single else SyncVectorEnv([make] * 2)
    cost = {"cost": ((), getattr(torch, dtype))}
    with (
        Collector(env, frames_per_batch=2, info_keys=cost) as collector,
        pytest.raises(EnvError, match=f"'cost'.* is .*, which {dtype} of info_keys does not hold"),
    ):
        collector.next()


def test_info_entries_of_another_shape_are_named():
    env = Native(AutoresetMode.DISABLED, infos={"score": np.zeros((3, 2))})
    with pytest.raises(EnvError, match=r"infos\['score'\].*\(3, 2\).*shape \(3,\)"):
        collect(env, info_keys=["score"])


@pytest.mark.parametrize("mode", DENSE)
def test_a_cut_environment_keeps_its_last_observation_and_starts_again(mode):
    # The second clock ends by itself each time: once by termination, once by truncation.
    env = clocks([(9,), (1,), (9,)], mode)
    got = collect(env, steps=2, max_frames_per_traj=1)
    late = got["next", "truncated"][..., 0]
    assert late.tolist() == [[True, True], [False, True], [True, True]]
    assert got["next", "observation"][..., 2].tolist() == [[1, 1]] * 3
    assert got["observation"][..., 2].tolist() == [[0, 0]] * 3
    got = collect(clocks([(9,), (1,), (9,)], mode), steps=3, max_frames_per_traj=2)
    late = got["next", "truncated"][..., 0]
    assert late.tolist() == [[False, True, False], [False, True, False], [False, True, False]]
    after = got["next", "observation"][..., 2]
    assert after.tolist() == [[1, 2, 1], [1, 1, 1], [1, 2, 1]]
    assert got["observation"][..., 2].tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_only_environments_known_to_reset_alone_can_be_cut(mode):
    collect(clocks([(1,)], mode), max_frames_per_traj=2)
    env = clocks([(1,)], mode, wrap=True)
    if mode == "Disabled":
        collect(env, max_frames_per_traj=2)
    else:
        with pytest.raises(ConfigError, match="one by one, which Plain cannot do"):
            collect(env, max_frames_per_traj=2)


def test_same_step_environments_must_return_final_observations():
    over = np.array([True, False, False])
    env = Native(AutoresetMode.SAME_STEP, terminated=over, infos={"x": 1})
    with pytest.raises(EnvError, match=r"environments \[0\] ended, but infos has no 'final_obs'"):
        collect(env)


def test_final_observations_are_looked_for_in_a_dict():
    env = Native(AutoresetMode.SAME_STEP, terminated=np.ones(3, bool), infos=[{}, {}, {}])
    with pytest.raises(EnvError, match=r"infos of type list.*DictInfoToList"):
        collect(env)
    with pytest.raises(EnvError, match=r"infos of type list, and 'x'"):
        collect(Native(AutoresetMode.DISABLED, infos=[{}, {}, {}]), info_keys=["x"])


def test_a_reset_in_the_next_step_does_not_end_the_episode_that_it_begins():
    env = Native(AutoresetMode.NEXT_STEP, terminated=np.ones(3, bool))
    with pytest.raises(EnvError, match="end flag also in steps that only reset it"):
        collect(env, steps=2)


@pytest.mark.parametrize("form", ["objects", "list", "array"])
def test_final_observations_come_as_an_array_or_one_by_one(form):
    over = np.array([True, False, True])
    finals = np.arange(6, dtype=np.float32).reshape(3, 2)
    rows = np.full(3, None, object)
    rows[0], rows[2] = finals[0], finals[2]
    forms = {"objects": rows, "list": rows.tolist(), "array": finals}
    infos = {"final_obs": forms[form], "_final_obs": over}
    got = collect(Native(AutoresetMode.SAME_STEP, terminated=over, infos=infos), steps=2)
    assert got["next", "done"][:, 0, 0].tolist() == [True, False, True]
    assert got["next", "observation"][:, 0].tolist() == [[0, 1], [0, 0], [4, 5]]
    assert not got["observation"][:, 1].any()


def test_a_final_observation_that_does_not_fit_names_its_environment():
    rows = np.full(3, None, object)
    rows[1] = np.zeros(5, np.float32)
    over = np.array([False, True, False])
    env = Native(AutoresetMode.SAME_STEP, terminated=over, infos={"final_obs": rows})
    with pytest.raises(EnvError, match=r"environment 1 \(final_obs\).*shape \(5,\)"):
        collect(env)


@pytest.mark.parametrize(
    ("observation", "match"),
    [
        (np.zeros((3, 4), np.float32), r"'observation' with shape \(3, 4\).*shape \(3, 2\)"),
        (np.zeros((2, 2), np.float32), r"shape \(2, 2\)"),
        (np.zeros((3, 2)), r"dtype float64.*float32.*observation_dtype=torch.float32"),
        (np.zeros((3, 2), np.int32), r"dtype int32"),
    ],
)
def test_observations_are_checked_against_their_space(observation, match):
    with pytest.raises(EnvError, match=match):
        collect(Native(AutoresetMode.DISABLED, observation=observation))


def test_floats_are_cast_on_the_way_in_if_asked():
    wide = spaces.Box(-9, 9, (2,), np.float64)
    observation = np.array([[1.5, 2.5]] * 3)
    env = Native(AutoresetMode.DISABLED, space=wide, observation=observation)
    got = collect(env, observation_dtype=torch.float32)
    assert got["next", "observation"].dtype == torch.float32
    assert got["next", "observation"][:, 0].tolist() == observation.tolist()
    env.given["observation"] = np.full((3, 2), 1e300)
    with pytest.raises(EnvError, match=r"1e\+300, which does not fit float32"):
        collect(env, observation_dtype=torch.float32)


def test_without_a_cast_observations_keep_the_dtype_of_their_space():
    env = Native(AutoresetMode.DISABLED, space=spaces.Box(-9, 9, (2,), np.float64))
    assert collect(env)["observation"].dtype == torch.float64


def test_rewards_become_float32_unless_they_overflow():
    rewards = [np.array([1.5, np.inf, -2.0]), np.array([0.0, 0.0, -1e300])]
    got = collect(Native(AutoresetMode.DISABLED, reward=rewards[0]))
    assert got["next", "reward"][:, 0, 0].tolist() == [1.5, float("inf"), -2.0]
    env = Native(AutoresetMode.DISABLED, reward=lambda t: rewards[t])
    with pytest.raises(EnvError, match=r"environment 2 returned reward -1e\+300 at step 1"):
        collect(env, steps=2)


@pytest.mark.parametrize(
    ("returns", "match"),
    [
        ({"reward": np.ones((3, 1))}, r"shapes \[\(3, 1\), \(3,\), \(3,\)\]; each must be \(3,\)"),
        ({"reward": 1.0}, r"shapes \[\(\), "),
        ({"truncated": np.zeros(2, bool)}, r"\(2,\)\]; each must be \(3,\)"),
        ({"reward": np.array(["a", "b", "c"])}, "rewards of dtype <U1"),
    ],
)
@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_rewards_and_flags_must_be_one_per_environment(mode, returns, match):
    with pytest.raises(EnvError, match=match):
        collect(Native(mode, **returns))


def test_a_step_must_return_five_things():
    native = Native(AutoresetMode.DISABLED)
    native.step = lambda actions: (1, 2, 3, 4)
    with pytest.raises(EnvError, match="it returned 4 instead"):
        collect(native)


def test_a_reset_must_return_two_things():
    native = Native(AutoresetMode.DISABLED)
    native.reset = lambda **_: np.zeros(3)
    with pytest.raises(EnvError, match=r"must return \(observation, infos\)"):
        collect(native)


def test_the_environment_gets_its_own_copy_of_the_actions():
    native = Native(AutoresetMode.DISABLED)
    collect(native, always(1, 0, 1))["action"].zero_()
    assert native.actions[0].tolist() == [1, 0, 1]
    assert native.actions[0] in native.action_space
    assert native.actions[0].flags.owndata


def test_actions_can_be_one_hot():
    native = Native(AutoresetMode.DISABLED)
    collect(native, always([0, 1], [1, 0], [0, 1]), categorical_action_encoding=False)
    assert native.actions[0].tolist() == [1, 0, 1]


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_random_actions_are_drawn_as_if_step_by_step(mode):
    with Collector(Native(mode, envs=5), None, frames_per_batch=5 * 70) as collector:
        torch.manual_seed(0)
        got = collector.next()
    torch.manual_seed(0)
    torch.manual_seed(int(torch.randint(2**62, ())))  # actions have a stream of their own
    expected = torch.stack([Categorical(2).rand((5,)) for _ in range(70)], 1)
    assert torch.equal(got["action"], expected)


def test_seeds_reach_every_environment():
    env = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode="SameStep")
    expected = [gym.make("CartPole-v1").reset(seed=5 + i)[0].tolist() for i in range(3)]
    with Collector(env, None, frames_per_batch=3) as collector:

        def shown():
            return collector.next()["observation"][:, 0].tolist()

        assert collector.set_seed(5) == 7
        assert shown() == expected
        collector.reset()
        assert shown() != expected
        assert collector.set_seed(5, static_seed=True) == 5
        assert shown() == [expected[0]] * 3


def test_options_reach_the_environments():
    native = Native(AutoresetMode.NEXT_STEP)
    with Collector(native, None, frames_per_batch=3) as collector:
        collector.reset(options={"low": 3})
    assert native.reset_with[-1] == (None, {"low": 3})


def test_some_can_be_reset_where_the_environment_can():
    with Collector(clocks([(9,)] * 3), None, frames_per_batch=3) as collector:
        collector.reset([2, 0])
        assert collector.next()["observation"][:, 0, 1].tolist() == [1, 0, 1]
    with (
        Collector(Native(AutoresetMode.NEXT_STEP), None, frames_per_batch=3) as other,
        pytest.raises(ConfigError, match=r"environments \[2\] cannot be reset alone: Native"),
    ):
        other.reset([2])


def test_a_vector_environment_must_say_how_it_resets():
    with pytest.raises(ConfigError, match=r"Native.metadata\['autoreset_mode'\] is None"):
        collect(Native(None))


@pytest.mark.slow
def test_unshared_async_environments_that_would_reset_twice_are_refused():
    env = AsyncVectorEnv([Clock], shared_memory=False, context="forkserver")
    try:
        with pytest.raises(ConfigError, match="shared_memory=True"):
            collect(env)
        with pytest.raises(ConfigError, match="shared_memory=True"):
            collect(Plain(env))
    finally:
        env.close()


def test_closing_twice_is_fine():
    collector = Collector(clocks([(1,)]), None, frames_per_batch=1)
    collector.shutdown()
    collector.shutdown()


@pytest.mark.parametrize("wrap", [clocks, lambda lengths: VectorWrapper(clocks(lengths))])
def test_vector_environments_are_told_from_others(wrap):
    assert collect(wrap([(1,), (1,)])).shape == (2, 1)


class Reusing(gym.Env):
    """Counts in memory that it, or all of its class, return again and again."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(0, 100, (2,))
    common = np.zeros(2, np.float32)

    def __init__(self, number, kind):
        self.number, self.kind = number, kind
        self.memory = Reusing.common if kind == "of the class" else np.zeros(2, np.float32)
        self.nested = {"count": self.memory}
        self.nests = "dict" in kind
        if self.nests:
            self.observation_space = gym.spaces.Dict(count=Reusing.observation_space)

    def _show(self, steps):
        self.steps = steps
        shown = np.full(2, 10 * self.number + steps, np.float32)
        if self.kind == "kept in an episode" and steps == 0:
            self.memory = shown
        self.memory[:] = shown
        if self.kind == "dict":  # the dict is used again, its arrays are fresh
            self.nested["count"] = shown
        if self.kind == "copied by reset" and steps == 0:
            return shown
        return shown if self.kind == "fresh" else self.nested if self.nests else self.memory

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show(0), {}

    def step(self, action):
        return self._show(self.steps + 1), 0.0, self.steps == 3, False, {}


@pytest.mark.covering
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(
    "kind",
    [
        *("fresh", "array", "dict", "array in dict"),
        *("copied by reset", "kept in an episode", "of the class"),
    ],
)
def test_members_may_return_one_memory_again_and_again(kind, mode, wrapped):
    makers = [functools.partial(Reusing, number, kind) for number in range(3)]
    env = whole = SyncVectorEnv(makers, copy=False, autoreset_mode=mode)
    if wrapped:
        whole = gym.wrappers.vector.RecordEpisodeStatistics(env)
    with Collector(whole, frames_per_batch=3, total_frames=36) as collector:
        after = torch.cat([batch["next"] for batch in collector], 1)
    values = after["count" if "dict" in kind else "observation"]
    expected = [[10 * number + step for step in (1, 2, 3)] * 4 for number in range(3)]
    assert values[..., 0].tolist() == expected
    copies = kind != "fresh" and (mode is AutoresetMode.SAME_STEP or kind == "of the class")
    assert ("step" in vars(env.envs[0])) is copies
