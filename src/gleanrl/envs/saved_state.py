"""The state of environments as plain data: numbers, strings, lists, dicts and tensors.

A state is loaded into the objects of an environment that was made alike. No constructor is called
and no module imported; docs/decisions.md ("Exact resume") says which parts are saved.

Each part that is no number or string is a list, ``[kind, ...]``. Parts that others may refer to
have a number there. `_KINDS` has both directions of every kind.
"""

from __future__ import annotations

import collections
import enum
import io
import operator
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase
from torch import nn

from gleanrl.envs.simulator_state import NeedsPickle, StateError, as_bytes, as_tensor, simulator_of
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

_SCALARS = frozenset({type(None), bool, int, float, str})
_PLAIN_GENERATORS = ("PCG64", "PCG64DXSM")
"""Generators whose state is plain data as it is."""
_OTHER_GENERATORS = ("MT19937", "Philox", "SFC64")
_BESIDE_HOOKS = ("_np_random", "action_space", "observation_space")
"""Attributes that are saved in addition to the result of a user's ``get_state``."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_ABSENT: Any = type("_Absent", (), {})()


def save_state(value: Any, allow_pickle: bool = False, at: str = "env") -> Node:
    """Return the state of an environment, or of a list of them, which errors call ``at``.

    `StateError` names a part whose state cannot be saved, `NeedsPickle` one only for pickle.
    """
    return Saver(allow_pickle).save(value, at)


def load_state(value: Any, state: Node, allow_pickle: bool = False) -> Any:
    """Load a state from `save_state` into environments that were made alike; return them.

    Nothing changes before all parts were read. After a `StateError`, environments must be reset.
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
    """Return a batch from its state."""
    batch = load_state(None, state)
    if not isinstance(batch, TensorDictBase):
        raise StateError(f"a {type(batch).__name__} is in the place of a batch")
    return batch


class Saver:
    """Turns objects into plain data."""

    def __init__(self, allow_pickle: bool) -> None:
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
        name = kind_of(kind)
        if name == "refused":
            raise StateError(f"{at} ({name_of(kind)}) belongs to this process and cannot be saved")
        if not _KINDS[name].numbered:
            return [name, *_KINDS[name].save(self, value, at)]
        number = self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        return [name, number, *_KINDS[name].save(self, value, at)]


class Loader:
    """Restores objects from plain data."""

    def __init__(self, allow_pickle: bool) -> None:
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
        if node[0] == "same":
            return self._found[node[1]]
        _, load, fill, numbered = _KINDS[node[0]]
        if not numbered:
            return load(self, node[1:], present, at)
        parts = node[2:]
        value = load(self, parts, present, at)
        self.note(node[1], value)
        if fill is not None:
            fill(self, value, parts, present, at)
        return value

    def later(self, call: Callable[..., Any], *args: Any, order: int = 1) -> None:
        """Change an object of the environment once all parts were read; lower orders first."""
        self._due.append((order, call, args))

    def finish(self) -> None:
        """Make all changes."""
        for _, call, args in sorted(self._due, key=operator.itemgetter(0)):
            call(*args)

    def note(self, number: int, value: Any) -> None:
        """Have later parts refer to ``value`` by ``number``."""
        self._found[number] = value
        self._used.add(id(value))

    def reusable(self, present: Any, kind: type | str) -> bool:
        """Tell whether ``present`` is of a class, and nothing was loaded into it."""
        own = type(present)
        alike = name_of(own) == kind if isinstance(kind, str) else own is kind
        return alike and id(present) not in self._used

    def class_named(self, name: str, at: str) -> type:
        """Return a loaded class of the environments' packages."""
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = vars(found).get(part) if found is not None else None
        if module.partition(".")[0] not in self.packages or not isinstance(found, type):
            raise StateError(f"{at} has no {name}, which was there when the state was saved")
        return found


