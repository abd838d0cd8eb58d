"""Our own environments with TensorDict methods: GymEnv, SerialEnv, EnvCreator."""

import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import GymWrapper as TorchRLGymWrapper
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.testing.mocking_classes import CountingEnv, NestedCountingEnv

from gleanrl import Collector, ConfigError, EnvError, UnknownEnvError
from gleanrl.data import Categorical, Composite, OneHot
from gleanrl.envs import EnvCreator, GymEnv, GymWrapper, SerialEnv, set_gym_backend


class Counter(gym.Env):
    """Counts steps; ends after ``length`` of them."""

    observation_space = spaces.Box(0, 255, (2,), np.uint8)
    action_space = spaces.Discrete(3, start=1)

    def __init__(self, length=3, reward=1.0, render_mode=None):
        self.length, self.reward, self.render_mode = length, reward, render_mode
        self.resets, self.actions, self.closed, self.options = 0, [], 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.options.append(options)
        self.count = 0
        return self._see(), {"count": 0}

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        over = self.count >= self.length
        return self._see(), self.reward, over, False, {"count": self.count}

    def _see(self):
        return np.full(2, self.count, np.uint8)

    def render(self):
        return np.full((4, 5, 3), self.count, np.uint8) if self.render_mode else None

    def close(self):
        self.closed += 1


class Nested(gym.Env):
    """Dict observations and actions."""

    observation_space = spaces.Dict(
        {
            "arm": spaces.Dict({"angle": spaces.Box(-1, 1, (3,), np.float64)}),
            "n": spaces.Discrete(4),
        }
    )
    action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,)), "grip": spaces.Discrete(2)})

    def reset(self, *, seed=None, options=None):
        return {"arm": {"angle": np.zeros(3)}, "n": np.int64(1)}, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return {"arm": {"angle": np.full(3, 0.5)}, "n": np.int64(2)}, 0.5, False, False, {}


def test_a_rollout_equals_the_plain_loop():
    env = GymEnv("CartPole-v1")
    env.set_seed(4)
    torch.manual_seed(0)
    data = env.rollout(100)
    plain = gym.make("CartPole-v1")
    observation, _ = plain.reset(seed=4)
    for t in range(data.shape[0]):
        assert data["observation"][t].tolist() == observation.tolist()
        observation, reward, terminated, truncated, _ = plain.step(int(data["action"][t]))
        assert data["next", "observation"][t].tolist() == observation.tolist()
        assert data["next", "reward"][t].tolist() == [reward]
        assert data["next", "terminated"][t].tolist() == [terminated]
        assert data["next", "truncated"][t].tolist() == [truncated]
    assert terminated
    assert data.names == ["time"]


def test_keys_shapes_and_dtypes_are_those_of_torchrl():
    ours = GymEnv("Pendulum-v1").rollout(3)
    theirs = TorchRLGymEnv("Pendulum-v1").rollout(3)
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert ours[key].shape == theirs[key].shape
        assert ours[key].dtype == theirs[key].dtype


