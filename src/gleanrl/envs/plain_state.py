"""The state of environments as plain data: numbers, strings, lists, dicts and tensors.

An environment is a graph of Python objects. Everything in it that can change is saved: attributes,
containers, arrays, generators, simulators. A state is loaded into the objects of an environment
that was made alike, so that no constructor is called and no module imported. Functions, classes,
renderers and the like stay those of the environment that loads.

Each part that is no number or string is a list, ``[kind, ...]``. Parts that others may refer to
have a number.
"""

from __future__ import annotations

import abc
import collections
import enum
import functools
import inspect
import io
import operator
import pathlib
import pickle
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import nn

from gleanrl.envs.simulators import NeedsPickle, StateError, as_bytes, as_tensor, simulator_of
from gleanrl.envs.specs import TensorSpec

Node: TypeAlias = Any
Save: TypeAlias = Callable[["Saver", Any, str], Node]
Load: TypeAlias = Callable[["Loader", Any, Any, str], Any]
"""Of a loader, the parts of a node, the object at that place of the environment, and the place."""

_SCALARS = frozenset({type(None), bool, int, float, str})
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
"""What an environment keeps when it loads a state."""
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
"""What changes in spaces and specs."""
_BESIDE_HOOKS = ("_np_random", "action_space", "observation_space")
"""Attributes that are saved beside the state that a user's ``get_state`` returns."""
_REPLACES_COPYING = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__del__")
_CACHED = ("_parent", "_container")
"""Attributes in which TorchRL's transforms find their environment again."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_ABSENT: Any = type("_Absent", (), {})()


def save_state(value: Any, allow_pickle: bool = False, at: str = "env") -> Node:
    """Return the state of an environment, or of a list of them, which errors call ``at``.

    Raises:
        StateError: names a part whose state cannot be saved.
        NeedsPickle: names a part that can only be pickled.
    """
    return Saver(allow_pickle).save(value, at)


def pickled_parts(state: Any) -> Iterator[str]:
    """Yield the places of everything in a state that was pickled."""
    if isinstance(state, (list, tuple)):
        if len(state) == 4 and state[0] == "pickle" and isinstance(state[3], torch.Tensor):
            yield str(state[2])
        for part in state:
            yield from pickled_parts(part)
    elif isinstance(state, dict):
        for part in state.values():
            yield from pickled_parts(part)


def load_state(value: Any, state: Node, allow_pickle: bool = False) -> Any:
    """Load a state from `save_state` into environments that were made alike; return them.

    Nothing changes before all parts were read.

    Raises:
        StateError: it does not fit; the environments have to be reset.
    """
    loader = Loader(allow_pickle)
    try:
        loaded = loader.load(state, value, "env")
        loader.finish()
    except StateError:
        raise
    except Exception as err:  # a state may come from anyone
        raise StateError(f"it does not fit: {type(err).__name__}: {err}") from err
    return loaded


# -- classes ---------------------------------------------------------------------------------------


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _kind(kind: type) -> str:
    """Return how objects of a class are saved."""
    found = _kinds.get(kind)
    if found is None:
        found = _kinds[kind] = _find_kind(kind)
    return found


_kinds: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def _find_kind(kind: type) -> str:
    if (exact := _EXACTLY.get(kind)) is not None:
        return exact
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
    return "object" if visible and (_is_env(kind) or _is_plain(kind)) else "pickle"


def _is_env(kind: type) -> bool:
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
    return all(one is None or one.__module__ == "dataclasses" for one in found)


def _has_hooks(kind: type) -> bool:
    """Tell whether a class has the methods ``get_state()`` and ``set_state(state)``."""
    get, put = (inspect.getattr_static(kind, name, None) for name in ("get_state", "set_state"))
    if get is None or not isinstance(put, types.FunctionType):
        return False
    needed = [p for p in inspect.signature(put).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]) == 2


def _attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    found = dict(vars(obj)) if type(obj).__dictoffset__ else {}
    for base in type(obj).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = (
                getattr(obj, name, _ABSENT) if name not in ("__dict__", "__weakref__") else _ABSENT
            )
            if value is not _ABSENT:
                found[name] = value
    return found


def _changing(obj: Any, at: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the place, owner and name of everything that changes in a space or a spec."""
    for name, value in _attributes(obj).items():
        if name in _CHANGING:
            yield f"{at}.{name}", obj, name
            continue
        parts: Iterable[tuple[Any, Any]] = [("", value)]
        if isinstance(value, Mapping):
            parts = value.items()
        elif isinstance(value, (list, tuple)):
            parts = enumerate(value)
        for key, part in parts:
            if _kind(type(part)) == "declared":
                yield from _changing(part, f"{at}.{name}[{key}]")


