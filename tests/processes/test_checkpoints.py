"""A collector and its replay buffer saved at one moment; states of other numbers of workers."""

import os
import shutil
import signal
import subprocess
import textwrap

import pytest
import rig
import torch
from resume_rig import take
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import (
    Collector,
    ConfigError,
    MultiAsyncCollector,
    MultiSyncCollector,
    PrioritizedSampler,
    ReplayBuffer,
)
from gleanrl.collectors import DistributedCollector
from gleanrl.data import LazyTensorStorage, ListStorage


def buffer(sampler=None, **options):
    return ReplayBuffer(
        storage=LazyTensorStorage(1000, **options),
        sampler=sampler,
        generator=torch.Generator().manual_seed(5),
        batch_size=8,
    )


def prioritized():
    return buffer(PrioritizedSampler(1000, 0.7, 0.5))


def one(stored):
    return Collector("CartPole-v1", num_envs=2, frames_per_batch=20, replay_buffer=stored)


def sync(stored):
    return MultiSyncCollector(
        "CartPole-v1", num_workers=2, frames_per_batch=20, replay_buffer=stored
    )


def rows_of(stored):
    rows = stored[:]
    rows = rows.reshape(-1) if rows.ndim == 2 else rows
    rows = rows.exclude("index")  # workers store where there is room
    return rows[rows["collector", "traj_ids"].argsort(stable=True)]


def equal(one, other):
    return all(torch.equal(value, other[key]) for key, value in one.items(True, True))


BUFFERS = {
    "rows": buffer,
    "priorities": prioritized,
    "env, time": lambda: buffer(ndim=2),
    "compact": lambda: buffer(compact=["observation"]),
}


@pytest.mark.covering
@pytest.mark.parametrize("where", [one, sync])
@pytest.mark.parametrize("kind", BUFFERS)
def test_collector_and_buffer_continue_together(kind, where, tmp_path):
    def run(collector, stored, count):
        found = []
        for _ in range(count):
            collector.next()
            sample = stored.sample()
            if kind == "priorities":
                stored.update_priority(sample["index"], sample["observation"][:, 0].abs())
            found.append(sample.clone())
        return found

    stored = BUFFERS[kind]()
    with where(stored) as collector:
        collector.set_seed(3)
        run(collector, stored, 3)
        collector.save(tmp_path / "both", replay_buffer=True)
        samples, expected = run(collector, stored, 3), rows_of(stored)
    stored = BUFFERS[kind]()
    with where(stored) as collector:
        collector.load(tmp_path / "both")
        assert len(stored) == collector.stats()["frames"] == 60
        found = run(collector, stored, 3)
    assert equal(rows_of(stored), expected)
    if where is one:
        assert all(map(equal, found, samples))


def test_background_collection_waits_while_both_are_saved(tmp_path):
    stored = buffer()
    options = {"num_workers": 2, "frames_per_batch": 20}
    with MultiAsyncCollector("CartPole-v1", replay_buffer=stored, **options) as collector:
        collector.start()
        for _ in range(3):
            before = stored.write_count
            rig.until(lambda before=before: stored.write_count > before + 100)
            collector.save(tmp_path / "both", replay_buffer=True)
    other = buffer()
    with MultiAsyncCollector("CartPole-v1", replay_buffer=other, **options) as collector:
        collector.load(tmp_path / "both")
        assert collector.stats()["frames"] == other.write_count > 300
        collector.start()
        rig.until(lambda: other.write_count > stored.write_count + 100)


def test_the_last_states_are_kept_each_with_its_buffer(tmp_path):
    with one(buffer()) as collector:
        for _ in range(4):
            collector.next()
            collector.save(tmp_path, replay_buffer=True, keep=2)
    assert len(os.listdir(tmp_path)) == 4
    for name, frames in (("", 80), ("state", 80), ("state.1", 60)):
        stored = buffer()
        with one(stored) as collector:
            collector.load(tmp_path / name)
            assert len(stored) == collector.stats()["frames"] == frames


def test_nothing_is_loaded_if_one_of_both_does_not_fit(tmp_path):
    with one(buffer()) as collector:
        collector.next()
        collector.save(tmp_path / "both", replay_buffer=True)
        collector.save(tmp_path / "alone")
        with pytest.raises(ConfigError, match="is a file"):
            collector.save(tmp_path / "alone", replay_buffer=True)
    stored = buffer(ndim=2)
    with one(stored) as collector:
        collector.set_seed(1)
        expected = [collector.next(), len(stored)]
        with pytest.raises(ConfigError):
            collector.load(tmp_path / "both")
        assert collector.stats()["frames"] == 20
        assert len(stored) == expected[1]
        shutil.rmtree(next((tmp_path / "both").glob("buffer-*")))
        with pytest.raises(ConfigError, match="holds no replay buffer"):
            collector.load(tmp_path / "both")
        collector.next()
        after = rows_of(stored)
    stored = buffer(ndim=2)
    with one(stored) as collector:
        collector.set_seed(1)
        take_all(collector, 2)
        assert equal(rows_of(stored), after)
    with Collector("CartPole-v1", num_envs=2, frames_per_batch=20) as collector:
        with pytest.raises(ConfigError, match="replay_buffer is None"):
            collector.load(tmp_path / "both")
        with pytest.raises(ConfigError, match="replay_buffer is None"):
            collector.save(tmp_path / "other", replay_buffer=True)
    with (
        one(ReplayBuffer(storage=ListStorage(10))) as collector,
        pytest.raises(ConfigError, match="LazyTensorStorage"),
    ):
        collector.save(tmp_path / "other", replay_buffer=True)
    assert sorted(os.listdir(tmp_path)) == ["alone", "both"]


