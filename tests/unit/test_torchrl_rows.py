"""TorchRL's environments are stepped by their parts only where that is the same, bit for bit."""

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from benchmarks import transforms
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.zoo import gym_toys
from tests.zoo.laws import Outcome, differences, quiet
from torch import nn
from torchrl.data import Bounded, Composite
from torchrl.envs import (
    BinarizeReward,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    GrayScale,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    PermuteTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    TimeMaxPool,
    ToTensorImage,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    QValueActor,
    TanhModule,
)
from torchrl.modules import RandomPolicy as TheirRandomPolicy
from torchrl_rig import (
    BY_PARTS,
    SEEN,
    assert_equal,
    assert_like_torchrl,
    collected,
    policy,
    toy,
)

import gleanrl
from gleanrl import Collector, EnvError, MultiSyncCollector


def chain():
    return Compose(
        StepCounter(max_steps=5),
        RewardSum(),
        ObservationNorm(0.1, 3.0, in_keys=SEEN),
        RewardScaling(0.5, 2.0),
        ClipTransform(in_keys=SEEN, low=-0.6, high=0.6),
    )


def single():
    return TransformedEnv(toy(), chain())


def around():
    return TransformedEnv(SerialEnv(3, toy), chain())


def inside():
    return SerialEnv(3, single)


def ours():
    return gleanrl.envs.SerialEnv(3, single)


def both():
    inner = SerialEnv(3, lambda: TransformedEnv(toy(), DoubleToFloat()))
    return TransformedEnv(inner, chain())


def nested():
    return TransformedEnv(TransformedEnv(toy(), RewardSum()), chain(), auto_unwrap=False)


BUILDS = (toy, single, around, inside, ours, both, nested)


@pytest.mark.covering
@pytest.mark.parametrize("actor", [policy, None])
@pytest.mark.parametrize("build", BUILDS)
def test_parts_give_what_the_environment_gives(build, actor):
    explained = assert_equal(build, actor=actor)
    assert all(BY_PARTS in text for text in explained)


def halved(env, collector):
    """Have a random policy draw from half the range."""
    policy, spec = collector.policy, env.action_spec
    half = Bounded(-0.5, 0.5, shape=spec.shape, dtype=spec.dtype)
    whole = isinstance(policy.action_spec, Composite)
    policy.action_spec = Composite(action=half, shape=env.batch_size) if whole else half


class Indices(gym_toys.Small):
    """Shows indices, and takes several."""

    def __init__(self, shown=None):
        here = gym_toys.spaces.Discrete(4)
        inner = gym_toys.spaces.Dict(here=here, far=gym_toys.spaces.MultiDiscrete([2, 3]))
        space = gym_toys.spaces.Dict(a=inner, b=gym_toys.spaces.Discrete(2))
        super().__init__(gym_toys.spaces.MultiDiscrete([3, 4]), space)
        self.shown = shown

    def show(self):
        here = int(self.x[0] > 0) + 2 * int(self.x[1] > 0)
        far = (self.x[:2] > 0.2).astype(np.int64)
        return {"a": {"here": here, "far": far}, "b": int(self.x[2] > 0)}


class Index(Indices):
    def __init__(self, shown=None):
        super().__init__(shown)
        self.observation_space = gym_toys.spaces.Discrete(4)

    def show(self):
        return super().show()["a"]["here"] if self.shown is None else self.shown


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("kind", [Indices, Index])
def test_indices_are_encoded_as_torchrl_does(kind, categorical):
    def build():
        return GymWrapper(kind(), categorical_action_encoding=categorical)

    def actor():
        return TheirRandomPolicy(build().full_action_spec)

    (batch,) = Collector(build(), frames_per_batch=4, total_frames=4)
    assert batch["action"].shape == ((4, 2) if categorical else (4, 7))
    key = ("a", "here") if kind is Indices else "observation"
    assert batch[key].shape == ((4,) if categorical else (4, 4))
    assert_like_torchrl(build, actor)
    several = [build, lambda: TransformedEnv(SerialEnv(2, build), StepCounter(4))]
    for each in several:
        assert all(BY_PARTS in text for text in assert_equal(each, actor=None))


def test_an_index_that_is_shown_as_a_float_is_encoded():
    def build():
        return GymWrapper(Index(shown=2.0))

    assert_like_torchrl(build, lambda: TheirRandomPolicy(build().full_action_spec))


