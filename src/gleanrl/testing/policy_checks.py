"""Checks of a policy that collectors cannot make while they collect."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from gleanrl.collectors import Collector
from gleanrl.core.errors import CheckFailed, for_users
from gleanrl.testing.comparing import failing, require_same
from gleanrl.testing.env_checks import maker

_HIDDEN = (
    "it has hidden state, since earlier calls change what it returns: {}. Read and write recurrent "
    "state as entries ('state' and ('next', 'state')), and call eval() on layers that count"
)


@for_users
def check_policy(policy: Any, env: Any, *, steps: int = 48, seed: int = 0) -> None:
    """Check that the data of a policy follow from its inputs and the seed alone.

    Each run has a copy of the policy. The check passes if

    - a collector accepts it: its keys, shapes and dtypes, and the shape of recurrent states;
    - one seed gives the same data twice;
    - it has no hidden state: earlier calls do not change later ones;
    - it does not change observations in place;
    - ``fast=True`` and ``fast=False`` give the same data.

    Args:
        policy: Anything that a collector takes.
        env: What a `Collector` takes; of a built environment, copies are used. It must make
            the same steps under one seed, as `check_env` finds out.
        steps: The frames of a batch; each run has three batches.
        seed: The seed of all runs.

    Raises:
        CheckFailed: it says what is wrong, where, and what to do.

    Example:
        >>> from gleanrl.testing import check_policy
        >>> check_policy(lambda observation: (observation[..., 2] > 0).long(), "CartPole-v1")
    """

    def data(policy: Any, fast: bool = False) -> list[TensorDictBase]:
        with (
            failing(f"a Collector with fast={fast} does not accept it"),
            Collector(
                maker(env), policy, frames_per_batch=steps, total_frames=3 * steps, fast=fast
            ) as collector,
        ):
            collector.set_seed(seed)
            return [batch.clone() for batch in collector]

    used = _copied(policy)
    first = data(used)
    require_same(
        first,
        data(_copied(policy)),
        "batches",
        "two runs with one seed differ: {}. Draw random numbers from torch, NumPy or random, and "
        "keep no state outside of the policy",
    )
    for batch in first:
        _require_unchanged(batch, policy)
    if isinstance(policy, TensorDictModuleBase):
        rows = first[0].exclude("next", *({*policy.out_keys} - {*policy.in_keys})).unbind(-1)[:8]
        fresh, later = ([_call(p or _copied(policy), r) for r in rows] for p in (None, used))
        require_same(fresh, later, "outputs", _HIDDEN)
    require_same(first, data(used), "batches", _HIDDEN)
    require_same(
        data(_copied(policy), fast=True),
        first,
        "batches",
        "its data with fast=True and fast=False differ: {}. This is a fault of GleanRL: please "
        "report it, and pass fast=False meanwhile",
    )


def _require_unchanged(batch: TensorDictBase, policy: Any) -> None:
    """Require that steps begin with what the steps before returned, but for declared outputs."""
    rows, after = batch[..., :-1], batch[..., 1:]
    same = rows["collector", "traj_ids"] == after["collector", "traj_ids"]
    returned, seen = rows["next"][same], after[same]
    written = policy.out_keys if isinstance(policy, TensorDictModuleBase) else ()
    keys = seen.exclude(*written).keys(include_nested=True, leaves_only=True)
    common = [key for key in returned.keys(include_nested=True, leaves_only=True) if key in keys]
    require_same(
        returned.select(*common),
        seen.select(*common),
        "rows",
        "it changes what it reads, so that rows differ from what the environment returned: {}. "
        "Compute out of place: observation * 0.5, not observation.mul_(0.5)",
    )


def _copied(policy: Any) -> Any:
    try:
        return copy.deepcopy(policy)
    except Exception as error:
        raise CheckFailed(
            f"it cannot be copied ({error}), so no worker can have one; keep locks, files and "
            "tensors with a history out of its attributes"
        ) from error


def _call(policy: Any, row: TensorDictBase) -> TensorDictBase:
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return policy(row.clone()).select(*policy.out_keys, strict=False)
    except Exception as error:  # of a copy that was not called on the steps before
        raise CheckFailed(_HIDDEN.format(repr(error))) from error
