"""Transforms that step, count, mask or prime: equal data where they are stepped by their parts."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.covering import ALL
from tests.zoo import gym_toys
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionMask,
    Compose,
    DiscreteActionProjection,
    EndOfLifeTransform,
    FrameSkipTransform,
    GymWrapper,
    InitTracker,
    NoopResetEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TrajCounter,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.modules import GRUModule
from torchrl_rig import BY_PARTS, SEEN, assert_equal, assert_like_torchrl, collected, policy

import gleanrl
from gleanrl import Collector

FEW = gym_toys.spaces.Discrete(3)


class Draws(gym_toys.Lives):
    """Draws from torch's stream, as the transforms do, and tells lives."""

    def step(self, action):
        self.x = self.x + 0.1 * torch.randn(3).numpy()
        return super().step(action)

    def reset(self, **options):
        torch.randn(1)
        return super().reset(**options)


class TensorRewards(Draws):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, torch.tensor(reward), *rest


def member(*makers, kind=Draws, index=False):
    env = GymWrapper(kind(FEW), categorical_action_encoding=index)
    return TransformedEnv(env, Compose(*[make() for make in makers]))


def base(index=False):
    return GymWrapper(Draws(FEW), categorical_action_encoding=index)


def noops(count=3):
    return NoopResetEnv(count)


def as_many_noops():
    return NoopResetEnv(1, random=False)


def skip():
    return FrameSkipTransform(3)


def projection():
    return DiscreteActionProjection(3, 5)


CHAINS = {
    "skip": (skip, RewardSum, lambda: StepCounter(4)),
    "noops": (noops, RewardSum),
    "as many noops": (as_many_noops, RewardSum),
    "noops, skip": (noops, skip, RewardSum, EndOfLifeTransform),
    "skip, noops": (skip, lambda: noops(2), InitTracker),
    "lives": (EndOfLifeTransform, RewardSum),
    "counter": (TrajCounter, RewardSum),
}
ALONE = {
    "projection": (noops, projection, RewardSum),
    "all": (noops, skip, TrajCounter, projection, EndOfLifeTransform, RewardSum),
}
AROUND = {
    "counter": (TrajCounter, RewardSum),
    "lives": (EndOfLifeTransform, RewardSum),
    "projection": (projection, RewardSum),
    "VecNormV2": (lambda: VecNormV2(in_keys=[*SEEN, "reward"], decay=0.9), RewardSum),
    "VecNorm": (lambda: VecNorm(in_keys=SEEN, decay=0.9, new_api=False), RewardSum),
}


def one(chain):
    return lambda: member(*chain)


def inside(chain, serial=SerialEnv):
    return lambda: serial(3, lambda: member(*chain))


def around(chain):
    return lambda: TransformedEnv(SerialEnv(3, base), Compose(*[make() for make in chain]))


BUILDS = {
    **{f"one: {name}": one(chain) for name, chain in {**CHAINS, **ALONE}.items()},
    **{f"inside: {name}": inside(chain) for name, chain in CHAINS.items()},
    "inside ours": inside(CHAINS["noops, skip"], gleanrl.envs.SerialEnv),
    **{f"around: {name}": around(chain) for name, chain in AROUND.items()},
    "frame_skip": lambda: TransformedEnv(GymWrapper(Draws(FEW), frame_skip=3), RewardSum()),
    "skip: tensors": lambda: member(skip, RewardSum, kind=TensorRewards),
}


REPEATED = {"one: noops", "one: lives", *(f"inside: {name}" for name in CHAINS)}
REPEATED -= {"inside: noops, skip", "inside: skip, noops", "inside: counter"}
"""Builds of which each transform is in another one at the same place, or in ``one``."""


OURS_ONLY = {"inside ours", "around: lives", "around: VecNorm", "around: VecNormV2"}
"""TorchRL's collector takes no environments of ours, raises an error where lives are read around
several members, and makes statistics of more resets at its construction."""


class Picks(nn.Module):
    """Picks an action by the observation."""

    def forward(self, observation):
        index = (observation[..., 0] * 50).abs().long() % self.count
        return nn.functional.one_hot(index, self.count)


