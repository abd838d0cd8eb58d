"""Environments with TensorDict methods give what their own methods and TorchRL's collector give."""

import warnings
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict
from tests.covering import ALL
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.testing.mocking_classes import (
    CountingEnv,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from gleanrl import Collector
from gleanrl.envs import GymEnv as OurGymEnv
from gleanrl.envs import SerialEnv as OurSerialEnv


@pytest.fixture
def collect():
    """Collect one batch; collectors are shut down after the test."""
    opened = []

    def one(env, policy=None, frames=24, batches=1, seed=None, **options):
        if seed is not None:
            torch.manual_seed(seed)
        source = Collector(env, policy, frames_per_batch=frames, **options)
        opened.append(source)
        found = [batch.clone() for _, batch in zip(range(batches), source, strict=False)]
        return torch.cat(found, -1)

    yield one
    for source in opened:
        source.shutdown()


def seed_actions(seed):
    """Seed torch as a collector's stream for random actions is: by a number that torch draws."""
    torch.manual_seed(seed)
    torch.manual_seed(int(torch.randint(2**62, ())))


def reference(env, steps, act=None, seed=5):
    """Step ``env`` with its own methods; the random stream is that of a collector."""
    torch.manual_seed(seed)
    root, taken = env.reset(), []
    seed_actions(seed)
    for _ in range(steps):
        step, root = env.step_and_maybe_reset((act or env.rand_action)(root))
        taken.append(step.clone())
    return LazyStackedTensorDict.maybe_dense_stack(taken, len(env.batch_size))


def ones(td):
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int8))


def flat(value):
    return value.flatten().tolist()


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


EQUAL = sorted(set(ENVS) - {"other flag names"})  # which draws from torch


