"""Environments continue from states of `plain_state`."""

from __future__ import annotations

import collections
import enum
import operator
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import nn

from gleanrl.envs.simulators import NeedsPickle, StateError, as_bytes, simulator_of
from gleanrl.envs.state_kinds import (
    LINKS,
    Node,
    Resumable,
    attributes_of,
    changing_parts,
    is_env,
    kind_of,
    name_of,
)

Load: TypeAlias = Callable[["Loader", Any, Any, str], Any]
"""Of a loader, the parts of a node, the object at that place of the environment, and the place."""

_OF_MODULES = ("_parameters", "_buffers", "_modules")
_ABSENT: Any = type("_Absent", (), {})()


_BIT_GENERATORS = (
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
)


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


def load_batch(state: Node) -> TensorDictBase:
    """Return a batch from its state.

    Raises:
        StateError: it is the state of something else.
    """
    batch = load_state(None, state)
    if not isinstance(batch, TensorDictBase):
        raise StateError(f"a {type(batch).__name__} is in the place of a batch")
    return batch


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
        alike = name_of(own) == kind if isinstance(kind, str) else own is kind
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
        if kind_of(kind) != "object" or is_env(kind):
            raise StateError(f"{at} has no {name}, which was there when the state was saved")
        value = object.__new__(kind)
    loader.note(number, value)
    if is_env(type(value)):
        loader.packages.add(type(value).__module__.partition(".")[0])
    own = attributes_of(value)
    for new in own.keys() - attributes.keys() - {*LINKS}:
        if own[new] is not None and kind_of(type(own[new])) not in ("ours", "declared"):
            raise StateError(f"{at} has {new}, which was not there when the state was saved")
    _load_attributes(loader, value, attributes, own, at)
    return value


def _load_hooked(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    number, name, attributes, state = parts
    if not loader.reusable(present, name):
        raise StateError(f"{at} is no {name}, as it was when the state was saved")
    loader.note(number, present)
    _load_attributes(loader, present, attributes, attributes_of(present), at)
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
    if kind_of(type(present)) != "declared":
        raise StateError(f"{at} is no space or spec, as it was when the state was saved")
    loader.note(number, present)
    owners = {place: (owner, name) for place, owner, name in changing_parts(present)}
    for place, node in saved.items():
        owner, name = owners[place]
        value = loader.load(node, getattr(owner, name), at + place)
        loader.later(object.__setattr__, owner, name, value)
    return present


def _load_ours(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if kind_of(type(present)) != "ours":
        raise StateError(f"{at} was a function, a class or the like when the state was saved")
    return present


def _load_enum(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, member = parts
    kind = type(present) if name_of(type(present)) == name else loader.class_named(name, at)
    if not issubclass(kind, enum.Enum):
        raise StateError(f"{at}: {name} is no enumeration")
    return kind[member]


def _load_named(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, items = parts
    kind = type(present) if name_of(type(present)) == name else loader.class_named(name, at)
    if kind_of(kind) != "named":
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