def actor_for(name):
    class Fitting(Picks):
        count = 5 if "projection" in name or "all" in name else 3

    return lambda: TensorDictModule(Fitting(), in_keys=SEEN, out_keys=["action"])


pytestmark = [
    pytest.mark.filterwarnings("ignore:This class is to be deprecated"),
    pytest.mark.filterwarnings("ignore:Support of VecNormV2"),
    pytest.mark.filterwarnings("ignore:The base_env is not a gym env"),
]


@pytest.mark.parametrize("name", [name for name in BUILDS if ALL or name not in REPEATED])
def test_parts_give_what_the_environment_gives(name):
    assert BY_PARTS in assert_equal(BUILDS[name], actor=actor_for(name))[0]


@pytest.mark.parametrize("name", ["one: all", "inside: noops, skip", "around: projection"])
def test_random_actions_are_those_of_the_environment(name):
    assert BY_PARTS in assert_equal(BUILDS[name], actor=None)[0]


@pytest.mark.parametrize(
    "name", [name for name in BUILDS if name not in OURS_ONLY][:: 1 if ALL else 2]
)
def test_torchrls_collector_gives_the_same(name):
    assert_like_torchrl(BUILDS[name], actor_for(name))


@pytest.mark.covering
@pytest.mark.parametrize("name", ["noops", "noops, skip", "lives"])
@pytest.mark.parametrize("where", [one, inside])
def test_cut_episodes_are_reset_alone(where, name):
    explained = assert_equal(where(CHAINS[name]), actor=actor_for(name), max_frames_per_traj=2)
    assert BY_PARTS in explained[0]


# -- masks -----------------------------------------------------------------------------------------


def masked(index=False):
    return member(ActionMask, RewardSum, kind=gym_toys.Masked, index=index)


def masked_around():
    members = SerialEnv(3, lambda: GymWrapper(gym_toys.Masked(FEW)))
    return TransformedEnv(members, Compose(ActionMask(), RewardSum()))


@pytest.mark.parametrize("build", [masked, lambda: masked(True), masked_around])
def test_random_actions_are_those_that_the_mask_allows(build):
    fast, explained = collected(build, fast=True, actor=None, rounds=6)
    plain, _ = collected(build, fast=False, actor=None, rounds=6)
    assert BY_PARTS in explained[-1]
    for one_batch, other in zip(fast.batches, plain.batches, strict=True):
        assert torch.equal(one_batch["action"], other["action"])
        assert torch.equal(one_batch["observation"], other["observation"])


def test_the_mask_stays_in_the_environments_spec():
    env = masked(index=True)
    with Collector(env, None, frames_per_batch=5, total_frames=5) as collector:
        (batch,) = collector
    spec = env.full_action_spec["action"]
    after = batch["next", "action_mask"][-1]
    if not batch["next", "done"][-1]:
        assert torch.equal(spec.mask.reshape(-1), after.bool())


# -- state -----------------------------------------------------------------------------------------


def more_noops(env, collector):
    env.transform[0].noops = 1


def longer_skip(env, collector):
    env.transform[1].frame_skip += 1


def other_count(env, collector):
    env.transform[2].load_state_dict({"traj_count": 70})


def other_lives(env, collector):
    env.transform[4].eol_attribute = ["unwrapped", "ale", "lives"]


def rolled_out(env, collector):
    env.rollout(4)
    collector.reset()


def saved(env, collector):
    collector.load_state_dict(collector.state_dict())


@pytest.mark.filterwarnings("ignore:all environments begin new")  # a counter of processes
@pytest.mark.parametrize(
    "change", [more_noops, longer_skip, other_count, other_lives, rolled_out, saved]
)
def test_changes_between_batches_count(change):
    explained = assert_equal(one(ALONE["all"]), actor=actor_for("all"), change=change)
    assert BY_PARTS in explained[-1]


def test_frames_that_an_environment_skips_may_be_changed():
    def change(env, collector):
        env.base_env.wrapper_frame_skip += 1

    explained = assert_equal(one(CHAINS["lives"]), actor=actor_for(""), change=change)
    assert BY_PARTS in explained[-1]


