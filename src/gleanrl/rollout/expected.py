"""What the steps of a TensorDict environment are expected to be, before one was taken.

The environment's specs, its first reset and one call of the policy tell. A step that is something
else is no error: the rollout it is part of travels as a payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.keys import NEXT, Key, as_key, next_key
from gleanrl.core.layout import EnvLayout, Field, Group
from gleanrl.core.options import RolloutOptions
from gleanrl.envs.tensordict import EndFlags, spec_groups
from gleanrl.memory.trees import groups_of
from gleanrl.policies.policy import Actor
from gleanrl.rollout.plan import RolloutPlan
from gleanrl.rollout.recorder import StepFields
from gleanrl.rollout.tensordict_loop import Expected


def expect(
    env: Any, layout: EnvLayout, root: TensorDictBase, actor: Actor, options: RolloutOptions
) -> Expected | None:
    """Return what steps of ``env`` are expected to be.

    Args:
        env: The environment.
        layout: Its side of a step.
        root: A root TensorDict as the environment gets it.
        actor: What acts in it.
        options: What the user asked for.

    Returns:
        ``None`` where an entry does not begin with the batch dimensions of the environment.
    """
    leaves = {as_key(key): value for key, value in root.items(True, True)}
    size = len(layout.batch_shape)
    plain = all(
        isinstance(value, torch.Tensor) and tuple(value.shape[:size]) == layout.batch_shape
        for value in leaves.values()
    )
    if not plain:
        return None
    found = {key: Field(key, tuple(v.shape[size:]), v.dtype) for key, v in leaves.items()}
    flags = set(EndFlags(env.full_done_spec, layout.batch_shape).keys)
    roots = {field.key: field for field in layout.actions}
    roots |= {key: field for key, field in found.items() if key[0] != NEXT and key not in flags}
    fed = {key[1:]: field for key, field in found.items() if key[0] == NEXT}
    late = {key: fed[key] for key in actor.policy_written_state if key not in roots and key in fed}
    shown = () if options.compact else layout.observations
    after = {field.key: field for field in (*layout.rewards, *shown)}
    after |= {key: Field(key, field.shape, field.dtype) for key, field in fed.items()}
    plan = RolloutPlan(
        layout.batch_shape,
        [*roots.values(), *(Field(key, f.shape, f.dtype) for key, f in late.items())],
        after.values(),
        options,
        dones=layout.dones,
        finite={field.key for field in (*layout.observations, *layout.rewards)},
        groups=tuple(_groups(env, root, size)),
    )
    unset = plan.flags - flags
    stored = tuple(
        field
        for field in plan.layout.fields
        if field.key not in plan.bulk and _bare(field.key) not in unset
    )
    observed = [field.key for field in layout.observations]
    return Expected(
        plan,
        StepFields(
            layout=plan.layout,
            stored=stored,
            shown=tuple(key for key in (*observed, *flags) if key in found),
            # Random frames lack states that the policy makes itself, also under "next".
            optional=frozenset((*late, *map(next_key, late), *flags)),
            ignored=tuple(next_key(key) for key in observed if key not in after),
        ),
    )


def _bare(key: Key) -> Key:
    return key[1:] if key[0] == NEXT else key


def _groups(env: Any, root: TensorDictBase, size: int) -> Iterable[Group]:
    """Yield nested parts with a batch size of their own, at the root and under ``"next"``.

    Data are believed where they differ from specs.
    """
    trees = (env.full_observation_spec, env.full_action_spec, env.full_reward_spec)
    shapes = {key: shape[size:] for tree in trees for key, shape in spec_groups(tree)}
    found = {key: Group(key, more, (None,) * len(more)) for key, more in shapes.items() if more}
    own = {group.key: group for group in groups_of(root)}
    nested = {as_key(key) for key in root.keys(True) if isinstance(root.get(key), TensorDictBase)}
    found = {key: group for key, group in found.items() if key not in nested} | own
    for group in found.values():
        yield group
        if group.key[0] != NEXT and next_key(group.key) not in found:
            yield Group(next_key(group.key), group.shape, group.names)
