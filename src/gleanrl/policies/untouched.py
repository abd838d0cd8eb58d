"""Calling a policy once without leaving a trace in it."""

from __future__ import annotations

import dis
import functools
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from gleanrl.core.streams import preserved

_MAX_BYTES = 1 << 26
"""Larger tensors and arrays are not copied."""
_MAX_OBJECTS = 10_000
"""Objects that are looked at."""
_FOREIGN = {"gymnasium", "gleanrl", "numpy", "ray", "tensordict", "torch", "torchrl"}
_FOREIGN |= sys.stdlib_module_names

_Undo = Callable[[], object]


@contextmanager
def untouched(policy: Any) -> Iterator[None]:
    """Leave random streams and all that ``policy`` is made of as they were before the body.

    That is: attributes of modules and of objects of the user's, what their lists, dicts and other
    containers hold, variables of functions, tensors, arrays and generators. What changed is put
    back in place. Objects of other libraries, and what cannot be copied, are left alone.
    """
    with torch.no_grad():
        undos, _alive = _remember(policy)
    try:
        with preserved():
            yield
    finally:
        with torch.no_grad():
            for undo in undos:
                with suppress(Exception):
                    undo()


def _remember(policy: Any) -> tuple[list[_Undo], dict[int, Any]]:
    """Return what restores all that is reachable from ``policy``, and all that was looked at."""
    undos: list[_Undo] = []
    seen: dict[int, Any] = {}
    todo = [policy]
    while todo and len(seen) < _MAX_OBJECTS:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, ModuleType)):
            continue
        seen[id(item)] = item
        with suppress(Exception):  # What cannot be copied is left alone.
            undo, held = _looked_at(item)
            if undo is not None:
                undos.append(undo)
            todo.extend(held)
    return undos, seen


def _looked_at(item: Any) -> tuple[_Undo | None, list[Any]]:
    """Return what makes ``item`` what it is now, and what is reached through it.

    The first is ``None`` if it cannot change by itself.
    """
    if isinstance(item, torch.Tensor):
        return _undo_tensor(item), [item.grad] if item.is_leaf else []
    if isinstance(item, np.ndarray) and item.nbytes <= _MAX_BYTES:
        return functools.partial(np.copyto, item, item.copy(), "no"), []
    if isinstance(item, dict):
        return _undo_dict(item), list(item.values())
    if isinstance(item, (list, set, deque)):
        return _undo_container(item), list(item)
    if isinstance(item, (tuple, frozenset)):
        return None, list(item)
    if isinstance(item, CellType):
        held = item.cell_contents
        return functools.partial(setattr, item, "cell_contents", held), [held]
    if isinstance(item, type):
        return (_undo_class(item), list(vars(item).values())) if _is_users(item) else (None, [])
    return _looked_at_code(item)


def _looked_at_code(item: Any) -> tuple[_Undo | None, list[Any]]:
    if isinstance(item, (MethodType, BuiltinMethodType)):
        return None, [item.__self__, getattr(item, "__func__", None)]
    if isinstance(item, functools.partial):
        return None, [item.func, item.args, item.keywords]
    if isinstance(item, FunctionType):
        held = [*_variables_of(item), item.__dict__, item.__defaults__, item.__kwdefaults__]
        return _undo_globals(item), held
    return _undo_generator(item), [vars(item), *type(item).__mro__] if _has_state(item) else []


def _variables_of(function: FunctionType) -> list[Any]:
    cells = list(function.__closure__ or ())
    names = function.__code__.co_names
    seen = [function.__globals__[name] for name in names if name in function.__globals__]
    return cells + [value for value in seen if type(value) in (list, dict, set, deque)]


def _has_state(item: Any) -> bool:
    if isinstance(item, LazyModuleMixin):
        return False  # It becomes another class when it is called first.
    if isinstance(item, nn.Module) or type(item) is TensorDict:
        return True
    return isinstance(getattr(item, "__dict__", None), dict) and _is_users(type(item))


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _FOREIGN


# -- what puts an item back ------------------------------------------------------------------------


def _undo_generator(item: Any) -> _Undo | None:
    if isinstance(item, torch.Generator):
        return functools.partial(item.set_state, item.get_state())
    if isinstance(item, np.random.Generator):
        item = item.bit_generator
    if isinstance(item, np.random.BitGenerator):
        return functools.partial(setattr, item, "state", item.state)
    if isinstance(item, np.random.RandomState):
        return functools.partial(item.set_state, item.get_state())
    if isinstance(item, random.Random):
        return functools.partial(item.setstate, item.getstate())
    return None


def _undo_container(item: Any) -> _Undo:
    then = item.copy()

    def undo() -> None:
        if len(item) != len(then) or not all(map(operator.is_, item, then)):
            item.clear()
            item.extend(then) if isinstance(item, (list, deque)) else item.update(then)

    return undo


def _undo_dict(item: dict[Any, Any]) -> _Undo:
    then = dict(item)

    def undo() -> None:
        for key in item.keys() - then.keys():
            del item[key]
        for key, value in then.items():
            if key not in item or item[key] is not value:
                item[key] = value
        if list(item) != list(then):
            item.clear()
            item.update(then)

    return undo


def _undo_globals(function: FunctionType) -> _Undo | None:
    space = function.__globals__
    steps = dis.get_instructions(function.__code__)
    names = {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
    then = {name: space[name] for name in names if name in space}
    return functools.partial(space.update, then) if then else None


def _undo_class(kind: type) -> _Undo:
    then = dict(vars(kind))

    def undo() -> None:
        for name in vars(kind).keys() - then.keys():
            delattr(kind, name)
        for name, value in then.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)

    return undo


def _undo_tensor(tensor: torch.Tensor) -> _Undo | None:
    # Another process may write to shared memory while the policy is called.
    if tensor.numel() * tensor.element_size() > _MAX_BYTES:
        return None
    on_cpu = tensor.device.type == "cpu"  # torch calls all other memory shared
    if on_cpu and tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
        return None
    memory, values = tensor.detach(), tensor.detach().clone()
    needs_grad, grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None

    def undo() -> None:
        if not tensor.is_set_to(memory):
            tensor.data = memory
        if not torch.equal(memory, values):
            memory.copy_(values)
        if tensor.is_leaf:
            tensor.requires_grad_(needs_grad)
            tensor.grad = grad

    return undo
