"""A list of calls without arguments that does one step of arithmetic in place.

Tensors here are made once. A lowering writes ordinary tensor code through an `OpRecorder`; each
result is kept as the buffer into which every later replay computes again. Replaying a call costs
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
from gleanrl.core.window import Array


class Unknown(Exception):
    """What a unit does is not known here: it is called as it is."""


def require(known: bool) -> None:
    """Raise `Unknown` unless something is ``known`` to be so."""
    if not known:
        raise Unknown


def array_of(tensor: torch.Tensor) -> Array | None:
    """Return a numpy array over the memory of ``tensor``, ``None`` where there can be none."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.dtype is torch.bfloat16:
        return None
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of one entry of a step, as rows of environments."""

    tensor: torch.Tensor
    """``[P, ...]``."""
    array: Array | None
    """The same memory as an array, ``None`` where there can be none."""

    @classmethod
    def of(cls, value: torch.Tensor, batch_dims: int) -> Slot:
        """See a value with ``batch_dims`` batch dimensions as rows."""
        tensor = value.unsqueeze(0) if batch_dims == 0 else value
        if batch_dims > 1:
            tensor = value.view(-1, *value.shape[batch_dims:])
        return cls(tensor, array_of(tensor))


# The same arithmetic, bit for bit, called in half the time; tells on rows as small as these.
_UFUNCS: dict[Any, np.ufunc] = {
    torch.add: np.add,
    torch.div: np.divide,
    torch.mul: np.multiply,
    torch.sub: np.subtract,
}


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


class OpRecorder:
    """Records calls by making them."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.checks: list[Check] = []

    def mark(self) -> tuple[int, int]:
        """Return a place to `cut` at."""
        return len(self.calls), len(self.checks)

    def cut(self, mark: tuple[int, int]) -> None:
        """Forget what was recorded since ``mark``; nothing else was changed by recording it."""
        del self.calls[mark[0] :], self.checks[mark[1] :]

    def __call__(self, fn: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Call ``fn``, which takes ``out``, and return the buffer every replay writes to."""
        result = fn(*args)
        self.calls.append(_elementwise(fn, args, result) or partial(fn, *args, out=result))
        return result

    def do(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call ``fn`` for its effect on tensors of this recorder."""
        call = partial(fn, *args, **kwargs) if args or kwargs else fn
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
        self._fold(tensor, np.add, torch.add, 0.0, torch.isfinite, message)

    def check_above(self, tensor: torch.Tensor, least: float, message: str) -> None:
        """Have the rollout end with `PolicyError` if ``tensor`` was ever not above ``least``."""

        def valid(total: torch.Tensor) -> torch.Tensor:
            return total > least

        self._fold(tensor, np.minimum, torch.minimum, float("inf"), valid, message)

    def _fold(
        self,
        tensor: torch.Tensor,
        fold: Callable[..., Any],
        tensor_fold: Callable[..., Any],
        start: float,
        valid: Callable[[torch.Tensor], torch.Tensor],
        message: str,
    ) -> None:
        total = torch.full(tensor.shape, start, dtype=tensor.dtype, device=tensor.device)
        values, totals = array_of(tensor), array_of(total)
        if values is None or totals is None:
            self.calls.append(partial(tensor_fold, total, tensor, out=total))
        else:
            self.calls.append(partial(fold, totals, values, out=totals))
        self.checks.append(Check(total, start, valid, message))
