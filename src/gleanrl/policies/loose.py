"""What a policy on data without fixed layout writes and remembers, from one call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import IS_INIT, NEXT, Key, as_key, next_key
from gleanrl.core.layout import Field
from gleanrl.policies.adapt import Adapted
from gleanrl.policies.exploration import ExplorationType, set_exploration_type
from gleanrl.policies.learn import FAILURES, declared_states, explain, same_shape
from gleanrl.policies.probe import call_on
from gleanrl.policies.states import first_states
from gleanrl.policies.untouched import untouched


@dataclass(frozen=True, slots=True)
class Loose:
    """What one call showed."""

    silence: TensorDictBase
    """Zeros in place of what the policy wrote beside actions: its outputs in random frames."""
    states: tuple[Field, ...]
    """Root entries that its ``("next", ...)`` outputs feed."""
    needs_is_init: bool


def learn_loose(
    policy: Any,
    adapted: Adapted,
    root: TensorDictBase,
    actions: Collection[Key],
    owned: Collection[Key],
    exploration: ExplorationType,
) -> Loose:
    """Call the policy once on ``root`` and leave no trace, neither in it nor in the policy.

    Args:
        policy: What the user gave.
        adapted: How it is called.
        root: What the first reset returned.
        actions: Root keys of the actions.
        owned: Root keys that the environment decides, also under ``"next"``.
        exploration: How the policy acts in that call.

    Raises:
        PolicyTypeError: it returned something else than a TensorDict.
        PolicyError: it cannot be called with what the environment gives.
    """
    given = leaves(root)
    kept = {*given, *owned, IS_INIT}
    kept |= {next_key(key) for key in kept}
    asks = adapted.in_keys is not None and IS_INIT in adapted.in_keys and IS_INIT not in given
    start = root.clone()
    if asks:
        start.set(IS_INIT, torch.ones((*root.batch_size, 1), dtype=torch.bool, device=root.device))
    with untouched(policy), torch.no_grad(), set_exploration_type(exploration):
        out = _call(policy, adapted, start)
    written = leaves(out) - kept
    states = [
        Field(key[1:], tuple(value.shape[root.ndim :]), value.dtype)
        for key, value in ((key, _stacked(out, key)) for key in sorted(written) if key[0] == NEXT)
        if value is not None and (adapted.in_keys is None or key[1:] in adapted.in_keys)
    ]
    fed = {state.key for state in states}
    silence = out.select(*(written - set(actions) - fed)).apply(torch.zeros_like)
    return Loose(silence, tuple(states), asks)


def leaves(data: TensorDictBase) -> set[Key]:
    """Return the keys of all tensors and objects in ``data``."""
    keys = data.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
    return {as_key(key) for key in keys}


def _call(policy: Any, adapted: Adapted, start: TensorDictBase) -> TensorDictBase:
    """Return what the policy made of ``start``, with the likeliest first state that it takes."""
    batch, device = tuple(start.batch_size), start.device or torch.device("cpu")
    given = {key: _dtype(start, key) for key in sorted(leaves(start))}
    states = declared_states(policy, adapted, given)
    failure: Exception | None = None
    for guess in first_states(policy, states, batch, device):
        td = start.clone()
        for key, value in guess.items():
            td.set(key, value)
        try:
            out = call_on(adapted.call, td)
        except PolicyError:
            raise
        except FAILURES as err:
            failure = failure or err
            continue
        if all(same_shape(out.get(next_key(key), None), value) for key, value in guess.items()):
            return out
    missing = [key for key in adapted.in_keys or () if key not in given and key not in states]
    raise explain(failure, policy, given, missing, states) from failure


def _dtype(data: TensorDictBase, key: Key) -> torch.dtype | None:
    value = _stacked(data, key)
    return None if value is None else value.dtype


def _stacked(data: TensorDictBase, key: Key) -> torch.Tensor | None:
    """Return an entry, ``None`` if it is no tensor or does not stack."""
    try:
        value = data.get(key)
    except RuntimeError:
        return None  # Part of a lazy stack of different shapes.
    return value if isinstance(value, torch.Tensor) else None