def test_final_observation_is_the_true_one_and_the_next_root_that_of_the_reset():
    data = GymEnv(Counter()).rollout(7, break_when_any_done=False)
    assert data["observation"][:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert data["next", "observation"][:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert data["next", "done"].flatten().tolist() == [False, False, True] * 2 + [False]
    assert not data["done"].any()


def test_a_batch_is_reset_one_by_one():
    made = iter([Counter(2), Counter(3)])
    env = GymEnv(lambda: next(made), num_envs=2)
    data = env.rollout(5, break_when_any_done=False)
    assert data.shape == (2, 5)
    assert data["observation"][..., 0].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert data.names == [None, "time"]


def test_a_reset_mask_names_the_environments_to_reset():
    env = GymEnv(Counter, num_envs=3)
    root = env.step_mdp(env.rand_step(env.reset()))
    root["_reset"] = torch.tensor([[False], [True], [False]])
    assert env.reset(root)["observation"][:, 0].tolist() == [1, 0, 1]
    assert "_reset" not in root.keys()


def test_a_reset_of_some_members_needs_the_data_of_the_others():
    env = SerialEnv(3, Counter)
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = TensorDict({"_reset": torch.tensor([[False], [True], [False]])}, [3])
    with pytest.raises(ConfigError, match="was given no 'observation'"):
        env.reset(mask.clone())
    assert env.reset(root.update(mask))["observation"][:, 0].tolist() == [1, 0, 1]


def test_construction_resets_nothing():
    inner = Counter()
    env = GymEnv(inner)
    assert inner.resets == 0
    env.fake_tensordict()
    env.reset()
    assert inner.resets == 1


def test_discrete_actions_are_indices_that_begin_where_the_space_does():
    inner = Counter()
    env = GymEnv(inner)
    assert env.action_spec == Categorical(3)
    env.step(env.reset().set("action", torch.tensor(2)))
    assert inner.actions == [3]


def test_discrete_actions_can_be_one_hot():
    inner = Counter()
    env = GymEnv(inner, categorical_action_encoding=False)
    assert env.action_spec == OneHot(3, dtype=torch.int64)
    env.step(env.reset().set("action", torch.tensor([0, 1, 0])))
    assert inner.actions == [2]


@pytest.mark.parametrize("num_envs", [None, 2])
def test_nested_spaces_become_nested_keys(num_envs):
    env = GymEnv(Nested, num_envs=num_envs)
    data = env.rollout(2)
    lead = () if num_envs is None else (2,)
    assert data["arm", "angle"].shape == (*lead, 2, 3)
    assert data["arm", "angle"].dtype == torch.float64
    assert data["n"].dtype == torch.int64
    assert set(env.action_keys) == {("action", "push"), ("action", "grip")}
    assert data["action", "push"].shape == (*lead, 2, 2)


def test_observations_are_cast_if_asked():
    env = GymEnv(Nested(), observation_dtype=torch.float32)
    assert env.observation_spec["arm", "angle"].dtype == torch.float32
    data = env.rollout(2)
    assert data["arm", "angle"].dtype == torch.float32
    assert data["n"].dtype == torch.int64


def test_info_entries_are_delivered_beside_the_observation():
    data = GymEnv(Counter(), info_keys={"count": ((), torch.int64)}).rollout(3)
    assert data["count"].tolist() == [0, 1, 2]
    assert data["next", "count"].tolist() == [1, 2, 3]


def test_frames_are_skipped_and_rewards_added():
    data = GymEnv(Counter(length=5), frame_skip=2).rollout(9)
    assert data["next", "reward"].flatten().tolist() == [2.0, 2.0, 1.0]


@pytest.mark.parametrize("only", [True, False])
def test_pixels_are_what_is_rendered(only):
    env = GymEnv(Counter, from_pixels=True, pixels_only=only)
    data = env.rollout(2)
    assert data["pixels"].shape == (2, 4, 5, 3)
    assert data["pixels"].dtype == torch.uint8
    assert data["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2]
    assert ("observation" in data.keys()) is not only


def test_pixels_reset_the_environment_once():
    made = []

    def make(render_mode=None):
        made.append(Counter(render_mode=render_mode))
        return made[0]

    GymEnv(make, from_pixels=True).reset()
    assert made[0].resets == 1


def test_pixels_need_a_render_mode():
    with pytest.raises(ConfigError, match="render_mode='rgb_array', this one renders NoneType"):
        GymEnv(Counter(), from_pixels=True)


def test_atari_environments_exist_without_importing_their_package():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = GymEnv("ALE/Pong-v5", frame_skip=2)
    with env:
        assert env.reset()["observation"].shape == (210, 160, 3)


def test_seeds_are_counted_up_and_apply_to_the_next_reset():
    env = GymEnv("CartPole-v1", num_envs=2)
    assert env.set_seed(7) == 8
    first = env.reset()["observation"]
    assert first[1].tolist() == gym.make("CartPole-v1").reset(seed=8)[0].tolist()
    assert not torch.equal(env.reset()["observation"], first)


def test_a_static_seed_is_the_same_for_all():
    env = GymEnv("CartPole-v1", num_envs=2)
    assert env.set_seed(7, static_seed=True) == 7
    first = env.reset()["observation"]
    assert torch.equal(first[0], first[1])


def test_reset_options_are_passed_on():
    inner = Counter()
    env = GymEnv(inner)
    env.reset(options={"level": 3})
    env.reset()
    assert inner.options == [{"level": 3}, None]


class Shifted(Counter):
    """Begins where the options of its reset say."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = (options or {}).get("start", 0)
        return self._see(), {}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [Shifted] * 2,
        lambda: gym.vector.SyncVectorEnv([Shifted] * 2),
        lambda: gym.vector.SyncVectorEnv([Shifted] * 2, autoreset_mode="Disabled"),
        lambda: SerialEnv(2, Shifted),
        lambda: TorchRLSerialEnv(2, lambda: TorchRLGymWrapper(Shifted())),
    ],
    ids=["single", "vector", "masked", "serial", "TorchRL"],
)
def test_options_are_given_to_a_collectors_reset_as_to_gymnasiums(make, fast):
    with Collector(make(), None, frames_per_batch=4, fast=fast) as collector:
        collector.reset(options={"start": 7})
        assert collector.rollout()["observation"][:, 0, 0].tolist() == [7, 7]
        collector.reset()
        assert collector.rollout()["observation"][:, 0, 0].tolist() == [0, 0]


def test_reset_passes_arguments_on_and_refuses_a_seed_for_all():
    class Leveled(Counter):
        def reset(self, *, envs=0, carry=0, env=0, **given):
            self.given = envs, carry, env
            return super().reset(**given)

    inner = Leveled()
    GymEnv(inner).reset(envs=1, carry=2, env=3)
    assert inner.given == (1, 2, 3)
    with pytest.raises(TypeError, match="level") as caught:
        GymEnv(Counter()).reset(level=3)
    assert "in its reset(seed=None, options=None, level=3)" in caught.value.__notes__[0]
    with pytest.raises(ConfigError, match="seed=.*call set_seed"):
        GymEnv(Counter()).reset(seed=3)


@pytest.mark.parametrize(
    "make",
    [lambda: GymEnv(Counter, num_envs=2), lambda: SerialEnv(2, lambda: GymEnv(Counter()))],
)
def test_the_specs_of_what_a_batch_is_told_are_a_batch(make):
    env = make()
    assert env.input_spec["full_action_spec"].shape == (2,)
    assert env.input_spec["full_state_spec"] == env.state_spec == Composite(shape=(2,))
    assert env.output_spec.shape == (2,)


class Shaped(Counter):
    """Declares two floats and returns what it is given."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, observation):
        super().__init__()
        self.observation = observation

    def _see(self):
        return self.observation


@pytest.mark.parametrize(
    ("observation", "dtype", "hint"),
    [
        (np.zeros(2, np.float64), None, True),
        (np.zeros(3, np.float64), None, True),
        (np.zeros(3, np.float32), None, False),
        (np.zeros(2, np.int64), None, False),
        (np.zeros(3, np.float64), torch.float16, False),
    ],
)
def test_a_cast_is_advised_only_where_it_helps(observation, dtype, hint):
    with pytest.raises(EnvError, match="correct the space or the observation") as caught:
        GymEnv(Shaped(observation), observation_dtype=dtype).reset()
    assert ("observation_dtype=" in str(caught.value)) is hint


@pytest.mark.parametrize("reward", [1e39, -1e39])
def test_a_reward_that_overflows_is_an_error(reward):
    with pytest.raises(EnvError, match=r"environment 0 returned reward -?1e\+39, which overflows"):
        GymEnv(Counter(reward=reward)).rollout(1)


def test_an_infinite_reward_is_no_overflow():
    reward = GymEnv(Counter(reward=np.inf)).rollout(1)["next", "reward"]
    assert reward.item() == float("inf")


def test_a_reward_that_is_no_number_is_an_error():
    with pytest.raises(EnvError, match=r"returned reward \[1\]; it must be a number"):
        GymEnv(Counter(reward=[1])).rollout(1)


def test_an_old_style_step_is_an_error():
    class Old(Counter):
        def step(self, action):
            return super().step(action)[:4]

    with pytest.raises(EnvError, match="terminated, truncated, info"):
        GymEnv(Old()).rollout(1)


@pytest.mark.parametrize("kind", [KeyError, ValueError])
def test_an_unknown_id_names_what_is_close(kind):
    with pytest.raises(kind, match="did you mean 'CartPole-v1'"):
        GymEnv("CartPol-v1")


def test_an_unknown_id_names_the_package_that_may_be_missing():
    with pytest.raises(UnknownEnvError, match="no environment is registered as 'Nothing-like-it'"):
        GymEnv("Nothing-like-it")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymEnv(Counter(), num_envs=2), "needs an id or a callable, not a built Counter"),
        (lambda: GymEnv(Counter(), num_envs=-1), r"num_envs \(-1\) must be at least 0"),
        (lambda: GymEnv(Counter(), length=3), r"arguments \['length'\] are for making"),
        (lambda: GymEnv(3), "3 is neither an environment id"),
        (lambda: GymEnv(lambda: 3), "not a int"),
        (lambda: GymEnv(Counter(), frame_skip=0), r"frame_skip \(0\) must be at least 1"),
        (lambda: set_gym_backend("gym"), "gym backend 'gym' is not supported"),
        (lambda: GymEnv(Counter()).rollout(2, auto_reset=False), "needs tensordict="),
        (lambda: GymEnv(Nested()).action_key, "has the action keys"),
        (lambda: GymEnv(Counter()).load_state_dict({"a": 1}), "keeps no state"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_arguments_are_passed_on_to_what_makes_the_environment():
    assert GymEnv(Counter, length=2).rollout(9).shape == (2,)
    assert GymEnv("CartPole-v1", max_episode_steps=3).rollout(9).shape == (3,)


def test_a_wrapper_is_an_environment_around_another():
    assert GymWrapper(Counter()).rollout(9).shape == (3,)


def test_a_policy_may_write_in_place_or_return_what_it_writes():
    in_place = GymEnv(Counter()).rollout(2, lambda td: td.set("action", torch.tensor(1)))
    returned = GymEnv(Counter()).rollout(2, lambda td: TensorDict(action=torch.tensor(1)))
    assert (in_place == returned).all()
    assert in_place["action"].tolist() == [1, 1]


def test_a_rollout_can_start_from_given_data():
    env = GymEnv(Counter(length=9))
    root = env.step_mdp(env.rand_step(env.reset()))
    data = env.rollout(2, auto_reset=False, tensordict=root)
    assert data["observation"][:, 0].tolist() == [1, 2]


def test_a_callback_sees_every_step():
    seen = []
    GymEnv(Counter()).rollout(5, callback=lambda env, td: seen.append(int(td["observation"][0])))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(("steps", "truncated"), [(2, [False, True]), (3, [False, False, False])])
def test_the_last_step_is_marked_truncated_unless_it_ended(steps, truncated):
    data = GymEnv(Counter()).rollout(steps, set_truncated=True)
    assert data["next", "truncated"].flatten().tolist() == truncated
    assert data["next", "done"][-1].item()


def test_entries_given_under_next_survive_a_step():
    env = GymEnv(Counter())
    root = env.rand_action(env.reset()).set(("next", "hidden"), torch.ones(2))
    assert env.step(root)["next", "hidden"].tolist() == [1, 1]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_the_fake_step_is_like_a_real_one(num_envs):
    env = GymEnv(Nested, num_envs=num_envs)
    fake, real = env.fake_tensordict(), env.rand_step(env.reset())
    assert set(fake.keys(True, True)) == set(real.keys(True, True))
    for key in real.keys(True, True):
        assert fake[key].shape == real[key].shape
        assert fake[key].dtype == real[key].dtype


def test_specs_describe_the_data():
    env = GymEnv("CartPole-v1", num_envs=2)
    step = env.rand_step(env.reset())
    assert env.full_observation_spec.is_in(step)
    assert env.full_action_spec.is_in(step)
    assert env.full_reward_spec.is_in(step["next"])
    assert env.full_done_spec.is_in(step["next"])
    assert env.action_spec.shape == (2,)
    assert env.reward_spec.shape == (2, 1)
    assert isinstance(env.done_spec, Composite)
    assert (env.action_keys, env.action_key) == (["action"], "action")
    assert (env.reward_keys, env.done_keys) == (["reward"], ["done", "terminated", "truncated"])


def test_closing_is_idempotent_and_a_context_does_it():
    inner = Counter()
    with GymEnv(inner) as env:
        pass
    env.close()
    assert inner.closed == 1
    assert env.is_closed


def test_moving_an_environment_marks_its_data():
    env = GymEnv(Counter(), device=None)
    assert env.device is None
    assert env.to("cpu") is env
    assert env.reset().device == torch.device("cpu")
    assert env.action_spec.device == torch.device("cpu")


def test_the_backend_can_be_set_in_three_ways():
    set_gym_backend("gymnasium").set()
    with set_gym_backend(gym) as backend:
        assert backend.backend == "gymnasium"

    @set_gym_backend("gymnasium")
    def name_of(env):
        """Say the name."""
        return env

    assert name_of("it") == "it"
    assert name_of.__doc__ == "Say the name."


# -- SerialEnv -------------------------------------------------------------------------------------


def test_a_serial_environment_is_a_batch():
    lengths = iter([2, 3])
    env = SerialEnv(2, lambda: GymEnv(Counter(next(lengths))))
    data = env.rollout(5, break_when_any_done=False)
    assert data["observation"][..., 0].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
    assert data.names == [None, "time"]
    assert env.action_spec.shape == (2,)


def test_batches_can_be_batched():
    env = SerialEnv(2, lambda: GymEnv(Counter, num_envs=3))
    assert env.rollout(2).shape == (2, 3, 2)
    assert env.rand_action().batch_size == (2, 3)


def test_each_environment_may_have_its_own_recipe():
    env = SerialEnv(
        2,
        [GymEnv, GymEnv],
        create_env_kwargs=[{"env": Counter(2)}, {"env": Counter(4)}],
    )
    done = env.rollout(4, break_when_any_done=False)["next", "done"].squeeze(-1)
    assert done.tolist() == [[False, True, False, True], [False, False, False, True]]


def test_seeds_are_spread_over_batches():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2))
    assert env.set_seed(3) == 6
    last = env.reset()["observation"][1, 1]
    assert last.tolist() == gym.make("CartPole-v1").reset(seed=6)[0].tolist()


@pytest.mark.parametrize(
    "make", [lambda: CountingEnv(max_steps=2), lambda: NestedCountingEnv(max_steps=2)]
)
def test_torchrl_environments_can_be_batched(make):
    env = SerialEnv(2, make)
    data = env.rollout(6, lambda td: env.rand_action(td), break_when_any_done=False)
    assert data.shape == (2, 6)


@pytest.mark.parametrize("make", ["CartPole-v1", lambda: gym.make("CartPole-v1")])
def test_a_serial_env_wraps_what_gymnasium_calls_an_environment(make):
    assert SerialEnv(2, make).rollout(2)["observation"].shape == (2, 2, 4)


def test_only_environments_of_ours_that_agree_are_taken_apart():
    kwargs = [{"categorical_action_encoding": flag} for flag in (True, False)]
    with pytest.raises(ConfigError, match="declare the same data: 'action' is .* instead"):
        SerialEnv(2, lambda **own: GymEnv(Counter(), **own), create_env_kwargs=kwargs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SerialEnv(0, Counter), "num_workers .0. must be at least 1"),
        (lambda: SerialEnv(2, [GymEnv]), "create_env_fn has 1 entries for num_workers=2"),
        (lambda: SerialEnv(2, TensorDict), "or a gymnasium.Env, it made a TensorDict"),
    ],
)
def test_wrong_serial_arguments_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_same_environment_twice_is_an_error():
    env = GymEnv(Counter())
    with pytest.raises(ConfigError, match="the same environment more than once"):
        SerialEnv(2, lambda: env)


