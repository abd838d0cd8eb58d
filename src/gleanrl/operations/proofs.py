"""Whether a call does what a library wrote, and nothing else.

All knowledge of how ``nn.Module`` works inside is here. A module becomes recorded tensor calls only
where its classes and their methods are a library's own (`is_genuine`), nothing is overridden on
class or instance, and there are no hooks (`is_plain`). What is inside an environment is stepped
directly only where nobody replaced a method: in a subclass, on the instance, or on the class itself
(`unmodified`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import operator
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams, skip_existing
from torch import nn
from torch.utils._device import DeviceContext

# nn.Module offers no public way to ask for hooks; calling a module whose hooks are all empty is
# calling its ``forward`` and nothing else.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
_LIBRARIES = (
    "torch",
    "tensordict",
    "torchrl",
    "gleanrl",
    "typing_extensions",
    "warnings",
    "pyvers",
)
_LAYERS = (
    "torch.nn.",
    "tensordict.nn.",
    "torchrl.modules.models.",
    "torchrl.modules.tensordict_module.rnn",
)
_VERSIONED = "pyvers.implement_for._RegisterableFunction"
"""The decorator of TorchRL's methods for several versions of a library."""
_BUILT_IN = ("builtins", "typing", "abc", "collections")


def functions_of_modules() -> tuple[Any, ...]:
    """Return the functions that modules call, as they are now."""
    return *_MODULE_FUNCTIONS(torch.nn.functional), *_TORCH_FUNCTIONS(torch)


_FUNCTIONS = functions_of_modules()


@functools.lru_cache(maxsize=16)
def has_source(digest: str, *functions: Any) -> bool:
    """Tell whether the SHA-256 of the source of functions, or code objects, begins like that."""
    with contextlib.suppress(OSError, TypeError):
        source = "".join(map(inspect.getsource, functions))
        return hashlib.sha256(source.encode()).hexdigest().startswith(digest)
    return False


def functions_are_genuine() -> bool:
    """Tell whether the functions that modules call are still those of the import."""
    return functions_of_modules() == _FUNCTIONS


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
    if qualified(type(value)) == _VERSIONED:
        value = value.__wrapped__
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


C = TypeVar("C", bound=type)


class Methods:
    """Methods and properties of a class at the construction of this object."""

    def __init__(self, cls: type, names: Iterable[str] | None = None) -> None:
        """Remember the methods and properties called ``names``; all by default."""
        self._names = frozenset(names or (name for name in dir(cls) if _counts(cls, name)))
        self._read = operator.attrgetter(*self._names)
        self._found = self._read(cls)

    def kept_by(self, obj: Any) -> bool:
        """Tell whether neither ``obj`` nor its class, a subclass, replaces any of them."""
        return bool(self._read(type(obj)) == self._found) and self._names.isdisjoint(vars(obj))


def _counts(cls: type, name: str) -> bool:
    value = inspect.getattr_static(cls, name)
    if name.startswith("__") and name != "__getattribute__":
        return False
    if vars(nn.Module).get(name) is value:  # none of these is called while stepping
        return False
    # A class method, looked up on a subclass, is another object; they only construct.
    return not isinstance(value, classmethod) and (callable(value) or isinstance(value, property))


_WRITTEN: dict[type, Methods] = {}


def remembered(cls: C) -> C:
    """Remember the methods and properties of ``cls`` as they are now. A class decorator."""
    _WRITTEN[cls] = Methods(cls)
    return cls


def unmodified(obj: Any) -> bool:
    """Tell whether ``obj`` is of a class marked by `remembered`, and no method was replaced.

    A subclass that only adds to its class (a constructor, further methods) passes.
    """
    known = next((_WRITTEN[cls] for cls in type(obj).__mro__ if cls in _WRITTEN), None)
    return known is not None and known.kept_by(obj)


# -- modules ---------------------------------------------------------------------------------------


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


def is_made_of_layers(fn: Any) -> bool:
    """Tell whether ``fn`` is a module all code of which is that of libraries."""
    return isinstance(fn, nn.Module) and all(map(_is_layer, fn.modules()))


def _is_layer(part: nn.Module) -> bool:
    return (
        type(part).__module__.startswith(_LAYERS)
        and not isinstance(part, TensorDictModuleBase)
        and is_plain(part)
        and all(map(_is_function, filter(callable, vars(part).values())))
        # Tensors of a TensorDict can be replaced unnoticed.
        and (
            isinstance(part, TensorDictParams)
            or not any(isinstance(value, TensorDictBase) for value in vars(part).values())
        )
        and all(map(_is_dense, [*part.parameters(recurse=False), *part.buffers(recurse=False)]))
    )


def _is_function(value: Any) -> bool:
    """Tell whether ``value`` is a function of torch's, or a class (no call makes instances)."""
    home = getattr(value, "__globals__", {"__name__": "torch."})["__name__"]
    return isinstance(value, BuiltinFunctionType | FunctionType | type) and home.startswith("torch")


def _is_dense(weight: Any) -> bool:
    """Tell whether ``weight`` is numbers in memory, and no tensor with a mind of its own."""
    return (
        type(weight) in (nn.Parameter, torch.Tensor)
        and weight.layout is torch.strided
        and not weight.is_meta
    )
