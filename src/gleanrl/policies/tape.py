"""A list of calls without arguments that does one step of arithmetic in place.

Tensors here are made once. A lowering writes ordinary tensor code through a `Tape`; what it
computes is kept as the buffer into which every later replay computes again. Replaying a call costs
the kernel and nothing else: no allocation, no lookup, no Python frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import PolicyError
from gleanrl.core.protocols import Array


def array_of(tensor: torch.Tensor) -> Array | None:
    """Return a numpy array over the memory of ``tensor``, ``None`` where there can be none."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype is torch.bfloat16:
        return None
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True)
class Cell:
    """One entry of a step as rows of environments."""

    tensor: torch.Tensor
    """``[P, ...]``."""
    array: Array | None
    """The same memory as an array, ``None`` where there can be none."""

    @classmethod
    def of(cls, value: torch.Tensor, batch_dims: int) -> Cell:
        """See a value with ``batch_dims`` batch dimensions as rows."""
        tensor = value.unsqueeze(0) if batch_dims == 0 else value
        if batch_dims > 1:
            tensor = value.view(-1, *value.shape[batch_dims:])
        return cls(tensor, array_of(tensor))


_UFUNCS: dict[Any, np.ufunc] = {
    torch.add: np.add,
    torch.div: np.divide,
    torch.mul: np.multiply,
    torch.sub: np.subtract,
}
"""The same arithmetic, bit for bit, called in half the time; tells on rows as small as these."""


def _elementwise(
    fn: Callable[..., Any], args: tuple[Any, ...], result: torch.Tensor
) -> Callable[[], Any] | None:
    """Return ``fn`` over the same memory as a numpy call, ``None`` where there is none."""
    ufunc, out = _UFUNCS.get(fn), array_of(result)
    if ufunc is None or out is None:
        return None
    if not all(isinstance(arg, torch.Tensor) and arg.dtype == result.dtype for arg in args):
        return None
    arrays = [array_of(arg) for arg in args]
    if any(array is None for array in arrays):
        return None
    return partial(ufunc, *arrays, out)


@dataclass(slots=True)
class Check:
    """Folds one tensor over all steps, to be looked at once per rollout."""

    total: torch.Tensor
    start: float
    valid: Callable[[torch.Tensor], torch.Tensor]
    message: str

    def begin(self) -> None:
        """Forget the steps seen."""
        self.total.fill_(self.start)

    def finish(self) -> None:
        """Raise `PolicyError` if any step since `begin` was invalid."""
        if not bool(self.valid(self.total).all()):
            raise PolicyError(self.message)


class Tape:
    """Records calls by making them."""

    def __init__(self) -> None:
        """Start empty."""
        self.calls: list[Callable[[], Any]] = []
        self.checks: list[Check] = []

    def mark(self) -> tuple[int, int]:
        """Return a place to `cut` at."""
        return len(self.calls), len(self.checks)

    def cut(self, mark: tuple[int, int]) -> None:
        """Forget what was recorded since ``mark``; nothing else was changed by recording it."""
        del self.calls[mark[0] :], self.checks[mark[1] :]

    def __call__(self, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call ``fn``, which takes ``out``, and return the buffer every replay writes to."""
        result = fn(*args, **kwargs)
        fast = None if kwargs else _elementwise(fn, args, result)
        self.calls.append(fast or partial(fn, *args, **kwargs, out=result))
        return result

    def do(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn`` for its effect on tensors of this tape."""
        call = partial(fn, *args) if args else fn
        call()
        self.calls.append(call)

    def into(self, out: torch.Tensor, fn: Callable[..., Any], *args: Any) -> None:
        """Call ``fn``, which takes ``out``, into a tensor of this tape."""
        call = partial(fn, *args, out=out)
        call()
        self.calls.append(call)

    def fill(self, fn: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call ``fn``, which makes a new tensor, and return a buffer every replay copies it to."""
        buffer = fn().clone()

        def call() -> None:
            buffer.copy_(fn())

        self.calls.append(call)
        return buffer

    def check_finite(self, tensor: torch.Tensor, message: str) -> None:
        """Have the rollout end with `PolicyError` if ``tensor`` was NaN or infinite at any step."""
        self._fold(tensor, np.add, torch.add, Check(torch.zeros(0), 0.0, torch.isfinite, message))

    def check_above(self, tensor: torch.Tensor, least: float, message: str) -> None:
        """Have the rollout end with `PolicyError` if ``tensor`` was ever not above ``least``."""

        def valid(total: torch.Tensor) -> torch.Tensor:
            return total > least

        start = float("inf")
        self._fold(tensor, np.minimum, torch.minimum, Check(torch.zeros(0), start, valid, message))

    def _fold(
        self,
        tensor: torch.Tensor,
        fold: Callable[..., Any],
        tensor_fold: Callable[..., Any],
        check: Check,
    ) -> None:
        check.total = torch.full(
            tensor.shape, check.start, dtype=tensor.dtype, device=tensor.device
        )
        value, total = array_of(tensor), array_of(check.total)
        if value is None or total is None:
            self.calls.append(partial(tensor_fold, check.total, tensor, out=check.total))
        else:
            self.calls.append(partial(fold, total, value, out=total))
        self.checks.append(check)
