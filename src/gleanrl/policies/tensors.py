"""Feed-forward modules as recorded calls: linear layers, activations, and sequences of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from tensordict.nn import (
    AddStateIndependentNormalScale,
    NormalParamExtractor,
    biased_softplus,
)
from torch import nn

from gleanrl.policies.structure import is_plain, qualified, uses
from gleanrl.policies.tape import Tape
from gleanrl.policies.watch import Watch

Tensor: TypeAlias = torch.Tensor

_TRIALS = 3

# Activations that exist in place, as the function that applies one.
_IN_PLACE: dict[type, Callable[[Any], Callable[[Tensor], Any]]] = {
    nn.Tanh: lambda m: torch.tanh_,
    nn.ReLU: lambda m: torch.relu_,
    nn.Sigmoid: lambda m: torch.sigmoid_,
    nn.ELU: lambda m: partial(F.elu, alpha=m.alpha, inplace=True),
    nn.CELU: lambda m: partial(F.celu, alpha=m.alpha, inplace=True),
    nn.SELU: lambda m: partial(F.selu, inplace=True),
    nn.SiLU: lambda m: partial(F.silu, inplace=True),
    nn.Mish: lambda m: partial(F.mish, inplace=True),
    nn.ReLU6: lambda m: partial(F.hardtanh, min_val=m.min_val, max_val=m.max_val, inplace=True),
    nn.Hardtanh: lambda m: partial(F.hardtanh, min_val=m.min_val, max_val=m.max_val, inplace=True),
    nn.LeakyReLU: lambda m: partial(F.leaky_relu, negative_slope=m.negative_slope, inplace=True),
}
_NUMBERS = ("alpha", "min_val", "max_val", "negative_slope", "scale_lb", "bias", "p")
"""Settings that become part of recorded calls; only numbers are sure to stay what they are."""
# Modules that make one new tensor from one tensor and hold nothing but parameters.
_PURE = (nn.GELU, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax, nn.LayerNorm, nn.RMSNorm)
# Subclasses of nn.Sequential that add nothing for one input; their packages are not imported here.
_SEQUENTIALS = {"torchrl.modules.models.models.MLP": "_reshape_out"}
_NORMAL_PARAMETERS = (NormalParamExtractor, AddStateIndependentNormalScale)
_OTHERS = (nn.Identity, AddStateIndependentNormalScale)
# Modules whose result may be their input.
_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)
_LIBRARIES = ("torch.nn.", "torchrl.modules.models.")
_SCALE_MAPPINGS: tuple[Callable[..., Tensor], ...] = (torch.exp, F.softplus)


def is_known(module: Any) -> bool:
    """Tell whether `lower_tensors` understands ``module`` completely."""
    if not isinstance(module, nn.Module):
        return False
    leaves = list(_leaves(module))
    # These return two tensors: nothing in a sequence can follow them.
    return all(map(_is_known_leaf, leaves)) and not any(
        isinstance(leaf, _NORMAL_PARAMETERS) for leaf in leaves[:-1]
    )


def keeps_nothing(module: Any) -> bool:
    """Tell whether ``module`` cannot hold on to what it is called with.

    True of torch's own modules: no code of the user's sees their inputs.
    """
    return isinstance(module, nn.Module) and all(
        type(part).__module__.startswith(_LIBRARIES) and is_plain(part) for part in module.modules()
    )


def writes_input(module: Any) -> bool:
    """Tell whether ``module`` may change its input in place, as its first activation can."""
    for leaf in _leaves(module) if isinstance(module, nn.Module) else ():
        if any(vars(part).get("inplace") for part in leaf.modules()):
            return True
        if type(leaf) not in _VIEWS:
            return False
    return False


def _is_known_leaf(module: nn.Module) -> bool:
    kind, state = type(module), vars(module)
    if not is_plain(module) or not _are_numbers(state):
        return False
    if kind is NormalParamExtractor:
        return _is_known_mapping(module.scale_mapping)
    if kind is nn.Dropout:
        return not module.training or not module.p
    if kind is nn.Linear:
        return _is_dense(module.weight) and (module.bias is None or _is_dense(module.bias))
    return kind in _IN_PLACE or kind in _PURE or kind in _OTHERS


def _are_numbers(state: Mapping[str, Any]) -> bool:
    return all(type(state[name]) in (int, float) for name in _NUMBERS if name in state)


def _is_dense(weight: Any) -> bool:
    """Tell whether ``weight`` is real numbers in memory, and no tensor with a mind of its own."""
    return (
        type(weight) in (nn.Parameter, Tensor)
        and weight.layout is torch.strided
        and weight.is_floating_point()
        and not weight.is_meta
    )


def lower_tensors(tape: Tape, watch: Watch, module: nn.Module, value: Tensor) -> tuple[Tensor, ...]:
    """Record ``module(value)`` for a module that `is_known`.

    Args:
        tape: Receives the calls.
        watch: Told of every module that the calls stand for.
        module: What to record.
        value: A tensor that stays, refilled before every replay.

    Returns:
        What the module returns: tensors that every replay refills.
    """
    private = False
    values: tuple[Tensor, ...] = (value,)
    for part in _leaves(module, watch):
        first = values[0]
        if isinstance(part, nn.Linear):
            values, private = (_linear(tape, part, first),), True
        elif type(part) in _IN_PLACE:
            in_place = private or bool(vars(part).get("inplace"))
            values, private = (_activation(tape, part, first, in_place),), True
        elif isinstance(part, NormalParamExtractor):
            if isinstance(part.scale_mapping, nn.Module):
                watch.add(part.scale_mapping)
            values = (*_normal_parameters(tape, part, first), *values[1:])
        elif isinstance(part, AddStateIndependentNormalScale):
            values = (first, tape.fill(partial(_second, part, first)))
        elif isinstance(part, _PURE):
            values, private = (tape.fill(partial(part, first)),), True
    return values


def _leaves(module: nn.Module, watch: Watch | None = None) -> Iterator[nn.Module]:
    """Yield the leaves of nested sequences in the order of their calls."""
    if watch is not None:
        watch.add(module)
    if not _is_sequential(module):
        yield module
        return
    # Not children(): a module that stands twice in a sequence is called twice.
    for child in cast("nn.Sequential", module):
        yield from _leaves(child, watch)


def _is_sequential(module: nn.Module) -> bool:
    if uses(module, nn.Sequential, "forward", "__iter__"):
        return True
    flag = _SEQUENTIALS.get(qualified(type(module)))
    return flag is not None and is_plain(module) and not vars(module).get(flag, True)


def _linear(tape: Tape, module: nn.Linear, value: Tensor) -> Tensor:
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    if not value.is_contiguous() or not _flattens(value, weight, bias):
        return tape.fill(partial(F.linear, value, weight, bias))
    flat = value.view(-1, value.shape[-1])
    if bias is None:
        out = tape(torch.mm, flat, weight.t())
    else:
        out = tape(torch.addmm, bias, flat, weight.t())
    return out.view(*value.shape[:-1], weight.shape[0])


def _flattens(value: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether one matrix product over flattened rows gives ``F.linear``'s result, bit for bit.

    Kernels differ between vectors, matrices and batches of matrices; tried on random numbers, where
    another order of summation shows in almost every element.
    """
    generator = torch.Generator(value.device).manual_seed(0)
    for _ in range(_TRIALS):
        trial = torch.randn(value.shape, generator=generator, device=value.device).to(value.dtype)
        flat = trial.view(-1, trial.shape[-1])
        product = torch.mm if bias is None else partial(torch.addmm, bias)
        mine = product(flat, weight.t())
        if not torch.equal(mine.view(-1), F.linear(trial, weight, bias).view(-1)):
            return False
    return True


