"""Tensor specs: the set of values one tensor may take.

The names and meanings are those TorchRL users know (``Bounded``, ``Categorical``, ...); the methods
are the common core of the two: ``shape``, ``dtype``, ``device``, ``rand``, ``zero``, ``is_in``.
Everything random is drawn from torch's global generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.keys import Key, NestedKey, as_key


class TensorSpec:
    """Base of the leaf specs: any tensor of one shape and dtype."""

    stepwise = False
    """Whether ``rand([T, P])`` equals ``T`` calls of ``rand([P])`` draw for draw."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe tensors of ``shape`` and ``dtype`` on ``device`` (CPU by default)."""
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device(device or "cpu")

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw ``[*shape, *self.shape]`` values: standard normal, cast to the dtype."""
        return torch.randn((*shape, *self.shape), device=self.device).to(self.dtype)

    def zero(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return zeros ``[*shape, *self.shape]`` (in range or not)."""
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether ``value`` (with any leading dimensions) belongs to the set."""
        trailing = value.shape[value.ndim - len(self.shape) :]
        return value.dtype == self.dtype and trailing == self.shape

    def to(self, device: torch.device | str) -> TensorSpec:
        """Return the same spec on another device."""
        moved = object.__new__(type(self))
        moved.__dict__.update(self.__dict__)
        moved.device = torch.device(device)
        return moved

    def expand(self, *shape: int) -> TensorSpec:
        """Return the same spec with leading dimensions added; ``shape`` is the new whole shape."""
        wide = object.__new__(type(self))
        wide.__dict__.update(self.__dict__)
        wide.shape = torch.Size(shape)
        return wide

    def _details(self) -> str:
        return ""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._details()}shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return mine.keys() == theirs.keys() and all(
            torch.equal(mine[k], theirs[k])
            if isinstance(mine[k], torch.Tensor)
            else bool(mine[k] == theirs[k])
            for k in mine
        )

    __hash__ = None  # type: ignore[assignment]  # specs are compared by value and hold tensors


class Unbounded(TensorSpec):
    """Any tensor of one shape and dtype."""


class Bounded(TensorSpec):
    """Tensors between ``low`` and ``high``, both included; either may be infinite."""

    def __init__(
        self,
        low: torch.Tensor | float,
        high: torch.Tensor | float,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe ``[*shape]`` tensors with ``low <= value <= high`` elementwise."""
        super().__init__(shape, dtype, device)
        self.low = torch.as_tensor(low, dtype=dtype).expand(self.shape)
        self.high = torch.as_tensor(high, dtype=dtype).expand(self.shape)
        wide = torch.float64
        self._finite_low = torch.isfinite(self.low.to(wide))
        self._finite_high = torch.isfinite(self.high.to(wide))
        self.stepwise = bool((self._finite_low & self._finite_high).all())

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw uniformly; where a side is infinite, exponentially or normally."""
        size = (*shape, *self.shape)
        low, high = self.low.to(self.device), self.high.to(self.device)
        if not self.dtype.is_floating_point:
            draw = torch.rand(size, dtype=torch.float64, device=self.device)
            span = high.to(torch.float64) - low.to(torch.float64) + 1
            return (low.to(torch.float64) + (draw * span).floor()).to(self.dtype)
        if self.stepwise:
            draw = torch.rand(size, dtype=self.dtype, device=self.device)
            return torch.minimum(low + draw * (high - low), high)
        draw = torch.rand(size, dtype=self.dtype, device=self.device)
        tail = torch.empty(size, dtype=self.dtype, device=self.device).exponential_()
        normal = torch.randn(size, dtype=self.dtype, device=self.device)
        finite_low = self._finite_low.to(self.device)
        finite_high = self._finite_high.to(self.device)
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        safe_low, safe_high = (
            torch.where(finite_low, low, zero),
            torch.where(finite_high, high, zero),
        )
        return torch.where(
            finite_low & finite_high,
            safe_low + draw * (safe_high - safe_low),
            torch.where(
                finite_low, safe_low + tail, torch.where(finite_high, safe_high - tail, normal)
            ),
        )

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether ``value`` has the shape and dtype and lies within the bounds."""
        if not super().is_in(value):
            return False
        here = value.to(self.low.device)
        return bool(((here >= self.low) & (here <= self.high)).all())

    def expand(self, *shape: int) -> TensorSpec:
        """Return the same spec with leading dimensions added."""
        return Bounded(
            self.low.expand(shape), self.high.expand(shape), shape, self.dtype, self.device
        )

    def _details(self) -> str:
        return f"low={self.low.flatten()[:3].tolist()}, high={self.high.flatten()[:3].tolist()}, "


