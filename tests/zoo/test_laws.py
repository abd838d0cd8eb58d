"""Plain, fast and reference loop agree, for a sample that holds every kind of policy of the zoo.

``python -m tests.zoo`` checks more pairs, or all.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
import torch
from tensordict import TensorDictBase
from tests.covering import ALL
from tests.zoo.compositions import compositions
from tests.zoo.environments import ENVIRONMENTS
from tests.zoo.laws import (
    BATCHES,
    STEPS,
    Outcome,
    changing,
    check,
    check_workers,
    differences,
    pairs,
    quiet,
    reference,
    run,
)
from tests.zoo.policies import POLICIES
from tests.zoo.reference import seed_all

FITTING = pairs(POLICIES, ENVIRONMENTS)


def some_of_each_kind() -> set[str]:
    """Return at most five policies whose names begin with the same word."""
    kinds: dict[str, list[str]] = {}
    for policy in POLICIES:
        kinds.setdefault(policy.partition("-")[0], []).append(policy)
    return {policy for kind in kinds.values() for policy in kind[:: -(-len(kind) // 5)]}


def sample(seed: int, policies: Collection[str]) -> list[tuple[str, str]]:
    """Return one pair for each of ``policies``; environments repeat only where they must.

    One environment and several of it are the same.
    """
    draw, used, chosen = random.Random(seed), set(), []
    fitting: dict[str, list[str]] = {}
    for policy, env in FITTING:
        if policy in policies:
            fitting.setdefault(policy, []).append(env)
    for policy, envs in sorted(fitting.items(), key=lambda item: len(item[1])):
        env = draw.choice([env for env in envs if env.partition("[")[0] not in used] or envs)
        used.add(env.partition("[")[0])
        chosen.append((policy, env))
    return chosen


def agree(found: list[str]) -> None:
    """Fail with what was found."""
    assert not found, "\n".join(found)


def test_the_zoo_is_large() -> None:
    assert len(POLICIES) >= 150
    assert len(ENVIRONMENTS) >= 60
    assert {policy for policy, _ in FITTING} == POLICIES.keys()
    assert {env for _, env in FITTING} == ENVIRONMENTS.keys()


BROKEN = [
    ("member-sometimes", "small-meddles"),
    ("select-out-keys", "small-mapped[3]"),
    ("odd-alias", "views[4]"),
    ("function-clone", "vector-small-SameStep"),
    ("odd-clamps-observation", "vector-cartpole-Disabled"),
]
SAMPLE = [*sample(0, POLICIES if ALL else some_of_each_kind()), *BROKEN]
"""A pair for each policy, or five of each kind, and pairs that broke the law once."""


@pytest.mark.parametrize(("policy", "env"), SAMPLE)
def test_plain_fast_and_reference_agree(policy: str, env: str) -> None:
    agree(check(POLICIES[policy], ENVIRONMENTS[env]))


WORKERS = [
    ("gaussian-TanhNormal", "small-box[3]"),
    ("member-counts", "toy-continuous[4]"),
    ("odd-clamps-action", "listening[4]"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "env"), WORKERS)
def test_workers_agree(policy: str, env: str) -> None:
    agree(check_workers(POLICIES[policy], ENVIRONMENTS[env]))


def torchrl(policy: str, env: str) -> Outcome:
    """Run TorchRL's collector."""
    case, where = POLICIES[policy], ENVIRONMENTS[env]
    with quiet():
        from torchrl.collectors import Collector  # warns where it is imported

        module = case.make(where)
        seed_all(0)
        frames = STEPS * where.rows
        collector = Collector(where.make, module, frames_per_batch=frames, use_buffers=False)
        try:
            batch = iter(collector)

            def rollout() -> TensorDictBase:
                return next(batch)

            return run(rollout, BATCHES, changing(case, where, module))
        finally:
            collector.shutdown()


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        ("actor", "toy-onehot[4]"),
        ("gaussian-TanhNormal", "t-reward-sum"),
        ("two-outputs", "several[4]"),
        ("function", "t-observation-norm"),
        ("OrnsteinUhlenbeck", "t-init-tracker"),
        ("odd-counts", "toy-continuous"),
        ("odd-clamps-action", "listening"),
        ("own-GRU-at-root", "stateless"),
        ("QValueActor", "rl-cartpole"),
        ("layer-hooked", "toy[2,3]"),
    ],
)
def test_the_reference_is_what_torchrl_collects(policy: str, env: str) -> None:
    torch.manual_seed(0)
    expected = reference(POLICIES[policy], ENVIRONMENTS[env])
    agree(differences(expected, torchrl(policy, env)))


@pytest.mark.parametrize("first", range(0, 12000, 1000))
def test_transforms_drawn_at_random(first: int) -> None:
    for one in compositions(first, 5 if ALL else 1):
        env = one.case()
        assert env is not None
        agree(check(one.policy_of(env), env))
