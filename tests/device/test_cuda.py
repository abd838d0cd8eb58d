"""What only CUDA has: kernels that end later than their call, compilation for it, graphs."""

import itertools
from functools import partial

import pytest
import torch
from device_rig import Walk, check_same
from tensordict.nn import TensorDictModule
from test_tensor_envs import Carts, InNumpy, collect
from torch import nn

from gleanrl import (
    Collector,
    LazyTensorStorage,
    MultiAsyncCollector,
    MultiSyncCollector,
    ReplayBuffer,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree"),  # captured policies
]
WAYS = {
    "called": {},
    "compiled": {"compile_policy": True},
    "compiled, with graphs": {"compile_policy": {"mode": "reduce-overhead"}},
    "captured": {"cudagraph_policy": True},
    "compiled and captured": {"compile_policy": True, "cudagraph_policy": True},
}
SLOW = 2_000_000
"""Cycles of a kernel, about a millisecond: a read that comes too early finds the step before."""


class Tells(nn.Module):
    """Shows, late, from which observation and weight an action came."""

    def __init__(self, slow=SLOW):
        super().__init__()
        self.weight, self.slow = nn.Parameter(torch.ones(1)), slow

    def forward(self, observation):
        if self.slow:
            torch.cuda._sleep(self.slow)
        seen = observation * self.weight
        return (
            (seen[..., 0] > seen[..., 1]).long(),
            seen,
            torch.ones_like(seen[..., :1]) * self.weight,
        )


def tells(slow=SLOW):
    """Return the policy, on CUDA."""
    return TensorDictModule(Tells(slow), ["observation"], ["action", "seen", "weight"]).to("cuda")


def check_told(batch, weight=None):
    """Raise `AssertionError` unless each row belongs to its observation, and to ``weight``."""
    batch = batch.cpu()
    seen, observed = batch["seen"], batch["observation"]
    assert torch.equal(seen, observed * batch["weight"])
    assert torch.equal(
        batch["action"].reshape(seen.shape[:-1]), (seen[..., 0] > seen[..., 1]).long()
    )
    if weight is not None:
        assert (batch["weight"] == weight).all()
    going_on = ~batch["next", "done"][..., :-1, 0]
    before, after = batch["next", "observation"][..., :-1, :], observed[..., 1:, :]
    assert torch.equal(before[going_on], after[going_on])


def grow(policy):
    """Change the weight, and return it."""
    with torch.no_grad():
        policy.module.weight.add_(1)
    return policy.module.weight.item()


def check_weights_act_in_the_next_batch(collector, policy, stored):
    """Change the weight after each of some batches, which are ``stored`` on a kind of device."""
    iterator, weight = iter(collector), 1.0
    for _ in range(6):
        batch = next(iterator)
        assert batch["seen"].device.type == stored
        check_told(batch, weight)
        weight = grow(policy)
        collector.update_policy_weights_()


def check_weights_act_some_time(iterator, weight, batches):
    """Take batches until one is made with ``weight``; at first come those that had begun."""
    for batch in itertools.islice(iterator, batches):
        check_told(batch)
        if (batch["weight"] == weight).all():
            break
    check_told(batch, weight)