class Categorical(TensorSpec):
    """Indices ``0 .. n - 1``."""

    stepwise = True

    def __init__(
        self,
        n: int,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe index tensors of ``shape`` (a scalar by default)."""
        super().__init__(shape, dtype, device)
        self.n = n

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw uniformly among the ``n`` indices."""
        size = (*shape, *self.shape)
        return torch.randint(self.n, size, device=self.device).to(self.dtype)

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether every index is in range."""
        return super().is_in(value) and bool(((value >= 0) & (value < self.n)).all())

    def _details(self) -> str:
        return f"n={self.n}, "


class OneHot(TensorSpec):
    """One-hot vectors of ``n`` elements along the last dimension."""

    stepwise = True

    def __init__(
        self,
        n: int,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe ``[..., n]`` one-hot tensors."""
        super().__init__((n,) if shape is None else shape, dtype, device)
        self.n = n

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw uniformly among the ``n`` vectors."""
        index = torch.randint(self.n, (*shape, *self.shape[:-1]), device=self.device)
        return torch.nn.functional.one_hot(index, self.n).to(self.dtype)

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether ``value`` is one-hot."""
        if not super().is_in(value):
            return False
        binary = ((value == 0) | (value == 1)).all()
        return bool(binary & (value.sum(-1) == 1).all())

    def _details(self) -> str:
        return f"n={self.n}, "


class MultiCategorical(TensorSpec):
    """Vectors of indices, element ``i`` in ``0 .. nvec[i] - 1``."""

    stepwise = True

    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe index tensors shaped like ``nvec`` (with leading dimensions if given)."""
        self.nvec = torch.as_tensor(nvec, dtype=torch.int64)
        super().__init__(self.nvec.shape if shape is None else shape, dtype, device)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw every element uniformly."""
        size = (*shape, *self.shape)
        draw = torch.rand(size, dtype=torch.float64, device=self.device)
        return (draw * self.nvec.to(self.device)).floor().to(self.dtype)

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether every index is in range."""
        return super().is_in(value) and bool(
            ((value >= 0) & (value < self.nvec.to(value.device))).all()
        )

    def _details(self) -> str:
        return f"nvec={self.nvec.tolist()}, "


class Binary(TensorSpec):
    """Tensors of zeros and ones."""

    stepwise = True

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.bool,
        device: torch.device | str | None = None,
    ) -> None:
        """Describe 0/1 tensors of ``shape``."""
        super().__init__(shape, dtype, device)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw fair bits."""
        return torch.randint(2, (*shape, *self.shape), device=self.device).to(self.dtype)

    def is_in(self, value: torch.Tensor) -> bool:
        """Tell whether every element is 0 or 1."""
        return super().is_in(value) and bool(((value == 0) | (value == 1)).all())


class Composite:
    """Named specs, nested by key, with common leading dimensions."""

    def __init__(
        self,
        specs: Mapping[NestedKey, TensorSpec] | None = None,
        shape: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        """Group ``specs``; nested keys are tuples. ``shape`` is what all of them start with."""
        self._specs: dict[Key, TensorSpec] = {as_key(k): v for k, v in (specs or {}).items()}
        self.shape = torch.Size(shape)
        self.device = torch.device(device or "cpu")

    def keys(self) -> list[Key]:
        """Return the keys of the leaves as tuples."""
        return list(self._specs)

    def items(self) -> list[tuple[Key, TensorSpec]]:
        """Return leaf keys with their specs."""
        return list(self._specs.items())

    def __iter__(self) -> Iterator[Key]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, key: NestedKey) -> bool:
        return as_key(key) in self._specs

    def __getitem__(self, key: NestedKey) -> TensorSpec | Composite:
        path = as_key(key)
        if path in self._specs:
            return self._specs[path]
        size = len(path)
        below: dict[NestedKey, TensorSpec] = {
            k[size:]: v for k, v in self._specs.items() if k[:size] == path
        }
        if not below:
            raise KeyError(f"{key!r} is not in this spec; it has {sorted(self._specs)}")
        return Composite(below, self.shape, self.device)

    def rand(self, shape: Sequence[int] = ()) -> TensorDict:
        """Draw every leaf, in order; batch size is ``[*shape, *self.shape]``."""
        return self._fill({k: s.rand(shape) for k, s in self._specs.items()}, shape)

    def zero(self, shape: Sequence[int] = ()) -> TensorDict:
        """Return zeros for every leaf; batch size is ``[*shape, *self.shape]``."""
        return self._fill({k: s.zero(shape) for k, s in self._specs.items()}, shape)

    def is_in(self, value: TensorDictBase) -> bool:
        """Tell whether every leaf is present and in its set."""
        found: dict[Key, Any] = {key: value.get(key, None) for key in self._specs}
        return all(
            isinstance(found[key], torch.Tensor) and spec.is_in(found[key])
            for key, spec in self._specs.items()
        )

    def _fill(self, values: Mapping[Key, torch.Tensor], shape: Sequence[int]) -> TensorDict:
        out = TensorDict({}, batch_size=(*shape, *self.shape))
        for key, value in values.items():
            out.set(key, value)
        return out

    def __repr__(self) -> str:
        inside = ", ".join(f"{'.'.join(k)}: {s!r}" for k, s in self._specs.items())
        return f"Composite({inside}, shape={tuple(self.shape)})"