@pytest.mark.parametrize(
    ("name", "fast"),
    [*((name, True) for name in EQUAL), *((name, False) for name in EQUAL[:: 1 if ALL else 3])],
)
def test_data_equal_those_of_the_environments_own_methods(collect, name, fast):
    theirs, ours = ENVS[name](), ENVS[name]()
    theirs.set_seed(3)
    expected = reference(theirs, 24)
    ours.set_seed(3)
    got = collect(ours, frames=expected.numel(), seed=5, fast=fast).exclude("collector")
    assert set(got.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(got[key], expected[key]), key


@pytest.mark.parametrize("name", ["cartpole", "transforms", "serial", "groups"])
def test_data_equal_those_of_torchrls_collector(collect, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about itself
        from torchrl.collectors import Collector as TheirCollector
    theirs, ours = ENVS[name](), ENVS[name]()
    theirs.set_seed(3)
    torch.manual_seed(5)
    collector = TheirCollector(theirs, frames_per_batch=24, total_frames=24)
    seed_actions(5)
    (expected,) = collector
    collector.shutdown()
    ours.set_seed(3)
    got = collect(ours, seed=5)
    for key in expected.exclude("collector").keys(True, True):
        assert torch.equal(got[key], expected[key]), key


def test_taking_our_environments_apart_changes_no_data(collect):
    build = partial(OurSerialEnv, 2, lambda: OurGymEnv("CartPole-v1", num_envs=2))
    batches = []
    for fast in (True, False):
        env = build()
        assert env.set_seed(4) == 7
        batches.append(
            collect(env, frames=120, batches=2, seed=5, fast=fast, max_frames_per_traj=15)
        )
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    assert batches[0]["next", "truncated"].any()
    assert batches[0]["next", "terminated"].any()
    for key in batches[0].keys(True, True):
        assert torch.equal(batches[0][key], batches[1][key]), key


def test_two_rollouts_continue_each_other(collect, make):
    batches = []
    for count in (1, 2):
        env = make()
        env.set_seed(0)
        frames = 24 * env.batch_size.numel() // count
        batches.append(collect(env, frames=frames, batches=count, seed=0))
    assert set(batches[0].keys(True, True)) == set(batches[1].keys(True, True))
    for key in batches[0].keys(True, True):
        assert torch.equal(batches[0][key], batches[1][key]), key


def test_state_of_transforms_survives(collect):
    def build():
        return TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(in_keys=["observation"]))

    env, other = build(), build()
    env.transform.init_stats(20)
    other.transform.loc, other.transform.scale = torch.zeros(3), torch.ones(3)
    with Collector(env, frames_per_batch=4) as one, Collector(other, frames_per_batch=4) as two:
        two.load_state_dict(one.state_dict())
        assert torch.equal(other.transform.loc, env.transform.loc)


@pytest.mark.parametrize("strict", [True, False])
def test_state_of_batched_environments_survives(strict):
    one = Collector(SerialEnv(2, CountingEnv), ones, frames_per_batch=6)
    other = SerialEnv(2, CountingEnv)
    next(iter(one))
    state = one.state_dict()
    assert [env["count"].item() for env in state["env_state_dict"].values()] == [3, 3]
    two = Collector(other, ones, frames_per_batch=6)
    two.load_state_dict(state, strict=strict)
    one.shutdown()
    two.shutdown()


class Keeper(CountingEnv):
    """Keeps the actions it was given, and returns the same tensors at every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kept = []
        self.shown = torch.zeros(*self.batch_size, 1, dtype=torch.int32)
        self.paid = torch.zeros(*self.batch_size, 1)

    def _step(self, tensordict):
        self.kept.append(tensordict["action"])
        after = super()._step(tensordict)
        self.shown.copy_(after["observation"])
        self.paid.copy_(after["observation"])
        return after.set("observation", self.shown).set("reward", self.paid)

    def _reset(self, tensordict=None, **kwargs):
        root = super()._reset(tensordict, **kwargs)
        self.shown.copy_(root["observation"])
        return root.set("observation", self.shown)


class Writer(Keeper):
    """Writes a string beside its numbers, so that steps do not fit rows."""

    def _step(self, tensordict):
        return super()._step(tensordict).set_non_tensor("said", "step")


def test_what_the_environment_keeps_of_an_action_does_not_change(collect):
    env = Keeper(max_steps=100)
    collect(env, ones, 4)["action"].zero_()
    assert [int(action) for action in env.kept] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", [Keeper, Writer], ids=["rows", "payload"])
@pytest.mark.parametrize(
    "around",
    [
        lambda env: env(max_steps=2),
        lambda env: TransformedEnv(env(max_steps=2), RewardSum()),
        lambda env: env(max_steps=2, batch_size=[2]),
    ],
    ids=["alone", "transformed", "batched"],
)
def test_an_environment_may_use_its_tensors_again(collect, kind, around):
    env = around(kind)
    envs = env.batch_size.numel()
    batch = collect(env, ones, 4 * envs, 2).reshape(-1, 8)
    for row in batch:
        assert flat(row["observation"]) == [0, 1, 2, 0, 1, 2, 0, 1]
        assert flat(row["next", "observation"]) == [1, 2, 3, 1, 2, 3, 1, 2]
        assert flat(row["next", "reward"]) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_data_that_contradict_the_specs_arrive_as_they_are(collect):
    class Broken(CountingEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("observation", after["observation"].expand(2))

    batch = collect(Broken(max_steps=50), ones, 3)
    found = [step["next", "observation"].tolist() for step in batch.unbind(0)]
    assert found == [[1, 1], [2, 2], [3, 3]]
    assert batch[0]["observation"].tolist() == [0]


def test_a_missing_terminated_follows_from_done(collect):
    class DoneOnly(CountingEnv):
        """Has the methods but returns ``"done"`` alone."""

        def _step(self, tensordict):
            return super()._step(tensordict).exclude("terminated")

        def _step_proc_data(self, after):
            return after

    batch = collect(DoneOnly(max_steps=1), ones, 4)
    assert torch.equal(batch["next", "terminated"], batch["next", "done"])
    assert flat(batch["next", "done"]) == [False, True, False, True]


def test_state_entries_are_delivered_if_the_reset_has_them(collect):
    class Aimed(CountingEnv):
        def __init__(self):
            super().__init__(max_steps=2)
            self.state_spec = Composite(goal=Bounded(0, 1, (2,)), unused=Unbounded((3,)))

        def _reset(self, tensordict=None, **kwargs):
            return super()._reset(tensordict, **kwargs).set("goal", torch.ones(2))

    batch = collect(Aimed(), ones, 6)
    assert torch.equal(batch["goal"], torch.ones(6, 2))
    assert "unused" not in batch.keys()


# -- what environments add beside their specs ------------------------------------------------------


class Adding(CountingEnv):
    """Shows an entry that no spec names."""

    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(tensordict, **kwargs).set("seen", torch.zeros(2))

    def _step(self, tensordict):
        after = super()._step(tensordict)
        return after.set("seen", after["observation"].float().expand(2).clone())


class AddingLate(CountingEnv):
    """Shows an entry that no spec names, from its first step on."""

    def _step(self, tensordict):
        after = super()._step(tensordict)
        return after.set("late", after["observation"] * 2)


@pytest.mark.parametrize("kind", [Adding, AddingLate], ids=["since the reset", "in steps"])
def test_entries_beside_the_specs_arrive(collect, kind):
    expected = reference(kind(max_steps=2), 8, ones)
    batch = collect(kind(max_steps=2), ones, 4, 2).exclude("collector")
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for mine, other in zip(batch.unbind(0), expected.unbind(0), strict=True):
        for key in other.keys(True, True):
            assert torch.equal(mine[key], other[key]), key
    added = batch["next", "seen"][:, 0] if kind is Adding else batch["next", "late"][:, 0] / 2
    assert added.tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_entries_that_a_transform_adds_beside_its_specs_arrive(collect):
    from torchrl.envs import Transform

    class Delta(Transform):
        def _step(self, tensordict, next_tensordict):
            delta = next_tensordict["observation"] - tensordict["observation"]
            return next_tensordict.set("delta", delta)

    env = TransformedEnv(GymEnv("Pendulum-v1"), Delta())
    batch = collect(env, frames=5)
    for step in batch.unbind(0):
        expected = step["next", "observation"] - step["observation"]
        assert torch.equal(step["next", "delta"], expected)


def test_entries_that_come_late_arrive_in_an_open_layout(collect):
    class Sometimes(CountingEnv):
        def _step(self, tensordict):
            after = super()._step(tensordict)
            return after.set("odd", torch.ones(1)) if int(self.count) == 3 else after

    batch = collect(Sometimes(max_steps=50), ones, 5, fast=False)
    found = ["odd" in step["next"].keys() for step in batch.unbind(0)]
    assert found == [False, False, True, False, False]
    assert [int(step["next", "observation"]) for step in batch.unbind(0)] == [1, 2, 3, 4, 5]


# -- ragged environments ---------------------------------------------------------------------------


def growing(td):
    return td.set("action", td["observation"].mean((-3, -2)))


def test_growing_environments_start_and_collect_with_a_policy(collect):
    batch = collect(EnvWithDynamicSpec(max_count=3), growing, 5)
    assert [step["observation"].shape[1] for step in batch.unbind(0)] == [1, 2, 3, 1, 2]
    for step in batch.unbind(0):
        assert torch.equal(step["action"], step["observation"].mean((-3, -2)))


@pytest.mark.parametrize("batch_size", [[], [2]], ids=str)
@pytest.mark.parametrize("acts", [False, True], ids=["random", "policy"])
def test_heterogeneous_environments_start_and_collect(collect, batch_size, acts):
    env = HeterogeneousCountingEnv(max_steps=3, batch_size=batch_size)
    batch = collect(env, env.rand_action if acts else None, 12)
    assert batch.shape == (*batch_size, 12 // env.batch_size.numel())
    assert {part["vector"].shape[-1] for part in batch["lazy"].unbind(-1)} == {2, 3}
    assert batch["next", "lazy"].get("done").any()
