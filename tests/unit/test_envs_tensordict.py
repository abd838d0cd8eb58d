"""TensorDict environments stepped into windows, compared with how TorchRL itself steps them."""

import warnings
from functools import partial

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from gleanrl.core.errors import EnvError
from gleanrl.core.layout import Field
from gleanrl.envs import GymEnv as OurGymEnv
from gleanrl.envs import SerialEnv as OurSerialEnv
from gleanrl.envs import tensordict_env
from gleanrl.envs.gymnasium import GymnasiumEnv
from gleanrl.envs.serial import gym_source
from gleanrl.envs.tensordict_env import TensorDictEnv
from gleanrl.envs.tensordict_layout import EndFlags, is_tensordict_env, needs_carrier
from gleanrl.memory.trees import nest
from gleanrl.memory.window import RolloutWindow


class Driver:
    """Steps a `TensorDictEnv` the way a rollout does."""

    def __init__(self, env, steps, extra=()):
        self.env = TensorDictEnv(env) if is_tensordict_env(env) else env
        layout = self.env.layout
        flags = [Field(k, g.shape, torch.bool) for g in layout.dones for k in g.keys()]
        self.flags = [*(f.key for f in flags), *(("next", *f.key) for f in flags)]
        fields = [*layout.observations, *layout.actions, *flags, *extra]
        fields += [
            Field(("next", *f.key), f.shape, f.dtype)
            for f in (*layout.observations, *layout.rewards, *flags)
        ]
        self.window = RolloutWindow.allocate(fields, layout.num_envs, steps)
        self.carry = RolloutWindow.allocate(layout.observations, layout.num_envs, 1)
        self.env.reset(self.carry)
        self.ended = []

    def roll(self, act=None, cut=None, steps=None):
        """Roll out ``steps`` steps; ``act(t)`` may write actions, ``cut`` maps steps to envs."""
        window, env = self.window, self.env
        steps = window.steps if steps is None else steps
        for key in self.flags:
            window.tensor(key).zero_()
        for field in env.layout.observations:
            window.tensor(field.key)[:, 0] = self.carry.tensor(field.key)[:, 0]
        env.begin(window, self.carry)
        self.ended = []
        for t in range(steps):
            (act or env.random)(t)
            self.ended.append(list(env.step(t, (cut or {}).get(t, ()))))
        env.finish(steps)
        lead = env.layout.batch_shape
        flat = {k: window.tensor(k).clone() for k in window.keys()}
        flat = {k: v.view(*lead, *v.shape[1:]) for k, v in flat.items()}
        return TensorDict(nest(flat), batch_size=(*lead, window.steps))[..., :steps]

    def act_with(self, value):
        """Return an ``act`` that writes ``value`` to every action."""

        def act(t):
            for field in self.env.layout.actions:
                self.window.tensor(field.key)[:, t] = value

        return act


def reference(env, steps):
    """Step ``env`` with its own methods and random actions."""
    root, taken = env.reset(), []
    for _ in range(steps):
        step, root = env.step_and_maybe_reset(env.rand_action(root))
        taken.append(step.clone())
    return torch.stack(taken, len(env.batch_size))


def cartpole_with_transforms():
    transforms = Compose(
        ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"]),
        InitTracker(),
        RewardSum(),
        StepCounter(max_steps=6),
    )
    return TransformedEnv(GymEnv("CartPole-v1"), transforms)


ENVS = {
    "cartpole": lambda: GymEnv("CartPole-v1"),
    "pendulum": lambda: GymEnv("Pendulum-v1"),
    "transforms": cartpole_with_transforms,
    "double": lambda: TransformedEnv(
        GymEnv("MountainCarContinuous-v0"), Compose(DoubleToFloat(), StepCounter(4))
    ),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "serial of transformed": lambda: SerialEnv(2, cartpole_with_transforms),
    "transformed serial": lambda: TransformedEnv(
        SerialEnv(2, lambda: GymEnv("CartPole-v1")), Compose(StepCounter(5), RewardSum())
    ),
    "nested": lambda: NestedCountingEnv(max_steps=3),
    "groups": lambda: MultiKeyCountingEnv(max_steps=2, batch_size=[2]),
    "two batch dimensions": lambda: SerialEnv(2, lambda: CountingEnv(max_steps=3, batch_size=[3])),
    "our own": lambda: OurGymEnv("CartPole-v1", num_envs=3),
    "our own serial": lambda: OurSerialEnv(2, lambda: OurGymEnv("Pendulum-v1", num_envs=2)),
    "our serial of theirs": lambda: OurSerialEnv(2, lambda: NestedCountingEnv(max_steps=2)),
    "other flag names": lambda: MultiAgentCountingEnv(n_agents=2, max_steps=3),
}


