"""What a policy is made of, what its parts read, and whether they still are what they were.

All knowledge of how ``nn.Module`` and TensorDict's containers work inside is here. A unit of a
policy becomes recorded tensor calls only where these are proven equal to calling it: its classes
and their methods are a library's own (`is_genuine`), nothing is overridden on class or instance,
there are no hooks, and all it reads is watched.

What a unit reads:

==================================  ==============================================================
unit                                reads
==================================  ==============================================================
every module                        its class and bases, ``training``, hooks, the instance's
                                    ``__dict__``, and what lists, tuples and dicts in there hold
layers                              memory of weights and buffers; their values at every step
``TensorDictModule``                ``module``, keys, ``method``, ``inplace``, keyword arguments
``ProbabilisticTensorDictModule``   keys, ``distribution_class``, ``distribution_kwargs``, flags
``QValueModule``                    ``action_space``, ``action_mask_key``, keys
distributions                       classes of all that an instance is built of; bounds by value
sequences and wrappers              ``_modules``, keys, flags
the surroundings                    default dtype, ``composite_lp_aggregate``, functions of torch
==================================  ==============================================================
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModuleWrapper,
    TensorDictSequential,
    composite_lp_aggregate,
    skip_existing,
)
from tensordict.nn.probabilistic import DETERMINISTIC_REGISTER
from torch import nn
from torch.utils._device import DeviceContext

# nn.Module offers no public way to ask for hooks; calling a module whose hooks are all empty is
# calling its ``forward`` and nothing else.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# How far modules are looked for behind functions, methods and partials.
_DEPTH = 3
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
_DICTS = dict
_LISTS = (list, tuple, set, frozenset, deque)
_MAX_LENGTH = 1024
"""What holds more is not compared at every rollout."""


# -- classes ---------------------------------------------------------------------------------------


_MODULE_FUNCTIONS = operator.attrgetter(
    *("linear", "dropout", "layer_norm", "rms_norm", "softmax", "log_softmax", "gelu"),
    *("softplus", "softsign", "relu", "relu6", "hardtanh", "elu", "celu", "selu", "silu"),
    *("mish", "leaky_relu"),
)
_TORCH_FUNCTIONS = operator.attrgetter("tanh", "sigmoid", "normal", "multinomial")
# What a subclass may define without changing what a call does.
_HARMLESS = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__repr__"}
_HARMLESS |= {"__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
_HARMLESS |= {"__abstractmethods__", "_abc_impl", "__weakref__", "__dict__", "__str__"}
_HARMLESS |= {"extra_repr", "train", "eval", "reset_parameters", "__getstate__", "__setstate__"}
_LIBRARIES = ("torch", "tensordict", "torchrl", "gleanrl", "typing_extensions", "warnings")
_BUILT_IN = ("builtins", "typing", "abc")


def _functions() -> tuple[Any, ...]:
    return *_MODULE_FUNCTIONS(torch.nn.functional), *_TORCH_FUNCTIONS(torch)


_FUNCTIONS = _functions()


def functions_are_genuine() -> bool:
    """Tell whether the functions that modules call are still those of the import."""
    return _functions() == _FUNCTIONS


def is_genuine(kind: type) -> bool:
    """Tell whether ``kind`` is a library's class whose methods all come from files of libraries."""
    library = kind.__module__.partition(".")[0]
    return library in _BUILT_IN or (
        library in _LIBRARIES and all(map(_is_librarys, vars(kind).values()))
    )


def _is_librarys(value: Any) -> bool:
    """Tell whether a class attribute is no method, or one that a library wrote."""
    if isinstance(value, property):
        return all(_is_librarys(one) for one in (value.fget, value.fset) if one is not None)
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return isinstance(value, type) or not callable(value)
    # Not ``__module__``, which wrappers copy.
    home, inner = value.__globals__.get("__name__", ""), getattr(value, "__wrapped__", None)
    return home.partition(".")[0] in _LIBRARIES and (inner is None or _is_librarys(inner))


def _overrides(mro: tuple[type, ...], name: str) -> bool:
    """Tell whether ``mro[0]`` replaces what the rest of ``mro`` means by ``name``."""
    mine = vars(mro[0])[name]
    inherited = [vars(kind)[name] for kind in mro[1:] if name in vars(kind)]
    return bool(inherited) and inherited[0] is not mine


def is_plain(module: nn.Module) -> bool:
    """Tell whether calling ``module`` is the same as calling its class's ``forward``.

    And whether that is the library's: no class or attribute of the user's replaces anything that a
    call uses.
    """
    kind, state = type(module), vars(module)
    if state.get("_compiled_call_impl") is not None or any(state.get(name) for name in _HOOKS):
        return False
    registered = {
        name for part in ("_parameters", "_buffers", "_modules") for name in state.get(part) or ()
    }
    for index, cls in enumerate(kind.__mro__[:-1]):
        if is_genuine(cls):
            continue
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            return False  # Patched.
        own = vars(cls).keys() - _HARMLESS
        if own & registered or any(_overrides(kind.__mro__[index:], name) for name in own):
            return False
        if any(isinstance(vars(cls)[name], property) for name in own & state.keys()):
            return False
    return not any(callable(getattr(kind, name, None)) for name in state)


