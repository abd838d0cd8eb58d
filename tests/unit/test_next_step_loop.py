"""Pools: their automatic reset costs a step, and nobody may notice."""

import importlib
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from clocks_rig import Clock, clocks
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pool_rig import (
    ACTION,
    DONE,
    OBS,
    REWARD,
    STEPS,
    TERMINATED,
    TRAJ,
    TRUNCATED,
    Counting,
    Uniform,
    act_on,
    assert_consistent,
    assert_same_stream,
    by_hand,
    collect,
    collect_all,
    serve,
)

from gleanrl import ConfigError
from gleanrl.collectors import Collector
from gleanrl.core.keys import next_key

MODES = ["SameStep", "Disabled", "NextStep"]
VERSION = ("policy_version",)


@pytest.fixture(scope="module")
def envpool():
    """The module: importing it takes a second, in the one process that runs these tests."""
    return importlib.import_module("envpool")


def cartpoles(count, mode, **kwargs):
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * count, autoreset_mode=mode, **kwargs)


def splits_of(total):
    return st.lists(st.integers(1, total), min_size=1, max_size=8).map(
        lambda parts: [*parts, total]
    )


@pytest.fixture(scope="module")
def cartpole_by_hand():
    return by_hand(lambda i: gym.make("CartPole-v1"), 4, 120, seed=11, n=2)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(splits=splits_of(40))
def test_streams_equal_those_of_single_environments(mode, cartpole_by_hand, splits):
    source = serve(cartpoles(4, mode))
    source.seed(11, False)
    got = collect_all(source, splits)
    assert_same_stream(got, cartpole_by_hand, 120)
    assert_consistent(got)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(
    splits=splits_of(12),
    lengths=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4),
    wrap=st.booleans(),
)
def test_batch_boundaries_do_not_change_the_stream(mode, splits, lengths, wrap):
    source = serve(clocks(lengths, mode, wrap=wrap))
    source.seed(0, False)
    got = collect_all(source, splits)
    make = Resumed(lengths, 2)  # the first reset, at construction, is one of the episodes
    expected = by_hand(make, len(lengths), got[OBS].shape[1], seed=0, n=5)
    assert_same_stream(got, expected)
    assert_consistent(got)
    episodes = got[OBS][..., 1].long() - 1
    assert torch.equal(got[TRAJ], episodes * len(lengths) + torch.arange(len(lengths))[:, None])


class Resumed:
    """Makes clocks that were reset before."""

    def __init__(self, lengths, resets):
        self.lengths, self.resets = lengths, resets

    def __call__(self, i):
        clock = Clock(i, self.lengths[i])
        clock.episode += self.resets - 1
        return clock


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_async_vector_environments_give_the_same_streams(mode, cartpole_by_hand):
    env = AsyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 4, context="forkserver", autoreset_mode=mode, copy=False
    )
    source = serve(env)
    try:
        source.seed(11, False)
        got = collect_all(source, [1, 20, 7, 30])
        assert_same_stream(got, cartpole_by_hand)
    finally:
        source.close()


def test_a_natively_vectorised_environment_gives_the_same_transitions_as_a_bare_loop():
    def make():
        return gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="vector_entry_point")

    source = serve(make())
    source.seed(3, False)
    got = collect_all(source, [5, 40, 1, 30])
    assert_consistent(got)
    expected = bare_loop(make(), {"seed": 3}, 200)
    for i, rows in enumerate(expected):
        for key, position in ((OBS, 0), (next_key(OBS), 2), (next_key(DONE), 4)):
            theirs = np.stack([row[position] for row in rows[:76]])
            mine = got[key][i].numpy().reshape(theirs.shape)
            np.testing.assert_array_equal(mine, theirs)


def bare_loop(env, reset, steps):
    """Return the transitions of every environment of a pool, without its reset steps."""
    seen, _ = env.reset(**reset)
    rows = [[] for _ in range(len(seen))]
    over = np.zeros(len(seen), bool)
    for _ in range(steps):
        action = act_on(seen, 2)
        after, reward, dead, late, _ = env.step(action)
        for i in np.flatnonzero(~over):
            rows[i].append((seen[i], action[i], after[i], reward[i], dead[i] or late[i]))
        seen, over = after.copy(), dead | late
    return rows


