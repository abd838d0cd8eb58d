"""Explains the failure of a policy's first call: the layer, its input and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import IS_INIT, STEP_COUNT, Key, as_key, format_key, next_key
from gleanrl.memory.tensordicts import described
from gleanrl.policies.submodules import modules_of

_FLAGS = ("done", "terminated", "truncated", IS_INIT)
_CASTS = (torch.float16, torch.float32, torch.float64)
"""Values of a collector's ``observation_dtype``."""


def diagnose(
    err: Exception,
    policy: Any,
    shown: Mapping[Key, torch.Tensor | None],
    missing: Sequence[Key],
    states: Sequence[Key],
    written: Sequence[Key],
) -> PolicyError | None:
    """Say why ``policy`` raised ``err`` on the entries that it was ``shown``.

    It reads those that are ``missing`` as well, has recurrent ``states``, and declares to write
    those ``written``. ``None``: its own error says it best.
    """
    if missing:
        return PolicyError(_missing(missing, shown, written))
    failed = _failed_layer(err)
    if failed is not None and states and isinstance(failed[0], nn.RNNBase | nn.RNNCellBase):
        return PolicyError(
            f"the policy could not be called with its first state; {_declare(states)} ({err})"
        )
    if failed is None:
        return None
    observed = {k: v for k, v in shown.items() if k[-1] not in _FLAGS and v is not None}
    return PolicyError(_misfit(policy, *failed, observed) + f" ({err})")


def unknown_state(states: Sequence[Key]) -> PolicyError:
    """Return the error for recurrent states of which nothing says the shape."""
    names = ", ".join(map(format_key, states))
    return PolicyError(
        f"the policy reads {names} and writes the same under 'next': recurrent state of unknown "
        f"shape; {_declare(states)}, or read 'is_init' and begin with a state of your own"
    )


def unfit_state(key: Key, before: torch.Tensor, after: torch.Tensor | None) -> PolicyError:
    """Return the error for a state that is not written as it is read."""
    wrote = "nothing" if after is None else f"shape {tuple(after.shape)}"
    return PolicyError(
        f"the policy reads the state {format_key(key)} with shape {tuple(before.shape)} and wrote "
        f"{wrote} under 'next'; {_as_state(key) if after is None else _declare([key])}"
    )


def unprimed(key: Key, module: nn.Module) -> PolicyError:
    """Return the error for an entry that ``module`` wants at the start of every episode."""
    return PolicyError(
        f"{type(module).__name__} of the policy reads {format_key(key)}, of which episodes begin "
        "with a value of its primer that only the environment can give; add the primer to a "
        "TorchRL environment: env.append_transform(module.make_tensordict_primer())"
    )


def _as_state(key: Key) -> str:
    return f"write a recurrent state as {format_key(next_key(key))} (out_keys)"


def _declare(states: Sequence[Key]) -> str:
    shape = "(hidden_size,)" if len(states[0]) == 1 else "(agents, hidden_size)"
    return (
        "declare its shape, without the dimensions of environments: policy.state_shapes = "
        f"{{{format_key(states[0])}: {shape}}}"
    )


ONE_LAYOUT = (
    "Steps of a rollout have one layout: give the entry the same dtype and shape in every step, or "
    "pass fast=False, which delivers each step as it is (for vector environments, vectorise single "
    "ones with num_envs=; for asynchronous central inference, use inference='workers')"
)


def unlike_first_call(now: str, before: str) -> PolicyError:
    """Return the error for a policy that does something else ``now`` than in its first call."""
    return PolicyError(f"the policy {now}; in its first call, it {before}. {ONE_LAYOUT}")


def wrote_otherwise(key: Key, value: object, first: torch.Tensor | None) -> PolicyError:
    """Return the error for an entry that the policy wrote otherwise than in its first call."""
    before = "did not write that" if first is None else f"wrote {described(first)}"
    return unlike_first_call(f"wrote {format_key(key)} as {described(value)}", before)


def unbatched(err: RuntimeError) -> PolicyError | None:
    """Name the tensor without the batch's shape, if that it was written is what raised ``err``."""
    for frame, _ in walk_tb(err.__traceback__):
        seen = frame.f_locals
        td, value = seen.get("self"), seen.get("item", seen.get("value"))
        if "key" not in seen or not isinstance(td, TensorDictBase):
            continue
        if isinstance(value, torch.Tensor) and value.shape[: td.ndim] != td.batch_size:
            return PolicyError(
                f"the policy wrote {format_key(as_key(seen['key']))} with shape "
                f"{tuple(value.shape)}; it must begin with the batch shape {tuple(td.batch_size)}"
            )
    return None