@pytest.mark.parametrize("value", [-1, 4])
def test_an_index_out_of_its_space_is_an_error(value):
    env = GymWrapper(Index())
    collector = Collector(env, frames_per_batch=4, total_frames=4)
    env._env.shown = value
    with pytest.raises(EnvError, match=rf"Discrete\(4\) is {value}; correct"):
        next(iter(collector))


@pytest.mark.parametrize(
    ("build", "kind", "spec"),
    [
        (single, TheirRandomPolicy, "action_spec"),
        (around, TheirRandomPolicy, "full_action_spec"),
        (single, gleanrl.RandomPolicy, "full_action_spec"),
        (around, gleanrl.RandomPolicy, "action_spec"),
    ],
)
def test_random_policies_draw_from_their_spec_without_tensordicts(build, kind, spec):
    def actor():
        return kind(getattr(build(), spec))

    assert_like_torchrl(build, actor)
    explained = assert_equal(build, actor=actor, change=halved)
    # The environment's own composite knows what it is locked by, and cannot be watched.
    first = "tensor calls" if kind is TheirRandomPolicy or spec == "action_spec" else "called"
    assert f"RandomPolicy: {first}" in explained[0]
    assert "RandomPolicy: tensor calls" in explained[-1]
    assert all(BY_PARTS in text for text in explained)


def greedy(spec):
    """Return a policy that acts at random in half of its steps."""
    torch.manual_seed(1)
    net = MLP(4, spec.shape[-1] if spec.dtype is not torch.int64 else 2, num_cells=[8])
    values = QValueActor(net, in_keys=SEEN, spec=spec)
    return TensorDictSequential(values, EGreedyModule(spec=spec, eps_init=0.5))


def annealed(env, collector):
    collector.policy[1].step(300)


def narrowed(env, collector):
    """Have the module draw the first action only, by a mask in its spec."""
    collector.policy[1].spec["action"].update_mask(torch.tensor([True, False]))


@pytest.mark.parametrize("change", [annealed, narrowed])
@pytest.mark.parametrize("categorical", [False, True])
def test_epsilon_greedy_actions_are_recorded(categorical, change):
    def build():
        return GymEnv("CartPole-v1", categorical_action_encoding=categorical)

    def actor():
        return greedy(build().action_spec)

    assert_like_torchrl(build, actor)
    explained = assert_equal(build, actor=actor, change=change, rounds=4)
    assert "EGreedyModule: tensor calls" in explained[0]


class Wider(AdditiveGaussianModule):
    """A stranger's subclass."""

    def _add_noise(self, action):
        return super()._add_noise(2 * action)


def moved_bounds(env, collector):
    """Change a bound of the noise in place."""
    vars(collector.policy[2].spec["action"].space)["_low"].add_(0.2)


@pytest.mark.parametrize("kind", [AdditiveGaussianModule, Wider])
@pytest.mark.parametrize(
    "change", [lambda env, collector: collector.policy[2].step(5), moved_bounds]
)
def test_gaussian_noise_is_recorded(kind, change):
    def actor():
        torch.manual_seed(1)
        spec = toy().action_spec
        net = TensorDictModule(nn.Linear(3, 2), in_keys=SEEN, out_keys=["param"])
        tanh = TanhModule(in_keys=["param"], out_keys=["action"], spec=spec)
        return TensorDictSequential(net, tanh, kind(spec, annealing_num_steps=20))

    assert_like_torchrl(toy, actor)
    explained = assert_equal(toy, actor=actor, change=change, rounds=4)
    assert "TanhModule: tensor calls" in explained[-1]
    assert (f"{kind.__name__}: tensor calls" in explained[-1]) == (kind is AdditiveGaussianModule)


def correlated():
    """Return a policy whose noise depends on that of the step before."""
    torch.manual_seed(1)
    noise = OrnsteinUhlenbeckProcessModule(
        toy().action_spec, sigma=2.0, sigma_min=0.1, annealing_num_steps=20, safe=False
    )
    return TensorDictSequential(policy(), noise)


def hooked(env, collector):
    """Have the noise called and recorded in turn."""
    hooks = collector.policy[1]._forward_hooks
    hooks.clear() if hooks else collector.policy[1].register_forward_hook(lambda *_: None)


def saved(env, collector):
    collector.load_state_dict(collector.state_dict())


