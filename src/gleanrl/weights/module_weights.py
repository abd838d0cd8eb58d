"""Weights: taken out of modules and state dicts, checked, loaded, and their versions counted."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from gleanrl.core.errors import WeightsError
from gleanrl.core.options import check_word, warn

Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype, bool]]
"""Dotted name to shape, dtype, and whether weights must have it (parameters), else may."""
_VALUES = operator.methodcaller("values")
Weights: TypeAlias = dict[str, Any]
"""Dotted name to tensor; extra state under its ``state_dict`` name."""


def weights_of(source: Any) -> Weights:
    """Return the weights in ``source`` by dotted name. Tensors are not copied.

    Args:
        source: A module (parameters, all buffers, extra state), a `TensorDict` of weights (nested
            by module, as `TensorDict.from_module` makes it), or a state dict.
    """
    if isinstance(source, nn.Module):
        return module_weights(source)
    if isinstance(source, TensorDictBase):
        flat = source.flatten_keys(".")
        return {str(name): flat.get(name).detach() for name in flat.keys()}
    if isinstance(source, Mapping):
        return _flatten(source, "")
    raise WeightsError(
        f"weights must come from a module, a TensorDict or a state dict, not "
        f"{type(source).__name__}"
    )


def by_worker(source: Any) -> bool:
    """Tell whether ``source`` holds weights per worker instead of weights for all."""
    if not isinstance(source, Mapping) or isinstance(source, TensorDictBase):
        return False  # a TensorDict is a mapping too, but of weights
    return bool(source) and all(isinstance(key, int) for key in source)


def module_weights(module: nn.Module) -> Weights:
    """Return parameters, buffers (non-persistent ones too) and extra state of ``module``."""
    weights: Weights = {}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise WeightsError(
                f"{name!r} of {type(module).__name__} has no shape yet, because a Lazy layer makes "
                "it at its first call: call the module once on an example before"
            )
        weights[name] = tensor.detach()
    for name, value in module.state_dict().items():
        if _is_extra(name):
            weights[name] = value
    return weights


def warn_of_no_weights(policy: Any) -> None:
    """Warn that ``policy`` has nothing to send; a network that a function uses is not found."""
    warn(
        f"no weights are sent: the policy ({type(policy).__name__}) has no parameters and no "
        "buffers. A network that a function refers to was copied with the function and stays as "
        "it was; give a module that has the network as a submodule"
    )


def cloned(weights: Mapping[str, Any]) -> Weights:
    """Return ``weights`` with detached copies of the tensors: they no longer change with them."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }


def load_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy ``weights`` into ``module`` in place; if they do not fit, it is unchanged.

    Buffers may be missing (a `TensorDict` of parameters has none), parameters may not.
    """
    check_weights(module, weights)
    targets = _targets(module)
    with torch.no_grad():
        for name in sorted(weights, key=_is_extra):  # tensors first
            value = weights[name]
            if _is_extra(name):
                module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
            elif value is not targets[name]:
                _copy(targets[name], torch.as_tensor(value))


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy ``value`` in place; into an expanded tensor, whose elements share memory, once each."""
    if 0 in target.stride():
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
        target, whole, value = target[once], value, value[once]
        if not bool((whole == value).all()):
            raise WeightsError(
                "an expanded tensor, whose elements share memory, cannot hold different values: "
                "give the model a copy (.clone()) of what expand() returns"
            )
    target.copy_(value)