@settings(max_examples=8, deadline=None)
@given(splits=splits_of(30))
@example(splits=[1] * 150)  # long enough for laggards
def test_envpool_gives_the_same_transitions_as_a_bare_loop(envpool, splits):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bounds of its spaces
        expected = bare_loop(envpool.make_gymnasium("CartPole-v1", num_envs=6, seed=5), {}, 400)
    source = serve(envpool.make_gymnasium("CartPole-v1", num_envs=6, seed=5))
    got = collect_all(source, splits)
    assert_consistent(got)
    for i, rows in enumerate(expected):
        keys = (OBS, ACTION, next_key(OBS), next_key(REWARD), next_key(DONE))
        for position, key in enumerate(keys):
            theirs = np.stack([row[position] for row in rows[: sum(splits)]])
            mine = got[key][i].numpy().reshape(theirs.shape)
            np.testing.assert_array_equal(mine, theirs)


def test_envpool_is_seeded_by_making_it_anew(envpool):
    source = serve(envpool.make_gymnasium("CartPole-v1", num_envs=3))
    assert source.seed(9, False) == 11
    first = collect_all(source, [20])
    assert source.seed(9, False) == 11
    again = collect_all(source, [20])
    source.seed(10, False)
    shifted = collect_all(source, [20])
    assert torch.equal(first[OBS], again[OBS])
    assert torch.equal(first[OBS][1:], shifted[OBS][:-1])
    assert source.seed(4, True) == 4
    same = collect_all(source, [20])
    assert torch.equal(same[OBS][0], same[OBS][2])


def test_no_reset_step_is_delivered():
    source = serve(clocks([(1,), (2,), (5,), (1, 4)]))
    got = collect_all(source, [9, 9, 9, 9])
    assert (got[next_key(REWARD)] > 0).all()
    assert torch.equal(got[next_key(OBS)][..., 2], got[OBS][..., 2] + 1)


def test_what_is_left_over_keeps_its_own_policy_version():
    source = serve(clocks([(1,), (1000,)], wrap=True), track_policy_version=True)
    collected = []
    for version in range(4):
        source.policy_version = version
        batch, report = collect(source, 6)
        assert report.policy_version == int(batch[VERSION].min())
        collected.append(batch[VERSION])
        assert torch.equal(batch[VERSION], batch[next_key(VERSION)])
    assert [rows[0].tolist() for rows in collected] == [[v] * 6 for v in range(4)]
    # The long episode made 11 or 12 steps while the short ones made 6.
    assert [rows[1].tolist() for rows in collected] == [
        [0] * 6,
        [0] * 5 + [1],
        [1] * 6,
        [1] * 5 + [2],
    ]


def test_laggards_are_reset_at_once_where_that_is_possible():
    source = serve(clocks([(1,), (1000,)]), track_policy_version=True)
    oldest = 0
    for version in range(30):
        source.policy_version = version
        batch, report = collect(source, 8)
        assert report.discarded == 0
        assert_consistent(batch)
        oldest = max(oldest, version - int(batch[VERSION].min()))
    assert oldest <= 1


def test_an_environment_too_far_ahead_is_cut_and_what_it_lost_is_counted():
    source = serve(clocks([(1,), (100_000,)], wrap=True))
    batches, discarded = [], 0
    for _ in range(12):
        batch, report = collect(source, 40)
        discarded += report.discarded
        batches.append(batch)
        if report.discarded:
            break
    assert discarded > 0
    got = {key: torch.cat([batch[key] for batch in batches], 1) for key in batches[0]}
    clock = got[OBS][1, :, 2]
    assert torch.equal(clock, torch.arange(len(clock)))
    cut = batches[-1]
    assert cut[next_key(TRUNCATED)][1, -1].all()
    assert cut[next_key(DONE)][1, -1].all()
    assert not cut[next_key(TERMINATED)][1].any()
    after, _ = collect(source, 40)
    assert after[OBS][1, 0, 2] == len(clock) + discarded
    assert torch.equal(after[TRAJ][1], cut[TRAJ][1, -1:] + 2 + torch.zeros(40, dtype=torch.int64))
    assert not after[next_key(DONE)][1].any()
    assert torch.equal(after[TRAJ][0, 0], cut[TRAJ][0, -1] + 2)