@pytest.mark.parametrize(
    "change", [lambda env, collector: collector.policy[1].step(5), hooked, saved]
)
@pytest.mark.parametrize("inits", [True, False])
def test_noise_that_remembers_is_recorded_where_beginnings_are_shown(inits, change):
    def build():
        marks = [InitTracker()] if inits else []
        return TransformedEnv(SerialEnv(2, toy), Compose(StepCounter(4), *marks))

    with quiet():
        assert_like_torchrl(build, correlated)
        explained = assert_equal(build, actor=correlated, change=change, rounds=4)
    assert ("OrnsteinUhlenbeckProcessModule: tensor calls" in explained[0]) == inits


def test_a_random_policy_that_does_more_is_called():
    class Loud(TheirRandomPolicy):
        def __call__(self, td):
            return super().__call__(td).set("loud", torch.ones(()))

    explained = assert_equal(single, actor=lambda: Loud(single().action_spec))
    assert "Loud: called" in explained[0]


def test_a_random_policy_whose_spec_no_longer_fits_is_an_error():
    def wider(env, collector):
        collector.policy.action_spec = Bounded(-1, 1, shape=(3,))

    with pytest.raises(gleanrl.PolicyError, match="the policy wrote 'action'"):
        collected(
            single,
            fast=True,
            actor=lambda: TheirRandomPolicy(single().action_spec),
            change=wider,
        )


@pytest.mark.parametrize("build", [toy, lambda: TransformedEnv(SerialEnv(3, toy), RewardSum())])
def test_cut_episodes_are_reset_alone(build):
    explained = assert_equal(build, max_frames_per_traj=3)
    assert BY_PARTS in explained[0]


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {"init_random_frames": 50},
        {"reset_at_each_iter": True},
        {"compact_obs": True},
        {"split_trajs": True},
        {"trajs_per_batch": 3},
        {"set_truncated": True},
        {"check_finite": True},
    ],
)
@pytest.mark.parametrize("build", [single, around])
def test_arguments_of_collectors_mean_the_same(build, options):
    explained = assert_equal(build, **options)
    assert BY_PARTS in explained[0]


def in_place(env, collector):
    env.transform[2].loc += 0.5


def replaced(env, collector):
    env.transform[2].loc = torch.full((3,), 0.25)


def other_kind(env, collector):
    env.transform[2].standard_normal = ~env.transform[2].standard_normal


def shorter(env, collector):
    env.transform[0].max_steps -= 1


def tighter(env, collector):
    env.transform[4].low = env.transform[4].low * 0.5


def rolled_out(env, collector):
    env.rollout(4)
    collector.reset()


def saved(env, collector):
    collector.load_state_dict(collector.state_dict())


def seeded(env, collector):
    collector.set_seed(9)


@pytest.mark.covering
@pytest.mark.parametrize(
    "change", [in_place, replaced, other_kind, shorter, tighter, rolled_out, saved, seeded]
)
@pytest.mark.parametrize("build", [single, around])
def test_changes_between_batches_count(build, change):
    explained = assert_equal(build, change=change)
    assert BY_PARTS in explained[-1]


def test_numbers_of_members_may_be_changed_together():
    def change(env, collector):
        for member in env._envs:
            member.transform[2].loc += 0.5

    explained = assert_equal(inside, change=change)
    assert BY_PARTS in explained[-1]


def test_a_number_of_one_member_changed_has_them_stepped_by_their_own_methods():
    def change(env, collector):
        env._envs[1].transform[2].loc += 0.5

    explained = assert_equal(inside, change=change)
    assert "from member to member" in explained[-1]


def louder(step):
    def louder_step(*args):
        data = step(*args)
        return data.set("reward", data.get("reward") * 10)

    return louder_step


def patch_env(env, collector):
    env._step = louder(env._step)


def patch_base(env, collector):
    env.base_env._step = louder(env.base_env._step)


def patch_transform(env, collector):
    env.transform[1]._step = louder(env.transform[1]._step)


@pytest.mark.covering
@pytest.mark.parametrize("change", [patch_env, patch_base, patch_transform])
@pytest.mark.parametrize("build", [single, around])
def test_a_method_replaced_between_batches_is_called(build, change):
    explained = assert_equal(build, change=change, rounds=2)
    assert BY_PARTS in explained[0]


def test_a_method_replaced_on_a_class_is_called(monkeypatch):
    def change(env, collector):
        monkeypatch.setattr(RewardScaling, "_call", lambda self, data: data)

    fast, _ = collected(single, fast=True, change=change, rounds=2)
    monkeypatch.undo()
    plain, _ = collected(single, fast=False, change=change, rounds=2)
    assert not differences(plain, fast)


