"""Calls of modules that run as they are, and what is copied in and out around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import Key, as_key, show
from gleanrl.policies.probe import call_on


def tensor_call(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    names: Sequence[str] | None,
    cells: Sequence[torch.Tensor | None],
    keys: Sequence[Key],
    lent: bool,
) -> Callable[[], None]:
    """Call ``fn`` and copy what it returns; on copies unless its arguments can be ``lent``."""
    wanted = [(key, cell) for key, cell in zip(keys, cells, strict=True)]

    def call() -> None:
        values = args if lent else [arg.clone() for arg in args]
        out = fn(*values) if names is None else fn(**dict(zip(names, values, strict=True)))
        if not isinstance(out, tuple):
            out = _as_tuple(out, keys)
        for (key, cell), value in zip(wanted, out, strict=True):
            if cell is not None:
                _copy(key, cell, value)

    return call


def _as_tuple(out: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, TensorDictBase):
        return tuple(out.get(key) for key in keys)
    if isinstance(out, Mapping):
        values = {as_key(key): value for key, value in out.items()}
        return tuple(values.get(key) for key in keys)
    return () if out is None else (out,)


def tensordict_call(
    module: Callable[[Any], Any],
    entries: Mapping[Key, torch.Tensor],
    batch_shape: tuple[int, ...],
    constants: Collection[Key],
    cells: Mapping[Key, torch.Tensor],
) -> Callable[[], None]:
    """Call ``module`` on a TensorDict of its own (it may keep what it gets), copy what it wrote."""
    fixed = {key[0]: value for key, value in entries.items() if key in constants}
    fresh = [(key[0], value) for key, value in entries.items() if key not in constants]
    written = [(key, key if len(key) > 1 else key[0], cell) for key, cell in cells.items()]
    size = torch.Size(batch_shape)

    def flat() -> TensorDict:
        own = {name: value.clone() for name, value in fresh}
        return TensorDict({**fixed, **own}, batch_size=size)

    template = TensorDict({}, batch_size=size)
    for key, value in entries.items():
        template.set(key, value)
    make = flat if all(len(key) == 1 for key in entries) else template.clone

    def call() -> None:
        out = call_on(module, make())
        for key, name, cell in written:
            _copy(key, cell, out.get(name))

    return call


def _copy(key: Key, cell: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise PolicyError(f"the policy wrote {show(key)} before, and now {value!r:.100}")
    if value.shape != cell.shape or value.dtype != cell.dtype:
        raise PolicyError(
            f"the policy wrote {show(key)} as {value.dtype} of shape {tuple(value.shape)}; before, "
            f"it was {cell.dtype} of shape {tuple(cell.shape)}, and what is collected cannot change"
        )
    cell.copy_(value)
