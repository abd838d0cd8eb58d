"""Calls of functions of the user's on tensors, and what is copied in and out around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import Key, as_key, format_key


def tensor_call(
    fn: Callable[..., Any],
    args: Sequence[torch.Tensor],
    names: Sequence[str] | None,
    cells: Sequence[torch.Tensor | None],
    keys: Sequence[Key],
    lent: bool,
) -> Callable[[], None]:
    """Call ``fn`` and copy what it returns; on copies unless its arguments can be ``lent``.

    What ``fn`` writes into its arguments would reach other readers of the same entries, who are not
    looked for here: that is an error.
    """
    wanted = [(key, cell) for key, cell in zip(keys, cells, strict=True)]

    def call() -> None:
        values = args if lent else [arg.clone() for arg in args]
        out = fn(*values) if names is None else fn(**dict(zip(names, values, strict=True)))
        if not lent:
            for value, arg in zip(values, args, strict=True):
                _check_unwritten(value, arg)
        if not isinstance(out, tuple):
            out = _as_tuple(out, keys)
        for (key, cell), value in zip(wanted, out, strict=True):
            if cell is not None:
                _copy(key, cell, value)

    return call


def _check_unwritten(value: torch.Tensor, before: torch.Tensor) -> None:
    if not value.is_inference() and not value._version:
        return
    if not torch.equal(value, before) and not _same_numbers(value, before):
        raise PolicyError(
            "the policy changed a tensor that it was called with, which it did not do in its first "
            "call; pass fast=False to have it called as it is"
        )


def _same_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    floating = one.is_floating_point() or one.is_complex()
    return floating and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _as_tuple(out: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
    if isinstance(out, torch.Tensor):
        return (out,)
    if isinstance(out, TensorDictBase):
        return tuple(out.get(key) for key in keys)
    if isinstance(out, Mapping):
        values = {as_key(key): value for key, value in out.items()}
        return tuple(values.get(key) for key in keys)
    return () if out is None else (out,)


def _copy(key: Key, cell: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise PolicyError(f"the policy wrote {format_key(key)} before, and now {value!r:.100}")
    if value.shape != cell.shape or value.dtype != cell.dtype:
        raise PolicyError(
            f"the policy wrote {format_key(key)} as {value.dtype} of shape {tuple(value.shape)}; "
            f"before, it was {cell.dtype} of shape {tuple(cell.shape)}, and what is collected "
            "cannot change"
        )
    cell.copy_(value)