def test_a_stopped_rollout_keeps_its_shape_and_loses_nothing():
    lengths = [(1,), (3,), (1000,)]
    source = serve(clocks(lengths), mask=True)
    source.seed(0, False)
    parts = []
    for steps in (5, 3, 6):
        stop = bytearray(1)
        batch, report = collect(source, 9, StopAfter(steps, stop, source))
        assert 1 <= report.steps <= steps
        assert report.frames == 3 * report.steps
        valid = batch["collector", "mask"]
        assert valid[:, : report.steps].all()
        assert not valid[:, report.steps :].any()
        assert (batch[TRAJ][:, report.steps :] == -1).all()
        assert not batch[OBS][:, report.steps :].any()
        parts.append({key: value[:, : report.steps] for key, value in batch.items()})
    parts.append(collect(source, 9)[0])
    got = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    expected = by_hand(Resumed(lengths, 2), 3, got[OBS].shape[1], seed=0, n=5)
    assert_same_stream(got, expected)


class StopAfter(bytearray):
    """A stop byte that rises at the ``n``-th look."""

    def __init__(self, n, *_):
        super().__init__(1)
        self.left = n

    def __getitem__(self, index):
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_cut_at_the_limit_with_their_true_last_observation(mode):
    source = serve(clocks([(3,), (7,), (1000,)], mode), max_frames_per_traj=5)
    got = collect_all(source, [4, 1, 9, 20])
    assert_consistent(got)
    steps = got[OBS][..., 2]
    assert torch.equal(got[STEPS][..., 0], steps.long())
    assert torch.equal(got[next_key(STEPS)][..., 0], steps.long() + 1)
    assert torch.equal(got[next_key(OBS)][..., 2], steps + 1)
    assert steps.amax(1).tolist() == [2, 4, 4]
    cut = steps == 4
    assert torch.equal(got[next_key(DONE)][1:, :, 0], cut[1:])
    assert torch.equal(got[next_key(TRUNCATED)][1:, :, 0], cut[1:])


def test_limits_work_with_envpool(envpool):
    source = serve(envpool.make_gymnasium("CartPole-v1", num_envs=5), max_frames_per_traj=7)
    got = collect_all(source, [10, 3, 25])
    assert_consistent(got)
    assert got[STEPS].max() == 6
    late = got[STEPS] == 6
    assert got[next_key(DONE)][late].all()
    assert got[next_key(TRUNCATED)].any()