def test_a_transform_added_between_batches_is_used():
    def change(env, collector):
        env.append_transform(RewardScaling(0.1, 0.5))

    assert BY_PARTS in assert_equal(single, change=change)[-1]


def test_a_transform_that_adds_entries_between_batches_is_an_error():
    env = single()
    with Collector(env, policy(), frames_per_batch=4, total_frames=8) as collector:
        iterator = iter(collector)
        next(iterator)
        env.append_transform(InitTracker())
        with pytest.raises(EnvError, match="other entries now.*is_init"):
            next(iterator)


KINDS = [
    (StepCounter, {}),
    (RewardSum, {}),
    (InitTracker, {}),
    (DoubleToFloat, {}),
    (ObservationNorm, {"loc": 0.1, "scale": 2.0, "in_keys": SEEN}),
    (RewardScaling, {"loc": 0.1, "scale": 2.0}),
    (RewardClipping, {"clamp_min": -0.1, "clamp_max": 0.1}),
    (SignTransform, {"in_keys": ["reward"]}),
    (BinarizeReward, {}),
    (CatTensors, {"in_keys": SEEN, "out_key": "vector", "del_keys": False}),
    (UnsqueezeTransform, {"dim": -1, "in_keys": SEEN, "out_keys": ["column"]}),
]


@pytest.mark.parametrize(("kind", "kwargs"), KINDS)
def test_a_strangers_transform_is_called_as_it_is(kind, kwargs):
    class Mine(kind):
        def _step(self, tensordict, next_tensordict):
            data = super()._step(tensordict, next_tensordict)
            return data.set("reward", data.get("reward") + 1)

    explained = assert_equal(lambda: TransformedEnv(toy(), Compose(RewardSum(), Mine(**kwargs))))
    assert "Mine is not TorchRL's own" in explained[0]


def hooked():
    env = single()
    env.transform[1].register_forward_hook(lambda *args: None)
    return env


def patched():
    env = single()
    patch_transform(env, None)
    return env


def patched_env():
    env = single()
    patch_env(env, None)
    return env


@pytest.mark.parametrize("build", [hooked, patched, patched_env])
def test_hooks_and_replaced_methods_are_called(build):
    assert "replaced" in assert_equal(build)[0]


def stacked(frames=4):
    column = UnsqueezeTransform(-1, in_keys=SEEN, out_keys=["column"])
    return Compose(column, CatFrames(frames, -1, in_keys=["column"]))


def turned():
    """Return stacks that are as wide as they are high, transposed."""
    return Compose(stacked(3), PermuteTransform((-1, -2), in_keys=["column"]))


STATEFUL = [
    lambda: VecNormV2(in_keys=[*SEEN, "reward"], decay=0.9),
    lambda: VecNorm(in_keys=SEEN, decay=0.9, new_api=False),
    stacked,
    turned,
    lambda: TimeMaxPool(in_keys=SEEN, T=3),
]


def frozen(env, collector):
    env.transform.freeze()


@pytest.mark.filterwarnings("ignore:This class is to be deprecated")
@pytest.mark.parametrize(
    ("transform", "change"),
    [(STATEFUL[0], frozen), *itertools.product(STATEFUL, [rolled_out, saved])],
)
def test_a_transform_keeps_its_own_state(transform, change):
    explained = assert_equal(lambda: TransformedEnv(toy(), transform()), change=change)
    assert BY_PARTS in explained[-1]


def test_frames_are_stacked_for_several_members():
    explained = assert_equal(lambda: TransformedEnv(SerialEnv(3, toy), stacked()))
    assert "CatFrames: called as it is, on rows, in each reset" in explained[0]


def stacked_inside():
    return SerialEnv(3, lambda: TransformedEnv(toy(), Compose(stacked(), StepCounter(4))))


def cleared(env, collector):
    stack_of(env, 1).zero_()


def exchanged(env, collector):
    frames = env._envs[1].transform[0][1]
    frames._cat_buffers_column = frames._cat_buffers_column.clone() + 1


def stack_of(env, member):
    return env._envs[member].transform[0][1]._cat_buffers_column


@pytest.mark.parametrize("change", [rolled_out, saved, cleared, exchanged])
def test_members_keep_their_own_stacks(change):
    stacks = []

    def changed(env, collector):
        stacks.append(torch.stack([stack_of(env, member) for member in range(3)]))
        change(env, collector)

    explained = assert_equal(stacked_inside, change=changed)
    assert all(BY_PARTS in text for text in explained)
    fast, plain = stacks[:3], stacks[3:]
    assert all(map(torch.equal, fast, plain))