def test_environments_that_do_not_fit_together_are_an_error():
    sizes = iter([1, 2])
    with pytest.raises(ConfigError, match=r"1 and 0 .* batch size is \(2,\) instead of \(1,\)"):
        SerialEnv(2, lambda: GymEnv(Counter, num_envs=next(sizes)))


def test_truncated_keys_can_be_added():
    env = SerialEnv(2, lambda: CountingEnv(max_steps=1)).add_truncated_keys()
    assert "truncated" in env.done_keys
    data = env.rollout(3, lambda td: td.set("action", torch.ones(2, 1, dtype=torch.int8)))
    assert not data["next", "truncated"].any()
    assert data["truncated"].shape == (2, 2, 1)


def test_adding_truncated_keys_changes_nothing_where_they_are():
    env = GymEnv(Counter())
    assert env.add_truncated_keys() is env
    assert env.rollout(3)["next", "truncated"].shape == (3, 1)


def test_state_is_kept_per_environment():
    env = SerialEnv(2, lambda: CountingEnv(max_steps=9))
    env.rollout(4, lambda td: td.set("action", torch.ones(2, 1, dtype=torch.int8)))
    state = env.state_dict()
    other = SerialEnv(2, CountingEnv)
    other.load_state_dict(state)
    assert [int(part["count"]) for part in other.state_dict().values()] == [4, 4]
    with pytest.raises(ConfigError, match="that of 2 environments, there are 3"):
        SerialEnv(3, CountingEnv).load_state_dict(state)