def test_the_counter_is_left_where_the_environments_would_be():
    def count(fast):
        counts = []
        collected(
            around(AROUND["counter"]),
            fast=fast,
            actor=actor_for("counter"),
            change=lambda env, _: counts.append(env.transform[0].state_dict()),
        )
        return counts

    assert count(True) == count(False)


def test_statistics_around_several_members_are_left_where_theirs_would_be():
    def statistics(fast):
        env = around(AROUND["VecNormV2"])()
        env.set_seed(5)
        torch.manual_seed(0)
        kwargs = {"frames_per_batch": 21, "total_frames": 63, "fast": fast}
        with Collector(env, actor_for("VecNormV2")(), **kwargs) as collector:
            for _ in collector:
                pass
        norm = env.transform[0]
        return norm.loc["observation"], norm.scale["observation"]

    for fast, plain in zip(statistics(True), statistics(False), strict=True):
        assert torch.equal(fast, plain)


def of_one_member(env, collector):
    env._envs[1].transform[0].noops += 1


def test_a_setting_of_one_member_changed_has_them_stepped_by_their_own_methods():
    explained = assert_equal(inside(CHAINS["noops"]), actor=actor_for(""), change=of_one_member)
    assert BY_PARTS in explained[0]
    assert "from member to member" in explained[-1]


# -- what stays as it is ---------------------------------------------------------------------------


class Louder(NoopResetEnv):
    """A stranger's transform."""


def hooked():
    env = member(noops, RewardSum)
    env.transform[0].register_forward_hook(lambda *args: None)
    return env


def normed(*chain):
    """Return a batch that keeps what its members' transforms make, and statistics of all of it."""
    norm = VecNormV2(in_keys=[*SEEN, "reward"], decay=0.9)
    return TransformedEnv(SerialEnv(3, lambda: member(*chain)), norm)


def counted():
    return StepCounter(3)


def begins():
    """Return an environment whose statistics of rewards begin with its first step."""
    norm = VecNorm(in_keys=[*SEEN, "reward"], decay=0.9, new_api=False)
    return TransformedEnv(base(), norm)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: normed(as_many_noops, skip, counted), "counts members that a partial reset"),
        (lambda: normed(counted), "counts members that a partial reset"),
        (begins, "VecNorm has no statistics of some of its entries yet"),
        (one((RewardSum, skip)), "FrameSkipTransform is not the first"),
        (one((EndOfLifeTransform, noops)), "NoopResetEnv is not the first"),
        (around((skip, RewardSum)), "FrameSkipTransform is not the first"),
        (lambda: SerialEnv(3, masked), "of its own in ActionMask"),
        (inside((projection,)), "of its own in DiscreteActionProjection"),
        (one((lambda: Louder(2), RewardSum)), "Louder is not TorchRL's own"),
        (hooked, "has hooks"),
    ],
)
def test_others_are_stepped_by_their_own_methods(build, why):
    assert why in assert_equal(build, actor=actor_for(why.lower()))[0]


def other_lives(env, collector=None):
    vars(env.base_env)["unwrapped"] = Draws(FEW)


def test_lives_are_found_where_torchrl_finds_them():
    def build():
        env = member(EndOfLifeTransform, RewardSum)
        other_lives(env)
        return env

    assert "an environment has its own `unwrapped`" in assert_equal(build, actor=actor_for(""))[0]


def test_lives_may_be_found_elsewhere_later():
    build = one(CHAINS["lives"])
    explained = assert_equal(build, actor=actor_for(""), change=other_lives)
    assert BY_PARTS in explained[0]
    assert "an environment has its own `unwrapped`" in explained[1]


def test_lives_may_be_methods_of_the_environment():
    build = one([lambda: EndOfLifeTransform(eol_attribute="lives")])
    assert BY_PARTS in assert_equal(build, actor=actor_for(""))[0]


def test_a_method_replaced_between_batches_is_called():
    def change(env, collector):
        reset = env.transform[0]._reset
        env.transform[0]._reset = lambda *args: reset(*args)

    explained = assert_equal(one(CHAINS["noops"]), actor=actor_for(""), change=change)
    assert BY_PARTS in explained[0]
    assert BY_PARTS not in explained[-1]


