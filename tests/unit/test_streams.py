"""Random streams: whatever draws beside them, and wherever batches begin, they stay the same."""

import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl import Collector, Interruptor

STEPS = 24


class Drawing(gym.Env):
    """Observes numbers that it draws from the generators of torch, numpy and Python."""

    observation_space = gym.spaces.Box(-100, 100, (4,), np.float64)

    def __init__(self, actions=None, end=7):
        self.action_space = actions or gym.spaces.Discrete(5)
        self.end = end

    def _observe(self):
        normal = np.random.randn()  # one of a pair: numpy keeps the other for the next call
        return np.array([torch.rand(()).item(), normal, random.random(), self.steps])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 0.0, self.steps == self.end, False, {}


def acting(td):
    shape = td["observation"].shape[:-1]
    return td.set("action", torch.randint(5, shape))


SPACES = {
    "discrete": gym.spaces.Discrete(5),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "wide": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "several": gym.spaces.Dict(a=gym.spaces.Discrete(3), b=gym.spaces.Discrete(4)),
}


def stream(frames, *, seed=1, actions=None, total=2 * STEPS, **options):
    """Return all frames of two environments as one batch."""
    if seed is None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
    policy = options.pop("policy", None)
    make = [lambda: Drawing(actions)] * 2
    with Collector(
        make, policy, frames_per_batch=frames, total_frames=total, **options
    ) as collector:
        if seed is not None:
            collector.set_seed(seed)
        return torch.cat([batch.clone() for batch in collector], -1).exclude("collector")


def same(one, other):
    return isinstance(one, TensorDict) and bool((one == other).all())


@pytest.mark.covering
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seed", [None, 3])
def test_random_actions_and_environments_that_draw_do_not_disturb_each_other(space, seed):
    actions = SPACES[space]
    whole = stream(2 * STEPS, seed=seed, actions=actions)
    assert same(whole, stream(2 * STEPS, seed=seed, actions=actions, fast=False))
    for frames in (2, 6, 16):
        assert same(whole, stream(frames, seed=seed, actions=actions))


def test_a_policy_after_random_frames_draws_what_it_draws_without_the_fast_path():
    options = {"policy": acting, "init_random_frames": 2 * 10}
    whole = stream(2 * 4, **options)
    assert same(whole, stream(2 * 4, fast=False, **options))


@pytest.mark.parametrize("fast", [True, False])
def test_a_stopped_rollout_draws_no_action_in_vain(fast):
    whole, found = stream(2 * STEPS), []
    interruptor = Interruptor()

    class Stopping(Drawing):
        def step(self, action):
            if self.steps == 2:
                interruptor.start_collection()
                interruptor.stop_collection()
            return super().step(action)

    with Collector(
        [Drawing, Stopping],
        frames_per_batch=2 * 8,
        total_frames=2 * STEPS,
        interruptor=interruptor,
        fast=fast,
    ) as collector:
        collector.set_seed(1)
        for batch in collector:
            interruptor.start_collection()
            valid = batch["collector", "mask"]
            found.append(batch[:, valid[0]].exclude("collector").clone())
    assert any(part.shape[-1] < 8 for part in found)
    found = torch.cat(found, -1)
    assert same(found, whole[:, : found.shape[-1]])


def test_normal_numbers_of_numpy_do_not_depend_on_where_batches_begin():
    assert same(stream(2 * STEPS), stream(2))


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("drawn", [0, 1])
def test_collecting_leaves_the_learners_normal_numbers_alone(bits, drawn):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(bits(5))
        expected = np.random.RandomState(bits(5)).randn(drawn + 3)[drawn:]
        np.random.randn(drawn)
        with Collector(Drawing, frames_per_batch=3) as collector:
            collector.set_seed(1)
            np.random.set_bit_generator(bits(5))
            np.random.randn(drawn)
            collector.next()
            assert np.random.randn(3).tolist() == expected.tolist()
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("steps", [2, 3])  # an odd and an even number of draws, with the reset
def test_a_state_holds_the_normal_number_that_numpy_keeps(steps):
    with (
        Collector(Drawing, frames_per_batch=steps) as one,
        Collector(Drawing, frames_per_batch=steps) as other,
    ):
        one.set_seed(1)
        one.next()
        other.load_state_dict(one.state_dict())
        assert same(one.next().exclude("collector"), other.next().exclude("collector"))


@pytest.mark.parametrize("pool", ["NextStep", "SameStep", "Disabled"])
def test_random_actions_of_vector_environments_do_not_depend_on_where_batches_begin(pool):
    mode = getattr(gym.vector.AutoresetMode, pool.upper().replace("STEP", "_STEP"))
    found = []
    for steps in (8, 3):
        env = gym.vector.SyncVectorEnv([lambda: Drawing(end=1000)] * 2, autoreset_mode=mode)
        with Collector(env, frames_per_batch=2 * steps, total_frames=2 * STEPS) as collector:
            collector.set_seed(1)
            batches = torch.cat([batch.clone() for batch in collector], -1)
            found.append(batches.exclude("collector"))
    assert same(*found)
