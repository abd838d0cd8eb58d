"""Environments, policies and the law of exact resume, importable by another process."""

import io
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import GleanError
from gleanrl.collectors import Collector, MultiSyncCollector
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase


def wrapped_cartpole():
    env = gym.wrappers.NormalizeObservation(gym.make("CartPole-v1"))
    env = gym.wrappers.FrameStackObservation(env, 3)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    return gym.wrappers.TimeLimit(env, 17)


def cheetah():
    return gym.wrappers.TimeLimit(gym.make("HalfCheetah-v5"), 23)


def pong():
    import ale_py

    gym.register_envs(ale_py)
    env = gym.wrappers.AtariPreprocessing(gym.make("ALE/Pong-v5", frameskip=1), screen_size=16)
    return gym.wrappers.TimeLimit(env, 19)


def vector(mode):
    return gym.vector.SyncVectorEnv([wrapped_cartpole] * 2, autoreset_mode=mode)


def next_step():
    return vector("NextStep")


def same_step():
    return vector("SameStep")


class Walk(EnvBase):
    """A random walk, with its place and its generator in attributes."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Categorical(2)
        self.place, self.left, self.generator = torch.zeros(2), 0, torch.Generator()

    def _reset(self, tensordict=None):
        self.place = torch.rand(2, generator=self.generator)
        self.left = int(torch.randint(3, 20, (), generator=self.generator))
        return TensorDict({"observation": self.place.clone()})

    def _step(self, tensordict):
        self.place += torch.rand(2, generator=self.generator) * tensordict["action"]
        self.left -= 1
        reward = self.place.sum(-1, keepdim=True)
        done = torch.tensor([self.left <= 0])
        return TensorDict({"observation": self.place.clone(), "reward": reward, "done": done})

    def _set_seed(self, seed):
        self.generator.manual_seed(seed)


ENVS = {
    "wrappers": wrapped_cartpole,
    "mujoco": cheetah,
    "atari": pong,
    "next_step": next_step,
    "same_step": same_step,
    "walk": Walk,
}
DIMS = {"wrappers": 2, "atari": 2, "next_step": 2, "same_step": 2}


class Act(nn.Module):
    """Actions that depend on the observation and on chance."""

    def __init__(self, kind):
        super().__init__()
        self.dims = DIMS.get(kind, 1)
        self.net = nn.LazyLinear(6 if kind in ("mujoco", "atari") else 2)
        self.discrete = kind != "mujoco"

    def forward(self, observation):
        out = self.net(observation.float().flatten(observation.ndim - self.dims))
        if self.discrete:
            return torch.distributions.Categorical(logits=out / 100).sample()
        return torch.tanh(out + torch.randn_like(out))


class Remember(nn.Module):
    """Actions by a recurrent cell."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 8), nn.Linear(8, 2)

    def forward(self, observation, hidden, is_init):
        hidden = torch.where(is_init, torch.zeros_like(hidden), hidden)
        after = self.cell(observation.reshape(-1, 2), hidden.reshape(-1, 8)).reshape(hidden.shape)
        logits = self.head(after)
        return torch.distributions.Categorical(logits=logits).sample(), after


def policy_of(kind, recurrent=False):
    torch.manual_seed(3)
    if recurrent:
        keys = ["observation", "hidden", "is_init"]
        return TensorDictModule(Remember(), keys, ["action", ("next", "hidden")])
    act = Act(kind)
    width = {
        "wrappers": 12,
        "next_step": 12,
        "same_step": 12,
        "mujoco": 17,
        "atari": 256,
        "walk": 2,
        "numbers": 1,
        "cartpole": 4,
    }
    act(torch.zeros(*[1] * (DIMS.get(kind, 1) - 1), width[kind]))
    return TensorDictModule(act, ["observation"], ["action"])