# -- saving ----------------------------------------------------------------------------------------


class Resumable(abc.ABC):
    """An object that saves and restores its own state as plain data."""

    @abc.abstractmethod
    def snapshot(self, allow_pickle: bool = False) -> Node:
        """Return the state in the middle of episodes. Internal to the package.

        Raises:
            StateError: names a part whose state cannot be saved.
        """

    @abc.abstractmethod
    def resume(self, snapshot: Node, allow_pickle: bool = False) -> None:
        """Continue from a state of `snapshot`. Internal to the package.

        Raises:
            StateError: it does not fit; the environments have to be reset.
        """


class Saver:
    """Turns objects into plain data."""

    def __init__(self, allow_pickle: bool) -> None:
        """Start with nothing saved."""
        self.allow_pickle = allow_pickle
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        """What was numbered, so that nothing else gets the same address."""

    def save(self, value: Any, at: str) -> Node:
        """Return the state of ``value``, which is ``at`` a place in the environment."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if (number := self._numbers.get(id(value))) is not None:
            return ["same", number]
        name = _kind(kind)
        return [name, *_SAVE[name](self, value, at)]

    def number(self, value: Any) -> int:
        """Return the number by which later parts refer to ``value``."""
        number = self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        return number


def _save_items(saver: Saver, value: Any, at: str) -> Node:
    return [[saver.save(item, f"{at}[{i}]") for i, item in enumerate(value)]]


def _save_numbered(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    more = [value.maxlen] if isinstance(value, collections.deque) else []
    return [number, *_save_items(saver, value, at), *more]


def _save_dict(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    pairs = value.items()
    return [number, [[saver.save(k, at), saver.save(v, f"{at}[{k!r}]")] for k, v in pairs]]


def _save_array(saver: Saver, value: Any, at: str) -> Node:
    number, kind = saver.number(value), value.dtype
    if kind.hasobject and kind.fields is None:
        return [number, "O", list(value.shape), [saver.save(v, at) for v in value.flat]]
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    flat = (value.T if turned else value).copy()
    if (kind.kind in "fibc" and kind.char not in "gG" and kind.isnative) or kind == np.uint8:
        return [number, "T" if turned else "", torch.from_numpy(flat)]
    if kind.fields is not None:
        raise StateError(f"{at} is a structured array, which cannot be saved")
    data = as_tensor(value.tobytes())
    return [number, "B", kind.str, list(value.shape), data]


def _save_generator(saver: Saver, value: Any, at: str) -> Node:
    state = value.bit_generator.state
    return [saver.number(value), state["bit_generator"], saver.save(state, at)]


def _save_object(saver: Saver, value: Any, at: str) -> Node:
    attributes = _attributes(value)
    for name in _CACHED if isinstance(value, nn.Module) else ():
        attributes.pop(name, None)
    return _save_attributes(saver, value, attributes, at)


def _save_hooked(saver: Saver, value: Any, at: str) -> Node:
    beside = {k: v for k, v in _attributes(value).items() if k in _BESIDE_HOOKS}
    saved = _save_attributes(saver, value, beside, at)
    return [*saved, saver.save(value.get_state(), f"{at}.get_state()")]


def _save_attributes(saver: Saver, value: Any, attributes: Mapping[str, Any], at: str) -> Node:
    number = saver.number(value)
    parts = {name: part for name, part in attributes.items() if _own(part)}
    saved = {name: saver.save(part, f"{at}.{name}") for name, part in parts.items()}
    return [number, _name(type(value)), saved]


def _own(value: Any) -> bool:
    """Tell whether an attribute belongs to the state, and not to the making of an environment."""
    kind = _kind(type(value))
    if kind == "declared":
        return any(getattr(owner, name) is not None for _, owner, name in _changing(value))
    return kind != "ours"


def _save_changing(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    parts = {place: getattr(owner, name) for place, owner, name in _changing(value)}
    return [number, {place: saver.save(part, at + place) for place, part in parts.items()}]


def _save_simulator(saver: Saver, value: Any, at: str) -> Node:
    simulator = simulator_of(type(value))
    assert simulator is not None
    return [saver.number(value), _name(type(value)), simulator[0](value)]


def _save_tensordict(saver: Saver, value: Any, at: str) -> Node:
    if isinstance(value, LazyStackedTensorDict):
        parts = [saver.save(part, at) for part in value.tensordicts]
        return ["stack", value.stack_dim, parts]
    if type(value) is not TensorDict:
        raise StateError(f"{at} ({_name(type(value))}) cannot be saved")
    entries = {name: saver.save(part, f"{at}[{name!r}]") for name, part in value.items()}
    device = None if value.device is None else str(value.device)
    return ["plain", list(value.batch_size), list(value.names), device, entries]


def _save_refused(saver: Saver, value: Any, at: str) -> Node:
    raise StateError(f"{at} ({_name(type(value))}) belongs to this process and cannot be saved")


def _save_resumable(saver: Saver, value: Any, at: str) -> Node:
    return [saver.number(value), value.snapshot(saver.allow_pickle)]


def _save_pickle(saver: Saver, value: Any, at: str) -> Node:
    what, data = f"{at} ({_name(type(value))})", io.BytesIO()
    if _is_env(type(value)):
        raise StateError(f"{what} keeps its state where it cannot be read")
    try:
        _NoEnvironments(data, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as err:
        raise StateError(f"{what} cannot be saved: {err}") from err
    if not saver.allow_pickle:
        raise NeedsPickle(f"{what} can only be pickled: pass allow_pickle=True")
    return [saver.number(value), what, as_tensor(data.getvalue())]


class _NoEnvironments(pickle.Pickler):
    """Pickles objects that refer to no environment, which would be pickled with them."""

    def persistent_id(self, obj: Any) -> None:
        if _is_env(type(obj)):
            raise TypeError(f"it refers to a {type(obj).__name__}")


# -- loading ---------------------------------------------------------------------------------------


class Loader:
    """Restores objects from plain data."""

    def __init__(self, allow_pickle: bool) -> None:
        """Start with nothing loaded."""
        self.allow_pickle = allow_pickle
        self._found: dict[int, Any] = {}
        self._due: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = []
        self._used: set[int] = set()
        self.packages: set[str] = set()
        """Packages of the environments, whose other classes may be made."""

    def load(self, node: Node, present: Any, at: str) -> Any:
        """Return the object of ``node``; ``present`` is the one that the environment has there."""
        if not isinstance(node, list):
            return node
        kind, *parts = node
        if kind == "same":
            return self._found[parts[0]]
        return _LOAD[kind](self, parts, present, at)

    def later(self, call: Callable[..., Any], *args: Any, order: int = 1) -> None:
        """Change an object of the environment once all parts were read; lower orders first."""
        self._due.append((order, call, args))

    def finish(self) -> None:
        """Make all changes."""
        for _, call, args in sorted(self._due, key=operator.itemgetter(0)):
            call(*args)

    def note(self, number: int, value: Any) -> Any:
        """Have later parts refer to ``value`` by ``number``."""
        self._found[number] = value
        self._used.add(id(value))
        return value

    def reusable(self, present: Any, kind: type | str) -> bool:
        """Tell whether ``present`` is of a class, and nothing was loaded into it."""
        own = type(present)
        alike = _name(own) == kind if isinstance(kind, str) else own is kind
        return alike and id(present) not in self._used

    def class_named(self, name: str, at: str) -> type:
        """Return a loaded class of the environments' packages.

        Raises:
            StateError: there is none.
        """
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = vars(found).get(part) if found is not None else None
        if module.partition(".")[0] not in self.packages or not isinstance(found, type):
            raise StateError(f"{at} has no {name}, which was there when the state was saved")
        return found


def _load_list(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, items, *_ = parts
    return _fill(loader, loader.note(number, []), items, present, at)


def _fill(loader: Loader, into: Any, items: Any, present: Any, at: str) -> Any:
    own = list(present) if isinstance(present, (list, tuple, collections.deque)) else []
    for i, node in enumerate(items):
        into.append(loader.load(node, own[i] if i < len(own) else _ABSENT, f"{at}[{i}]"))
    return into


def _load_deque(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, items, longest = parts
    into = collections.deque[Any](maxlen=longest)
    return _fill(loader, loader.note(number, into), items, present, at)


def _load_set(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, items = parts
    value: set[Any] = loader.note(number, set())
    value.update(loader.load(node, _ABSENT, at) for node in items)
    return value


def _load_tuple(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return tuple(_fill(loader, [], parts[0], present, at))


def _load_frozenset(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return frozenset(_fill(loader, [], parts[0], None, at))


def _load_dict(loader: Loader, parts: Any, present: Any, at: str, into: Any = None) -> Any:
    number, pairs = parts
    own = dict(present) if isinstance(present, dict) else {}
    loader.note(number, into)
    for key_node, node in pairs:
        key = loader.load(key_node, _ABSENT, at)
        into[key] = loader.load(node, own.get(key, _ABSENT), f"{at}[{key!r}]")
    return into


def _load_plain_dict(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return _load_dict(loader, parts, present, at, {})


def _load_ordered(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return _load_dict(loader, parts, present, at, collections.OrderedDict())


def _load_default_dict(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if not isinstance(present, collections.defaultdict):
        raise StateError(f"{at} is no defaultdict, as it was when the state was saved")
    into: Any = collections.defaultdict(present.default_factory)
    return _load_dict(loader, parts, present, at, into)


def _load_array(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, form, *data = parts
    if form == "O":
        value = np.empty(data[0], object)
        loader.note(number, value)
        value.reshape(-1)[:] = [loader.load(node, _ABSENT, at) for node in data[1]]
        return value
    if form == "B":
        dtype, shape, raw = data
        value = np.frombuffer(as_bytes(raw), np.dtype(dtype)).reshape(shape).copy()
    else:
        value = data[0].numpy().copy()
        value = value.T if form == "T" else value
    if isinstance(present, np.ndarray) and _shows_other_memory(present, value):
        loader.later(np.copyto, present, value)
        value = present
    return loader.note(number, value)


def _shows_other_memory(array: Any, like: Any) -> bool:
    """Tell whether an array is a view of memory that is not numpy's, such as a simulator's."""
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        return False
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None and bool(array.flags.writeable)


def _load_bytearray(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, data = parts
    value = bytearray(as_bytes(data))
    if isinstance(present, bytearray) and len(present) == len(value):  # arrays may show it
        loader.later(present.__setitem__, slice(None), value)
        value = present
    return loader.note(number, value)


def _load_scalar(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return np.dtype(parts[0]).type(parts[1])


def _load_generator(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, name, node = parts
    kind = {bits.__name__: bits for bits in _BIT_GENERATORS}[name]
    same = loader.reusable(present, np.random.Generator)
    value = present if same and type(present.bit_generator) is kind else np.random.Generator(kind())
    loader.later(setattr, value.bit_generator, "state", loader.load(node, _ABSENT, at))
    return loader.note(number, value)


def _loads_by(make: Callable[[], Any], method: str) -> Load:
    """Return how to restore an object that takes its state by a ``method``."""

    def load(loader: Loader, parts: Any, present: Any, at: str) -> Any:
        number, node = parts
        fresh = make()
        value = present if loader.reusable(present, type(fresh)) else fresh
        loader.later(getattr(value, method), loader.load(node, _ABSENT, at))
        return loader.note(number, value)

    return load


def _load_object(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, name, attributes = parts
    if loader.reusable(present, name):
        value = present
    else:
        kind = loader.class_named(name, at)
        if _kind(kind) != "object" or _is_env(kind):
            raise StateError(f"{at} has no {name}, which was there when the state was saved")
        value = object.__new__(kind)
    loader.note(number, value)
    if _is_env(type(value)):
        loader.packages.add(type(value).__module__.partition(".")[0])
    own = _attributes(value)
    for new in own.keys() - attributes.keys() - {*_CACHED}:
        if own[new] is not None and _kind(type(own[new])) not in ("ours", "declared"):
            raise StateError(f"{at} has {new}, which was not there when the state was saved")
    _load_attributes(loader, value, attributes, own, at)
    return value


def _load_hooked(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, name, attributes, state = parts
    if not loader.reusable(present, name):
        raise StateError(f"{at} is no {name}, as it was when the state was saved")
    loader.note(number, present)
    _load_attributes(loader, present, attributes, _attributes(present), at)
    loader.later(present.set_state, loader.load(state, _ABSENT, at), order=2)
    return present


def _load_attributes(
    loader: Loader, value: Any, attributes: Mapping[str, Any], own: Mapping[str, Any], at: str
) -> None:
    in_place = _OF_MODULES if isinstance(value, nn.Module) else ()
    for name, node in attributes.items():
        where, there = f"{at}.{name}", own.get(name, _ABSENT)
        if name in in_place and isinstance(there, dict):
            _load_module_part(loader, node, there, where)
        else:
            loader.later(object.__setattr__, value, name, loader.load(node, there, where))


def _load_module_part(loader: Loader, node: Any, present: dict[str, Any], at: str) -> None:
    """Restore parameters, buffers or modules: tensors in place, because others refer to them."""
    number, pairs = node[1:]
    loader.note(number, present)
    for name, part in pairs:
        own = present.get(name)
        value = loader.load(part, own, f"{at}[{name!r}]")
        if isinstance(own, torch.Tensor) and value is not own and value.shape == own.shape:
            loader.later(own.data.copy_, value)
            loader.note(part[1], own)
        else:
            loader.later(present.__setitem__, name, value)


def _load_changing(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, saved = parts
    if _kind(type(present)) != "declared":
        raise StateError(f"{at} is no space or spec, as it was when the state was saved")
    loader.note(number, present)
    owners = {place: (owner, name) for place, owner, name in _changing(present)}
    for place, node in saved.items():
        owner, name = owners[place]
        value = loader.load(node, getattr(owner, name), at + place)
        loader.later(object.__setattr__, owner, name, value)
    return present


def _load_ours(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if _kind(type(present)) != "ours":
        raise StateError(f"{at} was a function, a class or the like when the state was saved")
    return present


def _load_enum(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, member = parts
    kind = type(present) if _name(type(present)) == name else loader.class_named(name, at)
    if not issubclass(kind, enum.Enum):
        raise StateError(f"{at}: {name} is no enumeration")
    return kind[member]


def _load_named(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, items = parts
    kind = type(present) if _name(type(present)) == name else loader.class_named(name, at)
    if _kind(kind) != "named":
        raise StateError(f"{at}: {name} is no named tuple")
    return tuple.__new__(kind, _fill(loader, [], items, present, at))


def _load_simulator(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, name, saved = parts
    simulator = simulator_of(type(present))
    if simulator is None or not loader.reusable(present, name):
        raise StateError(f"{at} is no {name}, as it was when the state was saved")
    loader.later(_restore_simulator, simulator[1], present, saved, at, order=0)
    return loader.note(number, present)


def _restore_simulator(restore: Callable[..., None], present: Any, saved: Any, at: str) -> None:
    try:
        restore(present, saved)
    except StateError as err:
        raise StateError(f"{at}: {err}") from err


def _load_resumable(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, snapshot = parts
    if not isinstance(present, Resumable):
        raise StateError(f"{at} is another kind of environment than when the state was saved")
    loader.later(present.resume, snapshot, loader.allow_pickle, order=0)
    return loader.note(number, present)


def _is_shared(value: Any) -> bool:
    """Tell whether a tensor is in memory that other processes may have."""
    return bool(value.is_shared())


def _load_tensor(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, data = parts
    if isinstance(present, torch.Tensor) and _is_shared(present) and present.shape == data.shape:
        loader.later(present.copy_, data)
        return loader.note(number, present)
    return loader.note(number, data.clone())


def _load_tensordict(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    form, *parts = parts
    if form == "stack":
        dim, members = parts
        return LazyStackedTensorDict(*(loader.load(n, _ABSENT, at) for n in members), stack_dim=dim)
    batch, names, device, entries = parts
    shared = isinstance(present, TensorDict) and _is_shared(present)
    own = dict(present.items()) if shared else {}
    values = {n: loader.load(node, own.get(n, _ABSENT), at) for n, node in entries.items()}
    if shared and all(values[name] is own.get(name) for name in values):
        return present
    value = TensorDict(values, batch_size=batch, device=device)
    if any(names):
        value.names = names
    return value


def _load_nontensor(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    return NonTensorData(loader.load(parts[0], _ABSENT, at), batch_size=parts[1])


def _load_pickle(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if not loader.allow_pickle:
        raise NeedsPickle(f"{at} was pickled: pass allow_pickle=True if you trust the state")
    number, _, data = parts
    return loader.note(number, pickle.loads(as_bytes(data)))


# -- the kinds -------------------------------------------------------------------------------------

_BIT_GENERATORS = (
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
)
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
_SAVE: dict[str, Save] = {
    "list": _save_numbered,
    "deque": _save_numbered,
    "set": _save_numbered,
    "tuple": _save_items,
    "size": _save_items,
    "frozenset": _save_items,
    "dict": _save_dict,
    "ordered": _save_dict,
    "defaultdict": _save_dict,
    "bytes": lambda saver, value, at: [as_tensor(value)],
    "bytearray": lambda saver, value, at: [saver.number(value), as_tensor(value)],
    "array": _save_array,
    "scalar": lambda saver, value, at: [value.dtype.str, value.item()],
    "generator": _save_generator,
    "randomstate": lambda s, v, at: [s.number(v), s.save(v.get_state(legacy=False), at)],
    "random": lambda s, v, at: [s.number(v), s.save(v.getstate(), at)],
    "torchgenerator": lambda s, v, at: [s.number(v), s.save(v.get_state(), at)],
    "tensor": lambda saver, value, at: [saver.number(value), value.detach().clone()],
    "tensordict": _save_tensordict,
    "nontensor": lambda s, v, at: [s.save(v.data, at), list(v.batch_size)],
    "enum": lambda saver, value, at: [_name(type(value)), value.name],
    "named": lambda s, value, at: [_name(type(value)), *_save_items(s, value, at)],
    "declared": _save_changing,
    "simulator": _save_simulator,
    "object": _save_object,
    "hooked": _save_hooked,
    "resumable": _save_resumable,
    "ours": lambda saver, value, at: [],
    "refused": _save_refused,
    "pickle": _save_pickle,
}
_LOAD: dict[str, Load] = {
    "list": _load_list,
    "deque": _load_deque,
    "set": _load_set,
    "tuple": _load_tuple,
    "size": lambda loader, parts, present, at: torch.Size(parts[0]),
    "frozenset": _load_frozenset,
    "dict": _load_plain_dict,
    "ordered": _load_ordered,
    "defaultdict": _load_default_dict,
    "bytes": lambda loader, parts, present, at: as_bytes(parts[0]),
    "bytearray": _load_bytearray,
    "array": _load_array,
    "scalar": _load_scalar,
    "generator": _load_generator,
    "randomstate": _loads_by(np.random.RandomState, "set_state"),
    "random": _loads_by(random.Random, "setstate"),
    "torchgenerator": _loads_by(torch.Generator, "set_state"),
    "tensor": _load_tensor,
    "tensordict": _load_tensordict,
    "nontensor": _load_nontensor,
    "enum": _load_enum,
    "named": _load_named,
    "declared": _load_changing,
    "simulator": _load_simulator,
    "object": _load_object,
    "hooked": _load_hooked,
    "resumable": _load_resumable,
    "ours": _load_ours,
    "pickle": _load_pickle,
}
