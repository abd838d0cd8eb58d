"""Policies of the zoo act on a device as on the CPU, or are refused by name."""

import random

import pytest
import torch
from device_rig import ON, check_same
from tests.covering import ALL
from tests.zoo.environments import ENVIRONMENTS
from tests.zoo.laws import STEPS, Outcome, changing, collected, differences, kind, pairs, quiet, run
from tests.zoo.policies import POLICIES
from tests.zoo.reference import seed_all
from torch import nn

from gleanrl import Collector

SEED, COUNT = 0, 40 if ALL else 20
TWO_STREAMS = ("EGreedy", "EGreedy-masked")
"""They draw on the CPU as well, from the stream that draws everything there."""
NOT_MOVED = ("gSDE", "lazy", "layer-tied", "MultiAgentMLP", "own-GRU-at-root")
"""They keep tensors on the CPU, or torch moves them to PrivateUse1 otherwise than to CUDA."""
REFUSED = "Move the whole policy to one device"


def drawn(number):
    """Return ``number`` policies, each with an environment, in which two streams never mix."""
    draw, fitting = random.Random(SEED), {}
    for policy, env in pairs(POLICIES, ENVIRONMENTS):
        mixed = POLICIES[policy].draws and "draws" in ENVIRONMENTS[env].tags
        mixed |= POLICIES[policy].draws and ON == "cuda"  # which draws other numbers than the CPU
        if policy not in TWO_STREAMS + NOT_MOVED and not mixed:
            fitting.setdefault(policy, []).append(env)
    return [(policy, draw.choice(fitting[policy])) for policy in draw.sample([*fitting], number)]


def on_device(policy, env, batches):
    """Run a `Collector` whose policy is on the device."""
    with quiet():
        module = policy.make(env)
        module = module.to(ON) if isinstance(module, nn.Module) else module
        seed_all(0)
        getattr(torch, ON).manual_seed_all(0)
        options = {"policy_device": ON, **env.kwargs}
        try:
            collector = Collector(env.given, module, frames_per_batch=STEPS * env.rows, **options)
        except Exception as error:
            return Outcome(error=error)
        seeds = iter(range(100, 100 + batches))
        with collector:
            iterator = iter(collector)

            def batch():
                getattr(torch, ON).manual_seed_all(next(seeds))
                return next(iterator).cpu()

            return run(batch, batches, changing(policy, env, module))


@pytest.mark.parametrize(("policy", "env"), drawn(COUNT))
def test_a_policy_acts_there_as_on_the_cpu(policy, env):
    policy, env = POLICIES[policy], ENVIRONMENTS[env]
    there, here = on_device(policy, env, 3), collected(policy, env, None, 3)
    if ON == "cuda" and kind(there.error) == kind(here.error):
        check_same(there.batches, here.batches)
    elif REFUSED not in str(there.error):
        assert not differences(here, there)
