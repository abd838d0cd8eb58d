"""Slices of what several collectors stored, in any order: only successive steps stand together."""

import itertools
import tempfile

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.covering import examples

from gleanrl import (
    Collector,
    ConfigError,
    LazyTensorStorage,
    MultiStep,
    MultiSyncCollector,
    ReplayBuffer,
    ReplayError,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
)

numbers = itertools.count()


class Certified(gym.Env):
    """Observations say which environment made them, in which episode and at which step."""

    observation_space = gym.spaces.Box(-1, 2**31, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=7):
        self.number, self.length, self.episode = next(numbers), length, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.step_count = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action):
        self.step_count += 1
        return self.seen(), 1.0, self.step_count == self.length, False, {}

    def seen(self):
        return np.array([self.number, self.episode, self.step_count], np.float64)


def check(rb, size=120):
    """Every pair of rows in a slice is two successive steps of one episode of one environment."""
    try:
        pairs = rb.sample(size).reshape(-1, 2)
    except ReplayError:
        return  # nothing has two rows in a row
    before, after = pairs["observation"][:, 1], pairs["next", "observation"][:, 0]
    assert (before == after).all()


EVENTS = ("next", "next", "next", "reset", "seed", "save", "back", "rollout", "new", "by_hand")
EVENTS += ("reload", "share", "empty")


class Filling:
    """A buffer, the collectors that fill it, and what may happen to them."""

    def __init__(self, envs, ndim, sampler, **options):
        self.envs, self.options = envs, options
        self.ndim, self.sampler = ndim, sampler
        self.rb = self.make(200)
        self.collectors, self.states = [], []
        self.new(), self.new()

    def make(self, size):
        storage = LazyTensorStorage(size, ndim=self.ndim)
        return ReplayBuffer(storage=storage, sampler=self.sampler(slice_len=2))

    def collector(self, **options):
        frames, envs = 3 * self.envs, [Certified] * self.envs
        return Collector(envs, frames_per_batch=frames, total_frames=-1, **options, **self.options)

    def new(self):
        """Another run: its ids begin at 0."""
        self.collectors.append(self.collector(replay_buffer=self.rb))
        self.states.append(self.collectors[-1].state_dict())

    def happen(self, event, which):
        which %= len(self.collectors)
        collector = self.collectors[which]
        if event in ("next", "reset", "rollout"):
            getattr(collector, event)()
        elif event == "seed":
            collector.set_seed(which)
        elif event == "save":
            self.states[which] = collector.state_dict()
        elif event == "back":
            collector.load_state_dict(self.states[which])
        elif event in ("share", "empty"):
            getattr(self.rb, event)()
        else:
            getattr(self, event)()

    def by_hand(self):
        """Ids of data that the user stores are the user's."""
        with self.collector() as other:
            batch = other.rollout()
        batch["collector", "traj_ids"] += next(numbers) * 1000
        self.rb.extend(batch if self.ndim == 2 else batch.reshape(-1))

    def reload(self):
        """Continue with what was saved, here and in a buffer of another size."""
        if self.rb.write_count:
            with tempfile.TemporaryDirectory() as folder:
                self.rb.dumps(folder)
                other = self.make(60)
                other.loads(folder)
                check(other)
                self.rb.loads(folder)


@examples(30)
@given(
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), max_size=12),
    envs=st.integers(1, 2),
    ndim=st.integers(1, 2),
    once=st.booleans(),
    end_key=st.sampled_from([None, ("next", "done")]),
)
def test_a_slice_never_joins_rows_of_two_writers_or_two_runs(events, envs, ndim, once, end_key):
    kind = SliceSamplerWithoutReplacement if once else SliceSampler
    filling = Filling(envs, ndim, lambda **options: kind(end_key=end_key, **options))
    for event, which in events:
        filling.happen(event, which)
        check(filling.rb)
    for collector in filling.collectors:
        collector.shutdown()


def test_what_one_collector_stores_in_several_batches_is_one_trajectory():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=7))
    with Collector(Certified, frames_per_batch=2, total_frames=14, replay_buffer=rb) as collector:
        for _ in collector:
            pass
    steps = rb.sample(70)["observation"][:, 2].reshape(-1, 7)
    assert (steps == torch.arange(7.0)).all()


# -- without ids -----------------------------------------------------------------------------------


def test_slices_of_a_collector_need_ids():
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=2))
    with (
        Collector(
            Certified, frames_per_batch=4, total_frames=8, replay_buffer=rb, track_traj_ids=False
        ) as collector,
        pytest.raises(ConfigError, match="leave track_traj_ids on"),
    ):
        next(iter(collector))
    assert not len(rb)


def test_slices_by_an_entry_of_the_environments_need_no_ids():
    sampler = SliceSampler(slice_len=2, traj_key="episode")
    rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)

    def number(batch):
        return batch.set(
            "episode", batch["observation"][..., :2] @ torch.tensor([1000.0, 1.0]).double()
        )

    with Collector(
        [Certified] * 2,
        frames_per_batch=6,
        total_frames=30,
        replay_buffer=rb,
        track_traj_ids=False,
        postproc=number,
    ) as collector:
        for _ in collector:
            pass
    check(rb)


def test_sums_over_steps_need_ids_where_rollouts_follow_one_another():
    with pytest.raises(ConfigError, match="only track_traj_ids=True tells where one ends"):
        MultiSyncCollector(
            [Certified] * 2,
            frames_per_batch=8,
            cat_results=-1,
            track_traj_ids=False,
            postproc=MultiStep(0.9, 3),
        )


# -- priorities of rows that were replaced ---------------------------------------------------------


@examples(60)
@given(
    events=st.lists(st.sampled_from(["sample", "extend", "update", "all"]), max_size=24),
    batch=st.integers(2, 5),
    ndim=st.integers(1, 2),
    shared=st.booleans(),
)
def test_a_priority_is_that_of_the_row_that_was_sampled(events, batch, ndim, shared):
    """A row's priority is its own number if it was updated, else the largest until then."""
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(12, ndim=ndim), shared=shared
    )
    count, largest, fresh, expected, samples = 0, 1.0, [], {}, []

    def extend(steps):
        nonlocal count
        number = torch.arange(count, count + steps * ndim, dtype=torch.float64) + 2
        count += steps * ndim
        fresh.extend(number.tolist())
        rb.extend({"number": number if ndim == 1 else number.reshape(-1, 2).T})

    def follow(numbers=()):
        nonlocal largest
        expected.update(dict.fromkeys(fresh, largest))
        fresh.clear()
        expected.update({number: number for number in numbers})
        largest = max([largest, *numbers])

    extend(12 // ndim)
    for event in events:
        if event == "extend":
            extend(batch)
        elif event == "sample":
            samples.append(rb.sample(batch))
            follow()
        elif event == "update" and samples:
            sample = samples.pop(0)
            rb.update_priority(sample["index"].clone(), sample["number"])
            follow(sample["number"].tolist())
        elif event == "all":  # places that come from no sample
            place = torch.arange(12)
            place = place if ndim == 1 else torch.stack([place // 2, place % 2], 1)
            numbers = rb[place]["number"]
            rb.update_priority(place, numbers)
            follow(numbers.tolist())
    follow()
    state = rb.state_dict()
    stored = state["storage"]["tensors"][0].flatten().tolist()
    assert state["sampler"]["priorities"].tolist() == [expected[number] for number in stored]
