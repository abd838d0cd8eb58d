"""State that a policy writes and a transform of the environment keeps, as TorchRL collects it."""

import warnings
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from tests.covering import ALL
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
)
from torchrl.modules import (
    AdditiveGaussianModule,
    ConsistentDropoutModule,
    GRUModule,
    LSTMModule,
)
from torchrl.testing.mocking_classes import CountingEnvWithString

from gleanrl import PolicyError
from gleanrl.collectors import Collector
from gleanrl.envs import SerialEnv as OurSerialEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns about its own classes
    from torchrl.collectors import Collector as TheirCollector

NAMES = {"gru": ["hx"], "lstm": ["hx", "cx"], "counter": ["cnt"], "function": ["cnt"]}


def network(kind):
    torch.manual_seed(0)
    names = NAMES[kind]
    build = GRUModule if kind == "gru" else LSTMModule
    after = [("next", name) for name in names]
    return build(3, 8, in_keys=["observation", *names], out_keys=["feat", *after])


def counting(td):
    td["action"] = (td["observation"][..., :1] + td["cnt"]).clamp(-2, 2)
    td["next", "cnt"] = td["cnt"] + 1


def returning(td):
    counting(td)
    return td


def parts(kind):
    """Return a policy and what makes the primer of its state."""
    if kind in ("gru", "lstm"):
        module = network(kind)
        policy = Seq(module, Mod(nn.Linear(8, 1), ["feat"], ["action"]))
        return policy, module.make_tensordict_primer
    make = partial(TensorDictPrimer, cnt=Unbounded(shape=(1,)), expand_specs=True, default_value=3)
    if kind == "function":
        return returning, make
    keys = ["action", ("next", "cnt")]
    return Mod(lambda obs, cnt: (obs[..., :1] * 0, cnt + 1), ["observation", "cnt"], keys), make


def short():
    """Episodes of 5 steps without any transform."""
    return GymEnv("Pendulum-v1", max_episode_steps=5)


def pendulum(primer=None):
    """Episodes of 7 steps."""
    transforms = [InitTracker(), StepCounter(7), *([primer] if primer is not None else [])]
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms))


def inner(serial, make):
    return serial(2, lambda: pendulum(make()))


def outer(serial, make):
    return TransformedEnv(serial(2, lambda: GymEnv("Pendulum-v1")), around(make))


def around(make):
    return Compose(InitTracker(), StepCounter(7), make())


ENVS = {
    "one": lambda make: pendulum(make()),
    "primer alone": lambda make: TransformedEnv(short(), make()),
    "serial, inner": partial(inner, SerialEnv),
    "serial, outer": partial(outer, SerialEnv),
    "our serial, inner": partial(inner, OurSerialEnv),
}


def collect(collector, kind, build, frames=20, static=False, **options):
    """Return three batches."""
    policy, make = parts(kind)
    env = build(make)
    env.set_seed(0, static_seed=static)  # ours gives its elements other seeds than TorchRL's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = collector(env, policy, frames_per_batch=frames, total_frames=3 * frames, **options)
        batches = [batch.clone() for batch in source]
        source.shutdown()
    return batches


def both(kind, build, theirs=None, **options):
    """Return batches of ours and of TorchRL's collector, which must hold the same."""
    ours = collect(Collector, kind, build, **options)
    expected = collect(TheirCollector, kind, theirs or build, **options)
    assert len(ours) == len(expected) == 3
    for mine, other in zip(ours, expected, strict=True):
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            torch.testing.assert_close(mine[key], other[key], msg=f"{key}: %s".__mod__)
    return ours


SOME = {
    ("gru", "one"),
    ("gru", "serial, outer"),
    ("lstm", "serial, inner"),
    ("lstm", "our serial, inner"),
    ("counter", "primer alone"),
    ("counter", "serial, outer"),
    ("function", "one"),
    ("function", "our serial, inner"),
}
RUNS = [
    (kind, env)
    for kind in NAMES
    for env in ENVS
    if env != "primer alone" or "cnt" in NAMES[kind]  # TorchRL's networks want "is_init"
    if ALL or (kind, env) in SOME
]


@pytest.mark.parametrize(("kind", "env"), RUNS)
def test_state_kept_by_the_environment_is_what_torchrl_delivers(kind, env):
    ours_only = env.startswith("our")
    batches = both(kind, ENVS[env], ENVS[env.removeprefix("our ")], static=ours_only, frames=20)
    for batch in batches:
        after = batch["next", NAMES[kind][0]]
        assert after.flatten(batch.ndim).any(-1).all(), "the state moved on"


def test_a_counter_starts_at_its_default_in_every_episode_and_crosses_batches():
    batch = torch.cat(collect(Collector, "function", ENVS["one"]))
    expected = torch.arange(60) % 7 + 3
    assert batch["cnt"].flatten().tolist() == expected.tolist()
    assert batch["next", "cnt"].flatten().tolist() == (expected + 1).tolist()


OPTIONS = [
    {"max_frames_per_traj": 4},
    {"reset_at_each_iter": True, "frames": 13},
    {"init_random_frames": 20},
    {"frames": 13},
]


