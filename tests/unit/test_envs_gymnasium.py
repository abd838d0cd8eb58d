"""Gymnasium environments on their way into a batch: what is refused, and what carries over."""

import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from gleanrl import ConfigError, EnvError
from gleanrl.collectors import Collector
from gleanrl.envs import GymEnv, SerialEnv


class Plain(gym.Env):
    """Does what it is told to return; counts how often it was closed."""

    action_space = spaces.Discrete(2)

    def __init__(self, space=None, show=None, info=None, end=False, reward=0.0, late=None):
        self.observation_space = spaces.Box(-9, 9, (2,), np.float64) if space is None else space
        self.show = show
        self.info = info or {}
        self.end, self.late, self.reward = end, late, reward
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._right(), {}

    def _right(self):
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {name: np.zeros(part.shape, part.dtype) for name, part in space.items()}
        return np.zeros(space.shape, space.dtype)

    def step(self, action):
        shown = self._right() if self.show is None else self.show
        late = False if self.late is None else self.late
        return shown, self.reward, self.end, late, self.info

    def close(self):
        self.closed += 1


def collector(env, **options):
    return Collector(env, frames_per_batch=12, **options)


def first_batch(env, **options):
    with Collector(env, frames_per_batch=12, **options) as collector:
        return collector.next()


# -- numbers and dtypes ----------------------------------------------------------------------------


def test_a_collector_takes_scientific_notation_and_numpy_counts():
    with Collector(
        "CartPole-v1",
        frames_per_batch=np.int64(4),
        total_frames=1e1 - 2,
        num_envs=2.0,
        init_random_frames=1e0,
        max_frames_per_traj=np.int32(2),
    ) as collector:
        batches = list(collector)
    assert [batch.shape for batch in batches] == [(2, 2)] * 2
    assert batches[0]["next", "truncated"].all(1).tolist() == [[False], [False]]
    assert batches[0]["next", "truncated"][:, 1].all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, "float32", np.dtype("f4"), float])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: collector("CartPole-v1", observation_dtype=dtype),
        lambda dtype: GymEnv("CartPole-v1", observation_dtype=dtype),
    ],
)
def test_observations_are_cast_to_floats_only(make, dtype):
    with pytest.raises(ConfigError) as caught:
        make(dtype)
    assert str(caught.value).startswith(f"observation_dtype ({dtype!r}) must be one of torch.float")


# -- seeds -----------------------------------------------------------------------------------------


def reset_states(*seeds):
    env = gym.make("CartPole-v1")
    return [env.reset(seed=seed)[0].tolist() for seed in seeds]


@pytest.mark.parametrize(
    ("make", "seeds"),
    [
        (lambda: GymEnv("CartPole-v1"), [7]),
        (lambda: GymEnv("CartPole-v1", num_envs=2), [7, 8]),
        (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2)), [7, 8, 9, 10]),
    ],
)
def test_seeds_given_to_an_environment_survive_its_way_into_a_collector(make, seeds):
    env = make()
    env.set_seed(7)
    batch = first_batch(env)
    first = batch["observation"][..., 0, :].reshape(-1, 4)
    assert first.tolist() == reset_states(*seeds)


def test_seeds_that_were_used_are_not_used_again():
    env = GymEnv("CartPole-v1")
    env.set_seed(7)
    env.reset()
    assert first_batch(env)["observation"][0].tolist() not in reset_states(7)


def cartpole_vector():
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda: collector("CartPole-v1", num_envs=2), 4),
        (lambda: collector(cartpole_vector()), 4),
        (lambda: GymEnv("CartPole-v1"), 3),
    ],
)
@pytest.mark.parametrize("bad", [-1, 1.5, "x"])
def test_a_seed_that_is_refused_leaves_nothing_behind(make, last, bad):
    env = make()
    with pytest.raises(ConfigError, match=r"^seed \("):
        env.set_seed(bad)
    if isinstance(env, GymEnv):
        env.reset()
    assert env.set_seed(np.int64(3)) == last
    env.close() if isinstance(env, GymEnv) else env.shutdown()


def test_collecting_goes_on_after_a_seed_that_was_refused():
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=4) as collector:
        with pytest.raises(ConfigError, match=r"seed \(-1\) must"):
            collector.set_seed(-1)
        assert collector.set_seed(5) == 6
        assert collector.next()["observation"][:, 0].tolist() == reset_states(5, 6)