def test_statistics_are_those_of_the_steps():
    def statistics(fast):
        env = TransformedEnv(toy(), VecNormV2(in_keys=SEEN))
        env.set_seed(3)
        with Collector(env, policy(), frames_per_batch=9, total_frames=18, fast=fast) as collector:
            for _ in collector:
                pass
        return env.transform.loc["observation"], env.transform.scale["observation"]

    for fast, plain in zip(statistics(True), statistics(False), strict=True):
        assert torch.equal(fast, plain)


def exchanged_statistics(env, collector):
    """Replace tensors in the TensorDicts of statistics, which stay the same objects."""
    transform = (env if isinstance(env, TransformedEnv) else env._envs[1]).transform[-1]
    for held in vars(transform).values():
        if isinstance(held, TensorDictBase):
            held.update(held.apply(lambda one: one + 1))


@pytest.mark.filterwarnings("ignore:This class is to be deprecated")
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("transform", STATEFUL[:2])
def test_statistics_may_be_exchanged(transform, several):
    def member():
        return TransformedEnv(toy(), Compose(RewardSum(), transform()))

    build = partial(SerialEnv, 3, member) if several else member
    explained = assert_equal(build, change=exchanged_statistics)
    assert all(BY_PARTS in text for text in explained)


@pytest.mark.filterwarnings("ignore:This class is to be deprecated")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("transform", STATEFUL)
def test_members_have_states_of_their_own(transform, count):
    def build():
        return SerialEnv(count, lambda: TransformedEnv(toy(), transform()))

    assert all(BY_PARTS in text for text in assert_equal(build, change=saved))


def test_members_may_have_statistics_in_common():
    def build():
        zeros = TensorDict(observation=torch.zeros(3))
        counts = TensorDict(observation=torch.zeros((), dtype=torch.int64))
        shared = {"loc": zeros, "var": zeros.clone(), "count": counts}
        return SerialEnv(3, lambda: TransformedEnv(toy(), VecNormV2(SEEN, shared_data=shared)))

    assert all(BY_PARTS in text for text in assert_equal(build))


def test_transforms_that_act_for_one_member_have_its_settings():
    def build():
        kinds = [lambda n=n: VecNormV2(in_keys=SEEN, decay=n) for n in (0.5, 0.9)]
        return SerialEnv(2, [lambda kind=kind: TransformedEnv(toy(), kind()) for kind in kinds])

    assert BY_PARTS in assert_equal(build)[0]


def test_a_state_that_two_transforms_change_is_left_to_them():
    def member():
        first, second = VecNormV2(in_keys=SEEN), VecNormV2(in_keys=SEEN)
        env = TransformedEnv(toy(), Compose(first, second))
        env.set_seed(0)
        env.reset()
        second._loc, second._var, second._count = first._loc, first._var, first._count
        return env

    assert "have one state" in assert_equal(lambda: SerialEnv(2, member))[0]


def test_members_with_other_settings_are_stepped_by_their_own_methods():
    def build():
        makers = [lambda n=n: TransformedEnv(toy(), StepCounter(n)) for n in (3, 4)]
        return SerialEnv(2, makers)

    assert "from member to member" in assert_equal(build)[0]


class Wide(gym_toys.Small):
    """Returns other floats than it declares."""

    def show(self):
        return self.x.astype(np.float64)


class Narrow(gym_toys.Small):
    """Returns other whole numbers than it declares."""

    def __init__(self, action):
        super().__init__(action, gym.spaces.Box(-50, 50, (3,), np.int64))

    def show(self):
        return (self.x * 5).astype(np.int16)


class Unpaid(gym_toys.Small):
    """Pays nothing, and says so with ``None``."""

    def pay(self, push):
        return None


@pytest.mark.parametrize("kind", [Wide, Narrow, Unpaid])
def test_odd_results_are_cast_as_torchrl_does(kind):
    def build():
        return TransformedEnv(GymWrapper(kind(gym_toys.MOVES)), RewardSum())

    assert BY_PARTS in assert_equal(build, actor=None)[0]


def test_an_error_names_the_environment():
    env = TransformedEnv(GymWrapper(gym_toys.Quits(gym_toys.MOVES)), RewardSum())
    with (
        Collector(env, policy(), frames_per_batch=12, total_frames=24) as collector,
        pytest.raises(ArithmeticError, match="the ninth step"),
    ):
        next(iter(collector))


