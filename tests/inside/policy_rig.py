"""Drives a policy without an environment, next to the plain call of the same policy."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from gleanrl.core.keys import as_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import SourceOptions
from gleanrl.core.window import Window
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.policy import ExplorationType, make_policy, set_exploration_type
from gleanrl.rollout.policy_inputs import Provided

OBS = ("observation",)
RANDOM, MODE = ExplorationType.RANDOM, ExplorationType.MODE
MEAN, DETERMINISTIC = ExplorationType.MEAN, ExplorationType.DETERMINISTIC
STEPS = 6


def layout(batch=(5,), action=((), torch.int64), obs=(4,), dtype=torch.float32, more=()):
    """Return an environment that gives ``obs`` numbers and wants ``action`` (shape, dtype)."""
    return EnvLayout(
        batch_shape=batch,
        observations=(Field(OBS, obs, dtype), *more),
        actions=(Field(("action",), *action),),
        rewards=(Field(("reward",), (1,), torch.float32),),
    )


def probe_of(env, seed=0):
    """Return a window that holds the observation of a first reset."""
    window = Window.allocate(env.observations, env.num_envs, 1)
    generator = torch.Generator().manual_seed(seed)
    for field in env.observations:
        tensor = window.tensor(field.key)
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return window


def make(policy, env, exploration=RANDOM, one_hot=(), specs=None, **options):
    contract = EnvContract.of_rows(env, probe_of(env), one_hot)
    options = SourceOptions(exploration_type=exploration, **options)
    return make_policy(policy, contract, specs or {}, options)


def windows(env, policy, steps=STEPS):
    """Return window and carry for ``policy``, filled with random observations."""
    written = {field.key: field for field in policy.outputs}
    roots = list(env.observations)
    for key in policy.states:
        after = written[("next", *key)]
        roots.append(Field(key, after.shape, after.dtype))
    if ("is_init",) in policy.provided:
        roots.append(Field(("is_init",), (1,), torch.bool))
    window = Window.allocate([*roots, *policy.outputs], env.num_envs, steps)
    carry = Window.allocate(roots, env.num_envs, 1)
    generator = torch.Generator().manual_seed(7)
    for field in env.observations:
        tensor = window.tensor(field.key)
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 2)
    if ("is_init",) in policy.provided:
        window.tensor(("is_init",))[:, 0] = True
    return window, carry


def run(policy, window, carry, kind=RANDOM, steps=None, ends=None):
    """Make one rollout; ``ends`` maps steps to the environments that end there."""
    steps = window.steps if steps is None else steps
    provided = Provided(policy.states, policy.provided, carry)
    provided.begin(window, np.zeros(window.envs, np.int64))
    with torch.no_grad(), set_exploration_type(kind):
        policy.begin(window, carry)
        for t in range(steps):
            policy.act(t)
            ended = (ends or {}).get(t, ())
            if ended:
                provided.started(t, ended)
        policy.finish(steps)


def plain(policy, env, window, kind=RANDOM, steps=None, ends=None, states=(), init=False):
    """Call ``policy`` on TensorDicts; return ``[P, T, ...]`` of everything it writes.

    ``states`` are (key, shape) pairs, zero at the start and where ``ends`` says so.
    """
    steps = window.steps if steps is None else steps
    batch = env.batch_shape
    memory = {as_key(key): torch.zeros(*batch, *shape) for key, shape in states}
    first = torch.ones(*batch, 1, dtype=torch.bool)
    rows = []
    with torch.no_grad(), set_exploration_type(kind):
        for t in range(steps):
            entries = {
                field.key: window.tensor(field.key)[:, t].reshape(*batch, *field.shape).clone()
                for field in env.observations
            }
            td = TensorDict({}, batch_size=batch)
            for key, value in (*entries.items(), *memory.items()):
                td.set(key, value.clone())
            if init:
                td.set("is_init", first.clone())
            result = policy(td)
            result = td if result is None else result
            row = {as_key(k): v for k, v in result.items(True, True)}
            rows.append({k: v.clone() for k, v in row.items()})
            first = torch.zeros(*batch, 1, dtype=torch.bool)
            for key in memory:
                memory[key] = row[("next", *key)].clone()
                for env_index in (ends or {}).get(t, ()):
                    memory[key].view(env.num_envs, -1)[env_index] = 0
            for env_index in (ends or {}).get(t, ()):
                first.view(env.num_envs, -1)[env_index] = True
    return {
        key: torch.stack(
            [r[key].reshape(env.num_envs, *r[key].shape[len(batch) :]) for r in rows], 1
        )
        for key in rows[0]
    }


def seed(number):
    """Seed the one generator used here; `torch.manual_seed` notes where it was called, slowly."""
    torch.default_generator.manual_seed(number)


def same(policy, env, kind=RANDOM, reference=None, **kwargs):
    """Assert that outputs and the random stream equal those of the plain call, bit for bit."""
    ours = make(policy, env, exploration=kind)
    window, carry = windows(env, ours)
    seed(3)
    expected = plain(reference or policy, env, window, kind, **kwargs)
    state = torch.get_rng_state()
    seed(3)
    run(ours, window, carry, kind, ends=kwargs.get("ends"))
    for field in ours.outputs:
        got = window.tensor(field.key)
        want = expected[field.key].to(got.dtype)
        assert got.shape == want.shape, field.key
        assert torch.equal(got, want), (field.key, (got - want).abs().max())
    assert torch.equal(torch.get_rng_state(), state)
    written = {k for k in expected if k in {f.key for f in ours.outputs}}
    assert written == {f.key for f in ours.outputs}
    return ours
