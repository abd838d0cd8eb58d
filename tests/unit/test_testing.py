"""The checks of `gleanrl.testing` find each fault of a part, and none in a part that is right."""

import functools
import random
import threading
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import (
    Collector,
    ConfigError,
    EnvError,
    GymEnv,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PolicyError,
    SerialEnv,
)
from gleanrl.envs import PettingZooEnv
from gleanrl.testing import (
    FAULTS,
    CheckFailed,
    FaultyEnv,
    FaultyPolicy,
    InjectedError,
    check_env,
    check_policy,
    check_resume,
    check_storage,
)

pytestmark = pytest.mark.usefixtures("tidy_workers")


class Good(gym.Env):
    """Observes where it is; each step adds the action and a random number."""

    observation_space = gym.spaces.Dict({"at": gym.spaces.Box(-99, 99, (2,), np.float32)})
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    drawn = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.at = 0, self.draw()
        return self.seen(), {}

    def draw(self):
        return self.np_random.random(2, np.float32)

    def seen(self):
        return {"at": self.at.copy()}

    def step(self, action):
        self.steps += 1
        self.at += action + self.draw()
        return self.seen(), float(self.at[0]), False, self.steps == 7, {}


class SharesItsMemory(Good):
    def seen(self):
        return {"at": self.at}


class SharesTheMemoryOfAll(Good):
    memory = np.zeros(2, np.float32)

    def seen(self):
        self.memory[:] = self.at
        return {"at": self.memory}


class DrawsGlobally(Good):
    def draw(self):
        return np.array([random.random(), 0], np.float32)


class CountsInTheClass(Good):
    def draw(self):
        Good.drawn += 1
        return np.full(2, Good.drawn / 1e4, np.float32)


class Forgets(Good):
    """Its generator goes on after a reset with a seed."""

    def __init__(self):
        self.own = np.random.default_rng(0)

    def draw(self):
        return self.own.random(2, np.float32)


class ChangesActions(Good):
    def step(self, action):
        action *= 2
        return super().step(action)


class LeavesItsSpace(Good):
    def seen(self):
        return {"at": self.at + 100 * (self.steps == 5)}


class KnowsItsProcess(Good):
    def draw(self):
        here = threading.current_thread() is threading.main_thread() and Good.drawn == -1
        return super().draw() + np.float32(here)


@pytest.mark.parametrize("env", ["CartPole-v1", Good, Good()], ids=["id", "class", "built"])
def test_a_right_environment_passes(env):
    check_env(env)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (SharesItsMemory, r"observation of (step|reset).*'at'\] at \(0,\) .*Return a copy"),
        (SharesTheMemoryOfAll, "Return a copy"),
        (DrawsGlobally, r"two environments .*reset\(\) before step 0: .*self.np_random only"),
        (CountsInTheClass, r"two environments .*no state outside"),
        (Forgets, r"the second time.*seed self.np_random"),
        (ChangesActions, r"step 1 changed its action: .*Copy it"),
        (LeavesItsSpace, r"the observation of step 5.*is not in the space.*clip"),
        (functools.partial(FaultyEnv, Good, "nan"), r"Collector cannot collect.*check_finite"),
        (functools.partial(FaultyEnv, Good, "shape"), r"\(2, 1\)"),
        (functools.partial(FaultyEnv, Good, "dtype"), r"float64"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_environment_is_told_what_is_wrong_and_what_to_do(env, says):
    with pytest.raises(CheckFailed, match=f"(?s){says}"):
        check_env(env)


def test_an_environment_that_is_another_in_a_worker_is_found(monkeypatch):
    monkeypatch.setattr(Good, "drawn", -1)
    with pytest.raises(CheckFailed, match=r"(?s)in this process and in a worker .*as arguments"):
        check_env(KnowsItsProcess)


def test_an_environment_that_cannot_travel_is_found():
    lock = threading.Lock()
    with pytest.raises(CheckFailed, match="MultiSyncCollector cannot .*captures lock"):
        check_env(lambda: lock and Good())


def test_errors_of_an_environment_come_through():
    with pytest.raises(InjectedError):
        check_env(functools.partial(FaultyEnv, Good, "raise"))


def vector():
    return gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)


