"""A call of a policy on a device takes one copy there and one back; only the second is awaited."""

import gc

import gymnasium as gym
import numpy as np
import pytest
import torch
from device_rig import ON, Walk, check_same, recurrent, seeded
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gleanrl import Collector, MultiAsyncCollector, MultiSyncCollector
from gleanrl.data import Categorical, Composite, Unbounded
from gleanrl.envs import EnvBase


class Copies(TorchDispatchMode):
    """Counts copies to a device and back, and operations that wait for the device."""

    def __init__(self):
        super().__init__()
        self.there = self.back = self.waits = 0
        self.shapes = []
        """Of what is copied back."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            target = args[0].device if name == "aten::copy_" else kwargs.get("device")
            source = args[1].device if name == "aten::copy_" else args[0].device
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if target is not None and torch.device(target).type != source.type:
                self.there += source.type == "cpu"
                self.back += source.type != "cpu"
                if source.type != "cpu":
                    self.shapes.append(tuple(args[name == "aten::copy_"].shape))
                self.waits += not asynchronous
        elif name in ("aten::_local_scalar_dense", "aten::equal"):
            self.waits += any(each.device.type != "cpu" for each in args)
        return func(*args, **kwargs)


class Many(Walk):
    """Observes several entries: of other dtypes, without dimensions, without elements."""

    observation_space = gym.spaces.Dict(
        flag=gym.spaces.MultiBinary(3),
        none=gym.spaces.Box(-1, 1, (0,), np.float32),
        number=gym.spaces.Box(-9, 9, (), np.float64),
        observation=Walk.observation_space,
    )

    def reset(self, *, seed=None, options=None):
        return self.shown(super().reset(seed=seed)[0]), {}

    def step(self, action):
        seen, *rest = super().step(action)
        return self.shown(seen), *rest

    def shown(self, seen):
        return {
            "flag": (np.arange(3) < seen[0]).astype(np.int8),
            "none": np.zeros(0, np.float32),
            "number": np.float64(seen[0]),
            "observation": seen,
        }


class Acts(nn.Module):
    """Reads and writes several entries, and keeps what it is shown."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kept = []

    def forward(self, flag, number, observation):
        self.kept.append((observation, observation.clone()))
        seen = observation * self.weight + number[..., None]
        return (seen[..., 0] > seen[..., 1]).long(), seen.double(), flag.bool(), number.half()


def acts():
    names = ["action", "seen", "flags", "small"]
    return TensorDictModule(Acts(), ["flag", "number", "observation"], names)


CENTRAL = {"inference": "central"}
ASYNC = {"inference": "central", "policy_process": False, "num_envs": 3}
CASES = {
    "in process": (Collector, Many, acts, {"num_envs": 3}, 8),
    "one environment": (Collector, Many, acts, {}, 24),
    "recurrent": (Collector, Walk, recurrent, {"num_envs": 3}, 8),
    "central": (MultiSyncCollector, [Many] * 2, acts, CENTRAL, 12),
    "groups": (
        MultiSyncCollector,
        [Walk] * 2,
        recurrent,
        {**CENTRAL, "num_envs": 2, "env_groups": 2},
        12,
    ),
    "asynchronous": (MultiAsyncCollector, [Many], acts, ASYNC, 8),
    "asynchronous, recurrent": (MultiAsyncCollector, [Walk], recurrent, ASYNC, 8),
}
"""Collectors, and their calls of the policy per batch of 24 frames."""


def collect(case, device):
    """Return batches of a policy on ``device``, the copies for the second one, and the policy."""
    seeded()
    kind, env, policy, options, _ = CASES[case]
    policy = policy().to(device)
    with kind(env, policy, frames_per_batch=24, storing_device="cpu", **options) as collector:
        collector.set_seed(3)
        iterator = iter(collector)
        batches = [next(iterator).clone()]
        with Copies() as copies:
            batch = next(iterator)
        return [*batches, batch.clone(), next(iterator).clone()], copies, policy


@pytest.mark.parametrize("case", CASES)
def test_a_call_takes_one_copy_there_and_one_back(device, case):
    batches, copies, policy = collect(case, ON)
    calls = CASES[case][-1]
    assert (copies.there, copies.back, copies.waits) == (calls, calls, 0)
    check_same(batches, collect(case, "cpu")[0])
    kept = getattr(policy.module, "kept", [])
    assert all(torch.equal(shown, then) for shown, then in kept)


