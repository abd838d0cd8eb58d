"""Groups of agents keep the batch size and the names of their own, wherever batches come from."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import SerialEnv
from torchrl.testing.mocking_classes import CountingEnv

from gleanrl import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import LazyTensorStorage, ReplayBuffer


class Team(CountingEnv):
    """Has a group of three agents with a batch size and a name of its own."""

    def __init__(self):
        super().__init__(max_steps=4)
        self.observation_spec = Composite(
            observation=self.observation_spec["observation"],
            agents=Composite(seen=Unbounded((3, 2)), shape=(3,)),
        )

    def _team(self):
        seen = torch.full((3, 2), float(self.count))
        return TensorDict(seen=seen, batch_size=[3], names=["agent"])

    def _reset(self, tensordict=None, **kwargs):
        return super()._reset(tensordict, **kwargs).set("agents", self._team())

    def _step(self, tensordict):
        return super()._step(tensordict).set("agents", self._team())


class Growing(Team):
    """Adds an entry in some steps."""

    def _step(self, tensordict):
        after = super()._step(tensordict)
        return after.set("odd", torch.ones(1)) if int(self.count) == 2 else after


def act(td):
    """Act with 1; write into the group, too."""
    td["agents", "chosen"] = td["agents", "seen"][..., :1] + 1
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int8))


def check(batch, names=("agent",)):
    for group in (batch["agents"], batch["next", "agents"]):
        assert group.batch_size == (*batch.batch_size, 3)
        assert group.names[batch.ndim :] == list(names)
    assert torch.equal(batch["agents", "chosen"], batch["agents", "seen"][..., :1] + 1)


def first(collector):
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


@pytest.mark.parametrize("fast", [True, False])
def test_groups_keep_their_batch_size_and_names_in_one_process(fast):
    batch = first(Collector(Team(), act, frames_per_batch=6, fast=fast))
    check(batch)
    assert batch["agents", "seen"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert batch["next", "agents", "seen"][:, 0, 0].tolist() == [1, 2, 3, 4, 5, 1]


def test_groups_of_an_open_layout_keep_their_batch_size():
    batch = first(Collector(Growing(), act, frames_per_batch=6, fast=False))
    for step in batch.unbind(0):
        for group in (step["agents"], step["next", "agents"]):
            assert group.batch_size == (3,)


@pytest.mark.parametrize("cat_results", ["stack", 0, -1])
def test_groups_keep_them_from_workers(cat_results):
    collector = MultiSyncCollector(
        [Team, Team], act, frames_per_batch=12, total_frames=12, cat_results=cat_results
    )
    check(first(collector))


def test_groups_keep_them_from_asynchronous_workers():
    check(first(MultiAsyncCollector([Team], act, frames_per_batch=6, total_frames=6)))


@pytest.mark.parametrize("inner", [MultiSyncCollector, MultiAsyncCollector])
def test_groups_keep_them_from_collectors_inside_workers(inner):
    check(first(MultiSyncCollector([[Team]], act, frames_per_batch=6, collector_class=inner)))


@pytest.mark.parametrize("workers", [0, 2])
def test_groups_keep_them_in_replay_buffers(workers):
    buffer = ReplayBuffer(storage=LazyTensorStorage(24), batch_size=5)
    options = {"frames_per_batch": 12, "total_frames": 12, "replay_buffer": buffer}
    if workers:
        collector = MultiSyncCollector([Team] * workers, act, **options)
    else:
        collector = Collector(Team(), act, **options)
    for _ in collector:
        pass
    collector.shutdown()
    assert len(buffer) == 12
    check(buffer.sample())
    check(buffer[:])


def two_counting():
    return SerialEnv(2, [lambda: CountingEnv(max_steps=2), lambda: CountingEnv(max_steps=4)])


def count_on(tensordict):
    return tensordict.set("action", torch.ones(*tensordict.batch_size, 1, dtype=torch.int8))


def test_trajectories_of_a_collector_of_another_library_are_those_of_its_environments():
    quota = {"trajs_per_batch": 4, "traj_quota": "equal", "backend": "inline"}
    with MultiSyncCollector(
        [two_counting] * 2, count_on, frames_per_batch=28, collector_class=TorchRLCollector, **quota
    ) as collector:
        lengths = [
            batch["collector", "mask"].sum(1).tolist()
            for _, batch in zip(range(4), collector, strict=False)
        ]
        assert collector.stats()["frames_discarded"] == 0
        collector.reset()
        later = collector.next()
    assert lengths == [[3, 5, 3, 5]] * 4
    assert later["collector", "mask"].sum(1).tolist() == [3, 5, 3, 5]
