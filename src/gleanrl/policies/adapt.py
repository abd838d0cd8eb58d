"""Accepted kinds of policies, and the ways to call them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from gleanrl.core.errors import PolicyError, PolicyTypeError
from gleanrl.core.keys import IS_INIT, STEP_COUNT, Key, as_keys, format_key
from gleanrl.core.options import SourceOptions
from gleanrl.policies.env_contract import EnvContract

_TENSORDICT_NAMES = ("tensordict", "td")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def converted(value: Any) -> Any:
    """Return ``value``; an array or number of numpy as a tensor of its dtype, copied."""
    return torch.tensor(value) if isinstance(value, (np.ndarray, np.generic)) else value


class TensorCall:
    """A callable on tensors, seen as one on TensorDicts.

    It returns the action, or a tuple that starts with the actions, as tensors or numpy's arrays;
    what else it returns is called ``output1``, ``output2``, ... It is called by keyword if there
    are ``names``.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_keys: Sequence[Key],
        action_keys: Sequence[Key],
        names: Sequence[str] | None,
    ) -> None:
        self.fn = fn
        self.in_keys = tuple(in_keys)
        self.out_keys = self.action_keys = tuple(action_keys)
        self.names = names

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call ``fn`` on entries of ``tensordict`` and write its results."""
        values = [tensordict.get(key) for key in self.in_keys]
        if self.names is None:
            out = self.fn(*values)
        else:
            out = self.fn(**dict(zip(self.names, values, strict=True)))
        outs = tuple(map(converted, out if isinstance(out, tuple) else (out,)))
        if not all(isinstance(value, torch.Tensor) for value in outs):
            kinds = ", ".join(type(value).__name__ for value in outs)
            raise PolicyTypeError(
                f"the policy was called with tensors and returned {kinds}; it must return the "
                "action as a tensor, or a tuple of tensors that starts with it. To work on a "
                "TensorDict, name its argument 'tensordict'"
            )
        if len(outs) < len(self.action_keys):
            raise PolicyError(
                f"the policy returned {len(outs)} tensors for {len(self.action_keys)} actions "
                f"{_list(self.action_keys)}"
            )
        extra = len(outs) - len(self.action_keys)
        self.out_keys = (*self.action_keys, *((f"output{i + 1}",) for i in range(extra)))
        for key, value in zip(self.out_keys, outs, strict=True):
            tensordict.set(key, value)
        return tensordict


@dataclass(frozen=True, slots=True)
class Adapted:
    """A policy ready to be called on a TensorDict."""

    call: Callable[[Any], Any]
    in_keys: tuple[Key, ...] | None
    """What it says it reads; ``None`` if it does not say."""
    out_keys: tuple[Key, ...] | None
    """What it says it writes; ``None`` if it does not say."""
    counts: bool = False
    """Whether ``"step_count"`` is there for it to read."""


def adapt(policy: Any, contract: EnvContract, options: SourceOptions) -> Adapted:
    """Find out how ``policy`` wants to be called.

    TensorDict modules, callables with ``in_keys`` and ``out_keys``, and callables whose one
    argument is named ``tensordict`` or ``td`` or is annotated as a TensorDict are called with a
    TensorDict. Any other is called with tensors: those its arguments are named after, or the only
    observation there is beside entries of ``info``.
    """
    counts = options.counts
    if isinstance(policy, type) or not callable(policy):
        raise PolicyTypeError(
            f"policy ({policy!r:.200}) must be a callable: a TensorDict module, an nn.Module or a "
            "function; pass an instance rather than a class, or use policy_factory"
        )
    # torch.compile hides the signature of what it wraps.
    looked_at = getattr(policy, "_orig_mod", policy) if isinstance(policy, nn.Module) else policy
    if options.trust_policy or isinstance(looked_at, TensorDictModuleBase):
        return Adapted(policy, *_declared(looked_at), counts)
    parameters = _parameters(looked_at)
    in_keys, out_keys = _declared(looked_at)
    declared = in_keys is not None and out_keys is not None and len(_required(parameters)) <= 1
    if declared or _takes_tensordict(looked_at, parameters):
        return Adapted(policy, in_keys, out_keys, counts)
    more = (STEP_COUNT,) if counts else ()
    call = _tensor_call(
        policy, parameters, (*contract.observed, *more), contract.acted, (*contract.infos, *more)
    )
    return Adapted(call, call.in_keys, None, counts)


def _declared(policy: Any) -> tuple[tuple[Key, ...] | None, tuple[Key, ...] | None]:
    named = (getattr(policy, "in_keys", None), getattr(policy, "out_keys", None))
    in_keys, out_keys = (None if keys is None else as_keys(keys) for keys in named)
    return in_keys, out_keys


def _parameters(policy: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(_function(policy)).parameters.values())
    except (TypeError, ValueError) as err:
        raise PolicyTypeError(
            f"policy ({policy!r:.200}) has no signature to tell whether it takes a TensorDict or "
            "tensors; wrap it in a tensordict.nn.TensorDictModule"
        ) from err


def _function(policy: Any) -> Callable[..., Any]:
    return policy.forward if isinstance(policy, nn.Module) else policy


def _required(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [one for one in parameters if one.default is one.empty and one.kind not in _VARIADIC]


def _takes_tensordict(policy: Any, parameters: Sequence[inspect.Parameter]) -> bool:
    if len(_required(parameters)) > 1 or not parameters or parameters[0].kind not in _POSITIONAL:
        return False
    first = parameters[0]
    annotation = first.annotation
    if isinstance(annotation, str):
        function = _function(policy)
        function = function if inspect.isroutine(function) else type(policy).__call__
        with suppress(NameError, TypeError, AttributeError):  # only imported for type checkers
            annotation = typing.get_type_hints(function).get(first.name, annotation)
    return first.name in _TENSORDICT_NAMES or _means_tensordict(annotation)


def _means_tensordict(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2].strip() in ("TensorDict", "TensorDictBase")
    if isinstance(annotation, type):
        return issubclass(annotation, TensorDictBase)
    return any(map(_means_tensordict, typing.get_args(annotation)))


def _tensor_call(
    policy: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    observation_keys: Sequence[Key],
    action_keys: Sequence[Key],
    infos: Collection[Key],
) -> TensorCall:
    names = {key[0]: key for key in observation_keys if len(key) == 1}
    required = _required(parameters)
    if required and all(one.name in names for one in required):
        taken = [one for one in parameters if one.name in names and one.kind not in _VARIADIC]
        keys = [names[one.name] for one in taken]
        by_position = any(one.kind is one.POSITIONAL_ONLY for one in taken)
        return TensorCall(
            policy, keys, action_keys, None if by_position else [o.name for o in taken]
        )
    fits_one = len(required) == 1 and required[0].kind in _POSITIONAL
    fits_one = fits_one and (required[0].name,) not in (IS_INIT, STEP_COUNT)  # no observation
    fits_any = not required and any(one.kind is one.VAR_POSITIONAL for one in parameters)
    unnamed = [key for key in observation_keys if key not in infos]
    if len(unnamed) == 1 and (fits_one or fits_any):
        return TensorCall(policy, unnamed, action_keys, None)
    signature = ", ".join(map(str, parameters))
    name = getattr(policy, "__name__", None) or type(policy).__name__
    raise PolicyTypeError(
        f"policy {name}({signature}) cannot be called with what the environment gives: "
        f"{_list(observation_keys)}. Name its arguments after these keys, or let it take one "
        "argument named 'tensordict', or wrap it in "
        "tensordict.nn.TensorDictModule(policy, in_keys=..., out_keys=...)"
    )


def _list(keys: Sequence[Key]) -> str:
    return "[" + ", ".join(map(format_key, keys)) + "]"
