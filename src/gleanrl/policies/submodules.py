"""The modules that a policy is made of."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
)
from torch import nn

from gleanrl.operations.change_watch import Watch
from gleanrl.operations.proofs import is_plain, uses

# How far modules are looked for behind functions, methods and partials.
_DEPTH = 3


def selects(module: Any) -> bool:
    """Tell whether a TensorDict sequence drops some outputs of its modules."""
    return bool(vars(module).get("_select_before_return"))


def children_of(module: Any) -> list[Any] | None:
    """Return the modules that ``module`` calls one after the other, ``None`` if it does more.

    Selection of outputs is the caller's to look at.
    """
    if uses(module, TensorDictModuleWrapper, "forward"):
        return [module.td_module]
    if not isinstance(module, TensorDictSequential):
        return None
    if module.partial_tolerant or module.inplace not in (None, True):
        return None
    if uses(module, ProbabilisticTensorDictSequential, "forward", "get_dist_params", "_run_module"):
        return _probabilistic_children(module)
    if uses(module, TensorDictSequential, "forward", "_run_module", "_module_iter"):
        return _members(module)
    return None


def _members(module: Any) -> list[Any]:
    inner = module.module
    return list(inner.children() if isinstance(inner, nn.ModuleDict) else inner)


def _probabilistic_children(module: Any) -> list[Any] | None:
    members = _members(module)
    if module.return_composite:
        return members if vars(module).get("_requires_sample") else None
    if not vars(module).get("_requires_sample"):
        return None
    # The deterministic part is a sequence of its own: it keeps modules that were replaced since.
    return [*_members(module.det_part), members[-1]]


def units_of(policy: Any) -> list[Any]:
    """Return the modules ``policy`` calls one after the other; itself, if that is unknown."""
    children = children_of(policy) if isinstance(policy, nn.Module) else None
    if children is None:
        return [policy]
    units = []
    for child in children:
        inner = isinstance(child, nn.Module) and not selects(child)
        units.extend(units_of(child) if inner else [child])
    return units


def modules_of(policy: Any) -> Iterator[nn.Module]:
    """Yield every ``nn.Module`` that ``policy`` is made of, closures and bound methods included."""
    seen: set[int] = set()
    todo = [(policy, 0)]
    while todo:
        item, depth = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            for module in item.modules():
                seen.add(id(module))
                yield module
        elif depth < _DEPTH:
            todo.extend((held, depth + 1) for held in _captured(item))


def _captured(item: Any) -> Iterator[Any]:
    """Yield the objects in a callable other than a module that it may call."""
    held = [getattr(item, "__self__", None), getattr(item, "func", None)]
    for cell in getattr(item, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    if not isinstance(item, type) and callable(item):
        held += getattr(item, "__dict__", {}).values()
    for value in held:
        if isinstance(value, nn.Module) or (callable(value) and not isinstance(value, type)):
            yield value


def watch_layers(units: Collection[Any]) -> Watch:
    """Return a `Watch` of the layers of ``units`` that may become tensor calls."""
    watch = Watch()
    for unit in units:
        layers = getattr(unit, "module", None)
        parts = [*layers.modules()] if isinstance(layers, nn.Module) else []
        with suppress(Exception):  # a layer that cannot be watched is called as it is
            for part in parts if all(map(is_plain, parts)) else ():
                watch.add(part)
    return watch