def take_all(collector, count):
    for _ in range(count):
        collector.next()


SAVES = """
import sys
from gleanrl import Collector, ReplayBuffer
from gleanrl.data import LazyTensorStorage

stored = ReplayBuffer(storage=LazyTensorStorage(200_000), batch_size=8)
collector = Collector(
    "CartPole-v1", num_envs=2, frames_per_batch=20, replay_buffer=stored
)
while True:
    collector.next()
    collector.save(sys.argv[1], replay_buffer=True)
    print(collector.stats()["frames"], flush=True)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_both_of_one_moment(python, tmp_path):
    for number in range(4):
        line = [python, "-c", textwrap.dedent(SAVES), str(tmp_path)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as program:
            for _ in range(2 + number):
                last = int(program.stdout.readline())
            program.send_signal(signal.SIGKILL)
        stored = ReplayBuffer(storage=LazyTensorStorage(200_000), batch_size=8)
        with one(stored) as collector:
            collector.load(tmp_path)
            assert len(stored) == collector.stats()["frames"] >= last
            collector.save(tmp_path, replay_buffer=True)
        assert len(os.listdir(tmp_path)) == 2  # nothing of the killed process is left


# -- another number of workers and environments ----------------------------------------------------


def counted(workers, envs, **options):
    if not workers:
        return Collector("CartPole-v1", num_envs=envs, frames_per_batch=48, **options)
    return MultiSyncCollector(
        "CartPole-v1",
        num_workers=workers,
        num_envs=envs,
        frames_per_batch=48,
        cat_results=0,
        **options,
    )


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (3, 1)), ((0, 2), (2, 4)), ((2, 1), (0, 3))]
)
def test_all_but_the_environments_continues_in_other_workers(before, after, tmp_path):
    with counted(*before, init_random_frames=96) as collector:
        collector.set_seed(4)
        first = take(collector, 3)
        collector.save(tmp_path / "state")
        stats = collector.stats()
    with counted(*after, init_random_frames=96) as other:
        with pytest.raises(ConfigError, match="environments=False"):
            other.load(tmp_path / "state")
        assert other.stats()["frames"] == 0
        with pytest.warns(UserWarning, match="all environments begin new episodes") as caught:
            other.load(tmp_path / "state", environments=False)
        assert len(caught) == 1
        found = other.stats()
        for name in ("frames", "batches", "episodes", "return_mean", "policy_version"):
            assert found[name] == pytest.approx(stats[name], nan_ok=True), name
        later = take(other, 2)
        assert other.stats()["frames"] == 240
    ids = [
        {int(i) for batch in part for i in batch["collector", "traj_ids"].flatten()}
        for part in (first, later)
    ]
    assert not ids[0] & ids[1]


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation):
        rows = observation.shape[:-1]
        return torch.zeros(rows, dtype=torch.int64), self.value.expand(*rows, 1)


def valued(value):
    policy = TensorDictModule(Constant(value), ["observation"], ["action", "value"])
    return {"policy": policy, "frames_per_batch": 8, "track_policy_version": True}


WITH_A_POLICY = {
    "one process": lambda **options: Collector("CartPole-v1", **options),
    "central": lambda **options: MultiSyncCollector(
        ["CartPole-v1"] * 2, inference="central", **options
    ),
    "a process of the policy": lambda **options: MultiSyncCollector(
        ["CartPole-v1"] * 2, inference="central", policy_process=True, **options
    ),
    "a collector in each node": lambda **options: DistributedCollector(
        ["CartPole-v1"], launcher="mp", collector_class="sync", sync=True, **options
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("after", WITH_A_POLICY)
@pytest.mark.parametrize("before", WITH_A_POLICY)
def test_weights_and_version_of_any_collector_go_into_any_other(before, after, tmp_path):
    with WITH_A_POLICY[before](**valued(1)) as collector:
        collector.update_policy_weights_(valued(2)["policy"])
        collector.next()
        collector.save(tmp_path / "state")
    with WITH_A_POLICY[after](**valued(3)) as other:
        other.load(tmp_path / "state", environments=False)
        batch = other.next()
        assert batch["value"].unique().tolist() == [2.0]
        assert batch["policy_version"].unique().tolist() == [other.policy_version] == [1]


def test_frames_that_no_other_number_can_continue_are_counted(tmp_path):
    options = {"trajs_per_batch": 3}
    with counted(2, 2, **options) as collector:
        collector.set_seed(4)
        delivered = 0
        while not delivered or collector.collection.ready:  # until nothing waits
            delivered += int(collector.next()["collector", "mask"].sum())
        collector.save(tmp_path / "state")
        frames = collector.stats()["frames"]
    with counted(3, 1, **options) as other:
        with pytest.warns(UserWarning, match="environments=False"):
            other.load(tmp_path / "state", environments=False)
        stats = other.stats()
        assert stats["frames"] == frames
        assert stats["frames_discarded_unfinished"] == frames - delivered
