"""Ways to collect from many environments without a collector."""

from __future__ import annotations

import numpy as np
import torch

from gleanrl.core.keys import next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import SourceOptions
from gleanrl.core.window import Window
from gleanrl.envs.rows_or_tensordict import make_vector
from gleanrl.envs.vector import NextStepPool
from gleanrl.rollout.env_loop import EnvLoop, check_can_cut
from gleanrl.rollout.pool_loop import PoolLoop

OBS, ACTION, REWARD = ("observation",), ("action",), ("reward",)
DONE, TERMINATED, TRUNCATED = ("done",), ("terminated",), ("truncated",)
TRAJ, STEPS = ("collector", "traj_ids"), ("step_count",)
GO = bytearray(1)


class Uniform:
    """Acts at random, as the environment draws."""

    inner = None
    states = ()
    provided = ()
    memory = None

    def __init__(self, env):
        self.outputs = env.layout.actions
        self.n, self.envs = env.action_specs[ACTION].n, env.layout.num_envs

    def begin(self, window, carry):
        self.seen, self.out = window.rows(OBS), window.rows(ACTION)

    def act(self, t):
        self.out[t][...] = torch.randint(self.n, (self.envs,)).numpy()

    def reset(self, t, ended):
        pass

    def finish(self, steps):
        return {}

    def forget(self):
        pass


class FromObservation(Uniform):
    """A deterministic policy: the action is a hash of the observation."""

    def act(self, t):
        self.out[t][...] = act_on(self.seen[t], self.n)


def act_on(observation, n):
    """Return the action `FromObservation` takes."""
    return (np.abs(observation).sum(-1) * 1000).astype(np.int64) % n


class Counting(FromObservation):
    """Keeps a recurrent state: the number of steps since the reset, plus one."""

    states = (("memory",),)

    def __init__(self, env):
        super().__init__(env)
        self.outputs = (*self.outputs, Field(("next", "memory"), (1,), torch.float32))

    def begin(self, window, carry):
        super().begin(window, carry)
        self.memory = window.rows(("memory",)) + carry.rows(("memory",))
        self.after = window.rows(("next", "memory"))

    def act(self, t):
        super().act(t)
        self.after[t][...] = self.memory[t] + 1
        self.memory[t + 1][...] = self.after[t]

    def reset(self, t, ended):
        assert isinstance(ended, list)
        self.memory[t + 1][ended] = 0


def serve(vector_env, policy=FromObservation, needs_is_init=False, info_keys=(), **options):
    """Return the source of ``vector_env``, in the loop that fits it."""
    env = make_vector(vector_env, SourceOptions(info_keys=info_keys))
    kind = PoolLoop if isinstance(env, NextStepPool) else EnvLoop

    made = policy(env)
    made.provided = [("is_init",)] * needs_is_init
    rollout_options = SourceOptions(**options)
    first = Window.allocate(env.layout.observations, env.layout.num_envs, 1)
    check_can_cut(env, rollout_options)
    env.reset(first)
    return kind(env, first, made, rollout_options)


def collect(source, steps, stop=GO):
    """Return one rollout as ``{key: [P, steps, ...]}`` and its report."""
    layout = source.layout()
    window = Window.allocate(layout.fields, layout.num_envs, steps)
    for key in window.keys():  # memory is used again in earnest: nothing may rely on zeros
        window.tensor(key).fill_(1)
    report = source.collect(window, steps, stop, False)
    return {key: window.tensor(key) for key in window.keys()}, report


def collect_all(source, splits):
    """Return rollouts of ``splits`` steps, one after the other, as one."""
    parts = [collect(source, steps)[0] for steps in splits]
    return {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}


def by_hand(make, count, steps, seed, n):
    """Return what ``count`` single environments give when stepped one by one."""
    rows = {key: [] for key in (OBS, ACTION, *map(next_key, (OBS, REWARD, TERMINATED, TRUNCATED)))}
    for i in range(count):
        env = make(i)
        seen, _ = env.reset(seed=seed + i)
        mine = {key: [] for key in rows}
        for _ in range(steps):
            action = int(act_on(np.array(seen), n))
            after, reward, dead, late, _ = env.step(action)
            for key, value in zip(mine, (seen, action, after, reward, dead, late), strict=True):
                mine[key].append(np.array(value))
            seen = env.reset()[0] if dead or late else after
        for key, values in mine.items():
            rows[key].append(np.stack(values))
    return {key: torch.from_numpy(np.stack(values)) for key, values in rows.items()}


def assert_same_stream(got, expected, steps=None):
    """Compare what `by_hand` has with the same fields of a batch."""
    for key, values in expected.items():
        mine = got[key][:, :steps]
        theirs = values[:, : mine.shape[1]].reshape(mine.shape).to(mine.dtype)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda m, k=key: f"{k}: {m}")


def assert_consistent(batch):
    """Check what every stream obeys: one step to the next, one trajectory to the next."""
    done = batch[next_key(DONE)][..., 0]
    flags = batch[next_key(TERMINATED)][..., 0] | batch[next_key(TRUNCATED)][..., 0]
    assert torch.equal(done, flags)
    assert not batch[DONE].any()
    assert not batch[TERMINATED].any()
    ids = batch[TRAJ]
    ends = done[:, :-1]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], ends)
    same = ~ends
    assert torch.equal(batch[OBS][:, 1:][same], batch[next_key(OBS)][:, :-1][same])