def check_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise `WeightsError` unless ``weights`` can be loaded into ``module``."""
    check_tensors(type(module).__name__, shapes_of(module), weights)


def shapes_of(module: nn.Module) -> Shapes:
    """Return the required shapes of weights of ``module``.

    Buffers may be missing, and so may the further names of a tensor that has several.
    """
    needed = {name for name, _ in module.named_parameters()}
    return {
        name: (tuple(tensor.shape), tensor.dtype, name in needed)
        for name, tensor in _targets(module).items()
    }


def check_tensors(kind: str, shapes: Shapes, weights: Mapping[str, Any]) -> None:
    """Raise `WeightsError` unless ``weights`` fit a model with ``shapes``, without harm to values.

    The message calls the model ``kind``. Extra state may be anything.
    """
    tensors = {name: value for name, value in weights.items() if not _is_extra(name)}
    needed = {name for name, (_, _, parameter) in shapes.items() if parameter}
    unknown, missing = sorted(set(tensors) - set(shapes)), sorted(needed - set(tensors))
    if unknown or missing:
        raise WeightsError(
            f"weights do not fit {kind}: missing {missing[:5]}, unexpected {unknown[:5]}"
        )
    for name, value in tensors.items():
        shape, dtype, _ = shapes[name]
        wrong = _wrong(value, shape, dtype)
        if wrong is not None:
            raise WeightsError(f"weights do not fit {kind}: {name!r} {wrong}")


def _wrong(value: Any, shape: tuple[int, ...], wanted: torch.dtype) -> str | None:
    try:
        value = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return f"is a {type(value).__name__}, not a tensor"
    if value.is_meta:
        return "is on the meta device: it has no values"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)}, the model's is {shape}"
    if value.is_complex() and not wanted.is_complex:
        return f"is {value.dtype}, the model's is {wanted}"
    if value.dtype != wanted:
        value = value.detach()
        cast = value.to(wanted)
        if value.is_floating_point() and wanted.is_floating_point:  # rounded, but not to infinity
            kept = cast.isfinite() | ~value.isfinite()
        else:
            kept = cast.to(value.dtype) == value
        if not bool(kept.all()):
            return f"has values that {wanted} cannot hold"
    return None


def _is_extra(name: str) -> bool:
    """Tell whether ``name`` names extra state, which may be any object."""
    return name.rpartition(".")[2] == "_extra_state"


def _targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors by all their names, as state dicts and TensorDicts have them."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Weights:
    flat: Weights = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and not _is_extra(path):
            flat.update(_flatten(value, f"{path}."))
        else:
            flat[path] = value.detach() if isinstance(value, torch.Tensor) else value
    return flat


class TrackedModule:
    """The tensors of a module in training, in the order of their names.

    Walking a module costs as much as copying a small one. So the tensors are kept, together with
    the dictionaries that hold them, and are valid as long as these hold the same objects.
    """

    def __init__(self, module: nn.Module) -> None:
        """Look at ``module``; nothing is copied."""
        self.module = module
        self._find()

    def _find(self) -> None:
        weights = module_weights(self.module)
        self.names = [name for name, value in weights.items() if isinstance(value, torch.Tensor)]
        self._tensors = [weights[name] for name in self.names]
        self._tables: list[dict[str, Any]] = [
            table
            for part in self.module.modules()
            for table in (part._parameters, part._buffers, part._modules)
        ]
        self._sizes = list(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._keys = list(chain.from_iterable(self._filled))
        self._values = [value for table in self._filled for value in table.values()]
        self._data = [value for value in self._values if isinstance(value, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._data))

    def tensors(self) -> list[torch.Tensor]:
        """Return the detached tensors as they are now; they are the module's own memory.

        The same list as before means that nothing but values can have changed.
        """
        if not self._unchanged():
            self._find()
        return self._tensors

    def _unchanged(self) -> bool:
        # ``p.data = ...`` keeps the parameter but not its memory, hence the addresses.
        filled = self._filled
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(filled), self._keys))
            and all(map(operator.is_, chain.from_iterable(map(_VALUES, filled)), self._values))
            and list(map(torch.Tensor.data_ptr, self._data)) == self._addresses
        )


class PolicyVersion:
    """An integer that only grows; with ``version_type="uuid"`` it shows as a label of its own.

    >>> version = PolicyVersion()
    >>> version.increment_version()
    >>> version.version
    1
    """

    def __init__(self, version_type: Literal["int", "uuid"] = "int") -> None:
        """Start at version 0."""
        self.version_type = check_word("version_type", version_type, ("int", "uuid"))
        self._number = 0
        self._label = str(uuid.uuid4()) if version_type == "uuid" else ""

    @property
    def number(self) -> int:
        """The number of updates, which batches contain."""
        return self._number

    @property
    def version(self) -> int | str:
        """The shown version: the number, or the label of a uuid version."""
        return self._label if self.version_type == "uuid" else self._number

    def increment_version(self) -> None:
        """Move to the next version."""
        self.set_number(self._number + 1)

    def set_number(self, number: int) -> None:
        """Continue from ``number`` (a restored checkpoint)."""
        self._number = number
        if self.version_type == "uuid":
            self._label = str(uuid.uuid4())