def test_state_of_some_environments_is_restored_if_not_strict():
    env = SerialEnv(2, lambda: CountingEnv(max_steps=9))
    env.rollout(4, lambda td: td.set("action", torch.ones(2, 1, dtype=torch.int8)))
    other = SerialEnv(3, CountingEnv)
    other.load_state_dict(env.state_dict(), strict=False)
    assert [int(part["count"]) for part in other.state_dict().values()] == [4, 4, 0]


def test_strict_is_passed_on_to_environments_that_keep_no_state():
    env, state = SerialEnv(1, lambda: GymEnv("CartPole-v1")), {"worker0": {"count": 1}}
    env.load_state_dict(state, strict=False)
    with pytest.raises(ConfigError, match="keeps no state"):
        env.load_state_dict(state)


def test_closing_a_batch_closes_all_of_it():
    inner = [Counter(), Counter()]
    parts = iter(inner)
    SerialEnv(2, lambda: GymEnv(next(parts))).close()
    assert [env.closed for env in inner] == [1, 1]


# -- EnvCreator ------------------------------------------------------------------------------------


def test_a_creator_makes_a_new_environment_at_every_call():
    make = EnvCreator(GymEnv, {"env": "CartPole-v1"})
    assert make() is not make()
    assert make(num_envs=2).batch_size == (2,)
    assert make.make_variant(num_envs=3)().batch_size == (3,)


def test_a_creator_travels_by_value():
    length = 2
    creator = EnvCreator(lambda: GymEnv(Counter(length)))
    assert pickle.loads(pickle.dumps(creator))().rollout(9).shape == (2,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EnvCreator("CartPole-v1"), "must be callable"),
        (lambda: EnvCreator(None), "must be callable"),
    ],
)
def test_wrong_creators_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