MAKERS = [
    vector,
    lambda: GymEnv("CartPole-v1"),
    lambda: SerialEnv(2, "CartPole-v1"),
    lambda: PettingZooEnv("simple_spread_v3", max_cycles=9),
    GymEnv("CartPole-v1"),
    vector(),
]


@pytest.mark.parametrize(
    "make",
    MAKERS,
    ids=["vector", "GymEnv", "SerialEnv", "PettingZoo", "built GymEnv", "built vector"],
)
def test_whatever_a_collector_takes_can_be_checked(make):
    check_resume(make)
    check_policy(None, make)
    with pytest.raises(CheckFailed, match="check_env takes a single Gymnasium environment"):
        check_env(make)


def test_what_no_collector_takes_is_one_error():
    checks = (check_env, check_resume, functools.partial(check_policy, None))
    for check in checks:
        with pytest.raises(CheckFailed, match="Nowhere"):
            check("Nowhere-v0")


# -- policies --------------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Acts by what it remembers; forgets at the beginnings of episodes."""

    def forward(self, observation, is_init):
        self.seen = observation * 0 if bool(is_init.any()) else self.seen + observation
        return (self.seen[..., 2] > 0).long()


class Declared(nn.Module):
    def forward(self, observation, hidden, is_init):
        return (observation[..., 2] > 0).long(), hidden + 1


def recurrent(module, **shapes):
    policy = TensorDictModule(
        module, ["observation", "hidden", "is_init"], ["action", ("next", "hidden")]
    )
    policy.state_shapes = shapes
    return policy


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, observation):
        self.calls += 1
        return torch.tensor(self.calls // 100 % 2)


class Locked(Counts):
    def __init__(self):
        self.lock = threading.Lock()


class Secret:
    def __call__(self, observation):
        return torch.tensor(random.SystemRandom().randrange(2))


WRITTEN = ["observation", "action"]


def halved(observation):
    return (observation.mul_(0.5)[..., 2] > 0).long()


def halve(tensordict):
    return tensordict.set("action", halved(tensordict["observation"]))


@pytest.mark.parametrize(
    "policy",
    [
        lambda observation: (torch.rand(observation.shape[:-1]) < 0.5).long(),
        TensorDictModule(lambda x: (x[..., 2] > 0).long(), ["observation"], ["action"]),
        recurrent(Declared(), hidden=(3,)),
        TensorDictModule(lambda x: (x / 2, (x[..., 2] > 0).long()), ["observation"], WRITTEN),
        None,
    ],
    ids=["draws", "module", "recurrent", "writes", "random"],
)
def test_a_right_policy_passes(policy):
    check_policy(policy, "CartPole-v1")


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (TensorDictModule(Hidden(), ["observation", "is_init"], ["action"]), "hidden state"),
        (Counts(), r"hidden state.*batches"),
        (Secret(), "two runs with one seed differ"),
        (recurrent(Declared()), "does not accept .*state_shapes"),
        (Locked(), "cannot be copied .*locks"),
        (nn.Linear(7, 2), "in_features=4"),
        (halved, r"changes what it reads.*'observation'.*out of place"),
        (TensorDictModule(halved, ["observation"], ["action"]), r"changes what it reads"),
        (halve, r"changes what it reads"),
    ],
    ids=[
        *("hidden", "counts", "secret", "undeclared", "lock", "misfit"),
        *("in-place", "in-place module", "in-place tensordict"),
    ],
)
def test_a_wrong_policy_is_told_what_is_wrong(policy, says):
    with pytest.raises(CheckFailed, match=f"(?s){says}"):
        check_policy(policy, "CartPole-v1")


# -- storages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("size", [1, 20])
def test_the_librarys_storages_pass(kind, size):
    check_storage(kind(size))


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    "options",
    [
        {"compact": True},
        {"compact": ("observation",)},
        {"compact": [("agents", "seen")]},
        {"stacks": {"pixels": 4}},
        {"stacks": {("agents", "seen"): 3}, "compact": True},
    ],
    ids=str,
)
def test_storages_whose_rows_have_parts_in_common_pass(kind, options):
    for size in (1, 50):
        check_storage(kind(size, **options))


