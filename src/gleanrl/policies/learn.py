"""What a policy writes and remembers, from one call on the first observation."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import distributions as D

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import IS_INIT, NEXT, Key, as_key, next_key, show
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Window
from gleanrl.policies.adapt import Adapted
from gleanrl.policies.exploration import ExplorationType, set_exploration_type
from gleanrl.policies.probe import Probed, run_once
from gleanrl.policies.states import first_states
from gleanrl.policies.structure import modules_of
from gleanrl.policies.untouched import untouched

FAILURES = (KeyError, RuntimeError, TypeError, AttributeError, ValueError, IndexError)
"""What a policy may raise because the state it is given does not suit it."""
_ONE_HOT = (D.OneHotCategorical, D.OneHotCategoricalStraightThrough)


@dataclass(frozen=True, slots=True)
class Learnt:
    """What one call showed, checked against the environment."""

    probed: Probed
    inputs: dict[Key, torch.Tensor]
    """Root entries of that call, ``[*batch_shape, ...]``, states and flags included."""
    outputs: tuple[Field, ...]
    states: tuple[Key, ...]
    needs_is_init: bool


def learn(
    policy: Any,
    adapted: Adapted,
    env: EnvLayout,
    probe: Window,
    exploration: ExplorationType,
    device: torch.device,
) -> Learnt:
    """Call the policy once on the observation in ``probe`` and leave no trace.

    Raises:
        PolicyError: it does not fit the environment.
    """
    asks = adapted.in_keys is not None and IS_INIT in adapted.in_keys
    inputs = _root_entries(env, probe, device, asks)
    states = declared_states(policy, adapted, inputs)
    with untouched(policy), torch.no_grad(), set_exploration_type(exploration):
        probed, inputs = _call(policy, adapted, env, inputs, states)
    outputs = probed.outputs
    found = _states(adapted, outputs, _owned(env))
    for key in found:
        # A policy that made its first state itself is given zeros of that kind from now on.
        inputs[key] = torch.zeros_like(outputs[next_key(key)])
        for unit in {id(unit): unit for unit in (*probed.units, probed.whole)}.values():
            if key not in unit.visible:
                unit.visible = (*unit.visible, key)
    fields = _fields(env, outputs, _draws_one_hot(policy))
    owned = {field.key for field in env.observations}
    return Learnt(probed, inputs, fields, tuple(found), asks and IS_INIT not in owned)


# -- inputs ----------------------------------------------------------------------------------------


def _root_entries(
    env: EnvLayout, probe: Window, device: torch.device, is_init: bool
) -> dict[Key, torch.Tensor]:
    entries = {
        field.key: probe.tensor(field.key)[:, 0]
        .reshape((*env.batch_shape, *field.shape))
        .to(device)
        for field in env.observations
    }
    for group in env.dones:
        shape, flags = (*env.batch_shape, *group.shape), group.keys()
        for key in flags:
            entries.setdefault(key, torch.zeros(shape, dtype=torch.bool, device=device))
    if is_init:
        first = torch.ones((*env.batch_shape, 1), dtype=torch.bool, device=device)
        entries.setdefault(IS_INIT, first)
    return entries


def declared_states(policy: Any, adapted: Adapted, given: Container[Key]) -> list[Key]:
    """Return the states a policy says it has, before it is called on what is ``given``."""
    shapes = getattr(policy, "state_shapes", None) or {}
    states = [as_key(key) for key in shapes]
    if adapted.in_keys is not None and adapted.out_keys is not None:
        states += [
            key
            for key in adapted.in_keys
            if next_key(key) in adapted.out_keys and key not in given and key not in states
        ]
    return states


def _call(
    policy: Any,
    adapted: Adapted,
    env: EnvLayout,
    inputs: dict[Key, torch.Tensor],
    states: Sequence[Key],
) -> tuple[Probed, dict[Key, torch.Tensor]]:
    device = next((value.device for value in inputs.values()), torch.device("cpu"))
    failure: Exception | None = None
    for guess in first_states(policy, states, env.batch_shape, device):
        try:
            probed = run_once(adapted.call, {**inputs, **guess}, env.batch_shape)
        except PolicyError:
            raise
        except FAILURES as err:
            failure = failure or err
            continue
        if all(same_shape(probed.outputs.get(next_key(k)), v) for k, v in guess.items()):
            return probed, {**inputs, **guess}
    missing = [k for k in adapted.in_keys or () if k not in inputs and k not in states]
    shown = {field.key: field.dtype for field in env.observations}
    raise explain(failure, policy, shown, missing, states) from failure


def same_shape(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Tell whether ``one`` is there and has the shape of ``other``."""
    return one is not None and one.shape == other.shape


def explain(
    err: Exception | None,
    policy: Any,
    shown: Mapping[Key, torch.dtype | None],
    missing: Sequence[Key],
    states: Sequence[Key],
) -> Exception:
    """Return what to raise when a first call failed with ``err``, or fitted no state.

    Args:
        err: What the policy raised.
        policy: What the user gave.
        shown: What the environment gives, with dtypes.
        missing: What the policy reads and is not given.
        states: The states it has.
    """
    reason = _reason(err, policy, shown, missing, states)
    if reason is None and err is not None:
        return err
    return PolicyError(f"{reason} ({err})")


