"""Notices changes of modules, specs and settings that recorded calls have read.

A `Watch` compares the class and bases of every module, its attributes with the contents of lists,
tuples and dicts in them, the memory of weights and buffers, parts of specs, bounds by value, the
default dtype, ``composite_lp_aggregate`` and functions of torch. Recorded calls read weights,
buffers, epsilon and sigma at every step. docs/migration/torchrl_environments.md lists the modules.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from types import MethodType
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictParams, composite_lp_aggregate
from tensordict.nn.probabilistic import DETERMINISTIC_REGISTER
from torch import nn

from gleanrl.core.raw_bytes import raw_bytes
from gleanrl.operations.proofs import functions_of_modules, is_genuine

# Parts of a module that calling it does not read.
_NOT_READ = {
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
_LISTS = (list, tuple, set, frozenset, deque)
_SPECS = (
    "torchrl.data.",
    "torchrl.modules.tensordict_module.exploration",
    "gleanrl.envs.specs",
    "gleanrl.policies.random",
)
"""Where specs are, and random policies, which are specs with a key."""
_FIXED = (bool, int, float, str, torch.device, torch.dtype, torch.Size, type(None), MethodType)
"""Types of immutable values in specs."""
_MAX_LENGTH = 1024
"""Larger containers and settings are `Unwatchable`."""


class Unwatchable(TypeError):
    """What recorded calls read cannot be compared later."""


class Watch:
    """Notices changes of the objects and values that were read."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._states: list[Any] = []
        self._parts: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._weights: set[int] = set()
        """Which of ``_tensors`` are weights and buffers, by identity: their values may change."""
        self._memory: list[list[Any]] = [[], [], [], []]
        self._settings: list[tuple[Callable[[], Any], Any]] = []
        self._around = _surroundings()
        self.hold(DETERMINISTIC_REGISTER)

    def add(self, module: nn.Module) -> None:
        """Remember ``module`` as it is now (not those below it), or raise `Unwatchable`."""
        if id(module) in self._seen:
            return
        if isinstance(module, TensorDictParams):
            self._store(module)
            return
        self._object(module)
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                self._part(value)
                self._part(value.values())
                for tensor in value.values():
                    if tensor is not None:
                        self._weight(tensor)
            elif name not in _NOT_READ:
                self.hold(value)

    def _store(self, store: TensorDictParams) -> None:
        """Remember the weights in ``store``; its other attributes tell about calls of it."""

        def read() -> list[int]:
            parts = vars(store)["_parameters"], vars(store)["_buffers"]
            return [id(tensor) for part in parts for tensor in part.values()]

        self._seen[id(store)] = store
        self.add_class(type(store))
        self.setting(read)
        for tensor in chain(store.parameters(), store.buffers()):
            self._weight(tensor)

    def add_class(self, kind: type) -> None:
        """Remember ``kind`` and its bases as they are now."""
        for cls in kind.__mro__[:-1]:
            if id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                self._part(vars(cls).values())
                if not is_genuine(cls):
                    for value in vars(cls).values():
                        self.hold(value)

    def add_spec(self, value: Any) -> None:
        """Remember ``value``, a spec or a random policy, with all that it consists of.

        Raises:
            Unwatchable: a part is of no class of a library, or has a method of its own.
        """
        if id(value) in self._seen or isinstance(value, _FIXED):
            return
        parts: Collection[Any] = ()
        if isinstance(value, (torch.Tensor, *_LISTS, dict)):
            self.hold(value)
            if not isinstance(value, torch.Tensor):
                parts = value.values() if isinstance(value, dict) else value
        else:
            kind, state = type(value), vars(value)
            own = [name for name, one in state.items() if callable(one) and name != "encode"]
            known = kind.__module__.startswith(_SPECS) and all(map(is_genuine, kind.__mro__[:-1]))
            if own or not known:
                raise Unwatchable(f"{kind.__name__} in a spec is no library's, or has {own}")
            self._object(value)
            parts = state.values()
        for part in parts:
            self.add_spec(part)

    def _object(self, value: Any) -> None:
        self._seen[id(value)] = value
        self._objects.append(value)
        self._kinds.append(type(value))
        self._states.append(vars(value))
        self.add_class(type(value))
        self._part(vars(value).values())

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The weights, and the tensors whose values are compared."""
        return self._tensors

    def changed(self) -> bool:
        """Tell whether anything was replaced; weights changed in place are no change."""
        try:
            return not self._same()
        except (RuntimeError, TypeError, ValueError):
            return True  # What a tensor became has no memory to compare.

    def _same(self) -> bool:
        return (
            list(map(len, self._parts)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._parts), self._values))
            and all(map(operator.is_, map(type, self._objects), self._kinds))
            and all(map(operator.is_, map(vars, self._objects), self._states))
            and _memory(self._tensors) == self._memory
            and all(read() == then for read, then in self._settings)
            and _surroundings() == self._around
        )

    def _part(self, part: Collection[Any]) -> None:
        self._parts.append(part)
        self._lengths.append(len(part))
        self._values.extend(part)

    def hold(self, value: Any) -> None:
        """Remember the contents of ``value``, if they can change in place."""
        is_dict = isinstance(value, dict)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
            if id(value) not in self._weights and not value.is_meta:
                self.setting(_reader(value.detach()))
        elif isinstance(value, np.ndarray):
            self.setting(_reader(torch.from_numpy(value)))
        elif (is_dict or isinstance(value, _LISTS)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            if len(value) > _MAX_LENGTH:
                raise Unwatchable(f"{len(value)} values in one attribute are too many to watch")
            self._part(value)
            if is_dict:
                self._part(value.values())
            for one in value.values() if is_dict else value:
                self.hold(one)

    def setting(self, read: Callable[[], Any]) -> None:
        """Remember what ``read`` returns."""
        self._settings.append((read, read()))

    def _weight(self, tensor: torch.Tensor) -> None:
        self._weights.add(id(tensor))
        self._tensor(tensor)

    def _tensor(self, tensor: torch.Tensor) -> None:
        for column, value in zip(self._memory, _memory([tensor]), strict=True):
            column.extend(value)
        self._tensors.append(tensor)


def _memory(tensors: Collection[torch.Tensor]) -> list[list[Any]]:
    """Return where the memory of ``tensors`` is and how they read it, column by column."""
    return [
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.stride, tensors)),
        list(map(_SHAPE, tensors)),
        list(map(_DTYPE, tensors)),
    ]


_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def _reader(tensor: torch.Tensor) -> Callable[[], bytes]:
    """Return a function that reads the values of a small tensor."""
    if tensor.numel() > _MAX_LENGTH:
        raise Unwatchable(f"a setting of {tensor.numel()} numbers is too large to watch")

    def read() -> bytes:
        return raw_bytes(tensor.cpu().contiguous()).tobytes()

    return read


def _surroundings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), composite_lp_aggregate(nowarn=True), *functions_of_modules()


# -- tensors ---------------------------------------------------------------------------------------


def writes_so_far(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was written in place, 0 where nothing counts that."""
    return 0 if tensor.is_inference() else tensor._version


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same numbers in memory."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same, bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