def _activation(tape: Tape, module: nn.Module, value: Tensor, in_place: bool) -> Tensor:
    if not in_place:
        value = tape.fill(partial(_same, value))
    tape.do(_IN_PLACE[type(module)](module), value)
    return value


def _same(value: Tensor) -> Tensor:
    return value


def _second(module: Callable[[Tensor], Sequence[Tensor]], value: Tensor) -> Tensor:
    return module(value)[1]


def _is_known_mapping(mapping: Any) -> bool:
    if type(mapping) is biased_softplus:
        return is_plain(mapping) and _are_numbers(vars(mapping))
    return any(mapping is known for known in _SCALE_MAPPINGS)


def _normal_parameters(
    tape: Tape, module: NormalParamExtractor, value: Tensor
) -> tuple[Tensor, Tensor]:
    loc, raw = value.chunk(2, -1)
    mapping = module.scale_mapping
    if type(mapping) is biased_softplus:
        # Not as a partial of the module: its attributes are numbers that stay.
        shifted = tape(torch.add, raw, mapping.bias)
        scale = tape(F.softplus, shifted)
        tape.do(scale.add_, mapping.min_val)
    else:
        scale = tape(mapping, raw)
    tape.do(scale.clamp_min_, module.scale_lb)
    return loc, scale