def _reason(
    err: Exception | None,
    policy: Any,
    shown: Mapping[Key, torch.dtype | None],
    missing: Sequence[Key],
    states: Sequence[Key],
) -> str | None:
    """Say why the policy failed, ``None`` if its own error says it best."""
    if missing:
        given = ", ".join(map(show, shown))
        return (
            f"the policy reads {', '.join(map(show, missing))}, which the environment does not "
            f"give; it gives {given}"
        )
    if states:
        return (
            f"the policy could not be called with its first state {', '.join(map(show, states))} "
            "left out or zero; say what shape it has, without batch dimensions: "
            f"policy.state_shapes = {{{show(states[0])}: (hidden_size,)}}"
        )
    wide = [show(key) for key, dtype in shown.items() if dtype == torch.float64]
    narrow = any(p.dtype == torch.float32 for m in modules_of(policy) for p in m.parameters(False))
    if isinstance(err, RuntimeError) and wide and narrow:
        return (
            f"the policy has float32 weights and failed on float64 observations {', '.join(wide)}: "
            "pass observation_dtype=torch.float32 to the environment, or call policy.double()"
        )
    return None


def _states(
    adapted: Adapted, outputs: Mapping[Key, torch.Tensor], owned: Collection[Key]
) -> list[Key]:
    """Return the root keys that what was written under ``"next"`` feeds."""
    return [
        key[1:]
        for key in outputs
        if key[0] == NEXT
        and key not in owned
        and (adapted.in_keys is None or key[1:] in adapted.in_keys)
    ]


# -- outputs ---------------------------------------------------------------------------------------


def _fields(
    env: EnvLayout, outputs: Mapping[Key, torch.Tensor], one_hot: Sequence[Key]
) -> tuple[Field, ...]:
    """Return the fields of a policy's outputs: actions first, nothing the environment decides."""
    actions = []
    for field in env.actions:
        _check_action(env, field, outputs, field.key in one_hot)
        actions.append(field)
    taken = {field.key for field in env.actions} | _owned(env)
    shown = {next_key(field.key): field for field in env.observations}
    extras = []
    size = len(env.batch_shape)
    for key, value in outputs.items():
        if key in env.fed:
            extras.append(_fed(env, shown[key], value))
        if key in taken:
            continue
        if tuple(value.shape[:size]) != env.batch_shape:
            raise PolicyError(
                f"the policy wrote {show(key)} with shape {tuple(value.shape)}; it must begin with "
                f"the batch shape {env.batch_shape} of the environment"
            )
        extras.append(Field(key, tuple(value.shape[size:]), value.dtype))
    return (*actions, *extras)


def _fed(env: EnvLayout, shown: Field, value: torch.Tensor) -> Field:
    """Return the field of ``value``, which the environment is given for its next observation."""
    name, wanted = show(next_key(shown.key)), (*env.batch_shape, *shown.shape)
    if tuple(value.shape) != wanted or not torch.can_cast(value.dtype, shown.dtype):
        raise PolicyError(
            f"the policy wrote {name} as {value.dtype} of shape {tuple(value.shape)}; the "
            f"environment declares {show(shown.key)} as {shown.dtype} of shape {wanted}: make its "
            "spec (that of the TensorDictPrimer) agree with the policy"
        )
    return Field(next_key(shown.key), shown.shape, shown.dtype)


def _owned(env: EnvLayout) -> set[Key]:
    roots = [field.key for field in env.observations] + [IS_INIT]
    for group in env.dones:
        roots += group.keys()
    after = [next_key(key) for key in (*roots, *(field.key for field in env.rewards))]
    return {*roots, *after}


def _check_action(
    env: EnvLayout, field: Field, outputs: Mapping[Key, torch.Tensor], one_hot: bool
) -> None:
    name = show(field.key)
    value = outputs.get(field.key)
    if value is None:
        wrote = ", ".join(map(show, outputs)) or "nothing"
        raise PolicyError(f"the policy did not write {name}; it wrote {wrote}")
    wanted = (*env.batch_shape, *field.shape)
    if tuple(value.shape) != wanted:
        hint = ""
        if not field.dtype.is_floating_point and tuple(value.shape[:-1]) == wanted:
            hint = "; take the index (argmax) or build it with categorical_action_encoding=False"
        raise PolicyError(
            f"the policy wrote {name} with shape {tuple(value.shape)}; the environment wants "
            f"{wanted}{hint}"
        )
    if not torch.can_cast(value.dtype, field.dtype) and not one_hot:
        raise PolicyError(
            f"the policy wrote {name} as {value.dtype}; the environment wants {field.dtype}"
        )


def _draws_one_hot(policy: Any) -> list[Key]:
    """Return the keys that hold zeros and ones though torch's distributions make them floats."""
    return [
        as_key(module.dist_sample_keys[0])
        for module in modules_of(policy)
        if isinstance(module, ProbabilisticTensorDictModule)
        and module.distribution_class in _ONE_HOT
    ]
