"""What a policy is made of, and whether it still is what it was.

All knowledge of how ``nn.Module`` and TensorDict's containers work inside is here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
    skip_existing,
)
from torch import nn

# nn.Module offers no public way to ask for hooks; calling a module whose hooks are all empty is
# calling its ``forward`` and nothing else.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS: tuple[Mapping[Any, Any], ...] = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)
# How far modules are looked for behind functions, methods and partials.
_DEPTH = 3


def may_lower(device: torch.device) -> bool:
    """Tell whether nothing in force around modules would change what a bare call does."""
    return (
        not any(_GLOBAL_HOOKS)
        and not skip_existing()
        and not torch.is_autocast_enabled(device.type)
    )


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling ``module`` is the same as calling its class's ``forward``."""
    state = vars(module)
    return (
        type(module).__call__ is nn.Module.__call__
        and "forward" not in state
        and state.get("_compiled_call_impl") is None
        and not any(state[name] for name in _HOOKS)
    )


def uses(module: nn.Module, owner: type, *methods: str) -> bool:
    """Tell whether ``module`` is a plain ``owner``; subclasses may override none of ``methods``."""
    kind = type(module)
    return (
        isinstance(module, owner)
        and is_plain(module)
        and all(getattr(kind, name) is getattr(owner, name) for name in methods)
    )


def qualified(kind: Any) -> str:
    """Return the full name of a class: how classes of packages we do not import are recognised."""
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def selects(module: Any) -> bool:
    """Tell whether a TensorDict sequence drops some of what its modules write."""
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
    """Yield what a callable that is no module holds and may call."""
    held = [getattr(item, "__self__", None), getattr(item, "func", None)]
    held += [cell.cell_contents for cell in getattr(item, "__closure__", None) or () if _full(cell)]
    if not isinstance(item, type) and callable(item):
        held += getattr(item, "__dict__", {}).values()
    for value in held:
        if isinstance(value, nn.Module) or (callable(value) and not isinstance(value, type)):
            yield value


def _full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class Watch:
    """Notices when modules are no longer what they were: attributes, hooks, children, weights."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._empty: list[Mapping[Any, Any]] = []
        self._parts: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = []
        self._tensors: list[tuple[torch.Tensor, int]] = []

    def add(self, module: nn.Module) -> None:
        """Remember ``module`` as it is now (not what is below it)."""
        state = vars(module)
        named = [state[name] for name in ("_parameters", "_buffers", "_modules", *_HOOKS)]
        own = [value for name, value in state.items() if type(value) is dict and name[0] != "_"]
        for part in (state, *named, *own):
            if part:
                self._parts.append((part, tuple(part.values())))
            else:
                self._empty.append(part)
        for tensor in (*state["_parameters"].values(), *state["_buffers"].values()):
            if tensor is not None:
                self._tensors.append((tensor, tensor.data_ptr()))

    def changed(self) -> bool:
        """Tell whether anything was replaced; values changed in place are no change."""
        if any(self._empty):
            return True
        for part, values in self._parts:
            if len(part) != len(values) or not all(map(operator.is_, part.values(), values)):
                return True
        return any(tensor.data_ptr() != pointer for tensor, pointer in self._tensors)