# -- what a policy is made of ----------------------------------------------------------------------


def may_lower(device: torch.device) -> bool:
    """Tell whether nothing in force around modules would change what a bare call does.

    Only on the CPU: there the Python around a call costs more than its arithmetic.
    """
    try:
        return (
            device.type == "cpu"
            and not any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS)
            and not skip_existing()
            and not torch.is_autocast_enabled("cpu")
            and not nn.utils.parametrize._cache_enabled
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and (not torch._C._len_torch_function_stack() or _only_places())
        )
    except AttributeError:
        return False  # This torch says none of it where others do.


def _only_places() -> bool:
    """Tell whether the modes in force only say that new tensors go to the CPU, as they do."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    return all(type(mode) is DeviceContext and mode.device.type == "cpu" for mode in modes)


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


# -- what was read ---------------------------------------------------------------------------------


class Unwatchable(TypeError):
    """What a unit reads cannot be compared later."""


class Watch:
    """Notices when what was read is no longer what it was."""

    def __init__(self) -> None:
        """Watch nothing but the surroundings yet."""
        self._seen: dict[int, Any] = {}
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._states: list[Any] = []
        self._empty: list[Collection[Any]] = []
        self._parts: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._memory: list[list[Any]] = [[], [], [], []]
        self._settings: list[tuple[Callable[[], bytes], bytes]] = []
        self._around = _surroundings()
        self._hold(DETERMINISTIC_REGISTER)

    def add(self, module: nn.Module) -> None:
        """Remember ``module`` as it is now (not the modules below it).

        Raises:
            Unwatchable: an attribute cannot be compared later.
        """
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        state = vars(module)
        self._objects.append(module)
        self._kinds.append(type(module))
        self._states.append(state)
        self.add_class(type(module))
        self._part(state.values())
        for name, value in state.items():
            if name in ("_parameters", "_buffers"):
                self._part(value)
                self._part(value.values())
                for tensor in value.values():
                    if tensor is not None:
                        self._tensor(tensor)
            elif name not in _NOT_READ:
                self._hold(value)

    def add_class(self, kind: type) -> None:
        """Remember ``kind`` and its bases as they are now."""
        for cls in kind.__mro__[:-1]:
            if id(cls) not in self._seen:
                self._seen[id(cls)] = cls
                self._part(vars(cls).values())
                if not is_genuine(cls):
                    for value in vars(cls).values():
                        self._hold(value)

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
            not any(self._empty)
            and list(map(len, self._parts)) == self._lengths
            and all(map(operator.is_, chain.from_iterable(self._parts), self._values))
            and all(map(operator.is_, map(type, self._objects), self._kinds))
            and all(map(operator.is_, map(vars, self._objects), self._states))
            and _memory(self._tensors) == self._memory
            and all(read() == then for read, then in self._settings)
            and _surroundings() == self._around
        )

    def _part(self, part: Collection[Any]) -> None:
        if not part:
            self._empty.append(part)
            return
        self._parts.append(part)
        self._lengths.append(len(part))
        self._values.extend(part)

    def _hold(self, value: Any) -> None:
        """Remember what ``value`` holds, if it can change in place."""
        is_dict = isinstance(value, _DICTS)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
            self._setting(_reader(value.detach()))
        elif isinstance(value, np.ndarray):
            self._setting(_reader(torch.from_numpy(value)))
        elif (is_dict or isinstance(value, _LISTS)) and id(value) not in self._seen:
            self._seen[id(value)] = value
            if len(value) > _MAX_LENGTH:
                raise Unwatchable(f"{len(value)} values in one attribute are too many to watch")
            self._part(value)
            if is_dict:
                self._part(value.values())
            for one in value.values() if is_dict else value:
                self._hold(one)

    def _setting(self, read: Callable[[], bytes]) -> None:
        self._settings.append((read, read()))

    def _tensor(self, tensor: torch.Tensor) -> None:
        for column, value in zip(self._memory, _memory([tensor]), strict=True):
            column.extend(value)
        self._tensors.append(tensor)


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
    """Return what reads the values of a small tensor."""
    if tensor.numel() > _MAX_LENGTH:
        raise Unwatchable(f"a setting of {tensor.numel()} numbers is too large to watch")

    def read() -> bytes:
        return tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

    return read


def _surroundings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), composite_lp_aggregate(nowarn=True), *_functions()