def test_an_episode_that_ends_too_soon_for_its_random_steps_is_an_error():
    class Short(gym_toys.Small):
        def reset(self, **options):
            shown = super().reset(**options)
            self.length = self.first
            self.first = 1
            return shown

        first = 9

    env = TransformedEnv(GymWrapper(Short(FEW)), NoopResetEnv(4, random=False))
    with (
        Collector(env, None, frames_per_batch=12, total_frames=12) as collector,
        pytest.raises(RuntimeError, match="ended again and again within the 4 random steps"),
    ):
        next(iter(collector))


# -- recurrent states ------------------------------------------------------------------------------


def recurrent():
    torch.manual_seed(1)
    cell = GRUModule(3, 4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 2), in_keys=["features"], out_keys=["action"])
    return TensorDictSequential(cell, head)


def primed(first=0.0, **kwargs):
    states = {"recurrent_state": Unbounded((1, 4))}
    return TensorDictPrimer(states, default_value=first, expand_specs=True, **kwargs)


def primed_chain(*args, **kwargs):
    return Compose(InitTracker(), StepCounter(4), primed(*args, **kwargs))


def small():
    return GymWrapper(gym_toys.Small(gym_toys.MOVES))


def primed_one(*args, **kwargs):
    return TransformedEnv(small(), primed_chain(*args, **kwargs))


PRIMED = {
    "one": primed_one,
    "around": lambda: TransformedEnv(SerialEnv(3, small), primed_chain()),
    "inside": lambda: SerialEnv(3, primed_one),
    "ours": lambda: gleanrl.envs.SerialEnv(3, primed_one),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    "options", [{}, {"init_random_frames": 40}, {"reset_at_each_iter": True}, {"split_trajs": True}]
)
@pytest.mark.parametrize("name", PRIMED)
def test_states_that_a_policy_writes_pass_through_primers(name, options):
    explained = assert_equal(PRIMED[name], actor=recurrent, **options)
    assert BY_PARTS in explained[-1]


@pytest.mark.parametrize("name", ["one", "around", "inside"])
def test_torchrls_collector_passes_the_same_states(name):
    assert_like_torchrl(PRIMED[name], recurrent)


@pytest.mark.covering
@pytest.mark.parametrize("acts", [None, policy])
@pytest.mark.parametrize("first", [0.0, 0.5])
def test_states_that_nobody_writes_stay(first, acts):
    assert BY_PARTS in assert_equal(lambda: primed_one(first), actor=acts)[0]


def other_first(env, collector):
    env.transform[2].default_value["recurrent_state"] = 0.25


def louder(env, collector):
    step = env.base_env._step
    env.base_env._step = lambda *args: step(*args)


@pytest.mark.parametrize("change", [rolled_out, saved, other_first, louder])
def test_states_pass_on_after_changes(change):
    assert BY_PARTS in assert_equal(primed_one, actor=recurrent, change=change)[0]


@pytest.mark.parametrize(
    ("build", "options", "why"),
    [
        (lambda: primed_one(0.5), {}, "need not be zeros"),
        (lambda: primed_one(None, random=True), {}, "need not be zeros"),
        (lambda: primed_one(lambda: torch.ones(1, 4)), {}, "calls a function"),
    ],
)
def test_other_first_states_have_the_environment_stepped_by_its_own_methods(build, options, why):
    assert why in assert_equal(build, actor=recurrent, **options)[0]


def test_compact_storage_leaves_no_rows_for_states():
    explained = collected(primed_one, fast=True, actor=recurrent, compact_obs=True)[1]
    assert "compact_obs leaves out" in explained[0]


def test_a_transform_may_read_the_states():
    def build():
        column = UnsqueezeTransform(-1, in_keys=["recurrent_state"], out_keys=["column"])
        return TransformedEnv(small(), Compose(InitTracker(), primed(), column))

    assert BY_PARTS in assert_equal(build, actor=recurrent)[0]