@pytest.mark.parametrize("stored", ["cpu", "cuda"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_their_step(way, stored):
    slow = 0 if "compile" in way else SLOW  # the compiler cannot see through it
    policy = tells(slow)
    with Collector(
        Walk, policy, num_envs=4, frames_per_batch=40, storing_device=stored, **WAYS[way]
    ) as collector:
        check_weights_act_in_the_next_batch(collector, policy, stored)


@pytest.mark.parametrize("way", ["called", "captured", "compiled"])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_with_policies_on_the_gpu(kind, way):
    policy = tells(0 if "compile" in way else SLOW)
    with kind([Walk] * 2, policy, frames_per_batch=32, **WAYS[way]) as collector:
        iterator = iter(collector)
        for _ in range(4):
            check_told(next(iterator))
        weight = grow(policy)
        collector.update_policy_weights_()
        check_weights_act_some_time(iterator, weight, 50)


@pytest.mark.parametrize("stored", ["cpu", "cuda"])
@pytest.mark.parametrize(("way", "groups"), [("called", 1), ("called", 2), ("captured", 1)])
def test_one_policy_on_the_gpu_for_workers_that_take_the_same_steps(way, groups, stored):
    policy = tells()
    with MultiSyncCollector(
        [Walk] * 2,
        policy,
        num_envs=2,
        env_groups=groups,
        frames_per_batch=40,
        inference="central",
        storing_device=stored,
        **WAYS[way],
    ) as collector:
        check_weights_act_in_the_next_batch(collector, policy, stored)


@pytest.mark.parametrize("way", ["called", "captured"])
@pytest.mark.parametrize("process", [False, True])
def test_one_policy_on_the_gpu_for_workers_at_their_own_pace(process, way):
    policy = tells(0)
    given = {"policy_factory": tells} if process else {"policy": policy}
    with MultiAsyncCollector(
        [Walk] * 3,
        frames_per_batch=10,
        inference="central",
        policy_process=process,
        **given,
        **WAYS[way],
    ) as collector:
        iterator = iter(collector)
        for _ in range(9):
            check_told(next(iterator))
        weight = grow(policy)
        collector.update_policy_weights_(policy if process else None)
        check_weights_act_some_time(iterator, weight, 500)


class Late(Carts):
    """Its kernels end later than its step."""

    def step(self, actions):
        torch.cuda._sleep(SLOW)
        return super().step(actions)


@pytest.mark.parametrize("stored", ["cpu", "cuda"])
def test_rows_of_environments_on_the_gpu_are_those_of_their_step(stored):
    check_same(collect(Late("cuda:0"), storing_device=stored), collect(InNumpy(Carts())))


def test_a_learner_on_the_gpu_and_workers_on_the_cpu():
    policy = tells(0)
    make = partial(MultiSyncCollector, [Walk] * 2, policy, frames_per_batch=32)
    with make(policy_device="cpu", storing_device="cuda") as collector:
        iterator, weight = iter(collector), 1.0
        for _ in range(4):
            check_told(next(iterator), weight)
            weight = grow(policy)
            collector.update_policy_weights_()


class Draws(nn.Module):
    """Draws actions on the device of its observations."""

    def forward(self, observation):
        noise = torch.rand(observation.shape[:-1], device=observation.device)
        return (noise > 0.5).long(), noise


def drawing(**options):
    """Return a collector whose policy draws on the GPU."""
    policy = TensorDictModule(Draws(), ["observation"], ["action", "noise"])
    options = {"policy_device": "cuda", "num_envs": 4, "frames_per_batch": 40, **options}
    return Collector(Walk, policy, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_decides_what_a_policy_draws(way):
    def noise():
        with drawing(**WAYS[way]) as collector:
            collector.set_seed(1)
            iterator = iter(collector)
            return torch.cat([next(iterator)["noise"].clone() for _ in range(3)])

    first = noise()
    assert torch.equal(first, noise())
    assert len(first.unique()) > 0.99 * first.numel()


def test_a_saved_collector_goes_on_with_the_numbers_of_the_gpu():
    with drawing() as collector:
        collector.set_seed(1)
        iterator = iter(collector)
        next(iterator)
        state = collector.state_dict()
        expected = next(iterator)["noise"].clone()
    with drawing() as collector:
        collector.set_seed(7)
        collector.load_state_dict(state)
        assert torch.equal(next(iter(collector))["noise"], expected)


def test_a_buffer_on_the_gpu_is_filled_while_the_learner_trains():
    policy = tells()
    buffer = ReplayBuffer(storage=LazyTensorStorage(400, device="cuda"), batch_size=16)
    with Collector(
        Walk, policy, num_envs=4, frames_per_batch=40, total_frames=400, replay_buffer=buffer
    ) as collector:
        collector.start()
        while collector.is_running():
            if len(buffer):
                sample = buffer.sample()
                assert torch.equal(sample["seen"], sample["observation"] * sample["weight"])
            grow(policy)
            collector.update_policy_weights_()
    rows = buffer[:]
    assert len(rows) == 400
    assert torch.equal(rows["seen"], rows["observation"] * rows["weight"])
