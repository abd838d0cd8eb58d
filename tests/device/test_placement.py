"""What a collector promises holds wherever policy, environment and batches are.

Equal to the CPU, bit for bit on the stand-in device.
"""

from functools import cache, partial
from itertools import cycle, product

import pytest
import torch
from device_rig import (
    ON,
    SECOND,
    Walk,
    at_once,
    check_same,
    net,
    recurrent,
    sampling,
    seeded,
    several,
    skip_unless_comparable,
    tensordicts,
)
from tests.covering import ALL
from torch import nn

from gleanrl import Collector, Interruptor, MultiSyncCollector

ENVS = {
    "rows": (Walk, {"num_envs": 3}),
    "plain": (Walk, {"num_envs": 3, "fast": False}),
    "pool": (several, {}),
    "same step": (at_once, {}),
    "tensordict": (tensordicts, {}),
}
POLICIES = {"net": net, "sampling": sampling, "recurrent": recurrent}
PLACES = {
    "policy": {"policy_device": ON},
    "batches": {"storing_device": ON},
    "policy and batches": {"policy_device": ON, "storing_device": ON},
    "policy, batches elsewhere": {"policy_device": SECOND, "storing_device": f"{ON}:0"},
    "policy, not environment": {"policy_device": ON, "env_device": "cpu"},
    "environment": {"env_device": ON, "policy_device": "cpu"},
    "all": {"device": ON},
}


class Doubled(nn.Module):
    """A ``postproc`` with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]))

    def forward(self, batch):
        return batch.set("twice", batch["next", "reward"] * self.factor)


OPTIONS = {
    "random first": {"init_random_frames": 30},
    "same": {"return_same_td": True},
    "compact": {"compact_obs": True},
    "split": {"split_trajs": True},
    "whole": {"trajs_per_batch": 3},
    "postproc": {"postproc": Doubled},
    "cut": {"max_frames_per_traj": 4},
    "truncated": {"set_truncated": True},
    "versions": {"track_policy_version": True},
    "fresh": {"reset_at_each_iter": True},
    "finite": {"check_finite": True},
}


def collect(env, policy, batches=4, seed=3, **options):
    """Return copies of some batches."""
    skip_unless_comparable(policy, options)
    seeded()
    made, more = ENVS[env] if isinstance(env, str) else env
    options = {"frames_per_batch": 24, **more, **options}
    if "postproc" in options:  # it is moved
        options["postproc"] = options["postproc"]()
    with Collector(made, POLICIES[policy](), **options) as collector:
        if seed is not None:
            collector.set_seed(seed)
        iterator = iter(collector)
        return [next(iterator).clone() for _ in range(batches)]


on_the_cpu = cache(collect)


TRIPLES = {
    *((env, "net", place) for env, place in zip(cycle(ENVS), PLACES, strict=False)),
    *((env, "recurrent", place) for env, place in zip(cycle(reversed(ENVS)), PLACES, strict=False)),
    *(("rows", "sampling", place) for place in PLACES),
    *((env, "sampling", "policy and batches") for env in ENVS),
}
"""All pairs of an environment and a policy, and of a policy and a place."""


@pytest.mark.parametrize(
    ("env", "policy", "place"),
    [each for each in product(ENVS, POLICIES, PLACES) if ALL or each in TRIPLES],
)
def test_batches_are_the_same_wherever_they_are_made(env, policy, place):
    batches = collect(env, policy, **PLACES[place])
    check_same(batches, on_the_cpu(env, policy))
    named = PLACES[place].get("storing_device", PLACES[place].get("device"))
    if named is not None:
        devices = {value.device for batch in batches for value in batch.values(True, True)}
        assert devices == {torch.empty(0, device=named).device}


@pytest.mark.covering
@pytest.mark.parametrize("env", ["rows", "tensordict"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_does_the_same(env, option):
    there = collect(env, "recurrent", **PLACES["policy and batches"], **OPTIONS[option])
    check_same(there, collect(env, "recurrent", **OPTIONS[option]))
    devices = {value.device for batch in there for value in batch.values(True, True)}
    assert devices == {torch.device(ON, 0)}


def test_a_state_reaches_the_policy_of_every_group_of_environments():
    def make():
        options = {"num_envs": 2, "env_groups": 2, "inference": "central", "policy_device": ON}
        return MultiSyncCollector([Walk], sampling(), frames_per_batch=8, **options)

    weights = {name: torch.full_like(value, 7.0) for name, value in sampling().state_dict().items()}
    with make() as one:
        one.update_policy_weights_(weights)
        state = one.state_dict()
    with make() as other:
        other.load_state_dict(state)
        first, second = other.cascade_execute("policy.state_dict")
    for name, value in weights.items():
        assert torch.equal(first[name].cpu(), value)
        assert torch.equal(second[name].cpu(), value)


@pytest.mark.parametrize("env", ["rows", "plain", "tensordict"])
def test_a_rollout_that_was_interrupted_leaves_the_state_to_the_next(env):
    def stopping(**places):
        interruptor = Interruptor()
        make = partial(Walk, interruptor)
        make = (lambda: type(tensordicts())(Walk(interruptor))) if env == "tensordict" else make
        options = {**ENVS[env][1], "interruptor": interruptor}
        return collect((make, options), "recurrent", **places)

    check_same(stopping(policy_device=ON), stopping())
