"""Vectorised environments: what they return is what a batch holds, or an error says why not."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from pool_rig import (
    ACTION,
    OBS,
    REWARD,
    TRUNCATED,
    Clock,
    Plain,
    Uniform,
    clocks,
    collect_all,
    serve,
)

from gleanrl import ConfigError, EnvError
from gleanrl.core.keys import next_key
from gleanrl.envs.gymnasium import GymOptions
from gleanrl.envs.vector import is_vector_env, make_vector
from gleanrl.memory.arena import RolloutWindow

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
    """A natively vectorised environment that returns what it is told to."""

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
        return tuple({**usual, **self.given}.values())


def bind(env, steps=4):
    """Reset ``env`` and bind it to a fresh window."""
    layout = env.layout
    after = (*layout.observations, *layout.rewards)
    flags = [key for group in layout.dones for key in group.keys()]
    fields = [*layout.observations, *layout.actions]
    fields += [type(f)(next_key(f.key), f.shape, f.dtype) for f in after]
    fields += [type(fields[0])(next_key(key), (1,), torch.bool) for key in flags]
    window = RolloutWindow.allocate(fields, layout.num_envs, steps)
    carry = RolloutWindow.allocate(layout.observations, layout.num_envs, 1)
    env.reset(carry)
    env.begin(window, carry)
    return window, carry


def everything(mode, **kwargs):
    return SyncVectorEnv(
        [lambda n=n: Everything(n) for n in (2, 3, 5)], autoreset_mode=mode, **kwargs
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_every_kind_of_space_goes_in_and_comes_out(mode, copy):
    source = serve(everything(mode, copy=copy), Uniform)
    got = collect_all(source, [6, 4])
    # Actions are stored as indices from zero, whatever the space starts at.
    offsets = {"0": 4, "1": 0, "2": torch.tensor([1, 0]), "3": 0}
    for name, offset in offsets.items():
        echo, action = got["next", "echo", name], got["action", name]
        assert torch.equal(echo, (action + offset).to(echo.dtype))
    t = got["t",]
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
    got = collect_all(serve(clocks([(2,), (3,), (1,)], mode, copy=copy)), [5, 3])
    assert torch.equal(got[next_key(OBS)][..., 2], got[OBS][..., 2] + 1)
    assert torch.equal(got[next_key(OBS)][..., 1], got[OBS][..., 1])


@pytest.mark.parametrize("mode", MODES)
def test_numeric_info_entries_stand_beside_the_observation(mode):
    source = serve(clocks([(2,), (5,)], mode), info_keys=["left", "nothing"])
    with pytest.warns(
        UserWarning, match=r"no info .* has 'nothing'.*there were \[.*'left'"
    ) as seen:
        got = collect_all(source, [7, 3])
    assert len(seen) == 1
    lengths = torch.tensor([[2.0], [5.0]])
    assert torch.equal(got["left",], lengths - got[OBS][..., 2])
    assert torch.equal(got["next", "left"], lengths - got[next_key(OBS)][..., 2])
    assert not got["nothing",].any()
    assert got["left",].dtype == torch.float32


def test_info_entries_only_some_environments_give_are_zero_for_the_others():
    infos = {"score": np.array([5.0, 6.0, 7.0]), "_score": np.array([True, False, True])}
    env = make_vector(
        Native(AutoresetMode.DISABLED, infos=infos),
        GymOptions(info_keys={"score": ((), torch.float64)}),
    )
    window, _ = bind(env)
    env.step(0, ())
    assert window.tensor(("next", "score"))[:, 0].tolist() == [5.0, 0.0, 7.0]
    assert window.tensor(("score",))[:, 1].tolist() == [5.0, 0.0, 7.0]


def test_info_entries_of_another_shape_are_named():
    infos = {"score": np.zeros((3, 2))}
    env = make_vector(Native(AutoresetMode.DISABLED, infos=infos), GymOptions(info_keys=["score"]))
    bind(env)
    with pytest.raises(EnvError, match=r"infos\['score'\].*\(3, 2\).*shape \(3,\)"):
        env.step(0, ())


@pytest.mark.parametrize("mode", DENSE)
def test_a_cut_environment_keeps_its_last_observation_and_starts_again(mode):
    env = make_vector(clocks([(9,), (1,), (9,)], mode))
    assert env.can_cut
    window, _ = bind(env)
    assert sorted(env.step(0, [2, 1])) == [1, 2]
    assert sorted(env.step(1, [0])) == [0, 1]
    env.finish(2)
    late = window.tensor(next_key(TRUNCATED))[:, :2, 0]
    # The second clock ended by itself both times: once by termination, once by truncation.
    assert late.tolist() == [[False, True], [False, True], [True, False]]
    assert window.tensor(next_key(OBS))[:, :2, 2].tolist() == [[1, 2], [1, 1], [1, 1]]
    assert window.tensor(OBS)[:, 1:3, 2].tolist() == [[1, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize("mode", MODES)
def test_only_environments_known_to_reset_alone_can_be_cut(mode):
    assert make_vector(clocks([(1,)], mode)).can_cut
    assert make_vector(clocks([(1,)], mode, wrap=True)).can_cut == (mode == "Disabled")


def test_same_step_environments_must_return_final_observations():
    over = np.array([True, False, False])
    env = make_vector(Native(AutoresetMode.SAME_STEP, terminated=over, infos={"x": 1}))
    bind(env)
    with pytest.raises(EnvError, match=r"environments \[0\] ended, but infos has no 'final_obs'"):
        env.step(0, ())


@pytest.mark.parametrize("as_objects", [True, False])
def test_final_observations_come_as_an_array_or_one_by_one(as_objects):
    over = np.array([True, False, True])
    finals = np.arange(6, dtype=np.float32).reshape(3, 2)
    if as_objects:
        rows = np.full(3, None, object)
        rows[0], rows[2] = finals[0], finals[2]
    env = make_vector(
        Native(
            AutoresetMode.SAME_STEP,
            terminated=over,
            infos={"final_obs": rows if as_objects else finals, "_final_obs": over},
        )
    )
    window, _ = bind(env)
    assert env.step(0, ()) == [0, 2]
    assert window.tensor(next_key(OBS))[:, 0].tolist() == [[0, 1], [0, 0], [4, 5]]
    assert not window.tensor(OBS)[:, 1].any()


def test_a_final_observation_that_does_not_fit_names_its_environment():
    rows = np.full(3, None, object)
    rows[1] = np.zeros(5, np.float32)
    env = make_vector(
        Native(
            AutoresetMode.SAME_STEP,
            terminated=np.array([False, True, False]),
            infos={"final_obs": rows},
        )
    )
    bind(env)
    with pytest.raises(EnvError, match=r"environment 1 \(final_obs\).*shape \(5,\)"):
        env.step(0, ())


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
    env = make_vector(Native(AutoresetMode.DISABLED, observation=observation))
    bind(env)
    with pytest.raises(EnvError, match=match):
        env.step(0, ())


def test_floats_are_cast_on_the_way_in_if_asked():
    wide = spaces.Box(-9, 9, (2,), np.float64)
    observation = np.array([[1.5, 2.5]] * 3)
    native = Native(AutoresetMode.DISABLED, space=wide, observation=observation)
    env = make_vector(native, GymOptions(observation_dtype=torch.float32))
    window, _ = bind(env)
    env.step(0, ())
    assert window.tensor(next_key(OBS)).dtype == torch.float32
    assert window.tensor(next_key(OBS))[:, 0].tolist() == observation.tolist()
    native.given["observation"] = np.full((3, 2), 1e300)
    with pytest.raises(EnvError, match=r"1e\+300, which does not fit float32"):
        env.step(1, ())


def test_without_a_cast_observations_keep_the_dtype_of_their_space():
    env = make_vector(Native(AutoresetMode.DISABLED, space=spaces.Box(-9, 9, (2,), np.float64)))
    window, _ = bind(env)
    env.step(0, ())
    assert window.tensor(OBS).dtype == torch.float64


def test_rewards_become_float32_unless_they_overflow():
    native = Native(AutoresetMode.DISABLED, reward=np.array([1.5, np.inf, -2.0]))
    env = make_vector(native)
    window, _ = bind(env)
    env.step(0, ())
    env.finish(1)
    assert window.tensor(next_key(REWARD))[:, 0, 0].tolist() == [1.5, float("inf"), -2.0]
    native.given["reward"] = np.array([0.0, 0.0, -1e300])
    env.step(1, ())
    with pytest.raises(EnvError, match=r"environment 2 returned reward -1e\+300 at step 1"):
        env.finish(2)


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
    source_env = make_vector(Native(mode, **returns))
    bind(source_env)
    with pytest.raises(EnvError, match=match):
        source_env.step(0, ()) if mode is AutoresetMode.DISABLED else source_env.step(0)


def test_a_step_must_return_five_things():
    native = Native(AutoresetMode.DISABLED)
    native.step = lambda actions: (1, 2, 3, 4)
    env = make_vector(native)
    bind(env)
    with pytest.raises(EnvError, match="it returned 4 instead"):
        env.step(0, ())


def test_a_reset_must_return_two_things():
    native = Native(AutoresetMode.DISABLED)
    native.reset = lambda **_: np.zeros(3)
    with pytest.raises(EnvError, match=r"must return \(observation, infos\)"):
        bind(make_vector(native))


def test_the_environment_gets_its_own_copy_of_the_actions():
    native = Native(AutoresetMode.DISABLED)
    env = make_vector(native)
    window, _ = bind(env)
    window.tensor(ACTION)[:, 0] = torch.tensor([1, 0, 1])
    env.step(0, ())
    window.tensor(ACTION).zero_()
    assert native.actions[0].tolist() == [1, 0, 1]
    assert native.actions[0] in native.action_space


def test_actions_can_be_one_hot():
    native = Native(AutoresetMode.DISABLED)
    env = make_vector(native, GymOptions(categorical=False))
    window, _ = bind(env)
    window.tensor(ACTION)[:, 0] = torch.tensor([[0, 1], [1, 0], [0, 1]])
    env.step(0, ())
    assert native.actions[0].tolist() == [1, 0, 1]


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_random_actions_are_drawn_as_if_step_by_step(mode):
    env = make_vector(Native(mode, envs=5))
    window, _ = bind(env, steps=70)
    torch.manual_seed(0)
    for t in range(70):
        env.random(t)
    torch.manual_seed(0)
    expected = torch.stack([env.action_specs[ACTION].rand((5,)) for _ in range(70)], 1)
    assert torch.equal(window.tensor(ACTION), expected)


def test_seeds_reach_every_environment():
    env = make_vector(
        SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode="SameStep")
    )
    carry = RolloutWindow.allocate(env.layout.observations, 3, 1)
    assert env.seed(5) == 7
    env.reset(carry)
    expected = [gym.make("CartPole-v1").reset(seed=5 + i)[0].tolist() for i in range(3)]
    assert carry.tensor(OBS)[:, 0].tolist() == expected
    env.reset(carry)
    assert carry.tensor(OBS)[:, 0].tolist() != expected
    assert env.seed(5, static=True) == 5
    env.reset(carry)
    assert carry.tensor(OBS)[:, 0].tolist() == [expected[0]] * 3


def test_options_reach_the_environments():
    native = Native(AutoresetMode.NEXT_STEP)
    env = make_vector(native)
    bind(env)
    carry = RolloutWindow.allocate(env.layout.observations, 3, 1)
    env.reset(carry, low=3)
    assert native.reset_with[-1] == (None, {"low": 3})


def test_some_can_be_reset_where_the_environment_can():
    env = make_vector(clocks([(9,)] * 3))
    _, carry = bind(env)
    env.reset(carry, [2, 0])
    assert carry.tensor(OBS)[:, 0, 1].tolist() == [1, 0, 1]
    other = make_vector(Native(AutoresetMode.NEXT_STEP))
    with pytest.raises(ConfigError, match=r"environments \[2\] cannot be reset alone: Native"):
        other.reset(carry, [2])


def test_a_vector_environment_must_say_how_it_resets():
    with pytest.raises(ConfigError, match=r"Native.metadata\['autoreset_mode'\] is None"):
        make_vector(Native(None))


@pytest.mark.slow
def test_unshared_async_environments_that_would_reset_twice_are_refused():
    env = AsyncVectorEnv([Clock], shared_memory=False, context="forkserver")
    try:
        with pytest.raises(ConfigError, match="shared_memory=True"):
            make_vector(env)
        with pytest.raises(ConfigError, match="shared_memory=True"):
            make_vector(Plain(env))
    finally:
        env.close()


def test_closing_twice_is_fine():
    env = make_vector(clocks([(1,)]))
    env.close()
    env.close()


def test_vector_environments_are_told_from_others():
    assert is_vector_env(clocks([(1,)]))
    assert is_vector_env(VectorWrapper(clocks([(1,)])))
    assert not is_vector_env(gym.make("CartPole-v1"))
    assert not is_vector_env("CartPole-v1")