class LinksAcrossEpisodes(LazyTensorStorage):
    def write(self, first, rows, values, offset):
        end = [value.clone() for value in values]
        if rows > 1:
            at = self.rows.keys.index(("next", "observation"))
            root = self.rows.keys.index(("observation",))
            end[at][:-1] = end[root][1:]
        super().write(first, rows, end, offset)


class RoundsNumbers(LazyTensorStorage):
    def gather(self, index, extra):
        rows = super().gather(index, extra)
        rows["next", "value"] = rows["next", "value"].float().double()
        return rows


class LosesOneAtTheWrap(LazyTensorStorage):
    def write(self, first, rows, values, offset):
        super().write(first, rows - (first % 20 + rows > 20), values, offset)


@pytest.mark.parametrize("kind", [RoundsNumbers, LosesOneAtTheWrap, LinksAcrossEpisodes])
def test_a_wrong_storage_is_told_what_is_wrong(kind):
    with pytest.raises(CheckFailed, match=r"the rows .*are not those that were written"):
        check_storage(kind(20))


def test_a_storage_that_cannot_be_checked_is_refused():
    for storage in (LazyTensorStorage(10, ndim=2), LazyTensorStorage(10**6)):
        with pytest.raises(ConfigError, match="must be empty"):
            check_storage(storage)
    with pytest.raises(TypeError, match="is no storage: give LazyTensorStorage"):
        check_storage(LazyTensorStorage)


# -- faults ----------------------------------------------------------------------------------------


class Tally(Good):
    """Rewards the number of steps of all environments of the class."""

    total: ClassVar[list[int]] = [0]

    def step(self, action):
        self.total[0] += 1
        return *super().step(action)[:1], float(self.total[0]), *super().step(action)[2:]


class Streaming(Good):
    """Draws from a generator that cannot be copied."""

    def __init__(self):
        self.numbers = (float(number) for number in range(10**6))

    def draw(self):
        return np.full(2, next(self.numbers) % 3, np.float32)


@pytest.mark.parametrize("env", ["CartPole-v1", Good, "Pendulum-v1"])
def test_a_run_that_continues_passes(env):
    check_resume(env)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Tally, r"after batch \d differs: .*attributes of plain data"),
        (Streaming, "numbers .*cannot"),
    ],
)
def test_a_run_that_does_not_continue_is_found(env, says):
    with pytest.raises(CheckFailed, match=f"(?s){says}"):
        check_resume(env)


def test_faults_happen_at_their_call_and_only_once(tmp_path):
    mark = tmp_path / "mark"
    env = FaultyEnv("CartPole-v1", "raise", at=3, once=mark)
    env.reset(seed=0)
    env.step(0), env.step(0)
    with pytest.raises(InjectedError):
        env.step(0)
    again = FaultyEnv("CartPole-v1", "raise", at=3, once=mark)
    again.reset(seed=0)
    assert [len(again.step(0)) for _ in range(5)] == [5] * 5
    with pytest.raises(InjectedError):
        FaultyEnv("CartPole-v1", "raise", when="build")
    for options in ({"fault": "burn"}, {"fault": "nan", "when": "build"}):
        with pytest.raises(ConfigError, match="fault"):
            FaultyEnv("CartPole-v1", **options)
    assert "kill" in FAULTS


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"), [("raise", InjectedError), ("shape", (PolicyError, ValueError))]
)
def test_a_faulty_policy_fails_at_its_call_on_every_path(fast, fault, error):
    inner = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    policy = FaultyPolicy(inner, fault, at=8)
    with Collector("Pendulum-v1", policy, frames_per_batch=5, fast=fast) as collector:
        collector.next()
        with pytest.raises(error):
            collector.next()


@pytest.mark.parametrize("fast", [True, False])
def test_nan_of_a_policy_and_an_environment_is_found(fast):
    policy = FaultyPolicy(nn.Linear(3, 1), "nan", at=8)
    env = functools.partial(FaultyEnv, "Pendulum-v1", "nan", at=7)
    for one, acts in (("Pendulum-v1", policy), (env, None)):
        with (
            Collector(one, acts, frames_per_batch=20, check_finite=True, fast=fast) as collector,
            pytest.raises((EnvError, PolicyError), match="check_finite"),
        ):
            collector.next()
