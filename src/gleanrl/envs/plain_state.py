"""The state of environments as plain data: numbers, strings, lists, dicts and tensors.

An environment is a graph of Python objects. Everything in it that can change is saved: attributes,
containers, arrays, generators, simulators. A state is loaded into the objects of an environment
that was made alike, so that no constructor is called and no module imported. Functions, classes,
renderers and the like stay those of the environment that loads.

Each part that is no number or string is a list, ``[kind, ...]``. Parts that others may refer to
have a number.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

from gleanrl.envs.simulators import NeedsPickle, StateError, as_tensor, simulator_of
from gleanrl.envs.state_kinds import (
    LINKS,
    Node,
    attributes_of,
    changing_parts,
    is_env,
    kind_of,
    name_of,
)

Save: TypeAlias = Callable[["Saver", Any, str], Node]
_SCALARS = frozenset({type(None), bool, int, float, str})
_OF_NUMBERS = ("PCG64", "PCG64DXSM")
"""Generators whose state is plain data as it is."""
_BESIDE_HOOKS = ("_np_random", "action_space", "observation_space")
"""Attributes that are saved beside the state that a user's ``get_state`` returns."""


def save_state(value: Any, allow_pickle: bool = False, at: str = "env") -> Node:
    """Return the state of an environment, or of a list of them, which errors call ``at``.

    Raises:
        StateError: names a part whose state cannot be saved.
        NeedsPickle: names a part that can only be pickled.
    """
    return Saver(allow_pickle).save(value, at)


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
        name = kind_of(kind)
        return [name, *_SAVE[name](self, value, at)]

    def number(self, value: Any) -> int:
        """Return the number by which later parts refer to ``value``."""
        number = self._numbers[id(value)] = len(self._kept)
        self._kept.append(value)
        return number


def _save_items(saver: Saver, value: Any, at: str) -> Node:
    return [
        [
            item if type(item) in _SCALARS else saver.save(item, f"{at}[{i}]")
            for i, item in enumerate(value)
        ]
    ]


def _save_numbered(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    more = [value.maxlen] if isinstance(value, collections.deque) else []
    return [number, *_save_items(saver, value, at), *more]


def _save_dict(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    pairs = [
        [
            key if type(key) in _SCALARS else saver.save(key, at),
            part if type(part) in _SCALARS else saver.save(part, f"{at}[{key!r}]"),
        ]
        for key, part in value.items()
    ]
    return [number, pairs]


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
    state, number = value.bit_generator.state, saver.number(value)
    name = state["bit_generator"]
    return [number, name, state if name in _OF_NUMBERS else saver.save(state, at)]


def _save_object(saver: Saver, value: Any, at: str) -> Node:
    attributes = attributes_of(value)
    for name in LINKS if isinstance(value, nn.Module) else ():
        attributes.pop(name, None)
    return _save_attributes(saver, value, attributes, at)


def _save_hooked(saver: Saver, value: Any, at: str) -> Node:
    beside = {k: v for k, v in attributes_of(value).items() if k in _BESIDE_HOOKS}
    saved = _save_attributes(saver, value, beside, at)
    return [*saved, saver.save(value.get_state(), f"{at}.get_state()")]


def _save_attributes(saver: Saver, value: Any, attributes: Mapping[str, Any], at: str) -> Node:
    number = saver.number(value)
    saved = {
        name: part if type(part) in _SCALARS else saver.save(part, f"{at}.{name}")
        for name, part in attributes.items()
        if type(part) in _SCALARS or _own(part)
    }
    return [number, name_of(type(value)), saved]


def _own(value: Any) -> bool:
    """Tell whether an attribute belongs to the state, and not to the making of an environment."""
    kind = kind_of(type(value))
    if kind == "declared":
        return any(getattr(owner, name) is not None for _, owner, name in changing_parts(value))
    return kind != "ours"


def _save_changing(saver: Saver, value: Any, at: str) -> Node:
    number = saver.number(value)
    parts = {place: getattr(owner, name) for place, owner, name in changing_parts(value)}
    return [number, {place: saver.save(part, at + place) for place, part in parts.items()}]


def _save_simulator(saver: Saver, value: Any, at: str) -> Node:
    simulator = simulator_of(type(value))
    assert simulator is not None
    return [saver.number(value), name_of(type(value)), simulator[0](value)]


def _save_tensordict(saver: Saver, value: Any, at: str) -> Node:
    if isinstance(value, LazyStackedTensorDict):
        parts = [saver.save(part, at) for part in value.tensordicts]
        return ["stack", value.stack_dim, parts]
    if type(value) is not TensorDict:
        raise StateError(f"{at} ({name_of(type(value))}) cannot be saved")
    entries = {name: saver.save(part, f"{at}[{name!r}]") for name, part in value.items()}
    device = None if value.device is None else str(value.device)
    return ["plain", list(value.batch_size), list(value.names), device, entries]


def _save_refused(saver: Saver, value: Any, at: str) -> Node:
    raise StateError(f"{at} ({name_of(type(value))}) belongs to this process and cannot be saved")


def _save_resumable(saver: Saver, value: Any, at: str) -> Node:
    return [saver.number(value), value.snapshot(saver.allow_pickle)]


def _save_pickle(saver: Saver, value: Any, at: str) -> Node:
    what, data = f"{at} ({name_of(type(value))})", io.BytesIO()
    if is_env(type(value)):
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
        if is_env(type(obj)):
            raise TypeError(f"it refers to a {type(obj).__name__}")


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
    "enum": lambda saver, value, at: [name_of(type(value)), value.name],
    "named": lambda s, value, at: [name_of(type(value)), *_save_items(s, value, at)],
    "declared": _save_changing,
    "simulator": _save_simulator,
    "object": _save_object,
    "hooked": _save_hooked,
    "resumable": _save_resumable,
    "ours": lambda saver, value, at: [],
    "refused": _save_refused,
    "pickle": _save_pickle,
}