class _Kind(NamedTuple):
    """How objects of a kind are saved, and loaded."""

    save: Callable[[Saver, Any, str], Sequence[Any]]
    """Returns the parts of an object at a place."""
    load: Callable[[Loader, Any, Any, str], Any]
    """Returns an object of these parts, for the place of another one that is present there."""
    fill: Callable[[Loader, Any, Any, Any, str], None] | None = None
    """Loads what is in that object, and may refer to it."""
    numbered: bool = True
    """Whether other parts may refer to such an object; only then it is filled."""


# -- containers ------------------------------------------------------------------------------------


def _save_items(saver: Saver, value: Any, at: str) -> list[Any]:
    return [
        [
            item if type(item) in _SCALARS else saver.save(item, f"{at}[{i}]")
            for i, item in enumerate(value)
        ]
    ]


def _items(loader: Loader, nodes: Any, present: Any, at: str) -> list[Any]:
    own = list(present) if isinstance(present, (list, tuple, collections.deque)) else []
    return [
        loader.load(node, own[i] if i < len(own) else _ABSENT, f"{at}[{i}]")
        for i, node in enumerate(nodes)
    ]


def _fill_items(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    (value.update if isinstance(value, set) else value.extend)(
        _items(loader, parts[0], present, at)
    )


def _immutable(make: Callable[[list[Any]], Any]) -> _Kind:
    def load(loader: Loader, parts: Any, present: Any, at: str) -> Any:
        return make(_items(loader, parts[0], present, at))

    return _Kind(_save_items, load, numbered=False)


def _save_pairs(saver: Saver, value: Any, at: str) -> list[Any]:
    return [
        [
            [
                key if type(key) in _SCALARS else saver.save(key, at),
                part if type(part) in _SCALARS else saver.save(part, f"{at}[{key!r}]"),
            ]
            for key, part in value.items()
        ]
    ]


def _fill_pairs(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    own = dict(present) if isinstance(present, dict) else {}
    for key_node, node in parts[0]:
        key = loader.load(key_node, _ABSENT, at)
        value[key] = loader.load(node, own.get(key, _ABSENT), f"{at}[{key!r}]")


def _load_default_dict(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if not isinstance(present, collections.defaultdict):
        raise StateError(f"{at} is no defaultdict, as it was when the state was saved")
    return collections.defaultdict(present.default_factory)


def _save_named(saver: Saver, value: Any, at: str) -> list[Any]:
    return [name_of(type(value)), *_save_items(saver, value, at)]


def _load_named(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, items = parts
    kind = type(present) if name_of(type(present)) == name else loader.class_named(name, at)
    if kind_of(kind) != "named":
        raise StateError(f"{at}: {name} is no named tuple")
    return tuple.__new__(kind, _items(loader, items, present, at))


# -- numbers ---------------------------------------------------------------------------------------


def _save_array(saver: Saver, value: Any, at: str) -> list[Any]:
    kind = value.dtype
    if kind.hasobject and kind.fields is None:
        return ["O", list(value.shape), [saver.save(v, at) for v in value.flat]]
    turned = value.flags.f_contiguous and not value.flags.c_contiguous
    flat = (value.T if turned else value).copy()
    if (kind.kind in "fibc" and kind.char not in "gG" and kind.isnative) or kind == np.uint8:
        return ["T" if turned else "", torch.from_numpy(flat)]
    if kind.fields is not None:
        raise StateError(f"{at} is a structured array, which cannot be saved")
    return ["B", kind.str, list(value.shape), as_tensor(value.tobytes())]


def _load_array(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    form, *data = parts
    if form == "O":
        return np.empty(data[0], object)
    if form == "B":
        dtype, shape, raw = data
        value = np.frombuffer(as_bytes(raw), np.dtype(dtype)).reshape(shape).copy()
    else:
        value = data[0].numpy().copy()
        value = value.T if form == "T" else value
    if isinstance(present, np.ndarray) and _shows_other_memory(present, value):
        loader.later(np.copyto, present, value)
        value = present
    return value


def _fill_array(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    if parts[0] == "O":
        value.reshape(-1)[:] = [loader.load(node, _ABSENT, at) for node in parts[2]]


def _shows_other_memory(array: Any, like: Any) -> bool:
    """Tell whether an array is a view of memory that is not numpy's, such as a simulator's."""
    if (array.shape, array.dtype) != (like.shape, like.dtype):
        return False
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None and bool(array.flags.writeable)


def _load_bytearray(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    value = bytearray(as_bytes(parts[0]))
    if isinstance(present, bytearray) and len(present) == len(value):  # arrays may show it
        loader.later(present.__setitem__, slice(None), value)
        value = present
    return value


def _save_generator(saver: Saver, value: Any, at: str) -> list[Any]:
    state = value.bit_generator.state
    name = state["bit_generator"]
    return [name, state if name in _PLAIN_GENERATORS else saver.save(state, at)]


def _load_generator(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, node = parts
    if name not in (*_PLAIN_GENERATORS, *_OTHER_GENERATORS):
        raise StateError(f"{at}: {name!r:.50} is no generator of numpy's")
    kind = getattr(np.random, name)
    same = loader.reusable(present, np.random.Generator)
    value = present if same and type(present.bit_generator) is kind else np.random.Generator(kind())
    loader.later(setattr, value.bit_generator, "state", loader.load(node, _ABSENT, at))
    return value


def _by_methods(kind: type, get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> _Kind:
    """Return how to save and load objects that have methods for their state."""

    def load(loader: Loader, parts: Any, present: Any, at: str) -> Any:
        value = present if loader.reusable(present, kind) else kind()
        loader.later(put, value, loader.load(parts[0], _ABSENT, at))
        return value

    return _Kind(lambda saver, value, at: [saver.save(get(value), at)], load)


def _is_shared(value: Any) -> bool:
    """Tell whether a tensor is in memory that other processes may have."""
    return bool(value.is_shared())


def _load_tensor(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    (data,) = parts
    if isinstance(present, torch.Tensor) and _is_shared(present) and present.shape == data.shape:
        loader.later(present.copy_, data)
        return present
    return data.clone()


def _save_tensordict(saver: Saver, value: Any, at: str) -> list[Any]:
    if isinstance(value, LazyStackedTensorDict):
        parts = [saver.save(part, at) for part in value.tensordicts]
        return ["stack", value.stack_dim, parts]
    if type(value) is not TensorDict:
        raise StateError(f"{at} ({name_of(type(value))}) cannot be saved")
    entries = {name: saver.save(part, f"{at}[{name!r}]") for name, part in value.items()}
    device = None if value.device is None else str(value.device)
    return ["plain", list(value.batch_size), list(value.names), device, entries]


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


# -- objects ---------------------------------------------------------------------------------------


def _save_attributes(saver: Saver, value: Any, at: str, attributes: Mapping[str, Any]) -> list[Any]:
    saved = {
        name: part if type(part) in _SCALARS else saver.save(part, f"{at}.{name}")
        for name, part in attributes.items()
        if type(part) in _SCALARS or _own(part)
    }
    return [name_of(type(value)), saved]


def _own(value: Any) -> bool:
    """Tell whether an attribute belongs to the state, and not to the making of an environment."""
    kind = kind_of(type(value))
    if kind == "declared":
        return any(getattr(owner, name) is not None for _, owner, name in changing_parts(value))
    return kind != "ours"


def _fill_attributes(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    in_place = _OF_MODULES if isinstance(value, nn.Module) else ()
    own = attributes_of(value)
    for name, node in parts[1].items():
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


def _save_object(saver: Saver, value: Any, at: str) -> list[Any]:
    attributes = attributes_of(value)
    for name in LINKS if isinstance(value, nn.Module) else ():
        attributes.pop(name, None)
    return _save_attributes(saver, value, at, attributes)


def _load_object(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name = parts[0]
    if loader.reusable(present, name):
        return present
    kind = loader.class_named(name, at)
    if kind_of(kind) != "object" or is_env(kind):
        raise StateError(f"{at} has no {name}, which was there when the state was saved")
    return object.__new__(kind)


def _fill_object(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    if is_env(type(value)):
        loader.packages.add(type(value).__module__.partition(".")[0])
    own = attributes_of(value)
    for new in own.keys() - parts[1].keys() - {*LINKS}:
        if own[new] is None or kind_of(type(own[new])) in ("ours", "declared"):
            continue
        if getattr(type(value), new, value) is not None:
            raise StateError(f"{at} has {new}, which was not there when the state was saved")
        # As the class has it, before the first use.
        loader.later(object.__setattr__, value, new, None)
    _fill_attributes(loader, value, parts, present, at)


def _save_hooked(saver: Saver, value: Any, at: str) -> list[Any]:
    beside = {k: v for k, v in attributes_of(value).items() if k in _BESIDE_HOOKS}
    saved = _save_attributes(saver, value, at, beside)
    return [*saved, saver.save(value.get_state(), f"{at}.get_state()")]


def _load_same(kind: str, loader: Loader, parts: Any, present: Any, at: str) -> Any:
    """Return the object that is present, which must be of the same class, and of ``kind``."""
    if kind_of(type(present)) != kind or not loader.reusable(present, parts[0]):
        raise StateError(f"{at} is no {parts[0]}, as it was when the state was saved")
    return present


def _fill_hooked(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    _fill_attributes(loader, value, parts, present, at)
    loader.later(value.set_state, loader.load(parts[2], _ABSENT, at), order=2)


def _save_simulator(saver: Saver, value: Any, at: str) -> list[Any]:
    simulator: Any = simulator_of(type(value))
    return [name_of(type(value)), simulator[0](value)]


def _fill_simulator(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    loader.later(_restore_simulator, value, parts[1], at, order=0)


def _restore_simulator(present: Any, saved: Any, at: str) -> None:
    simulator: Any = simulator_of(type(present))
    try:
        simulator[1](present, saved)
    except StateError as err:
        raise StateError(f"{at}: {err}") from err


def _load_resumable(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if not isinstance(present, Resumable):
        raise StateError(f"{at} is another kind of environment than when the state was saved")
    loader.later(present.resume, parts[0], loader.allow_pickle, order=0)
    return present


def _save_changing(saver: Saver, value: Any, at: str) -> list[Any]:
    parts = {place: getattr(owner, name) for place, owner, name in changing_parts(value)}
    return [{place: saver.save(part, at + place) for place, part in parts.items()}]


def _fill_changing(loader: Loader, value: Any, parts: Any, present: Any, at: str) -> None:
    owners = {place: (owner, name) for place, owner, name in changing_parts(value)}
    for place, node in parts[0].items():
        owner, name = owners[place]
        part = loader.load(node, getattr(owner, name), at + place)
        loader.later(object.__setattr__, owner, name, part)


def _load_present(kind: str, what: str, loader: Loader, parts: Any, present: Any, at: str) -> Any:
    """Return the object that is present, which must be of ``kind``."""
    if kind_of(type(present)) != kind:
        raise StateError(f"{at} {what} when the state was saved")
    return present


def _load_enum(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    name, member = parts
    kind = type(present) if name_of(type(present)) == name else loader.class_named(name, at)
    if not issubclass(kind, enum.Enum):
        raise StateError(f"{at}: {name} is no enumeration")
    return kind[member]


def _save_pickle(saver: Saver, value: Any, at: str) -> list[Any]:
    what, data = f"{at} ({name_of(type(value))})", io.BytesIO()
    if is_env(type(value)):
        raise StateError(f"{what} keeps its state where it cannot be read")
    try:
        _NoEnvironments(data, pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as err:
        raise StateError(f"{what} cannot be saved: {err}") from err
    if not saver.allow_pickle:
        raise NeedsPickle(f"{what} can only be pickled: pass allow_pickle=True")
    return [what, as_tensor(data.getvalue())]


def _load_pickle(loader: Loader, parts: Any, present: Any, at: str) -> Any:
    if not loader.allow_pickle:
        raise NeedsPickle(f"{at} was pickled: pass allow_pickle=True if you trust the state")
    return pickle.loads(as_bytes(parts[1]))


class _NoEnvironments(pickle.Pickler):
    """Pickles objects that refer to no environment, which would be pickled with them."""

    def persistent_id(self, obj: Any) -> None:
        if is_env(type(obj)):
            raise TypeError(f"it refers to a {type(obj).__name__}")


_KINDS: dict[str, _Kind] = {
    "list": _Kind(_save_items, lambda *_: [], _fill_items),
    "deque": _Kind(
        lambda saver, value, at: [*_save_items(saver, value, at), value.maxlen],
        lambda loader, parts, present, at: collections.deque(maxlen=parts[1]),
        _fill_items,
    ),
    "set": _Kind(_save_items, lambda *_: set(), _fill_items),
    "tuple": _immutable(tuple),
    "size": _immutable(torch.Size),
    "frozenset": _immutable(frozenset),
    "dict": _Kind(_save_pairs, lambda *_: {}, _fill_pairs),
    "ordered": _Kind(_save_pairs, lambda *_: collections.OrderedDict(), _fill_pairs),
    "defaultdict": _Kind(_save_pairs, _load_default_dict, _fill_pairs),
    "named": _Kind(_save_named, _load_named, numbered=False),
    "bytes": _Kind(
        lambda saver, value, at: [as_tensor(value)],
        lambda loader, parts, present, at: as_bytes(parts[0]),
        numbered=False,
    ),
    "bytearray": _Kind(lambda saver, value, at: [as_tensor(value)], _load_bytearray),
    "array": _Kind(_save_array, _load_array, _fill_array),
    "scalar": _Kind(
        lambda saver, value, at: [value.dtype.str, value.item()],
        lambda loader, parts, present, at: np.dtype(parts[0]).type(parts[1]),
        numbered=False,
    ),
    "generator": _Kind(_save_generator, _load_generator),
    "randomstate": _by_methods(
        np.random.RandomState,
        lambda value: value.get_state(legacy=False),
        np.random.RandomState.set_state,
    ),
    "random": _by_methods(random.Random, random.Random.getstate, random.Random.setstate),
    "torchgenerator": _by_methods(
        torch.Generator, torch.Generator.get_state, torch.Generator.set_state
    ),
    "tensor": _Kind(lambda saver, value, at: [value.detach().clone()], _load_tensor),
    "tensordict": _Kind(_save_tensordict, _load_tensordict, numbered=False),
    "nontensor": _Kind(
        lambda saver, value, at: [saver.save(value.data, at), list(value.batch_size)],
        lambda loader, parts, present, at: NonTensorData(
            loader.load(parts[0], _ABSENT, at), batch_size=parts[1]
        ),
        numbered=False,
    ),
    "enum": _Kind(
        lambda saver, value, at: [name_of(type(value)), value.name], _load_enum, numbered=False
    ),
    "declared": _Kind(
        _save_changing,
        partial(_load_present, "declared", "is no space or spec, as it was"),
        _fill_changing,
    ),
    "simulator": _Kind(_save_simulator, partial(_load_same, "simulator"), _fill_simulator),
    "object": _Kind(_save_object, _load_object, _fill_object),
    "hooked": _Kind(_save_hooked, partial(_load_same, "hooked"), _fill_hooked),
    "resumable": _Kind(
        lambda saver, value, at: [value.snapshot(saver.allow_pickle)], _load_resumable
    ),
    "ours": _Kind(
        lambda saver, value, at: [],
        partial(_load_present, "ours", "was a function, a class or the like"),
        numbered=False,
    ),
    "pickle": _Kind(_save_pickle, _load_pickle),
}