@pytest.fixture(params=ENVS, ids=str)
def make(request):
    return ENVS[request.param]


def test_data_equal_those_of_the_environments_own_methods(make):
    theirs, ours = make(), make()
    theirs.set_seed(3)
    torch.manual_seed(5)
    expected = reference(theirs, 25)
    ours.set_seed(3)
    torch.manual_seed(5)
    got = Driver(ours, 25).roll()
    for key in expected.keys(True, True):
        assert torch.equal(got[key], expected[key]), key


@pytest.mark.parametrize("name", ["cartpole", "transforms", "serial", "groups"])
def test_data_equal_those_of_torchrls_collector(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about itself
        from torchrl.collectors import Collector
    theirs, ours = ENVS[name](), ENVS[name]()
    theirs.set_seed(3)
    collector = Collector(theirs, frames_per_batch=24, total_frames=24)
    torch.manual_seed(5)
    (expected,) = collector
    collector.shutdown()
    ours.set_seed(3)
    torch.manual_seed(5)
    got = Driver(ours, expected.shape[-1]).roll()
    for key in expected.exclude("collector").keys(True, True):
        assert torch.equal(got[key], expected[key]), key


def test_taking_our_environments_apart_changes_no_data():
    make = partial(OurSerialEnv, 2, lambda: OurGymEnv("CartPole-v1", num_envs=2))
    inside = gym_source(make())
    fast = GymnasiumEnv(inside.envs, inside.batch_shape)
    batches = []
    for env in (TensorDictEnv(make()), fast):
        assert env.seed(4) == 7
        torch.manual_seed(5)
        batches.append(Driver(env, 40).roll(cut={9: (2,)}))
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    assert (batches[0] == batches[1]).all()


def test_layout_has_every_key_of_the_environment(make):
    expected = {k if isinstance(k, tuple) else (k,) for k in reference(make(), 2).keys(True, True)}
    assert set(Driver(make(), 2).window.keys()) == expected


def test_two_rollouts_continue_each_other(make):
    env = make()
    env.set_seed(0)
    torch.manual_seed(0)
    whole = Driver(env, 20).roll()
    env = make()
    env.set_seed(0)
    torch.manual_seed(0)
    driver = Driver(env, 10)
    halves = torch.cat([driver.roll(), driver.roll()], len(env.batch_size))
    assert (halves == whole).all()


def test_final_observation_is_the_true_one_and_the_next_root_that_of_the_reset():
    driver = Driver(CountingEnv(max_steps=2), 8)
    data = driver.roll(driver.act_with(1))
    assert data["observation"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert data["next", "observation"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert data["next", "done"].flatten().tolist() == [False, False, True] * 2 + [False] * 2
    assert not data["done"].any()
    assert driver.ended == [[], [], [0], [], [], [0], [], []]


def test_a_cut_truncates_and_resets_that_environment_only():
    driver = Driver(SerialEnv(3, lambda: GymEnv("Pendulum-v1")), 6)
    data = driver.roll(cut={2: (1,)})
    truncated = data["next", "truncated"].squeeze(-1)
    assert truncated.nonzero().tolist() == [[1, 2]]
    assert torch.equal(data["next", "done"], data["next", "truncated"])
    assert not data["next", "terminated"].any()
    assert driver.ended[2] == [1]
    continues = (data["observation"][:, 1:] == data["next", "observation"][:, :-1]).all(-1)
    assert (~continues).nonzero().tolist() == [[1, 2]]


def test_a_cut_resets_what_transforms_count():
    env = TransformedEnv(
        SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        Compose(StepCounter(), RewardSum(), InitTracker()),
    )
    data = Driver(env, 5).roll(cut={1: (0,)})
    assert data["step_count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert data["next", "step_count"][0].flatten().tolist() == [1, 2, 1, 2, 3]
    assert data["is_init"].squeeze(-1)[0].tolist() == [True, False, True, False, False]
    sums = data["next", "reward"][0].flatten()
    assert torch.allclose(data["next", "episode_reward"][0, 2], sums[2])


def test_a_cut_does_not_touch_the_flags_of_an_environment_that_ends_by_itself():
    driver = Driver(CountingEnv(max_steps=2, batch_size=[2]), 4, [TRUNCATED_BELOW])

    def act(t):
        driver.window.tensor(("action",))[:, t, 0] = torch.tensor([1, 0])

    data = driver.roll(act, cut={2: (0, 1)})
    assert data["next", "terminated"].squeeze(-1)[:, 2].tolist() == [True, False]
    assert data["next", "truncated"].squeeze(-1)[:, 2].tolist() == [False, True]
    assert data["next", "done"].squeeze(-1)[:, 2].tolist() == [True, True]
    assert driver.ended[2] == [0, 1]


TRUNCATED_BELOW = Field(("next", "truncated"), (1,), torch.bool)


def test_every_group_is_cut():
    driver = Driver(MultiKeyCountingEnv(max_steps=50, batch_size=[2]), 4)
    data = driver.roll(cut={1: (1,)})
    for prefix in ((), ("nested_1",), ("nested_2",)):
        done = data[("next", *prefix, "done")].flatten(2).all(-1)
        assert done.nonzero().tolist() == [[1, 1]]


def test_an_agents_flag_does_not_end_an_episode_that_the_root_decides_about():
    class Agents(MultiKeyCountingEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            after["nested_1", "done"] = torch.ones_like(after["nested_1", "done"])
            return after

    driver = Driver(Agents(max_steps=100), 4)
    data = driver.roll()
    assert driver.ended == [[]] * 4
    assert data["next", "nested_1", "done"].all()
    assert not data["next", "done"].any()
    assert data["nested_1", "done"][1:].all()  # what the root of the next step shows


def test_a_stopped_rollout_is_right_up_to_its_last_step():
    whole = Driver(CountingEnv(max_steps=2), 8)
    part = Driver(CountingEnv(max_steps=2), 8)
    expected = whole.roll(whole.act_with(1))
    got = part.roll(part.act_with(1), steps=5)
    assert (got == expected[:5]).all()


def test_construction_resets_once_and_never_steps():
    class Strict(CountingEnv):
        resets = 0

        def _reset(self, tensordict=None, **kwargs):
            self.resets += 1
            return super()._reset(tensordict, **kwargs)

        def _step(self, tensordict):
            raise AssertionError("stepped")

    env = Strict()
    driver = Driver(env, 3)
    assert env.resets == 1
    driver.env.reset(driver.carry)
    assert env.resets == 2


def test_a_reset_done_elsewhere_is_taken_over():
    env = CountingEnv(start_val=4)
    first = env.reset()
    env.count += 1
    driver = Driver(TensorDictEnv(env, first), 2)
    assert driver.carry.tensor(("observation",)).item() == 4


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["plain", "with options"])
def test_a_partial_reset_leaves_the_other_environments_alone(options):
    driver = Driver(SerialEnv(3, lambda: GymEnv("Pendulum-v1")), 4)
    driver.roll()
    before = driver.carry.tensor(("observation",)).clone()
    driver.env.reset(driver.carry, [1], **options)
    same = (driver.carry.tensor(("observation",)) == before).all(-1).flatten()
    assert same.tolist() == [True, False, True]
    data = driver.roll()
    assert torch.equal(data["observation"][0, 0], before[0, 0])


def test_a_partial_reset_of_groups_reaches_all_of_them():
    driver = Driver(MultiKeyCountingEnv(max_steps=100, batch_size=[2]), 6)
    driver.roll()
    driver.env.reset(driver.carry, [0])
    for field in driver.env.layout.observations:
        left = driver.carry.tensor(field.key).flatten(1).any(1)
        assert left.tolist() == [False, True]


def test_seeds_go_to_the_environment_and_count_its_elements():
    driver = Driver(SerialEnv(3, lambda: GymEnv("CartPole-v1")), 2)
    assert driver.env.seed(7) == 9
    driver.env.reset(driver.carry)
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    env.set_seed(7)
    assert torch.equal(driver.carry.tensor(("observation",))[:, 0], env.reset()["observation"])


def test_a_static_seed_is_the_same_for_all():
    driver = Driver(SerialEnv(3, lambda: GymEnv("CartPole-v1")), 2)
    assert driver.env.seed(7, static=True) == 7
    driver.env.reset(driver.carry)
    first = driver.carry.tensor(("observation",))
    assert torch.equal(first[0], first[2])


def test_state_of_transforms_survives():
    env = TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"]))
    env.transform.init_stats(20)
    other = TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"]))
    other.transform.loc, other.transform.scale = torch.zeros(3), torch.ones(3)
    TensorDictEnv(other).load_state(TensorDictEnv(env).state())
    assert torch.equal(other.transform.loc, env.transform.loc)


def test_state_is_a_copy():
    env = CountingEnv()
    driver = Driver(env, 3)
    state = driver.env.state()
    driver.roll(driver.act_with(1))
    assert state["count"].item() == 0
    assert env.count.item() == 3


@pytest.mark.parametrize("strict", [True, False])
def test_state_of_batched_environments_survives(strict):
    ours = Driver(SerialEnv(2, CountingEnv), 3)
    ours.roll(ours.act_with(1))
    other = SerialEnv(2, CountingEnv)
    TensorDictEnv(other).load_state(ours.env.state(), strict)
    assert [env["count"].item() for env in other.state_dict().values()] == [3, 3]


class Keeper(CountingEnv):
    """Keeps the actions it was given, and returns the same tensors at every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kept = []
        self.shown = torch.zeros(1, dtype=torch.int32)
        self.paid = torch.zeros(1)

    def _step(self, tensordict):
        self.kept.append(tensordict["action"])
        after = super()._step(tensordict)
        self.shown.copy_(after["observation"])
        self.paid.copy_(after["observation"])
        return after.set("observation", self.shown).set("reward", self.paid)


def test_what_the_environment_keeps_of_an_action_does_not_change():
    env = Keeper(max_steps=100)
    driver = Driver(env, 4)
    driver.roll(driver.act_with(1))
    driver.window.tensor(("action",)).zero_()
    assert [int(action) for action in env.kept] == [1, 1, 1, 1]


def test_an_environment_may_use_its_buffers_again():
    driver = Driver(Keeper(max_steps=2), 7)
    data = driver.roll(driver.act_with(1))
    assert data["next", "observation"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert data["next", "reward"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_rewards_made_on_another_device_arrive_in_bulk(monkeypatch):
    monkeypatch.setattr(tensordict_env, "_other_device", lambda env: torch.device("cpu"))
    driver = Driver(SerialEnv(2, lambda: Keeper(max_steps=2)), 5)
    data = driver.roll(driver.act_with(1))
    assert data["next", "reward"].squeeze(-1).tolist() == [[1, 2, 3, 1, 2]] * 2
    assert driver.roll(driver.act_with(1), steps=2)["next", "reward"][1].flatten().tolist() == [
        3,
        1,
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("observation", torch.zeros(2, dtype=torch.int32), r"'observation' with shape \(2,\)"),
        ("observation", torch.zeros(1), r"dtype torch.float32; its specs .* torch.int32"),
    ],
)
def test_an_environment_that_breaks_its_own_declaration_is_named(key, value, message):
    class Broken(CountingEnv):
        def _step(self, tensordict):
            return super()._step(tensordict).set(key, value)

    with pytest.raises(EnvError, match=message):
        Driver(Broken(), 2).roll()


def test_a_batch_size_that_data_do_not_begin_with_is_named():
    root = TensorDict(observation=torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(EnvError, match=r"'observation' has shape \(3, 1\), .* batch size \(2,\)"):
        TensorDictEnv(CountingEnv(batch_size=[2]), root)


def test_recurrent_state_kept_by_a_transform_is_fed_back():
    def make():
        primer = TensorDictPrimer(hidden=Unbounded((2,)), expand_specs=True)
        return TransformedEnv(CountingEnv(max_steps=2), Compose(InitTracker(), primer))

    driver = Driver(make(), 6)
    driver.env.feed([("next", "hidden"), ("logits",)])
    window = driver.window

    def act(t):
        window.tensor(("action",))[:, t] = 1
        window.tensor(("next", "hidden"))[:, t] = window.tensor(("hidden",))[:, t] + 1

    data = driver.roll(act)
    assert data["hidden"][:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert data["next", "hidden"][:, 1].tolist() == [1, 2, 3, 1, 2, 3]


def test_an_action_spec_describes_one_environment():
    env = TensorDictEnv(SerialEnv(3, lambda: GymEnv("Pendulum-v1")))
    spec = env.action_specs[("action",)]
    assert spec.shape == (1,)
    assert spec.dtype == torch.float32
    drawn = spec.rand((5, 2))
    assert drawn.shape == (5, 2, 1)
    assert drawn.abs().max() <= 2
    assert len(drawn.unique()) == 10


def test_closing_twice_is_allowed():
    env = TensorDictEnv(CountingEnv())
    env.close()
    env.close()


def test_an_environment_closed_by_its_owner_stays_closed():
    inner = GymEnv("CartPole-v1")
    env = TensorDictEnv(inner)
    inner.close()
    env.close()
    assert env.inner is inner


def test_tensordict_environments_are_recognised_by_their_methods(make):
    assert is_tensordict_env(make())


@pytest.mark.parametrize(
    "other",
    [EnvBase, GymEnv, lambda: None, nn.Linear(1, 1), "CartPole-v1", gym.make("CartPole-v1")],
    ids=["class", "subclass", "callable", "module", "id", "gymnasium"],
)
def test_other_objects_are_not_recognised(other):
    assert not is_tensordict_env(other)


def test_fixed_layouts_do_not_need_the_carrier(make):
    env = make()
    assert not needs_carrier(env)
    assert not needs_carrier(env, env.reset())


@pytest.mark.parametrize(
    "make", [CountingEnvWithString, EnvWithDynamicSpec, HeterogeneousCountingEnv]
)
def test_open_layouts_need_the_carrier_by_their_specs(make):
    assert needs_carrier(make())


@pytest.mark.parametrize("what", ["string", "lazy"])
def test_undeclared_data_without_layout_need_the_carrier(what):
    env = CountingEnv()
    first = env.reset()
    ragged = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
    first.set(what, {"string": "text", "lazy": ragged}[what])
    assert needs_carrier(env, first)


def flags(**names):
    return EndFlags(
        Composite({name: Binary(shape=shape, dtype=torch.bool) for name, shape in names.items()}),
        (),
    )


def test_a_missing_done_or_terminated_follows_from_the_other():
    class DoneOnly(CountingEnv):
        """Has the methods but returns ``"done"`` alone."""

        def _step(self, tensordict):
            return super()._step(tensordict).exclude("terminated")

        def _step_proc_data(self, after):
            return after

    driver = Driver(DoneOnly(max_steps=1), 4)
    data = driver.roll(driver.act_with(1))
    assert torch.equal(data["next", "terminated"], data["next", "done"])
    assert data["next", "done"].flatten().tolist() == [False, True, False, True]


def test_flags_without_a_group_are_delivered_like_observations():
    found = flags(over=(1,))
    assert found.groups == ()
    assert [field.key for field in found.odd] == [("over",)]
    assert found.ended(TensorDict(over=torch.tensor([True]))) == [0]


def test_state_entries_are_delivered_if_the_reset_has_them():
    env = CountingEnv()
    env.state_spec = Composite(goal=Bounded(0, 1, (2,)), unused=Unbounded((3,)))
    first = env.reset().set("goal", torch.ones(2))
    keys = {field.key for field in TensorDictEnv(env, first).layout.observations}
    assert keys == {("observation",), ("goal",)}
