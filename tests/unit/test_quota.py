"""Equal quotas: every environment gives equally many whole trajectories to a batch."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from gleanrl import Collector, ConfigError, MultiAsyncCollector, MultiSyncCollector, ReplayBuffer


class Lasting(gym.Env):
    """Episodes of ``length`` steps, the first ``more`` steps longer."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length, more=0):
        self.length, self.more, self.t = length, more, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.until, self.more, self.t = self.length + self.more, 0, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, self.t >= self.until, False, {}


LENGTHS = (2, 3, 20, 31)


def makers():
    return [lambda length=length: Lasting(length) for length in LENGTHS]


def lengths(batch):
    return batch["collector", "mask"].sum(-1)


def test_plain_batches_prefer_short_episodes_and_equal_quotas_do_not():
    means = {}
    for quota in (None, "equal"):
        with Collector(
            makers(), frames_per_batch=40, trajs_per_batch=12, traj_quota=quota
        ) as collector:
            means[quota] = lengths(next(iter(collector))).float().mean().item()
    assert means[None] < 5
    assert means["equal"] == np.mean(LENGTHS)


def consecutive(batches, share):
    """Batch after batch, environment by environment, no episode is left out or taken twice."""
    number = len(LENGTHS)
    for count, batch in enumerate(batches):
        expected = [
            (count * share + k) * number + env for env in range(number) for k in range(share)
        ]
        assert batch["collector", "traj_ids"][:, 0].tolist() == expected
        assert lengths(batch).tolist() == [LENGTHS[i % number] for i in expected]


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: Collector(makers(), **given),
        lambda **given: MultiSyncCollector(makers(), backend="inline", **given),
        lambda **given: MultiSyncCollector(
            [makers()[:2], makers()[2:]], backend="inline", cat_results=0, **given
        ),
        lambda **given: MultiAsyncCollector(makers(), backend="inline", **given),
        lambda **given: MultiAsyncCollector(makers()[:2] + makers()[2:], **given),
    ],
    ids=["single", "sync", "two each", "async", "processes"],
)
def test_every_environment_gives_its_episodes_in_order(make):
    with make(frames_per_batch=24, trajs_per_batch=8, traj_quota="equal") as collector:
        iterator = iter(collector)
        consecutive([next(iterator) for _ in range(4)], 2)


def test_end_to_end_is_shared_out_too():
    with Collector(
        makers(), frames_per_batch=8, trajs_per_batch=4, traj_format="cat", traj_quota="equal"
    ) as collector:
        batch = next(iter(collector))
    assert batch.shape == (sum(LENGTHS),)
    ids = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    assert torch.equal(batch["collector", "traj_ids"], ids)


def test_what_cannot_be_shared_out_evenly_is_rounded_up():
    with (
        pytest.warns(UserWarning, match=r"trajs_per_batch \(5\).*4 environments.*hold 8"),
        Collector(makers(), frames_per_batch=8, trajs_per_batch=5, traj_quota="equal") as collector,
    ):
        assert next(iter(collector)).shape[0] == 8


def test_an_episode_cut_off_by_a_reset_is_not_taken():
    with Collector(
        [lambda: Lasting(4, more=9), lambda: Lasting(4)],
        frames_per_batch=12,
        trajs_per_batch=2,
        traj_quota="equal",
    ) as collector:
        iterator = iter(collector)
        collector.rollout()
        collector.reset()
        batch = next(iterator)
    assert lengths(batch).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trajs_per_batch": 4, "traj_quota": "fair"}, r"traj_quota \('fair'\)"),
        ({"traj_quota": "equal"}, "needs trajs_per_batch"),
        (
            {"trajs_per_batch": 4, "traj_quota": "equal", "reset_at_each_iter": True},
            "reset_at_each_iter",
        ),
        (
            {"trajs_per_batch": 4, "traj_quota": "equal", "replay_buffer": ReplayBuffer()},
            "replay_buffer",
        ),
    ],
)
@pytest.mark.parametrize("multi", [False, True])
def test_what_makes_no_sense_is_named(given, message, multi):
    make = MultiSyncCollector if multi else Collector
    with pytest.raises(ConfigError, match=message):
        make(makers(), frames_per_batch=8, **given)
