"""The parts of workers as bytes, and errors that name the part that cannot be sent."""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import cloudpickle
import torch
from torch import nn
from torch.multiprocessing import get_sharing_strategy

from gleanrl.core.by_value import ByValue
from gleanrl.core.errors import WORKER_NAME, ConfigError
from gleanrl.core.protocols import Source, SourceFactory
from gleanrl.envs.registrations import Registrations, registrations
from gleanrl.memory.shared import FileAddress, check_memory

_DEEPEST = 8
_ANYWHERE = ("cpu", "meta")
"""Devices that every process has."""
_AROUND = re.compile(r"^((args\[\d\]|factory|options)\.)+")
"""The way to a worker's record of arguments; users know the arguments in it."""


@dataclass(frozen=True, slots=True)
class Registering:
    """A `SourceFactory` that first makes the registrations of the process it comes from."""

    registered: Registrations
    script: types.FunctionType
    """Its globals are those of all functions of the script that came with it."""
    factory: SourceFactory

    def __call__(self, worker: int) -> Source:
        """Register, then build the source."""
        self.registered.restore()
        # torch.compile looks for globals of functions in the modules that these name.
        names, own = self.script.__globals__, sys.modules["__main__"]
        module = sys.modules.setdefault(names["__name__"], own)
        missing = (k for k in names.keys() - vars(module).keys() if k[:2] != "__")
        vars(module).update({k: names[k] for k in missing})
        return self.factory(worker)


class _Refused(Exception):
    """A tensor that must not travel; says why."""


_NOT_LOADED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes of tensors that torch pickles and then cannot load."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # no stubs
    """Pickles functions and classes of the script by value, and tensors of any dtype."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is ByValue:
            return ByValue, (obj.value,)
        if type(obj) is torch.Tensor and obj.dtype in _NOT_LOADED and obj.device.type == "cpu":
            return torch.from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)


class _Capturing(_Pickler):
    """Looks at tensors on the way.

    Parameters and buffers of modules travel as they are, on any device; other tensors are captured.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._of_modules: dict[int, Any] = {}
        """Buffers, and what parameters are over, by identity."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            reduced = cast("Any", obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            self._of_modules.update((id(part), part) for part in reduced[1])
            return reduced
        if isinstance(obj, nn.Module):
            self._of_modules.update((id(buffer), buffer) for buffer in obj._buffers.values())
        elif isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise _Refused(
                    f"a tensor of shape {tuple(obj.shape)} that is part of a gradient graph: "
                    "detach() it first"
                )
            if obj.device.type not in _ANYWHERE and id(obj) not in self._of_modules:
                raise _Refused(
                    f"a tensor of shape {tuple(obj.shape)} on {obj.device}: move it with .cpu()"
                )
        return super().reducer_override(obj)


class _Sharing(_Capturing):
    """Has tensors in shared memory, except those of modules, stay shared with the worker.

    Weights of a module in a worker are those of one version, so a worker has copies.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if type(obj) is torch.Tensor and id(obj) not in self._of_modules:
            return _by_reference(obj) or reduced
        return reduced


def _by_reference(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return a function, and arguments, that make ``tensor`` over the same memory in a worker.

    ``None`` if it is not in shared memory that has a file descriptor (``share_memory_()``), or if
    it is more than memory: a leaf with gradients, quantized, nested or conjugate. This process has
    to keep the tensor until the worker has called the function.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
        return None
    more = tensor.requires_grad, tensor.is_quantized, tensor.is_conj(), tensor.is_neg()
    if any(more) or not tensor.is_shared():  # type: ignore[no-untyped-call]  # torch's
        return None
    if get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]  # torch's
        return None
    file, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    if file < 0:  # a mapped file
        return None
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return _mapped, (FileAddress.of(file), nbytes, tensor.dtype, *place)


def _mapped(address: FileAddress, nbytes: int, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    """Return a tensor over the memory of the file at ``address``: its offset, shape and strides."""
    own = address.open()
    try:
        make: Any = torch.UntypedStorage
        storage = make._new_shared_fd_cpu(own, nbytes)  # as torch.multiprocessing does
    finally:
        os.close(own)
    return torch.empty(0, dtype=dtype).set_(storage, *place)


def pickled_each(
    factories: Sequence[SourceFactory], worker_name: str = WORKER_NAME, *, same_machine: bool = True
) -> list[bytes]:
    """Return the factory of every worker as bytes; on the ``same_machine`` they share memory."""
    dump = functools.partial(pickled, worker_name=worker_name, same_machine=same_machine)
    first, count = dump(0, factories[0]), len(factories)
    advice = "use fewer workers, or load large data inside create_env_fn and policy_factory"
    check_memory(
        2 * count * len(first),
        f"copies of policy and environments for {count} workers",
        advice,
        "memory",
    )
    return [first, *(dump(worker, factory) for worker, factory in enumerate(factories) if worker)]


def pickled(
    worker: int,
    factory: SourceFactory,
    worker_name: str = WORKER_NAME,
    *,
    same_machine: bool = True,
) -> bytes:
    """Return ``factory`` as bytes, with the Gymnasium environments registered here."""
    try:
        script = types.FunctionType((lambda: None).__code__, vars(sys.modules["__main__"]))
        dump = functools.partial(dumps, pickler=_Sharing if same_machine else _Capturing)
        return dump(Registering(registrations(dump), script, factory))
    except Exception as err:  # of the user's objects
        where, cause = _culprit(factory, err)
        kind = "" if isinstance(cause, _Refused) else f"{type(cause).__name__}: "
        raise ConfigError(
            f"what {worker_name.format(worker)} needs cannot be sent to a process: "
            f"{where or 'it'} ({kind}{cause}); make it inside create_env_fn or "
            "policy_factory, which run in the worker"
        ) from err


def dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    """Return ``value`` as bytes that ``pickle.loads`` reads."""
    script = sys.modules["__main__"]
    if script.__name__ == "__mp_main__":  # in a process that multiprocessing spawned
        cloudpickle.register_pickle_by_value(script)
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()


def _culprit(value: Any, error: Exception) -> tuple[str, Exception]:
    """Find the innermost part that cannot be pickled."""
    path = ""
    for _ in range(_DEEPEST):
        for name, part in _parts(value):
            try:
                dumps(part, _Capturing)
            except Exception as err:
                path, value, error = path + name, part, err
                break
        else:
            break
    return _AROUND.sub("", path.lstrip(".")), error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Name the parts of ``value``, the way a user would find them."""
    if isinstance(value, functools.partial):
        yield from ((f".args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from ((f".keywords[{name!r}]", arg) for name, arg in value.keywords.items())
        yield ".func", value.func
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((f" captures {name}", cell.cell_contents) for name, cell in cells)
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        yield from ((f" uses {name}", value.__globals__[name]) for name in names)
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, nn.Module):
        held = ("_modules", "_parameters", "_buffers")
        grown = {k: v for k, v in value._buffers.items() if v is not None and v.requires_grad}
        for table in (value._modules, value._parameters, grown):
            yield from ((f".{name}", part) for name, part in table.items())
        yield from ((f".{name}", part) for name, part in vars(value).items() if name not in held)
    elif isinstance(value, dict):
        yield from ((f"[{name!r}]", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    elif not isinstance(value, type | types.ModuleType):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
