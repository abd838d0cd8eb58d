"""Collects with a policy where observations are random numbers, next to plain calls of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from gleanrl import Collector, ExplorationType, set_exploration_type

RANDOM, MODE = ExplorationType.RANDOM, ExplorationType.MODE
MEAN, DETERMINISTIC = ExplorationType.MEAN, ExplorationType.DETERMINISTIC
STEPS = 6
DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}
FLAGS = ["done", "terminated", "truncated"]


@dataclass(frozen=True)
class Layout:
    """What environments show and want."""

    batch: tuple[int, ...]
    action: tuple[tuple[int, ...], torch.dtype]
    shown: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    ends: dict[int, list[int]] = field(default_factory=dict)
    """The environments whose episodes end with a step, by step."""

    @property
    def rows(self):
        return int(np.prod(self.batch, dtype=int))


def layout(
    batch=(5,), action=((), torch.int64), obs=(4,), dtype=torch.float32, more=None, ends=None
):
    """Return environments that show ``obs`` numbers and want ``action`` (shape, dtype)."""
    return Layout(batch, action, {"observation": obs, **(more or {})}, dtype, ends or {})


class Shows(gym.Env):
    """Shows random numbers, whatever the action is; the same ones after every reset."""

    def __init__(self, env, number):
        self.env, self.number, self.t = env, number, 0
        kind = DTYPES[env.dtype]
        spaces = {k: gym.spaces.Box(-99, 99, shape, kind) for k, shape in env.shown.items()}
        single = spaces["observation"]
        self.observation_space = single if len(spaces) == 1 else gym.spaces.Dict(spaces)
        shape, dtype = env.action
        if dtype.is_floating_point:
            self.action_space = gym.spaces.Box(-1e9, 1e9, shape, DTYPES[dtype])
        elif shape:
            self.action_space = gym.spaces.MultiDiscrete([9] * shape[0])
        else:
            self.action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.random = np.random.default_rng(self.number)
        return self._show(), {}

    def step(self, action):
        over = self.number in self.env.ends.get(self.t, ())
        self.t += 1
        return self._show(), 0.0, over, False, {}

    def _show(self):
        kind = DTYPES[self.env.dtype]
        shown = {
            key: (self.random.standard_normal(shape) * 2).astype(kind)
            for key, shape in self.env.shown.items()
        }
        return shown["observation"] if len(shown) == 1 else shown


class ShowsTensors(EnvBase):
    """The same with several batch dimensions."""

    def __init__(self, env):
        super().__init__(batch_size=env.batch)
        self.env, batch = env, env.batch
        shape, dtype = env.action
        action = Categorical(9, shape=(*batch, *shape))
        if dtype.is_floating_point:
            action = Unbounded((*batch, *shape), dtype=dtype)
        self.observation_spec = Composite(
            {k: Unbounded((*batch, *s), dtype=env.dtype) for k, s in env.shown.items()},
            shape=batch,
        )
        self.action_spec = Composite({"action": action}, shape=batch)
        self.reward_spec = Bounded(-1, 1, (*batch, 1))
        self.auto_register_info_dict = False

    def _reset(self, tensordict=None):
        self.random = torch.Generator().manual_seed(0)
        flags = {"done": torch.zeros(*self.batch_size, 1, dtype=torch.bool)}
        return TensorDict({**self._show(), **flags}, self.batch_size)

    def _step(self, tensordict):
        zero = torch.zeros(*self.batch_size, 1)
        flags = {"reward": zero, "done": zero.bool()}
        return TensorDict({**self._show(), **flags}, self.batch_size)

    def _show(self):
        return {
            key: torch.randn(*self.batch_size, *shape, generator=self.random).to(self.env.dtype)
            for key, shape in self.env.shown.items()
        }

    def _set_seed(self, seed):
        pass


def make(policy, env, kind=RANDOM, **options):
    """Return a collector of `STEPS` steps a batch; every batch shows the same observations."""
    given: Any = [partial(Shows, env, number) for number in range(env.rows)]
    if not env.batch:
        given = given[0]
    elif len(env.batch) > 1:
        given = partial(ShowsTensors, env)
    options = {"reset_at_each_iter": True, "frames_per_batch": STEPS * env.rows, **options}
    return Collector(given, policy, exploration_type=kind, total_frames=-1, **options)


def collect(policy, env, kind=RANDOM, **options):
    """Return one batch."""
    with make(policy, env, kind, **options) as collector:
        return next(iter(collector)).clone()


def lowered(collector):
    """Return how many parts of the policy the collector runs as tensor calls."""
    return collector.explain().count(": tensor calls")


def seed(number):
    """Seed the one generator used here; `torch.manual_seed` notes where it was called, slowly."""
    torch.default_generator.manual_seed(number)


def plain(policy, env, batch, kind=RANDOM, states=(), init=False):
    """Call ``policy`` on what ``batch`` shows; return all it writes, ``[*batch, T, ...]``.

    ``states`` are (key, shape) pairs, zero at the start and where episodes end.
    """
    dim, done = len(env.batch), batch["next", "done"].squeeze(-1)
    memory = {key: torch.zeros(*env.batch, *shape) for key, shape in states}
    first = torch.ones(*env.batch, 1, dtype=torch.bool)
    rows = []
    with torch.no_grad(), set_exploration_type(kind):
        for t in range(batch.shape[-1]):
            td = TensorDict({}, batch_size=env.batch)
            for key in env.shown:
                td.set(key, batch[key].select(dim, t).clone())
            for key, value in memory.items():
                td.set(key, value.clone())
            if init:
                td.set("is_init", first.clone())
            result = policy(td)
            rows.append((td if result is None else result).clone())
            ended = done.select(dim, t)
            first = ended.unsqueeze(-1)
            for key in memory:
                memory[key] = rows[-1]["next", key].clone()
                memory[key][ended] = 0
    keys = rows[0].keys(True, True)
    return {key: torch.stack([row[key] for row in rows], dim) for key in keys}


def written(env, batch, states=()):
    """Return the keys of what a policy wrote into ``batch``."""
    theirs = {*env.shown, "is_init", *FLAGS, "reward", *(key for key, _ in states)}
    return {
        key
        for key in batch.exclude("collector").keys(True, True)
        if key not in theirs and not (key[0] == "next" and key[1] in {*env.shown, *FLAGS, "reward"})
    }


def assert_same(batch, expected, env, states=()):
    """Assert that what the policy wrote is what plain calls gave, bit for bit."""
    found = written(env, batch, states)
    theirs = {*env.shown, "is_init", *(key for key, _ in states)}
    parts = {key: (key,) if isinstance(key, str) else key for key in expected}
    shown = {k for k, path in parts.items() if not any(part[0] == "_" for part in path)}
    assert found == shown - theirs
    for key in found:
        got, want = batch[key], expected[key].to(batch[key].dtype)
        assert got.shape == want.shape, key
        assert torch.equal(got, want), (key, (got - want).abs().max())


def same(policy, env, kind=RANDOM, reference=None, states=(), init=False):
    """Assert that outputs and the random stream equal those of plain calls, bit for bit.

    Returns what was collected, and how many parts of the policy became tensor calls.
    """
    with make(policy, env, kind) as collector:
        seed(3)
        batch = next(iter(collector)).clone()
        state = torch.get_rng_state()
        count = lowered(collector)
    seed(3)
    expected = plain(reference or policy, env, batch, kind, states, init)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(batch, expected, env, states)
    return batch, count
