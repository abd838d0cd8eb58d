"""Numbers that users write: read however they are written, refused by their name and value."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from gleanrl import Collector, ConfigError
from gleanrl.core.options import FrameLimits, SourceOptions, check_int, limit
from gleanrl.envs import GymEnv, SerialEnv


class Plain(gym.Env):
    """Is only made."""

    observation_space = spaces.Box(-9, 9, (2,), np.float64)
    action_space = spaces.Discrete(2)


def whole_trajectories(count):
    with Collector("CartPole-v1", frames_per_batch=8, trajs_per_batch=count) as collector:
        return collector


@pytest.mark.parametrize("value", [6, np.int64(6), np.uint8(6), 6.0, np.float32(6)])
def test_whole_numbers_are_read_however_they_are_written(value):
    budget = FrameLimits.from_arguments(value, value, value)
    assert (budget.frames_per_batch, budget.total_frames, budget.init_random_frames) == (6, 6, 6)
    assert type(budget.frames_per_batch) is int
    assert limit(value) == 6
    assert SourceOptions(num_envs=value).num_envs == 6
    assert whole_trajectories(value).trajs_per_batch == 6


@pytest.mark.parametrize("value", [2.7, "3", True, float("nan"), [3], None])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("frames_per_batch", lambda value: FrameLimits.from_arguments(value, 1, 0)),
        ("total_frames", lambda value: FrameLimits.from_arguments(1, value, 0)),
        ("init_random_frames", lambda value: FrameLimits.from_arguments(1, 1, value)),
        ("max_frames_per_traj", limit),
        ("trajs_per_batch", whole_trajectories),
        ("num_envs", lambda value: SourceOptions(num_envs=value)),
        ("num_envs", lambda value: GymEnv("CartPole-v1", num_envs=value)),
        ("num_workers", lambda value: SerialEnv(value, Plain)),
        ("seed", lambda value: GymEnv(Plain()).set_seed(value)),
    ],
)
def test_what_is_no_whole_number_is_named_with_its_value(name, read, value):
    if value is None and name in (
        "total_frames",
        "init_random_frames",
        "max_frames_per_traj",
        "trajs_per_batch",
        "num_envs",
    ):
        read(value)
        return
    with pytest.raises(ConfigError) as caught:
        read(value)
    assert str(caught.value) == f"{name} ({value!r}) must be a whole number"


def test_a_limit_that_is_zero_or_negative_is_none():
    assert [limit(value) for value in (None, 0, -1, -2.0)] == [None] * 4
    with pytest.raises(ConfigError, match=r"^steps \('x'\)"):
        limit("x", "steps")
    with pytest.raises(ConfigError, match=r"n \(2\) must be at least 3"):
        check_int("n", 2, least=3)