class Numbers(gym.Env):
    """Shows how many steps it has taken, over all episodes."""

    observation_space = gym.spaces.Box(0, 1e6, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.steps = 0

    def shown(self):
        return np.array([self.steps], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.shown(), {}

    def step(self, action):
        self.steps += 1
        return self.shown(), 0.0, self.steps % 7 == 0, False, {}


class Odd(gym.Wrapper):
    """Keeps something that can only be pickled."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.when = 3 + 4j


class Hidden(gym.Wrapper):
    """Counts steps where no state shows them."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        steps = iter(range(1_000_000))
        self.count = lambda: next(steps)

    def step(self, action):
        observation, _, *rest = self.env.step(action)
        return observation, float(self.count()), *rest


class Forgets(Numbers):
    """Rewards count its steps; its `get_state` leaves that count out."""

    rewarded = 0

    def step(self, action):
        observation, _, *rest = super().step(action)
        self.rewarded += 1
        return observation, float(self.rewarded), *rest

    def get_state(self):
        return {"steps": self.steps}

    def set_state(self, state):
        self.steps = state["steps"]


# -- the law ---------------------------------------------------------------------------------------

BEFORE, AFTER = 3, 4
VECTOR = ("next_step", "same_step")


def make(kind, where="one", *, recurrent=False, steps=30, **kwargs):
    """Return a collector of two environments per worker."""
    policy = policy_of(kind, recurrent)
    if kind not in VECTOR:
        kwargs["num_envs"] = 2
    if where == "one":
        return Collector(ENVS[kind], policy, frames_per_batch=2 * steps, **kwargs)
    workers = {"num_workers": 2, "frames_per_batch": 4 * steps, **kwargs}
    if where == "central":
        return MultiSyncCollector(ENVS[kind], policy, inference="central", **workers)
    return MultiSyncCollector(ENVS[kind], policy, cat_results=0, **workers)


def take(collector, count):
    return [collector.next().clone() for _ in range(count)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(
        torch.equal(torch.nan_to_num(one[key]), torch.nan_to_num(other[key])) for key in keys
    )


def statistics(collector):
    names = ("episodes", "return_mean", "length_mean", "frames", "batches", "policy_version")
    return {name: collector.stats()[name] for name in names}


def check_law(build, before=BEFORE):
    with build() as collector:
        collector.set_seed(7)
        take(collector, before)
        state = through_a_file(collector.state_dict())
        expected, stats = take(collector, AFTER), statistics(collector)
    with build() as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
        found = take(other, AFTER)
        assert all(map(same, found, expected))
        assert statistics(other) == pytest.approx(stats, nan_ok=True)


def check_each_frame_once(build):
    """Check that two asynchronous workers of `Numbers` continue without gap or repetition."""
    found = {0: [], 1: []}

    def note(batches):
        for batch in batches:
            env = int(batch["collector", "traj_ids"].flatten()[0]) % 2
            found[env] += batch["observation"].flatten().int().tolist()

    with build() as collector:
        note(take(collector, 7))
        state = through_a_file(collector.state_dict())
        frames = collector.stats()["frames"]
    with build() as other:
        other.load_state_dict(state)
        assert other.stats()["frames"] == frames == 70
        note(take(other, 12))
        assert other.stats()["frames"] == 190
    for env, own in found.items():
        assert own == list(range(len(own))), f"environment {env}"
        assert len(own) > 20


# -- verify=True -----------------------------------------------------------------------------------


def check_verified(build, path):
    """Check that a state is verified, and that the collector continues as if it was not."""
    with build() as collector, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        collector.set_seed(7)
        take(collector, BEFORE)
        collector.save(path / "before")
        collector.save(path / "state", verify=True)
        found = take(collector, 2)
        collector.load(path / "before")
        assert all(map(same, take(collector, 2), found))


def check_named(build, path, worker):
    """Check that worker 1, which alone has environments of `Forgets`, is named, and no more."""
    (path / "state").write_bytes(b"from before")
    differs = rf"nothing was saved: in {worker} 1, a copy differs 16 .*reward.* / .*get_state\(\)"
    with build() as collector:
        before = collector.next()["next", "reward"].max()
        with pytest.raises(GleanError, match=differs):
            collector.save(path / "state", verify=True)
        after = collector.next()["next", "reward"]
        assert after.flatten()[-1] == after.max() == 2 * before
    assert (path / "state").read_bytes() == b"from before"
    assert [file.name for file in path.iterdir()] == ["state"]
