"""A new kind of environment: rows in one class, and everything else works with it."""

import numpy as np
import pytest
import torch

from gleanrl import Collector
from gleanrl.core.keys import ACTION, DONE, OBSERVATION, REWARD, TERMINATED, TRUNCATED, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.data import Bounded, Unbounded
from gleanrl.envs import ParallelEnv, SerialEnv
from gleanrl.envs.row_env import EnvRows, RowEnv


class Walkers(EnvRows):
    """``P`` walkers on a line, stepped all at once; each ends where it leaves [-3, 3]."""

    def __init__(self, envs=3):
        self.place, self.random = np.zeros((envs, 1), np.float32), np.random.default_rng(0)
        self.observation_specs = {OBSERVATION: Unbounded((1,))}
        self.action_specs = {ACTION: Bounded(-1.0, 1.0, (1,))}
        shown, act, pay = (Field(key, (1,), torch.float32) for key in (OBSERVATION, ACTION, REWARD))
        self.layout = EnvLayout((envs,), (shown,), (act,), (pay,))

    def begin(self, window, carry):
        super().begin(window, carry)
        self.acts = window.rows(ACTION)
        self.roots = window.rows(OBSERVATION)[1:] + carry.rows(OBSERVATION)
        self.nexts = [window.rows(next_key(k)) for k in (OBSERVATION, REWARD)]
        self.flags = [window.rows(next_key(k)) for k in (TERMINATED, TRUNCATED, DONE)]

    def step(self, t, cut, resets=True):
        self.place = self.place + self.acts[t] * 2
        shown, pay = (rows[t] for rows in self.nexts)
        dead, late, done = (rows[t][:, 0] for rows in self.flags)
        shown[...], pay[...] = self.place, -np.abs(self.place)
        dead[...] = np.abs(self.place[:, 0]) > 3
        late[list(cut)] = ~dead[list(cut)]
        done[...] = dead | late
        ended = np.flatnonzero(done).tolist()
        if ended and resets:
            self._start(ended)
        self.roots[t][...] = self.place
        return ended

    def reset(self, carry, envs=None, /, **options):
        self._start(slice(None) if envs is None else list(envs))
        carry.rows(OBSERVATION)[0][...] = self.place

    def _start(self, envs):
        self.place[envs] = self.random.uniform(-1, 1, self.place[envs].shape)

    def seed(self, seed, static=False):
        self.random = np.random.default_rng(seed)


def collect(env, **options):
    torch.manual_seed(0)
    frames = {"frames_per_batch": 24, "total_frames": 72, "max_frames_per_traj": 9}
    with Collector(env, **frames, **options) as collector:
        collector.set_seed(3)
        return torch.cat([batch.clone() for batch in collector], -1), collector.explain()


def test_rows_and_tensordicts_hold_the_same_and_episodes_end():
    (rows, how), (plain, _) = (collect(lambda: RowEnv(Walkers()), fast=f) for f in (True, False))
    assert "loop: rows" in how
    assert (rows == plain).all()
    assert rows["next", "terminated"].any()
    assert rows["next", "truncated"].any()
    fresh = rows["next", "done"][:, :-1]
    assert (rows["observation"][:, 1:][fresh].abs() <= 1).all()


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_batches_of_them_take_them(kind):
    with kind(2, lambda: RowEnv(Walkers(2))) as env:
        assert env.rollout(5, break_when_any_done=False)["observation"].shape == (2, 2, 5, 1)