# -- info keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("lives", r"info_keys \('lives'\) is a string; pass a list of names: \['lives'\]"),
        (["observation"], "'observation' is the name of something else in a batch"),
        (["reward"], "'reward' is the name of something else"),
        (["action"], "'action' is the name of something else"),
        ({"next": ((), torch.int64)}, "'next' is the name of something else"),
        (["a", "b", "a"], r"\['a', 'b', 'a'\]. names 'a' more than once"),
        (["_a"], "'_a' must be a string that does not start with an underscore"),
        ([3], "3 must be a string"),
        ({"a": torch.int64}, r"'a' is declared as torch.int64; declare a shape and a dtype"),
        ({"a": ((), "int64")}, r"'a' is declared as \(\(\), 'int64'\)"),
        ({"a": (2, torch.int64)}, r"'a' is declared as \(2, torch.int64\)"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda keys: collector(Plain, info_keys=keys),
        lambda keys: GymEnv(Plain, info_keys=keys),
        lambda keys: collector(SyncVectorEnv([Plain]), info_keys=keys),
    ],
)
def test_info_keys_that_cannot_be_are_named(make, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(keys)


def test_info_keys_stand_beside_the_entries_of_the_observation():
    space = spaces.Dict({"speed": spaces.Box(-1, 1, (2,))})
    with pytest.raises(ConfigError, match="'speed' is the name of something else"):
        GymEnv(Plain(space), info_keys=["speed"])
    batch = first_batch(Plain(space, info={"observation": 2.0}), info_keys=["observation"])
    assert batch["next", "observation"].tolist() == [2.0] * 12


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "policy", [lambda x: (x[..., 0] > 9).long(), lambda x: (x.mul_(1)[..., 0] > 9).long()]
)
@pytest.mark.parametrize("given", [Plain, GymEnv])
def test_a_function_of_one_tensor_gets_the_observation_and_no_info(given, policy, fast):
    env = Plain(info={"lives": 3})
    env = GymEnv(env) if given is GymEnv else env
    keys = {"lives": ((), torch.int64)}
    batch = first_batch(env, policy=policy, fast=fast, info_keys=keys)
    assert batch["next", "lives"].tolist() == [3] * 12


@pytest.mark.parametrize(
    "option", [{"info_keys": ["lives"]}, {"categorical_action_encoding": False}]
)
def test_options_that_a_tensordict_environment_cannot_follow_are_refused(option):
    class Own(GymEnv):
        def _step(self, tensordict):
            return super()._step(tensordict)

    with pytest.raises(ConfigError, match=f"{next(iter(option))} .* is for Gymnasium .* a Own"):
        collector(Own(Plain()), **option)
    with collector(GymEnv(Plain()), categorical_action_encoding=False, fast=False) as made:
        assert made.next()["action"].shape == (12, 2)


def test_an_info_key_that_never_comes_is_warned_about_once():
    with Collector(
        Plain(info={"lives": 3, "_x": 1}), frames_per_batch=4, info_keys=["live", "lives"]
    ) as collector:
        with pytest.warns(
            UserWarning, match=r"has 'live', so .* zeros; there were \['lives'\]"
        ) as caught:
            batch = collector.next()
        assert caught[0].filename == __file__
        assert not batch["next", "live"].any()
        assert batch["next", "lives"].tolist() == [3] * 4
        collector.next()  # warnings are errors here


def test_an_info_key_that_comes_now_and_then_is_not_warned_about():
    class Sparse(Plain):
        steps = 0

        def step(self, action):
            self.steps += 1
            self.info = {"score": 5} if self.steps == 3 else {}
            return super().step(action)

    batch = first_batch([Sparse, Plain], info_keys=["score"])
    assert batch["next", "score"].tolist() == [[0, 0, 5, 0, 0, 0], [0] * 6]


# -- what environments return ----------------------------------------------------------------------