def brief(make):
    return TransformedEnv(short(), make())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whoever_ends_or_acts_the_counter_is_torchrls(options):
    batches = collect(Collector, "function", brief, **options)
    expected = collect(TheirCollector, "function", brief, **options)
    for mine, other in zip(batches, expected, strict=True):
        for key in ("cnt", ("next", "cnt")):
            assert torch.equal(mine[key], other[key])


def test_compact_batches_hold_the_state_after_the_step():
    batch = collect(Collector, "function", brief, compact_obs=True)[0]
    assert ("next", "observation") not in batch.keys(True)
    assert torch.equal(batch["next", "cnt"], batch["cnt"] + 1)


def test_the_environment_may_decide_otherwise_than_the_policy():
    class Even(Transform):
        def _step(self, tensordict, next_tensordict):
            return next_tensordict.set("cnt", tensordict["next", "cnt"] // 2 * 2)

    def build(make):
        return TransformedEnv(short(), Compose(make(), Even()))

    batches = both("function", build)
    assert not (batches[0]["next", "cnt"] % 2).any()


def ragged(primer):
    return TransformedEnv(CountingEnvWithString(max_steps=4), primer)


def tick(td):
    td["action"] = torch.ones(*td.batch_size, 1, dtype=torch.int8)
    td["next", "cnt"] = td["cnt"] + 1
    return td


@pytest.mark.parametrize("random", [0, 12])
def test_environments_without_fixed_layout_keep_state_too(random):
    primer = TensorDictPrimer(cnt=Unbounded(shape=(1,)), default_value=3)
    options = {"frames_per_batch": 12, "total_frames": 24, "init_random_frames": random}
    first, second = (batch.clone() for batch in Collector(ragged(primer), tick, **options))
    moved = torch.zeros(12) if random else torch.ones(12)
    assert torch.equal((first["next", "cnt"] - first["cnt"]).flatten(), moved)
    assert torch.equal(second["next", "cnt"], second["cnt"] + 1)
    batch = torch.cat([first["cnt"], second["cnt"]]).flatten()
    if not random:
        assert batch.tolist() == (torch.arange(24) % 5 + 3).tolist()


def test_gymnasium_environments_keep_their_observation_from_the_policy():
    def policy(td):
        td["action"] = td["observation"][..., :1]
        td["next", "observation"] = td["observation"] * 0

    (batch,) = Collector("Pendulum-v1", policy, frames_per_batch=5, total_frames=5)
    assert torch.equal(batch["next", "observation"][:-1], batch["observation"][1:])


def test_noise_without_spec_is_given_that_of_the_environment():
    noise = AdditiveGaussianModule(spec=None, sigma_init=50.0, sigma_end=50.0)
    policy = Seq(Mod(nn.Linear(3, 1), ["observation"], ["action"]), noise)
    (batch,) = Collector(pendulum(), policy, frames_per_batch=20, total_frames=20)
    assert batch["action"].abs().max() == 2


class Primed(nn.Module):
    """Reads and writes ``"cnt"``, of which its primer says the value at the start of episodes."""

    in_keys, out_keys = ["observation", "cnt"], ["action", ("next", "cnt")]

    def __init__(self, **values):
        super().__init__()
        self.values = values

    def make_tensordict_primer(self):
        return TensorDictPrimer(cnt=Unbounded(shape=(1,)), **self.values)

    def forward(self, td):
        counting(td)
        return td


@pytest.mark.parametrize(
    "module",
    [
        ConsistentDropoutModule(0.5, in_keys="observation", input_shape=(3,)),
        Primed(default_value=3.0),
        Primed(random=True),
        Primed(default_value=lambda: torch.ones(1)),
        Primed(
            default_value=lambda reset: TensorDict(cnt=torch.ones(1)), single_default_value=True
        ),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_value_at_the_start_of_episodes_that_only_a_primer_gives_is_not_replaced(module):
    """Zeros in its place would be a silent difference: the whole layer dropped, say."""
    policy = Seq(module, Mod(nn.Linear(3, 1), ["observation"], ["action"]))
    with pytest.raises(PolicyError, match=r"append_transform\(module.make_tensordict_primer"):
        Collector(pendulum(), policy, frames_per_batch=20)
    primed = pendulum(module.make_tensordict_primer())
    with Collector(primed, policy, frames_per_batch=20) as collector:
        assert next(iter(collector)).shape == (20,)


def test_zeros_of_a_primer_are_given():
    policy = Seq(Primed(), Mod(nn.Linear(3, 1), ["observation"], ["action"]))
    with Collector(pendulum(), policy, frames_per_batch=20, total_frames=20) as collector:
        cnt = next(iter(collector))["cnt"].squeeze(-1)
    assert cnt.tolist() == [*range(7), *range(7), *range(6)]


def test_a_primer_of_an_entry_that_the_policy_does_not_read_changes_nothing():
    """A critic or a model of the world beside the actor, say."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.actor = Primed(default_value=3.0), nn.Linear(3, 1)

        def forward(self, observation):
            return self.actor(observation)

    with Collector(pendulum(), Both(), frames_per_batch=20) as collector:
        assert "cnt" not in next(iter(collector))