def test_a_limit_needs_environments_that_can_be_reset_alone():
    env = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(ConfigError, match=r"max_frames_per_traj \(10\).*CartPoleVectorEnv"):
        serve(env, max_frames_per_traj=10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("wrap", [False, True])
def test_recurrent_state_is_zero_after_every_reset(mode, limit, wrap):
    if limit and wrap:
        pytest.skip("wrapped environments cannot be cut")
    env = clocks([(1,), (2, 3), (6,), (40,)], mode, wrap=wrap and mode == "NextStep")
    source = serve(env, Counting, max_frames_per_traj=limit)
    got = collect_all(source, [3, 1, 8, 2, 15])
    assert torch.equal(got["memory",][..., 0], got[OBS][..., 2])
    assert torch.equal(got["next", "memory"][..., 0], got[OBS][..., 2] + 1)


@pytest.mark.parametrize("mode", MODES)
def test_is_init_marks_the_first_step_of_every_episode(mode):
    source = serve(clocks([(1,), (2, 3), (6,)], mode), needs_is_init=True, max_frames_per_traj=5)
    got = collect_all(source, [3, 1, 8, 2, 15])
    assert torch.equal(got["is_init",][..., 0], got[OBS][..., 2] == 0)


def test_a_reset_discards_what_was_left_over_and_counts_it():
    source = serve(clocks([(1,), (1000,)], wrap=True))
    before, _ = collect(source, 10)
    source.reset(None, {})
    after, report = collect(source, 10)
    assert report.discarded == 9  # 19 steps, every second of the other's a reset
    assert (after[OBS][:, 0, 2] == 0).all()
    assert (after[TRAJ][:, 0] > before[TRAJ][:, -1]).all()
    _, report = collect(source, 10)
    assert report.discarded == 0


def test_a_reset_of_some_leaves_the_stream_of_the_others_alone():
    source = serve(clocks([(2,), (1000,), (1000,)]))
    before, _ = collect(source, 10)
    source.reset([1], {})
    after, report = collect(source, 10)
    assert report.discarded > 0
    assert after[OBS][:, 0].tolist()[1] == [1, 1, 0]
    assert after[OBS][2, :, 2].tolist() == list(range(10, 20))
    assert after[TRAJ][1, 0] == before[TRAJ][1, -1] + 3
    assert after[TRAJ][2, 0] == before[TRAJ][2, -1]


def test_every_batch_can_start_afresh():
    source = serve(clocks([(1,), (4,), (1000,)]), reset_at_each_iter=True)
    seen = set()
    for _ in range(3):
        batch, _ = collect(source, 7)
        assert (batch[OBS][:, 0, 2] == 0).all()
        assert_consistent(batch)
        ids = set(batch[TRAJ].flatten().tolist())
        assert not ids & seen
        seen |= ids


def test_rollouts_of_other_lengths_continue_the_stream_and_keep_what_is_left_over():
    source = serve(clocks([(1,), (2,), (1000,)], wrap=True))
    got = collect_all(source, [20, 2, 31, 5])
    assert torch.equal(got[OBS][2, :, 2], torch.arange(58))
    assert_consistent(got)


def test_compact_rollouts_have_no_next_observations():
    source = serve(clocks([(1,), (3,)]), compact_obs=True)
    got = collect_all(source, [5, 5])
    assert next_key(OBS) not in got
    assert (got[next_key(REWARD)] > 0).all()


def test_the_last_step_can_be_marked_as_truncated():
    source = serve(clocks([(1,), (3,), (50,)]), set_truncated=True)
    batch, _ = collect(source, 8)
    assert batch[next_key(DONE)][:, -1].all()
    assert batch[next_key(TRUNCATED)][2, -1].all()


def test_random_frames_come_from_the_space():
    source = serve(clocks([(1,), (3,), (50,)]), Uniform)
    torch.manual_seed(0)
    got = collect_all(source, [8, 50])
    assert set(got[ACTION].flatten().tolist()) == set(range(5))
    assert torch.equal(got[next_key(REWARD)][..., 0] % 10, got[ACTION].float())


def test_state_goes_into_a_new_source():
    source = serve(clocks([(1,), (3,)]))
    source.seed(1, False)
    before, _ = collect(source, 6)
    fresh = serve(clocks([(1,), (3,)]))
    fresh.load_state(source.state())
    after, _ = collect(fresh, 6)
    assert (after[TRAJ][:, 0] > before[TRAJ][:, -1]).all()


def test_pools_with_the_other_interface_are_refused(envpool):
    with pytest.raises(ConfigError, match=r"envpool\.make_gymnasium"):
        serve(envpool.make_dm("CartPole-v1", num_envs=4))


def test_envpool_counts_states_in_narrow_integers(envpool):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = serve(envpool.make_gymnasium("CliffWalking-v0", num_envs=3), Uniform)
    batch, _ = collect(source, 12)
    assert batch[OBS].dtype == torch.int64
    assert (batch[OBS][:, 0] == 36).all()


def test_a_dtype_that_numpy_lacks_is_refused_by_name():
    def act(td):
        td["score"] = torch.ones(*td.batch_size, dtype=torch.bfloat16)
        return td.set("action", torch.zeros(*td.batch_size, dtype=torch.int64))

    with pytest.raises(ConfigError, match=r"'score' is torch\.bfloat16, which numpy does not have"):
        Collector(cartpoles(2, "NextStep"), act, frames_per_batch=4)
    with Collector(cartpoles(2, "Disabled"), act, frames_per_batch=4) as collector:
        assert collector.next()["score"].dtype == torch.bfloat16
