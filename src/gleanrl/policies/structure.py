"""What a policy is made of.

All knowledge of how ``nn.Module`` and TensorDict's containers work inside is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
    skip_existing,
)
from torch import nn
from torch.utils._device import DeviceContext

from gleanrl.policies.watch import calls_as_written

# nn.Module offers no public way to ask for hooks; calling a module whose hooks are all empty is
# calling its ``forward`` and nothing else.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# How far modules are looked for behind functions, methods and partials.
_DEPTH = 3


def may_lower(device: torch.device) -> bool:
    """Tell whether nothing in force around modules would change what a bare call does."""
    try:
        return (
            not any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
            and not skip_existing()
            and not torch.is_autocast_enabled(device.type)
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and (not torch._C._len_torch_function_stack() or _only_places(device))
        )
    except AttributeError:
        return False  # This torch says none of it where others do.


def _only_places(device: torch.device) -> bool:
    """Tell whether the modes in force only say that new tensors go to the CPU, as they do."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    return device.type == "cpu" and all(
        type(mode) is DeviceContext and mode.device.type == "cpu" for mode in modes
    )


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling ``module`` is the same as calling its class's ``forward``.

    And whether that is the library's: no class of the user's replaces anything that a call uses.
    """
    state = vars(module)
    return (
        calls_as_written(module)
        and state.get("_compiled_call_impl") is None
        and not any(state.get(name) for name in _HOOKS)
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