def test_calls_for_numbers_of_environments_that_vary(device):
    options = {**ASYNC, "num_envs": 2, "max_batch_size": 4}
    with MultiAsyncCollector(
        [Walk] * 3, recurrent().to(ON), frames_per_batch=10, **options
    ) as collector:
        iterator = iter(collector)
        batches = [next(iterator).cpu() for _ in range(12)]
    for batch in batches:
        going_on = ~batch["next", "done"][:, :-1, 0]
        for key in ("hidden", "observation"):
            assert torch.equal(batch["next", key][:, :-1][going_on], batch[key][:, 1:][going_on])
        cell = recurrent()(batch.select("observation", "hidden").reshape(-1))
        found = batch["next", "hidden"].reshape(-1, 4)
        torch.testing.assert_close(cell["next", "hidden"], found)


class Sizes(nn.Module):
    """Notes how many environments it is called for."""

    def __init__(self):
        super().__init__()
        self.weight, self.sizes = nn.Parameter(torch.ones(1)), set()

    def forward(self, observation):
        self.sizes.add(len(observation))
        return (observation[..., 0] > observation[..., 1]).long(), observation * self.weight


@pytest.mark.parametrize(("most", "size"), [(None, 6), (5, 5), (1, 2)])
def test_a_captured_policy_acts_for_as_many_in_every_call(device, monkeypatch, most, size):
    # Only CUDA captures.
    monkeypatch.setattr("gleanrl.policies.policy._accelerate", lambda call, *_: (call, False))
    policy = TensorDictModule(Sizes(), ["observation"], ["action", "seen"]).to(ON)
    options = {**ASYNC, "num_envs": 2, "max_batch_size": most, "cudagraph_policy": True}
    with MultiAsyncCollector([Walk] * 3, policy, frames_per_batch=10, **options) as collector:
        iterator = iter(collector)
        policy.module.sizes.clear()
        for _ in range(6):
            batch = next(iterator).cpu()
            assert torch.equal(batch["seen"], batch["observation"])
            acted = batch["observation"][..., 0] > batch["observation"][..., 1]
            assert torch.equal(batch["action"], acted.long())
    assert policy.module.sizes == {size}


def test_memory_of_the_device_does_not_grow(device):
    def allocated():
        gc.collect()  # a collector refers to itself
        return getattr(torch, ON).memory_allocated()

    def rounds(collector, number):
        iterator = iter(collector)
        for _ in range(number):
            next(iterator)
            collector.update_policy_weights_()
        return allocated()

    policy = recurrent().to(ON)
    before = allocated()
    with Collector(Walk, policy, num_envs=4, frames_per_batch=40, storing_device=ON) as one:
        first = rounds(one, 3)
        assert first > before
        assert rounds(one, 20) <= first
    del one
    assert allocated() <= before + 4096 * (ON == "cuda")


class There(EnvBase):
    """Environments whose data are on a device; each ends after as many steps as its number."""

    def __init__(self, device):
        super().__init__(batch_size=[4], device=device)
        there = {"shape": (4,), "device": device}
        self.observation_spec = Composite(observation=Unbounded((4, 2), device=device), **there)
        self.action_spec = Categorical(2, **there)
        self.reward_spec = Unbounded((4, 1), device=device)
        self.ages = torch.zeros(4, 1, dtype=torch.int64, device=device)
        self.x = torch.zeros(4, 2, device=device)

    def _reset(self, tensordict=None):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        mask = torch.ones_like(self.ages, dtype=torch.bool) if mask is None else mask
        self.ages = torch.where(mask, 0, self.ages)
        self.x = torch.where(mask, 0.5, self.x)
        return TensorDict({"observation": self.x}, [4], device=self.device)

    def _step(self, tensordict):
        self.ages = self.ages + 1
        self.x = self.x.flip(-1) * 0.9 + tensordict["action"][:, None] * 0.1
        numbers = torch.arange(4, device=self.device)[:, None]
        done = self.ages > numbers + 2
        after = {"observation": self.x, "reward": self.x.sum(-1, keepdim=True), "done": done}
        return TensorDict({**after, "terminated": done}, [4], device=self.device)

    def _set_seed(self, seed, static=False):
        pass


def test_environments_on_the_device_without_fixed_layout_stay_there(device):
    def batches(device):
        seeded()
        options = {"frames_per_batch": 40, "fast": False, "storing_device": device}
        with Collector(There(device), recurrent().to(device), **options) as collector:
            iterator = iter(collector)
            first = next(iterator)
            with Copies() as copies:
                return [first, next(iterator), next(iterator)], copies

    there, copies = batches(ON)
    check_same(there, batches("cpu")[0])
    assert {value.device.type for value in there[-1].values(True, True)} == {ON}
    # Which ended, rewards of steps, flags of rollouts.
    assert set(copies.shapes) == {(4,), (4, 1), (4, 10, 1)}