INT = np.zeros(2, np.int64)
PAIR = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (1,))})


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            lambda: Plain(show=INT),
            r"'observation' with shape \(2,\) and dtype int64, but .* dtype float64",
        ),
        (lambda: Plain(show=np.zeros(2, np.float32)), "dtype float32, but .* dtype float64"),
        (lambda: Plain(show=[[1.0], [1.0, 2.0]]), "that is no array of shape"),
        (lambda: Plain(end=np.array([True, False])), r"terminated=array\(\[ True, False\]\); it"),
        (lambda: Plain(late=np.zeros(2, bool)), r"truncated=array\(\[False, False\]\); it must"),
        (lambda: Plain(reward=np.ones(2)), r"returned reward array\(\[1., 1.\]\) at step 0"),
    ],
)
def test_what_one_environment_returns_wrongly_is_an_error_whatever_the_others_do(
    odd, others, message
):
    with pytest.raises(EnvError, match=f"environment {others} .*{message}"):
        first_batch([*[Plain] * others, odd] if others else odd)


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [(">f4", "own byte order: float32"), (np.longdouble, "a dtype that torch has")],
)
@pytest.mark.parametrize("kind", ["observation_space", "action_space"])
def test_a_space_of_a_dtype_that_torch_lacks_is_named(kind, dtype, cure):
    env = Plain()
    setattr(env, kind, spaces.Box(-1, 1, (2,), dtype))
    name = np.dtype(dtype).str
    with pytest.raises(ConfigError, match=f"space Box.* has dtype {name}, .*; declare .*{cure}"):
        first_batch(env)


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({"a": np.zeros(2, np.float32)}, r"without \['b'\], .*: it is a mapping of \['a'\]"),
        (np.zeros(2), r"without \['a'\], .*: it is a ndarray"),
    ],
)
def test_a_missing_entry_of_an_observation_is_named(others, shown, message):
    env = [lambda: Plain(PAIR)] * others + [lambda: Plain(PAIR, show=shown)]
    with pytest.raises(EnvError, match=f"environment {others} .*{message}"):
        first_batch(env)
    with pytest.raises(EnvError, match=message):
        GymEnv(env[-1]).rollout(1)


def test_an_entry_that_goes_missing_later_is_named():
    class Losing(Plain):
        steps = 0

        def step(self, action):
            self.steps += 1
            self.show = {"a": np.zeros(2, np.float32)} if self.steps > 2 else None
            return super().step(action)

    with pytest.raises(EnvError, match=r"environment 1 .*without \['b'\]"):
        first_batch([lambda: Plain(PAIR), lambda: Losing(PAIR)])


def test_a_missing_entry_of_a_vector_environment_is_named():
    class Losing(SyncVectorEnv):
        def step(self, actions):
            shown, *rest = super().step(actions)
            return {"a": shown["a"]}, *rest

    with pytest.raises(EnvError, match=r"the vector environment .*without \['b'\]"):
        first_batch(Losing([lambda: Plain(PAIR)]))


@pytest.mark.parametrize("others", [0, 1])
def test_byte_order_does_not_matter(others):
    shown = np.array([1.0, 2.0], ">f8")
    env = [*[Plain] * others, lambda: Plain(show=shown)]
    batch = first_batch(env)
    assert batch["next", "observation"][-1, 0].tolist() == [1.0, 2.0]
    assert batch["next", "observation"].dtype == torch.float64


@pytest.mark.parametrize("make", [GymEnv, collector])
@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple(())])
def test_an_environment_without_action_is_refused(make, space):
    env = Plain()
    env.action_space = space
    with pytest.raises(ConfigError, match="has nothing to choose"):
        make(env)


def test_scalar_actions_are_values_of_their_space():
    seen = []

    class Dial(Plain):
        action_space = spaces.Box(-1, 1, ())

        def step(self, action):
            with warnings.catch_warnings(record=True) as raised:
                warnings.simplefilter("always")
                seen.append((type(action), self.action_space.contains(action), len(raised)))
            return super().step(action)

    first_batch([Dial, Dial])
    GymEnv(Dial()).rollout(2)
    assert set(seen) == {(np.ndarray, True, 0)}


# -- closing ---------------------------------------------------------------------------------------


