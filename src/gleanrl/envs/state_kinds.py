"""The ways to save objects as plain data, by their class."""

from __future__ import annotations

import abc
import collections
import contextlib
import enum
import functools
import inspect
import pathlib
import random
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import NonTensorData, TensorDictBase
from torch import nn

from gleanrl.envs.simulator_state import simulator_of
from gleanrl.envs.specs import TensorSpec

Node: TypeAlias = Any
_ENVS = (gym.Env, gym.vector.VectorEnv, nn.Module)
_PETTINGZOO = ("AECEnv", "ParallelEnv")
_OURS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    weakref.ReferenceType,
    *weakref.ProxyTypes,
    types.MappingProxyType,
    pathlib.PurePath,
    re.Pattern,
    np.dtype,
    np.ufunc,
    torch.dtype,
    torch.device,
    EnvSpec,
)
"""Classes of objects that an environment keeps when it loads a state."""
_OURS_BY_MODULE = (
    "pygame.surface",
    "pygame.font",
    "pygame.freetype",
    "pygame.time",
    "gymnasium.envs.mujoco.mujoco_rendering",
    "mujoco.renderer",
    "mujoco.viewer",
    "logging",
    "_thread",
    "multiprocessing.synchronize",
)
_REFUSED_BY_MODULE = ("multiprocessing", "subprocess", "socket", "concurrent")
_CHANGING = ("_np_random", "mask")
"""Attributes of spaces and specs that change."""
_REPLACES_COPYING = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__del__")
LINKS = ("_parent", "_container")
"""Attributes in which TorchRL's transforms find their environment again."""


class Resumable(abc.ABC):
    """An object that saves and restores its own state as plain data."""

    @abc.abstractmethod
    def snapshot(self, allow_pickle: bool = False) -> Node:
        """Return the state in the middle of episodes, or raise `StateError`. Internal."""

    @abc.abstractmethod
    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        """Continue from a `snapshot`; after a `StateError`, reset the environments. Internal."""


def name_of(kind: type) -> str:
    """Return the name by which a class is saved."""
    return f"{kind.__module__}:{kind.__qualname__}"


def kind_of(kind: type) -> str:
    """Return how objects of a class are saved."""
    found = _EXACTLY.get(kind) or _kinds.get(kind)
    if found is None:
        found = _kinds[kind] = _find_kind(kind)
    return found


_kinds: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _find_kind(kind: type) -> str:
    if issubclass(kind, _OURS) or kind.__module__.startswith(_OURS_BY_MODULE):
        return "ours"
    for name, base in _DERIVED.items():
        if issubclass(kind, base):
            return name
    if kind.__bases__ == (tuple,) and "_fields" in vars(kind):
        return "named"
    if kind.__module__.startswith(_REFUSED_BY_MODULE):
        return "refused"
    if any(base.__module__.startswith("torchrl.data.tensor_specs") for base in kind.__mro__):
        return "declared"
    if simulator_of(kind) is not None:
        return "simulator"
    if _has_hooks(kind):
        return "hooked"
    visible = not _is_hidden(kind)
    return "object" if visible and (is_env(kind) or _is_plain(kind)) else "pickle"


def is_env(kind: type) -> bool:
    """Tell whether objects of a class are environments, or modules in them."""
    if issubclass(kind, _ENVS):
        return True
    bases = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
    return any(package == "pettingzoo" and name in _PETTINGZOO for package, name in bases)


def _is_hidden(kind: type) -> bool:
    """Tell whether objects of a class have a part that is not written in Python."""
    return any(
        type(base).__module__.partition(".")[0] in ("pybind11_builtins", "nanobind")
        or (base is not object and isinstance(vars(base).get("__new__"), types.BuiltinFunctionType))
        for base in kind.__mro__
    )


def _is_plain(kind: type) -> bool:
    """Tell whether objects of a class are their attributes, and nothing happens when they go."""
    found = (vars(base).get(name) for base in kind.__mro__[:-1] for name in _REPLACES_COPYING)
    return all(
        one is None or (isinstance(one, types.FunctionType) and one.__module__ == "dataclasses")
        for one in found
    )


def _has_hooks(kind: type) -> bool:
    """Tell whether a class has the methods ``get_state()`` and ``set_state(state)``."""
    get, put = (inspect.getattr_static(kind, name, None) for name in ("get_state", "set_state"))
    if get is None or not isinstance(put, types.FunctionType):
        return False
    needed = [p for p in inspect.signature(put).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) == 2


def attributes_of(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    found = dict(vars(obj)) if type(obj).__dictoffset__ else {}
    for base in type(obj).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):  # it was never set
                    found[name] = getattr(obj, name)
    return found


def changing_parts(obj: Any, at: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the place, owner and name of everything that changes in a space or a spec."""
    for name, value in attributes_of(obj).items():
        if name in _CHANGING:
            yield f"{at}.{name}", obj, name
            continue
        parts: Iterable[tuple[Any, Any]] = [("", value)]
        if isinstance(value, Mapping):
            parts = value.items()
        elif isinstance(value, (list, tuple)):
            parts = enumerate(value)
        for key, part in parts:
            if kind_of(type(part)) == "declared":
                yield from changing_parts(part, f"{at}.{name}[{key}]")


_EXACTLY: dict[type, str] = {
    list: "list",
    collections.deque: "deque",
    set: "set",
    tuple: "tuple",
    torch.Size: "size",
    frozenset: "frozenset",
    dict: "dict",
    collections.OrderedDict: "ordered",
    collections.defaultdict: "defaultdict",
    bytes: "bytes",
    bytearray: "bytearray",
    np.ndarray: "array",
    np.random.Generator: "generator",
    np.random.RandomState: "randomstate",
    random.Random: "random",
    torch.Generator: "torchgenerator",
    torch.Tensor: "tensor",
    nn.Parameter: "tensor",
    NonTensorData: "nontensor",
}
_DERIVED: dict[str, Any] = {
    "resumable": Resumable,
    "enum": enum.Enum,
    "scalar": (np.bool_, np.integer, np.float64, np.float32, np.float16, np.str_),
    "declared": (gym.Space, TensorSpec),
    "tensordict": TensorDictBase,
}