@pytest.mark.parametrize("build", [single, inside])
def test_workers_step_by_parts(build):
    def run(fast):
        torch.manual_seed(0)
        kwargs = {"frames_per_batch": 42, "total_frames": 84, "fast": fast}
        with MultiSyncCollector([build, build], policy(), **kwargs) as collector:
            collector.set_seed(4)
            return Outcome([batch.clone() for batch in collector])

    assert not differences(run(False), run(True))


@pytest.mark.parametrize("build", [single, around, inside, ours])
def test_a_policy_that_remembers_is_shown_what_partial_resets_leave(build):
    class Remembers(nn.Module):
        def forward(self, td):
            before = td.get("n", None)
            td["n"] = torch.zeros(td.batch_size) if before is None else before + 1
            return td.set("action", torch.zeros(*td.batch_size, 2))

    explained = assert_equal(build, actor=Remembers)
    assert BY_PARTS in explained[0]


def test_images_are_transformed_by_parts():
    def build():
        images = ToTensorImage()  # of "pixels", as TorchRL calls observations like these
        grey = GrayScale()
        return TransformedEnv(
            GymWrapper(Picture(gym_toys.MOVES)),
            Compose(images, grey, StepCounter()),
        )

    assert BY_PARTS in assert_equal(build, actor=None)[0]


class Picture(gym_toys.Pictures):
    """Shows height, width and colours."""

    def __init__(self, action):
        super().__init__(action)
        self.observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def show(self):
        return np.ascontiguousarray(super().show().transpose(1, 2, 0))


TRANSFORMS = dict(transforms.transforms())


@pytest.mark.parametrize("name", transforms.EXAMPLES)
def test_every_transform_gives_what_it_gives(name):
    if name in ("CenterCrop", "Crop", "Resize"):
        pytest.importorskip("torchvision", reason="without torchvision")
    with quiet():
        assert_equal(lambda: transforms.example(name, TRANSFORMS[name]), actor=None)


def test_the_page_says_how_every_transform_is_called():
    page = transforms.PAGE.read_text()
    found = page.partition(transforms.BEGIN)[2].partition(transforms.END)[0].strip().splitlines()
    assert found == transforms.table()


def test_warnings_of_a_policy_are_not_repeated_in_every_rollout():
    class Warns(nn.Module):
        def forward(self, observation):
            warnings.warn("from the policy", stacklevel=1)
            return observation[..., :2]

    def actor():
        return TensorDictModule(Warns(), in_keys=SEEN, out_keys=["action"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        collected(single, fast=True, actor=actor, rounds=6)
    found = [
        str(warning.message) for warning in caught if "from the policy" in str(warning.message)
    ]
    assert len(found) <= 2  # one in the call at construction


def test_seconds_of_resets_do_not_run_back_where_transforms_are_recorded_again():
    def change(env, collector):
        env.transform.max_steps = 1000
        shares.append(collector.stats()["time_reset"])

    shares = []
    collected(
        lambda: TransformedEnv(GymEnv("Pendulum-v1"), StepCounter(max_steps=2)),
        fast=True,
        actor=None,
        change=change,
    )
    assert min(shares) > 0


def test_collectors_built_in_two_threads_at_once_step_by_parts():
    def built(_):
        with Collector(single(), None, frames_per_batch=7) as collector:
            return collector.explain()

    with ThreadPoolExecutor(2) as threads:
        assert all(BY_PARTS in text for text in threads.map(built, range(4)))


class Copies(gym.spaces.Box):
    """Counts its copies: a rehearsal makes some."""

    count = 0

    def __deepcopy__(self, memo):
        type(self).count += 1
        return type(self)(self.low, self.high, self.shape, self.dtype)


@pytest.mark.parametrize("build", [lambda end: end(), lambda end: SerialEnv(2, end)])
def test_parts_are_proven_once_where_nothing_changes(build):
    space = Copies(-np.inf, np.inf, (3,), np.float32)

    def end():
        return TransformedEnv(GymWrapper(gym_toys.Small(gym_toys.MOVES, space)), chain())

    before = Copies.count
    with Collector(build(end), None, frames_per_batch=14) as collector:
        built = Copies.count
        assert built > before
        for _ in range(3):
            collector.next()
        assert BY_PARTS in collector.explain()
    assert Copies.count == built
