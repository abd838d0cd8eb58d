"""Tensor specs: the set of values one tensor, or one entry of data, may take.

Names, arguments and meanings are those TorchRL users know. Everything random is drawn from torch's
global generator.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, NestedKey, as_key

Device: TypeAlias = torch.device | str | int | None
Size: TypeAlias = Sequence[int] | int


@dataclass(frozen=True, eq=False)
class Interval:
    """What numbers lie between; either side may be infinite."""

    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True)
class Choices:
    """How many values there are to choose from."""

    n: int


_one_hot = torch.nn.functional.one_hot


def _size(shape: Size) -> torch.Size:
    return torch.Size((shape,) if isinstance(shape, int) else shape)


class TensorSpec:
    """Base of all specs: any tensor of one shape and dtype."""

    stepwise = False
    """Whether ``rand([T, P])`` equals ``T`` calls of ``rand([P])`` draw for draw."""

    def __init__(
        self, shape: Size = (), device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Describe tensors of ``shape`` and ``dtype`` on ``device`` (CPU by default)."""
        self.shape = _size(shape)
        self.device: Any = torch.device("cpu" if device is None else device)
        self.dtype: Any = torch.get_default_dtype() if dtype is None else dtype

    @property
    def ndim(self) -> int:
        """How many dimensions there are; of a group, how many leading ones."""
        return len(self.shape)

    # -- values ----------------------------------------------------------------------------------

    def rand(self, shape: Size = ()) -> Any:
        """Draw ``[*shape, *self.shape]`` values.

        Here floats are standard normal, flags fair, and whole numbers any that there are.
        """
        size = (*_size(shape), *self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(size, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return torch.randint(2, size, device=self.device).bool()
        found = torch.iinfo(self.dtype)
        return torch.randint(found.min, found.max, size, dtype=self.dtype, device=self.device)

    def zero(self, shape: Size = ()) -> Any:
        """Return zeros ``[*shape, *self.shape]`` (in range or not)."""
        return torch.zeros((*_size(shape), *self.shape), dtype=self.dtype, device=self.device)

    def one(self, shape: Size = ()) -> Any:
        """Return ones ``[*shape, *self.shape]`` (in range or not)."""
        return torch.ones((*_size(shape), *self.shape), dtype=self.dtype, device=self.device)

    def sample(self, shape: Size = ()) -> Any:
        """Draw values, as `rand`."""
        return self.rand(shape)

    def zeros(self, shape: Size = ()) -> Any:
        """Return zeros, as `zero`."""
        return self.zero(shape)

    def ones(self, shape: Size = ()) -> Any:
        """Return ones, as `one`."""
        return self.one(shape)

    def is_in(self, value: Any) -> bool:
        """Tell whether ``value`` (with any leading dimensions) belongs to the set."""
        if not isinstance(value, torch.Tensor):
            return False
        trailing = value.shape[value.ndim - len(self.shape) :]
        return value.dtype == self.dtype and trailing == self.shape

    def assert_is_in(self, value: Any) -> None:
        """Raise an `AssertionError` unless ``value`` belongs to the set."""
        if not self.is_in(value):
            raise AssertionError(f"{value} is not in {self}")

    def project(self, value: Any) -> Any:
        """Return ``value``, moved into the set if it is not there."""
        return value if self.is_in(value) else self._project(value)

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return numbers, arrays or tensors as a tensor of this dtype, and device unless ignored.

        Raises:
            ConfigError: they do not fit the shape.
        """
        device = None if ignore_device else self.device
        if isinstance(value, np.ndarray) and any(stride < 0 for stride in value.strides):
            value = value.copy()
        found = torch.as_tensor(value, dtype=self.dtype, device=device)
        missing = len(self.shape) - found.ndim
        if found.shape[max(-missing, 0) :] != self.shape:
            if found.numel() != math.prod(self.shape):
                raise ConfigError(f"a value of shape {tuple(found.shape)} does not fit {self}")
            found = found.reshape(self.shape)
        return found

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return ``value`` as a numpy array; ``safe`` checks first that it is in the set."""
        if safe:
            self.assert_is_in(value)
        return value.detach().cpu().numpy()

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Check the dtype of ``value``.

        Raises:
            TypeError: it is another one.
        """
        if value.dtype != self.dtype:
            where = "" if key is None else f" of {key!r}"
            raise TypeError(f"the dtype{where} is {value.dtype}; the spec has {self.dtype}")

    @property
    def space(self) -> Any:
        """What values are chosen from."""
        low, high = (torch.full(self.shape, bound) for bound in (-torch.inf, torch.inf))
        return Interval(low, high)

    # -- other specs -----------------------------------------------------------------------------

    def clone(self) -> Any:
        """Return a copy."""
        return copy.copy(self)

    def to(self, dest: torch.dtype | Device) -> Any:
        """Return the same spec on another device, or for another dtype."""
        moved = copy.copy(self)
        if isinstance(dest, torch.dtype):
            moved.dtype = dest
        else:
            moved.device = torch.device("cpu" if dest is None else dest)
        return moved

    def cpu(self) -> Any:
        """Return the same spec on the CPU."""
        return self.to("cpu")

    def expand(self, *shape: Any) -> Any:
        """Return the same spec with leading dimensions added; ``shape`` is the new whole shape."""
        wide = copy.copy(self)
        wide.shape = torch.empty(self.shape, device="meta").expand(*shape).shape
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


class Unbounded(TensorSpec):
    """Any tensor of one shape and dtype."""

    def __init__(
        self, shape: Size = (1,), device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Describe tensors of ``shape`` and ``dtype``."""
        super().__init__(shape, device, dtype)


class Bounded(TensorSpec):
    """Tensors between ``low`` and ``high``, both included; either may be infinite."""

    def __init__(
        self,
        low: Any = None,
        high: Any = None,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Describe ``[*shape]`` tensors with ``low <= value <= high`` elementwise.

        Args:
            low: A number or a tensor.
            high: A number or a tensor.
            shape: That of the bounds by default.
            device: The CPU by default.
            dtype: That of the bounds if they are tensors, else torch's default.

        Raises:
            ConfigError: a bound is missing.
        """
        if low is None or high is None:
            raise ConfigError(f"Bounded needs low= and high=, got {low} and {high}")
        given = [x for x in (low, high) if isinstance(x, torch.Tensor | np.ndarray)]
        bounds = [torch.as_tensor(x) for x in (low, high)]
        if dtype is None and given:
            dtype = torch.as_tensor(given[0]).dtype
        if shape is None:
            shape = (bounds[0] + bounds[1]).shape
        super().__init__(shape, device, dtype)
        self.low, self.high = (
            bound.to(self.device, self.dtype).expand(self.shape) for bound in bounds
        )
        finite = torch.isfinite(self.low.double()) & torch.isfinite(self.high.double())
        self.stepwise = bool(finite.all())

    @property
    def space(self) -> Interval:
        """The bounds."""
        return Interval(self.low, self.high)

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw uniformly; where a side is infinite, exponentially or normally."""
        size = (*_size(shape), *self.shape)
        low, high = self.low, self.high
        if not self.dtype.is_floating_point:
            draw = torch.rand(size, dtype=torch.float64, device=self.device)
            span = high.to(torch.float64) - low.to(torch.float64) + 1
            return (low.to(torch.float64) + (draw * span).floor()).to(self.dtype)
        draw = torch.rand(size, dtype=self.dtype, device=self.device)
        if self.stepwise:
            return torch.minimum(low + draw * (high - low), high)
        tail = torch.empty(size, dtype=self.dtype, device=self.device).exponential_()
        normal = torch.randn(size, dtype=self.dtype, device=self.device)
        finite_low, finite_high = low.isfinite(), high.isfinite()
        safe_low, safe_high = low.nan_to_num(0, 0, 0), high.nan_to_num(0, 0, 0)
        return torch.where(
            finite_low & finite_high,
            safe_low + draw * (safe_high - safe_low),
            torch.where(
                finite_low, safe_low + tail, torch.where(finite_high, safe_high - tail, normal)
            ),
        )

    def is_in(self, value: Any) -> bool:
        """Tell whether ``value`` has the shape and dtype and lies within the bounds."""
        if not super().is_in(value):
            return False
        here = value.to(self.low.device)
        return bool(((here >= self.low) & (here <= self.high)).all())

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        low, high = self.low.to(value.device), self.high.to(value.device)
        return torch.minimum(torch.maximum(value, low), high).to(self.dtype)

    def to(self, dest: torch.dtype | Device) -> Bounded:
        """Return the same spec on another device, or for another dtype."""
        moved: Bounded = super().to(dest)
        moved.low, moved.high = (x.to(moved.device, moved.dtype) for x in (self.low, self.high))
        return moved

    def expand(self, *shape: Any) -> Bounded:
        """Return the same spec with leading dimensions added; ``shape`` is the new whole shape."""
        wide: Bounded = super().expand(*shape)
        wide.low, wide.high = self.low.expand(wide.shape), self.high.expand(wide.shape)
        return wide

    def _details(self) -> str:
        return f"low={self.low.flatten()[:3].tolist()}, high={self.high.flatten()[:3].tolist()}, "


class _Choice:
    """What the two specs of one of ``n`` values per element share."""

    stepwise = True
    n: int
    mask: torch.Tensor | None = None

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Set which values are allowed now, ``[..., n]``; ``None`` for all."""
        self.mask = None if mask is None else mask.bool()

    @property
    def space(self) -> Choices:
        """How many values there are."""
        return Choices(self.n)

    def _draw(self, size: torch.Size, device: torch.device) -> torch.Tensor:
        """Draw indices uniformly among those that are allowed."""
        if self.mask is None:
            return torch.randint(self.n, size, device=device)
        weights = self.mask.expand(*size, self.n).reshape(-1, self.n).float()
        return torch.multinomial(weights, 1).reshape(size).to(device)

    def _allows(self, index: torch.Tensor) -> bool:
        if self.mask is None:
            return True
        wide = self.mask.expand(*index.shape, self.n).to(index.device)
        return bool(wide.gather(-1, index.long().unsqueeze(-1)).all())

    def _details(self) -> str:
        return f"n={self.n}, "


class Categorical(_Choice, TensorSpec):
    """Indices ``0 .. n - 1``."""

    def __init__(
        self,
        n: int,
        shape: Size = (),
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe index tensors of ``shape`` (a scalar by default).

        Args:
            n: How many values there are.
            shape: Of the tensors.
            device: The CPU by default.
            dtype: Of the tensors.
            mask: Which of the ``n`` values are allowed now.
        """
        super().__init__(() if shape is None else shape, device, dtype)
        self.n = int(n)
        self.update_mask(mask)

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw uniformly among the indices that are allowed."""
        return self._draw(torch.Size((*_size(shape), *self.shape)), self.device).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Tell whether every index is in range and allowed."""
        inside = super().is_in(value) and bool(((value >= 0) & (value < self.n)).all())
        return inside and self._allows(value)

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return value.round().clamp(0, self.n - 1).to(self.dtype)


class OneHot(_Choice, TensorSpec):
    """One-hot vectors of ``n`` elements along the last dimension."""

    def __init__(
        self,
        n: int,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe ``[..., n]`` one-hot tensors.

        Args:
            n: How many values there are.
            shape: Of the tensors; ends in ``n``.
            device: The CPU by default.
            dtype: Of the tensors.
            use_register: Accepted for compatibility; without effect.
            mask: Which of the ``n`` values are allowed now.
        """
        super().__init__((n,) if shape is None else shape, device, dtype)
        self.n = int(n)
        self.update_mask(mask)

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw uniformly among the vectors that are allowed."""
        index = self._draw(torch.Size((*_size(shape), *self.shape[:-1])), self.device)
        return _one_hot(index, self.n).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Tell whether ``value`` is one-hot, and allowed."""
        if not super().is_in(value):
            return False
        binary = ((value == 0) | (value == 1)).all()
        one = bool(binary & (value.sum(-1) == 1).all())
        return one and self._allows(value.long().argmax(-1))

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return _one_hot(value.float().argmax(-1), self.n).to(self.dtype)

    def encode(self, value: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return an index, or a one-hot vector, as a one-hot vector."""
        tensor = torch.as_tensor(value, device=None if ignore_device else self.device)
        if tensor.shape[tensor.ndim - len(self.shape) :] == self.shape and tensor.ndim:
            return tensor.to(self.dtype)
        return _one_hot(tensor.long(), self.n).to(self.dtype)

    def to_numpy(self, value: torch.Tensor, safe: bool | None = None) -> Any:
        """Return the indices of one-hot vectors as a numpy array."""
        return super().to_numpy(value, safe).argmax(-1)


class MultiCategorical(TensorSpec):
    """Vectors of indices, element ``i`` in ``0 .. nvec[i] - 1``."""

    stepwise = True

    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        """Describe index tensors shaped like ``nvec`` (with leading dimensions if given)."""
        self.nvec = torch.as_tensor(nvec, dtype=torch.int64)
        super().__init__(self.nvec.shape if shape is None else shape, device, dtype)

    @property
    def space(self) -> tuple[Choices, ...]:
        """How many values there are per element."""
        return tuple(map(Choices, self.nvec.flatten().tolist()))

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw every element uniformly."""
        size = (*_size(shape), *self.shape)
        draw = torch.rand(size, dtype=torch.float64, device=self.device)
        return (draw * self.nvec.to(self.device)).floor().to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Tell whether every index is in range."""
        return super().is_in(value) and bool(
            ((value >= 0) & (value < self.nvec.to(value.device))).all()
        )

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        most = self.nvec.to(value.device) - 1
        return torch.minimum(value.round().clamp(0), most).to(self.dtype)

    def _details(self) -> str:
        return f"nvec={self.nvec.tolist()}, "


class MultiOneHot(TensorSpec):
    """One-hot vectors side by side along the last dimension, ``nvec[i]`` elements each."""

    stepwise = True

    def __init__(
        self,
        nvec: Sequence[int],
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
    ) -> None:
        """Describe ``[..., sum(nvec)]`` tensors; ``use_register`` is without effect."""
        self.nvec = [int(n) for n in nvec]
        super().__init__((sum(self.nvec),) if shape is None else shape, device, dtype)

    @property
    def space(self) -> tuple[Choices, ...]:
        """How many values there are per vector."""
        return tuple(map(Choices, self.nvec))

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw every vector uniformly."""
        size = (*_size(shape), *self.shape[:-1], len(self.nvec))
        draw = torch.rand(size, dtype=torch.float64, device=self.device)
        return self._of((draw * torch.tensor(self.nvec, device=self.device)).long())

    def _of(self, index: torch.Tensor) -> torch.Tensor:
        parts = [_one_hot(index[..., i], n) for i, n in enumerate(self.nvec)]
        return torch.cat(parts, -1).to(self.dtype)

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        parts = torch.split(value, self.nvec, -1)
        return torch.stack([part.float().argmax(-1) for part in parts], -1)

    def is_in(self, value: Any) -> bool:
        """Tell whether every part of ``value`` is one-hot."""
        if not super().is_in(value):
            return False
        return bool((self._of(self._indices(value)).to(value.device) == value).all())

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return self._of(self._indices(value))

    def encode(self, value: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return indices, or the vectors themselves, as one-hot vectors."""
        found = torch.as_tensor(value, device=None if ignore_device else self.device)
        if found.shape[-1:] == self.shape[-1:]:
            return found.to(self.dtype)
        return self._of(found.long())

    def to_numpy(self, value: torch.Tensor, safe: bool | None = None) -> Any:
        """Return the indices as a numpy array."""
        if safe:
            self.assert_is_in(value)
        return self._indices(value).cpu().numpy()

    def _details(self) -> str:
        return f"nvec={self.nvec}, "


class Binary(TensorSpec):
    """Tensors of zeros and ones."""

    stepwise = True

    def __init__(
        self,
        n: int | None = None,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        """Describe 0/1 tensors: of ``shape``, or vectors of ``n``.

        Raises:
            ConfigError: neither, or a shape that does not end in ``n``.
        """
        if shape is None and n is None:
            raise ConfigError("Binary needs n=, the length of its vectors, or shape=")
        size = _size((n or 0,) if shape is None else shape)
        if n is not None and size[-1:] != (n,):
            raise ConfigError(f"Binary(n={n}) needs a shape that ends in {n}, not {tuple(size)}")
        super().__init__(size, device, dtype)

    @property
    def n(self) -> int:
        """How many elements a vector has."""
        return self.shape[-1] if self.shape else 1

    @property
    def space(self) -> Choices:
        """How many elements a vector has."""
        return Choices(self.n)

    def rand(self, shape: Size = ()) -> torch.Tensor:
        """Draw fair bits."""
        size = (*_size(shape), *self.shape)
        return torch.randint(2, size, device=self.device).to(self.dtype)

    def is_in(self, value: Any) -> bool:
        """Tell whether every element is 0 or 1."""
        return super().is_in(value) and bool(((value == 0) | (value == 1)).all())

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return (value > 0).to(self.dtype)


class NonTensor(TensorSpec):
    """Anything that is no tensor."""

    def __init__(
        self,
        shape: Size = (1,),
        device: Device = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        **unused: Any,
    ) -> None:
        """Describe data of any kind, one for all elements of ``shape``; ``example_data`` shows it.

        Other arguments that TorchRL has are accepted without effect.
        """
        super().__init__(shape, device, dtype)
        self.dtype = dtype
        self.example_data = example_data

    def rand(self, shape: Size = ()) -> Any:
        """Return the example."""
        size = (*_size(shape), *self.shape)
        return NonTensorData(self.example_data, batch_size=size)

    zero = one = rand

    def is_in(self, value: Any) -> bool:
        """Tell whether it is no tensor."""
        return not isinstance(value, torch.Tensor)

    def encode(self, value: Any, *, ignore_device: bool = False) -> Any:
        """Return ``value`` as data of a TensorDict."""
        return NonTensorData(value, batch_size=self.shape)

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return what ``value`` holds."""
        return getattr(value, "data", value)

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Do nothing: every type is right."""


UnboundedContinuous = UnboundedDiscrete = Unbounded
BoundedContinuous = BoundedDiscrete = Bounded


class Composite(TensorSpec):
    """Named specs, in groups to any depth, with common leading dimensions per group."""

    def __init__(
        self,
        specs: Mapping[Any, Any] | None = None,
        *,
        shape: Size = (),
        device: Device = None,
        **named: Any,
    ) -> None:
        """Group ``specs``.

        Args:
            specs: By name; nested keys are tuples. Mappings become groups, ``None`` is left open.
            shape: What the shapes of all of them start with.
            device: Specs are taken to it. ``None`` leaves them where they are.
            named: More specs. TorchRL's further options are accepted without effect.
        """
        self._specs: dict[str, Any] = {}
        self.shape = _size(() if shape is None else shape)
        self.device = None if device is None else torch.device(device)
        self.dtype = None
        for option in ("data_cls", "step_mdp_static", "names"):
            named.pop(option, None)
        for key, spec in {**(specs or {}), **named}.items():
            self.set(key, spec)

    @property
    def batch_size(self) -> torch.Size:
        """What the shapes of all specs start with."""
        return self.shape

    # -- access ----------------------------------------------------------------------------------

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Any = None,
        step_mdp_static_only: bool = False,
        sort: bool = False,
    ) -> list[Any]:
        """Return the names; of groups within groups, too, if ``include_nested``."""
        found = [key for key, _ in self.items(include_nested, leaves_only)]
        return sorted(found, key=str) if sort else found

    def items(
        self, include_nested: bool = False, leaves_only: bool = False, **unused: Any
    ) -> list[tuple[Any, Any]]:
        """Return names with their specs."""
        found: list[tuple[Any, Any]] = []
        for name, spec in self._specs.items():
            group = isinstance(spec, Composite)
            if not (group and leaves_only):
                found.append((name, spec))
            if group and include_nested:
                found += [
                    ((name, *as_key(key)), inner) for key, inner in spec.items(True, leaves_only)
                ]
        return found

    def values(self, include_nested: bool = False, leaves_only: bool = False) -> list[Any]:
        """Return the specs."""
        return [spec for _, spec in self.items(include_nested, leaves_only)]

    def leaves(self) -> dict[Key, Any]:
        """Return every leaf by its full key."""
        return {as_key(k): spec for k, spec in self.items(True, True) if spec is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def is_empty(self, recurse: bool = False) -> bool:
        """Tell whether there is nothing in it."""
        return not (self.leaves() if recurse else self._specs)

    def __contains__(self, key: NestedKey) -> bool:
        try:
            self[key]
        except KeyError:
            return False
        return True

    def __getitem__(self, key: Any) -> Any:
        path, here = as_key(key), self
        for part in path:
            if not isinstance(here, Composite) or part not in here._specs:
                raise KeyError(f"{key!r} is not in this spec; it has {self.keys(True)}")
            here = here._specs[part]
        return here

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """Return the spec called ``key``, or ``default``."""
        try:
            return self[key]
        except KeyError:
            return default

    def set(self, key: NestedKey, spec: Any) -> Composite:
        """Set the spec called ``key``, making groups as they are needed.

        Raises:
            ConfigError: its shape does not begin with that of this group.
        """
        name, *rest = as_key(key)
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape)
        if rest:
            group = self._specs.get(name)
            if not isinstance(group, Composite):
                group = self._specs[name] = Composite(shape=self.shape, device=self.device)
            group.set(tuple(rest), spec)
            return self
        if spec is not None and tuple(spec.shape[: self.ndim]) != tuple(self.shape):
            raise ConfigError(
                f"the spec of {name!r} has shape {tuple(spec.shape)}, which does not begin with "
                f"{tuple(self.shape)}, the shape of its group"
            )
        self._specs[name] = spec if spec is None or self.device is None else spec.to(self.device)
        return self

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        self.set(key, spec)

    def __delitem__(self, key: NestedKey) -> None:
        self.pop(key)

    def pop(self, key: NestedKey, *default: Any) -> Any:
        """Take out the spec called ``key``; return ``default`` if there is none."""
        if key not in self and default:
            return default[0]
        *path, name = as_key(key)
        group = self[tuple(path)] if path else self
        return group._specs.pop(name)

    def update(self, specs: Mapping[Any, Any] | Composite) -> Composite:
        """Set all of ``specs``; groups that are there already are updated."""
        for key, spec in specs.items():
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, (Composite, Mapping)):
                mine.update(spec)
            else:
                self.set(key, spec)
        return self

    # -- values ----------------------------------------------------------------------------------

    def rand(self, shape: Size = ()) -> TensorDict:
        """Draw every leaf, in order; batch size is ``[*shape, *self.shape]``."""
        return self._fill(lambda spec: spec.rand(_size(shape)), shape)

    def zero(self, shape: Size = ()) -> TensorDict:
        """Return zeros for every leaf; batch size is ``[*shape, *self.shape]``."""
        return self._fill(lambda spec: spec.zero(_size(shape)), shape)

    def one(self, shape: Size = ()) -> TensorDict:
        """Return ones for every leaf; batch size is ``[*shape, *self.shape]``."""
        return self._fill(lambda spec: spec.one(_size(shape)), shape)

    def _fill(self, make: Callable[[Any], Any], shape: Size) -> TensorDict:
        values = {name: make(spec) for name, spec in self._specs.items() if spec is not None}
        return TensorDict(values, batch_size=(*_size(shape), *self.shape), device=self.device)

    def is_in(self, value: TensorDictBase) -> bool:
        """Tell whether every leaf is present and in its set."""
        found: dict[Key, Any] = {key: value.get(key, None) for key in self.leaves()}
        return all(
            found[k] is not None and spec.is_in(found[k]) for k, spec in self.leaves().items()
        )

    def project(self, value: TensorDictBase) -> TensorDictBase:
        """Move every leaf of ``value`` into its set; changes and returns ``value``."""
        for key, spec in self.leaves().items():
            value.set(key, spec.project(value.get(key)))
        return value

    def encode(self, values: Mapping[str, Any], *, ignore_device: bool = False) -> TensorDict:
        """Return numbers, arrays or tensors by name as a TensorDict."""
        found = {
            name: self._specs[name].encode(value, ignore_device=ignore_device)
            for name, value in values.items()
        }
        return TensorDict(found, batch_size=self.shape)

    def to_numpy(self, value: TensorDictBase, safe: bool | None = None) -> dict[str, Any]:
        """Return every entry of ``value`` as a numpy array."""
        return {name: self[name].to_numpy(item, safe) for name, item in value.items()}

    def type_check(self, value: Any, key: NestedKey | None = None) -> None:
        """Check the dtypes of ``value``, or of one entry called ``key``.

        Raises:
            TypeError: one is another.
        """
        if key is not None:
            self[key].type_check(value, key)
            return
        for name, spec in self.leaves().items():
            spec.type_check(value.get(name), name)

    # -- other specs -----------------------------------------------------------------------------

    def clone(self) -> Composite:
        """Return a copy."""
        return self._mapped(lambda spec: spec.clone(), self.shape, self.device)

    def to(self, dest: torch.dtype | Device) -> Composite:
        """Return the same specs on another device, or for another dtype."""
        if isinstance(dest, torch.dtype):
            return self._mapped(lambda spec: spec.to(dest), self.shape, self.device)
        where = torch.device("cpu" if dest is None else dest)
        return self._mapped(lambda spec: spec.to(where), self.shape, where)

    def expand(self, *shape: Any) -> Composite:
        """Return the same specs with leading dimensions added: ``shape`` is the new shape."""
        wide = torch.empty(self.shape, device="meta").expand(*shape).shape

        def widen(spec: Any) -> Any:
            return spec.expand((*wide, *spec.shape[self.ndim :]))

        return self._mapped(widen, wide, self.device)

    def _mapped(self, change: Callable[[Any], Any], shape: Size, device: Any) -> Composite:
        specs = {k: spec if spec is None else change(spec) for k, spec in self._specs.items()}
        return Composite(specs, shape=shape, device=device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composite):
            return NotImplemented
        same = (self.shape, self.device) == (other.shape, other.device)
        return same and self._specs == other._specs

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}: {spec!r}" for name, spec in self._specs.items())
        return f"Composite({inside}, shape={tuple(self.shape)})"
