"""What an environment may consist of, so that it continues after a load."""

import collections
import dataclasses
import enum
import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from resume_rig import check_law, policy_of, wrapped_cartpole

from gleanrl import DistributedCollector
from gleanrl.collectors import Collector


@dataclasses.dataclass(slots=True)
class Ball:
    place: np.ndarray
    owner: object


class Phase(enum.Enum):
    EARLY = 1
    LATE = 2


Score = collections.namedtuple("Score", "mine yours")


class Game(gym.Env):
    """Keeps its state in objects of many kinds, some of which are made in the episode."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.legacy, self.python = np.random.RandomState(4), random.Random(4)
        self.torch = torch.Generator().manual_seed(4)
        self.bits = np.random.Generator(np.random.Philox(4))
        self.balls, self.seen = [], collections.deque(maxlen=3)
        self.counts = collections.defaultdict(int)
        self.rule = lambda x: x + 1  # stays that of the environment
        self.memory = bytearray(8)
        self.view = np.frombuffer(self.memory, np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.balls = [Ball(self.np_random.normal(size=2), self) for _ in range(2)]
        self.first = self.balls[0]
        self.taken, self.phase, self.score = set(), Phase.EARLY, Score(0, 0)
        self.table = np.asfortranarray(self.np_random.normal(size=(2, 3))[:, ::-1])
        self.view[0] = 0.5
        return self._shown(), {}

    def step(self, action):
        self.first.place += self.legacy.normal()  # also that in the list
        if self.python.random() < 0.3:
            self.balls.append(Ball(self.bits.normal(size=2), self))
        self.counts[int(action)] = self.rule(self.counts[int(action)])
        self.taken.add((len(self.balls), int(action)))
        self.seen.append(len(self.balls))
        self.score = self.score._replace(mine=self.score.mine + len(self.balls))
        self.phase = Phase.LATE if self.score.mine > 20 else self.phase
        self.memory[0:2] = bytes([self.python.randrange(256) for _ in range(2)])
        ended = len(self.balls) > 7 and self.balls[-1].owner is self
        return self._shown(), float(self.phase.value), ended, False, {}

    def _shown(self):
        noise = float(torch.rand((), generator=self.torch))
        balls = sum(ball.place[0] for ball in self.balls)
        kept = self.balls[0].place[1] + self.counts[0] + sum(self.seen) + len(self.taken)
        sums = (self.table @ np.ones(3)).sum()
        return np.array([noise, balls, kept, sums, self.view[0], self.score.mine])


def test_objects_of_many_kinds_continue():
    check_law(lambda: Collector(Game, num_envs=2, frames_per_batch=26))


class Hooked(gym.Env):
    """Its state is where nobody can read it, but for two methods."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)
    hidden = {}  # of all environments

    def __init__(self):
        self.number = len(self.hidden)
        self.hidden[self.number] = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hidden[self.number] = self.np_random.normal()
        return self._shown(), {}

    def step(self, action):
        self.hidden[self.number] += self.np_random.normal()
        return self._shown(), 0.0, self.hidden[self.number] > 4, False, {}

    def _shown(self):
        return np.array([self.hidden[self.number]])

    def get_state(self):
        return {"value": self.hidden[self.number]}

    def set_state(self, state):
        self.hidden[self.number] = state["value"]


def test_a_hook_is_asked():
    check_law(lambda: Collector(Hooked, num_envs=2, frames_per_batch=26))


class Heavier(gym.Wrapper):
    """Changes the model of MuJoCo at each reset."""

    def __init__(self):
        super().__init__(gym.make("InvertedPendulum-v5").unwrapped)
        self.draw = np.random.default_rng(3)

    def reset(self, **kwargs):
        self.unwrapped.model.body_mass[1:] = self.draw.uniform(1, 20, 2)
        return super().reset(**kwargs)


def test_changed_models_of_mujoco_continue():
    check_law(lambda: Collector(Heavier, num_envs=2, frames_per_batch=26))


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5, 6])  # the emulator repeats one action in four
def test_sticky_actions_of_atari_continue(before):
    import ale_py

    gym.register_envs(ale_py)

    def env():
        small = gym.wrappers.ResizeObservation(gym.make("ALE/Pong-v5"), (8, 8))
        return gym.wrappers.GrayscaleObservation(small)

    check_law(lambda: Collector(env, num_envs=2, frames_per_batch=22), before)


class Pole(gym.Wrapper):
    """An environment with another constant, or another attribute."""

    def __init__(self, gravity=9.8, extra=False):
        super().__init__(gym.make("CartPole-v1").unwrapped)
        self.unwrapped.gravity = gravity
        if extra:
            self.unwrapped.wind = 3.0


def test_a_state_that_does_not_fit_changes_nothing():
    with (
        Collector(Pole, frames_per_batch=20, create_env_kwargs={"gravity": 5.0}) as one,
        Collector(Pole, frames_per_batch=20, create_env_kwargs={"extra": True}) as other,
    ):
        one.next()
        with pytest.warns(UserWarning, match=r"env\[0\]\.env has wind, which was not there"):
            other.load_state_dict(one.state_dict())
        assert other.env.unwrapped.gravity == 9.8
        assert other.next()["collector", "traj_ids"].min() > 0


def test_no_class_is_made_that_is_not_of_the_environment():
    with Collector(Pole, frames_per_batch=20) as one, Collector(Pole, frames_per_batch=20) as other:
        one.next()
        state = one.state_dict()
        _, (attributes,) = (
            state["worker"]["episodes"]["envs"][1],
            [state["worker"]["episodes"]["envs"][2][0][3]],
        )
        attributes["evil"] = ["object", 99, "tempfile:_TemporaryFileCloser", {"name": "/x"}]
        with pytest.warns(UserWarning, match="has no tempfile:_TemporaryFileCloser"):
            other.load_state_dict(state)


def test_nodes_continue_and_get_weights_that_are_due():
    def build():
        return DistributedCollector(
            [wrapped_cartpole] * 2,
            policy_of("wrappers"),
            frames_per_batch=32,
            sync=True,
            launcher="mp",
            max_weight_update_interval=3,
            track_policy_version=True,
        )

    check_law(build, 2)