def _missing(missing: Sequence[Key], shown: Mapping[Key, Any], written: Sequence[Key]) -> str:
    names = list(map(format_key, sorted(shown, key=lambda key: key[-1] in _FLAGS)))
    close = [
        found
        for key in missing
        for found in [format_key(nested) for nested in shown if nested[-1] == key[-1]]
        or difflib.get_close_matches(format_key(key), names, n=1, cutoff=0.4)
    ]
    hint = f"; did you mean {', '.join(dict.fromkeys(close))} (in_keys)?" if close else ""
    if states := [key for key in missing if key in written]:
        hint = f"; {_as_state(states[0])}"
    if STEP_COUNT in missing:
        hint = "; it has 'step_count' with max_frames_per_traj="
    return (
        f"the policy reads {', '.join(map(format_key, missing))}, which the environment does not "
        f"give; it gives {', '.join(names)}{hint}"
    )


# -- layers ----------------------------------------------------------------------------------------


def _failed_layer(err: Exception) -> tuple[nn.Module, list[torch.Tensor]] | None:
    """Return the layer of torch's that raised ``err``, and the tensors it was called with."""
    found = None
    for frame, _ in walk_tb(err.__traceback__):
        code = frame.f_code
        values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if values and code.co_name == "forward" and isinstance(values[0], nn.Module):
            found = values[0], [v for v in values[1:] if isinstance(v, torch.Tensor)]
    if found is None or not type(found[0]).__module__.startswith("torch.nn."):
        return None  # what a forward of the user's raises says itself what is wrong
    return found if isinstance(err, RuntimeError | ValueError) else None


def _misfit(
    policy: Any,
    layer: nn.Module,
    inputs: Sequence[torch.Tensor],
    observed: Mapping[Key, torch.Tensor],
) -> str:
    """Name the expected and the actual input of ``layer``, and the environment's entries."""
    got = " and ".join(map(_described, inputs)) or "nothing"
    shows = ", ".join(f"{format_key(k)}: {_described(v)}" for k, v in observed.items())
    return (
        f"the policy does not fit the environment: its layer {_named(policy, layer)}{layer} "
        f"with {_dtypes(layer)} got {got}; the environment shows {shows}. "
        f"{_fix(layer, inputs, observed)}"
    )


def _described(value: torch.Tensor) -> str:
    return f"{_short(value.dtype)} of shape {tuple(value.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtypes(layer: nn.Module) -> str:
    kinds = dict.fromkeys(_short(weight.dtype) for weight in layer.parameters())
    return f"{' and '.join(kinds)} weights" if kinds else "no weights"


def _named(policy: Any, layer: nn.Module) -> str:
    """Return the name of ``layer`` in the policy, if it has one, and a comma."""
    for root in [policy] if isinstance(policy, nn.Module) else modules_of(policy):
        for name, module in root.named_modules():
            if module is layer and name:
                return f"{name!r}, "
    return ""


def _fix(
    layer: nn.Module, inputs: Sequence[torch.Tensor], observed: Mapping[Key, torch.Tensor]
) -> str:
    weight, given = next(layer.parameters(), None), next(iter(inputs), None)
    if weight is not None and given is not None and weight.dtype != given.dtype:
        return _dtype_fix(weight.dtype, given.dtype, {v.dtype for v in observed.values()})
    if weight is not None and given is not None and weight.device != given.device:
        return (
            f"Move the whole policy to one device: policy.to({str(given.device)!r}), or pass "
            "policy_device= to the collector"
        )
    if isinstance(layer, nn.Linear) and given is not None and given.ndim:
        return (
            f"Make the layer with in_features={given.shape[-1]}, or have what comes before it "
            f"give {layer.in_features} features"
        )
    return "Make the layer for what it gets, or reshape that before it"


def _dtype_fix(weights: torch.dtype, given: torch.dtype, shown: set[torch.dtype]) -> str:
    if not given.is_floating_point:
        convert = f"Convert the observation in the policy: observation.to({weights})"
        states = ", or if it numbers states: torch.nn.functional.one_hot(observation, N)"
        return convert + states * (given == torch.int64)
    collector = f"pass observation_dtype={weights} to the collector"
    module = "call policy.float()" if given == torch.float32 else f"call policy.to({given})"
    if weights not in _CASTS or given not in shown:
        return module[0].upper() + module[1:]
    first, other = (collector, module) if weights == torch.float32 else (module, collector)
    return f"{first[0].upper()}{first[1:]}, or {other}"