class Made(list):
    """A factory that keeps what it made."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = iter(kinds)

    def make(self, **kwargs):
        kind = next(self.kinds)
        if isinstance(kind, Exception):
            raise kind
        self.append(kind())
        return self[-1]


def small():
    return Plain(spaces.Box(-1, 1, (1,)))


class Picture(Plain):
    def render(self):
        return None


@pytest.mark.parametrize(
    ("kinds", "options", "error"),
    [
        ([Plain, OverflowError()], {"num_envs": 2}, OverflowError),
        ([Plain, small], {"num_envs": 2}, ConfigError),
        ([Plain], {"info_keys": "lives"}, ConfigError),
        ([Plain, Plain], {"num_envs": 2, "info_keys": ["reward"]}, ConfigError),
        ([lambda: GymEnv(Plain()), Plain], {"num_envs": 2}, ConfigError),
        ([lambda: GymEnv(Plain()), lambda: GymEnv(small())], {"num_envs": 2}, ConfigError),
        ([lambda: GymEnv(Plain()), OverflowError()], {"num_envs": 2}, OverflowError),
        ([lambda: SyncVectorEnv([Plain])], {"info_keys": "lives"}, ConfigError),
    ],
)
def test_environments_that_were_made_are_closed_if_not_all_can_be(kinds, options, error):
    made = Made(kinds)
    with pytest.raises(error):
        collector(made.make, **options)
    assert made
    for env in made:
        assert env.closed is True if isinstance(env, SyncVectorEnv) else closings(env) == 1


def closings(env):
    return env.members[0].closed if isinstance(env, GymEnv) else env.closed


def test_environments_that_were_given_stay_open():
    mine, other = Plain(), small()
    made = Made([Plain])
    for items in ([mine, mine], [mine, other], [made.make, mine, other]):
        with pytest.raises(ConfigError):
            collector(items)
    with pytest.raises(ConfigError):
        collector(mine, info_keys="lives")
    with pytest.raises(ConfigError):
        GymEnv(mine, info_keys="lives")
    with pytest.raises(ConfigError, match="do not declare the same data"):
        collector([GymEnv(mine), GymEnv(other)])
    assert (mine.closed, other.closed) == (0, 0)
    assert [env.closed for env in made] == [1]


@pytest.mark.parametrize(
    ("kinds", "build"),
    [
        ([Plain, OverflowError("no")], lambda make: GymEnv(make, num_envs=2)),
        ([Plain], lambda make: GymEnv(make, info_keys="lives")),
        ([Plain], lambda make: GymEnv(make, frame_skip=0)),
        ([Picture], lambda make: GymEnv(make, from_pixels=True)),
        ([Plain, OverflowError("no")], lambda make: SerialEnv(2, lambda: GymEnv(make))),
        ([Plain, small], lambda make: SerialEnv(2, lambda: GymEnv(make))),
    ],
)
def test_batches_that_cannot_be_built_close_what_they_made(kinds, build):
    made = Made(kinds)
    with pytest.raises((ConfigError, OverflowError)):
        build(made.make)
    assert [env.closed for env in made] == [1] * len(made) != []


def test_an_error_while_closing_does_not_hide_what_went_wrong():
    class Stuck(Plain):
        def close(self):
            raise OSError("stuck")

    with pytest.raises(ConfigError, match="is a string"):
        collector(Stuck, info_keys="lives")


def test_the_same_environment_from_a_factory_is_closed_once():
    env = Plain()
    with pytest.raises(ConfigError, match="same environment object"):
        collector(lambda: env, num_envs=2)
    assert env.closed == 1


class Called(Plain):
    """Remembers whether a wrapper of Gymnasium's steps it."""

    checked = None

    def step(self, action):
        self.checked = "wrappers" in sys._getframe(1).f_code.co_filename
        self.info = {}  # Gymnasium's checks warn about one that is returned again
        return super().step(action)


@pytest.fixture
def called():
    """Register `Called`; return what was made."""
    made = []

    def make(**kwargs):
        made.append(Called())
        return made[-1]

    gym.register("Called-v0", make)
    yield made
    del gym.registry["Called-v0"]


@pytest.mark.parametrize(
    "given",
    [
        "Called-v0",
        lambda: gym.make("Called-v0"),
        lambda: GymEnv("Called-v0"),
        ["Called-v0"],
        [lambda: GymEnv("Called-v0")],
    ],
)
def test_environments_that_the_collector_makes_lose_the_call_checks(given, called):
    first_batch(given)
    assert [env.checked for env in called] == [False]


@pytest.mark.parametrize("around", [lambda e: e, GymEnv, lambda e: [e], lambda e: [GymEnv(e)]])
def test_environments_that_the_user_made_stay_as_they_are(around, called):
    mine = gym.make("Called-v0")
    first_batch(around(mine))
    assert "OrderEnforcing" in str(mine)
    assert [env.checked for env in called] == [True]


def test_an_environment_that_a_callable_returns_twice_stays_as_it_is():
    mine = gym.make("CartPole-v1")
    with pytest.raises(ConfigError, match="more than once"):
        collector(lambda: mine, num_envs=2)
    assert "OrderEnforcing" in str(mine)
