"""Tensor specs: the set of values one tensor, or one entry of data, may take.

Names, arguments and meanings are those TorchRL users know. Everything random is drawn from torch's
global generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, NestedKey, as_key

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]

Device: TypeAlias = torch.device | str | int | None
Size: TypeAlias = Sequence[int] | int
_INSTEAD = {
    "one": "torch.ones(spec.shape, dtype=spec.dtype)",
    "ones": "torch.ones(spec.shape, dtype=spec.dtype)",
    "zeros": "zero()",
    "sample": "rand()",
    "cpu": "to('cpu')",
    "encode": "torch.as_tensor(value, dtype=spec.dtype)",
    "to_numpy": "value.numpy(), for one-hot vectors value.argmax(-1).numpy()",
    "type_check": "value.dtype == spec.dtype",
}
"""Helpers of TorchRL's specs that these lack, with their replacements."""


class Interval(NamedTuple):
    """The bounds of numbers; either side may be infinite."""

    low: torch.Tensor
    high: torch.Tensor


class Choices(NamedTuple):
    """The number of values to choose from."""

    n: int


def _size(shape: Size) -> torch.Size:
    return torch.Size((shape,) if isinstance(shape, int) else shape)


class TensorSpec:
    """Base of all specs: any tensor of one shape and dtype."""

    stepwise = False
    """Whether ``rand([T, P])`` equals ``T`` calls of ``rand([P])`` draw for draw."""
    drawn_elsewhere = False
    """Whether only the environment, in a worker, knows what may be drawn now."""

    def __init__(
        self, shape: Size = (1,), device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        """Describe tensors of ``shape`` and ``dtype`` on ``device`` (CPU by default)."""
        self.shape = _size(shape)
        self.device: Any = torch.device("cpu" if device is None else device)
        self.dtype: Any = torch.get_default_dtype() if dtype is None else dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions; of a group, the number of leading dimensions."""
        return len(self.shape)

    @property
    def space(self) -> Any:
        """The set of values."""
        low, high = (torch.full(self.shape, bound) for bound in (-torch.inf, torch.inf))
        return Interval(low, high)

    # -- values ----------------------------------------------------------------------------------

    def rand(self, shape: Size = ()) -> Any:
        """Draw ``[*shape, *self.shape]`` values.

        Floats are standard normal, flags fair, and whole numbers any that there are; between bounds
        they are uniform.
        """
        if self.drawn_elsewhere:
            raise ConfigError(
                "random actions would be others than those that the environments allow or draw, "
                "because only their workers know these: collect with inference='workers', or act "
                "by a policy that keeps to them"
            )
        lead = (shape,) if isinstance(shape, int) else shape
        return self._drawn((*lead, *self.shape))

    def _drawn(self, size: Sequence[int]) -> torch.Tensor:
        """Draw values; ``size`` ends with `shape`."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(size, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return torch.randint(2, size, device=self.device).bool()
        values = torch.empty(size, dtype=self.dtype, device=self.device)
        return values.random_(torch.iinfo(self.dtype).min, None)

    def zero(self, shape: Size = ()) -> Any:
        """Return zeros ``[*shape, *self.shape]`` (in range or not)."""
        return torch.zeros((*_size(shape), *self.shape), dtype=self.dtype, device=self.device)

    def is_in(self, value: Any) -> bool:
        """Tell whether ``value`` (with any leading dimensions) belongs to the set."""
        if not isinstance(value, torch.Tensor):
            return False
        trailing = value.shape[value.ndim - len(self.shape) :]
        return value.dtype == self.dtype and trailing == self.shape

    def project(self, value: Any) -> Any:
        """Return ``value``, moved into the set if it is outside."""
        return value if self.is_in(value) else self._project(value)

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return value

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

    def expand(self, *shape: Any) -> Any:
        """Return the same spec with leading dimensions added; ``shape`` is the new whole shape."""
        wide = copy.copy(self)
        wide.shape = torch.empty(self.shape, device="meta").expand(*shape).shape
        return wide

    def __getattr__(self, name: str) -> Any:
        hint = f": use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        inside = ", ".join(
            f"{name}={item.flatten()[:3].tolist() if isinstance(item, torch.Tensor) else item}"
            for name, item in vars(self).items()
        )
        return f"{type(self).__name__}({inside})"

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


class Bounded(TensorSpec):
    """Tensors between ``low`` and ``high``, both included; either may be infinite.

    `rand` draws between finite bounds, whole numbers from fewer than 2**53.
    """

    stepwise = True

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
        if dtype is None:
            dtype = torch.as_tensor(given[0]).dtype if given else torch.get_default_dtype()
        bounds = [torch.as_tensor(x, dtype=dtype, device=device or "cpu") for x in (low, high)]
        if shape is None:
            shape = np.broadcast_shapes(*(bound.shape for bound in bounds))
        super().__init__(shape, device, dtype)
        self.low, self.high = (bound.expand(self.shape) for bound in bounds)
        half = self.high.double() / 2 - self.low.double() / 2  # no range is too wide for that
        most = torch.inf if self.dtype.is_floating_point else 2**52
        self.uniform = bool((half < most).all())
        """Whether `rand` can draw: a float64 tells the numbers of the range apart."""

    @property
    def space(self) -> Interval:
        return Interval(self.low, self.high)

    def _drawn(self, size: Sequence[int]) -> torch.Tensor:
        low, high, whole = self.low, self.high, not self.dtype.is_floating_point
        if not self.uniform:
            raise ConfigError(
                f"{self} has no uniform values: draw from finite bounds with fewer than 2**53 "
                "whole numbers between them, or give a policy"
            )
        if whole:
            draw = torch.rand(size, dtype=torch.float64, device=self.device)
            low, high = low.long(), high.long()
            return (low + (draw * (high - low + 1)).floor().long()).to(self.dtype)
        draw = torch.rand(size, dtype=self.dtype, device=self.device)
        return torch.minimum(2 * (low / 2 + draw * (high / 2 - low / 2)), high)

    def is_in(self, value: Any) -> bool:
        if not super().is_in(value):
            return False
        found, low, high = (x.double() for x in (value, self.low, self.high))
        return bool(((found >= low.to(found.device)) & (found <= high.to(found.device))).all())

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        low, high = self.low.to(value.device), self.high.to(value.device)
        return value.clamp(low, high).to(self.dtype)

    def to(self, dest: torch.dtype | Device) -> Bounded:
        moved: Bounded = super().to(dest)
        moved.low, moved.high = (x.to(moved.device, moved.dtype) for x in (self.low, self.high))
        return moved

    def expand(self, *shape: Any) -> Bounded:
        wide: Bounded = super().expand(*shape)
        wide.low, wide.high = self.low.expand(wide.shape), self.high.expand(wide.shape)
        return wide


class _Discrete(TensorSpec):
    """Values that encode indices; a subclass defines the indices and their encoding."""

    stepwise = True
    mask: torch.Tensor | None = None

    def _draw(self, size: Sequence[int]) -> torch.Tensor:
        """Draw the indices of values; ``size`` ends with `shape`."""
        raise NotImplementedError

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        """Return the indices that are nearest to ``value``."""
        raise NotImplementedError

    def _values(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the values that encode ``indices``."""
        return indices.to(self.dtype)

    def _drawn(self, size: Sequence[int]) -> torch.Tensor:
        return self._values(self._draw(size))

    def is_in(self, value: Any) -> bool:
        if not super().is_in(value):
            return False
        indices = self._indices(value)
        if self.mask is not None:
            allowed = self.mask.to(value.device).expand(*indices.shape, self.mask.shape[-1])
            if not allowed.gather(-1, indices.unsqueeze(-1)).all():
                return False
        return bool((self._values(indices) == value).all())

    def _project(self, value: torch.Tensor) -> torch.Tensor:
        return self._values(self._indices(value))


class Categorical(_Discrete):
    """Indices ``0 .. n - 1``."""

    _trailing = 0
    """The number of dimensions that encode one index."""

    def __init__(
        self,
        n: int,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.int64,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe index tensors of ``shape``.

        Args:
            n: The number of values.
            shape: Of the tensors; a scalar by default.
            device: The CPU by default.
            dtype: Of the tensors.
            mask: Which of the ``n`` values are allowed now.
        """
        super().__init__(() if shape is None else shape, device, dtype)
        self.n = int(n)
        self.update_mask(mask)

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Set the currently allowed values, ``[..., n]``; ``None`` for all."""
        self.mask = None if mask is None else mask.bool()
        self.drawn_elsewhere = False

    @property
    def space(self) -> Choices:
        return Choices(self.n)

    def _draw(self, size: Sequence[int]) -> torch.Tensor:
        size = size[: len(size) - self._trailing]
        if self.mask is None:
            return torch.randint(self.n, size, device=self.device)
        weights = self.mask.expand(*size, self.n).reshape(-1, self.n).float()
        return torch.multinomial(weights, 1).reshape(size).to(self.device)

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        return value.double().round().clamp(0, self.n - 1).long()


class OneHot(Categorical):
    """One-hot vectors of ``n`` elements along the last dimension."""

    _trailing = 1

    def __init__(
        self,
        n: int,
        shape: Size | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe ``[..., n]`` one-hot tensors; arguments as in `Categorical`.

        ``use_register`` is accepted for compatibility, without effect.
        """
        super().__init__(n, (n,) if shape is None else shape, device, dtype, mask)

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        return value.float().argmax(-1)

    def _values(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(indices, self.n).to(self.dtype)


class MultiCategorical(_Discrete):
    """Vectors of indices, element ``i`` in ``0 .. nvec[i] - 1``."""

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
        return tuple(map(Choices, self.nvec.flatten().tolist()))

    def _draw(self, size: Sequence[int]) -> torch.Tensor:
        draw = torch.rand(size, dtype=torch.float64, device=self.device)
        return (draw * self.nvec.to(self.device)).floor()

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        return value.double().round().clamp(0).minimum(self.nvec.to(value.device) - 1)


class MultiOneHot(_Discrete):
    """One-hot vectors concatenated along the last dimension, ``nvec[i]`` elements each."""

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
        return tuple(map(Choices, self.nvec))

    def _draw(self, size: Sequence[int]) -> torch.Tensor:
        parts = (*size[:-1], len(self.nvec))
        draw = torch.rand(parts, dtype=torch.float64, device=self.device)
        return (draw * torch.tensor(self.nvec, device=self.device)).long()

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        parts = torch.split(value, self.nvec, -1)
        return torch.stack([part.float().argmax(-1) for part in parts], -1)

    def _values(self, indices: torch.Tensor) -> torch.Tensor:
        columns = zip(indices.unbind(-1), self.nvec, strict=True)
        parts = [torch.nn.functional.one_hot(index, n) for index, n in columns]
        return torch.cat(parts, -1).to(self.dtype)


class Binary(_Discrete):
    """Tensors of zeros and ones."""

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
        """The number of elements of a vector."""
        return self.shape[-1] if self.shape else 1

    @property
    def space(self) -> Choices:
        return Choices(self.n)

    def _draw(self, size: Sequence[int]) -> torch.Tensor:
        return torch.randint(2, size, device=self.device)

    def _indices(self, value: torch.Tensor) -> torch.Tensor:
        return value.double() > 0


class NonTensor(TensorSpec):
    """Any object that is not a tensor."""

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
        return NonTensorData(self.example_data, batch_size=(*_size(shape), *self.shape))

    zero = rand

    def is_in(self, value: Any) -> bool:
        return not isinstance(value, torch.Tensor)


def masked_specs(tree: Composite) -> dict[Key, Categorical]:
    """Return the specs in ``tree`` that allow only some of their values now."""
    leaves = tree.leaves().items()
    return {k: s for k, s in leaves if isinstance(s, Categorical) and s.mask is not None}


UnboundedContinuous = UnboundedDiscrete = Unbounded
BoundedContinuous = BoundedDiscrete = Bounded


class Composite(TensorSpec, MutableMapping[Any, Any]):
    """Named specs, in groups to any depth, with common leading dimensions per group.

    Values are TensorDicts of batch size ``[*shape, *self.shape]``; `project` changes its argument.
    """

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
            shape: The leading dimensions of all specs.
            device: The device of all specs; ``None`` leaves each on its own.
            named: More specs. TorchRL's further options are accepted without effect.
        """
        self._specs: dict[str, Any] = {}
        self.shape = _size(() if shape is None else shape)
        self.device = None if device is None else torch.device(device)
        self.dtype = None
        for option in ("data_cls", "step_mdp_static", "names"):
            named.pop(option, None)
        for key, spec in {**(specs or {}), **named}.items():
            self[key] = spec

    @property
    def batch_size(self) -> torch.Size:
        """The leading dimensions of all specs."""
        return self.shape

    # -- access ----------------------------------------------------------------------------------

    def items(  # type: ignore[override]  # more than a mapping has
        self, include_nested: bool = False, leaves_only: bool = False, **unused: Any
    ) -> list[tuple[Any, Any]]:
        """Return names with their specs, also those of inner groups if ``include_nested``."""
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

    def keys(  # type: ignore[override]
        self, include_nested: bool = False, leaves_only: bool = False, **unused: Any
    ) -> list[Any]:
        """Return the names."""
        return [key for key, _ in self.items(include_nested, leaves_only)]

    def values(  # type: ignore[override]
        self, include_nested: bool = False, leaves_only: bool = False
    ) -> list[Any]:
        """Return the specs."""
        return [spec for _, spec in self.items(include_nested, leaves_only)]

    def leaves(self) -> dict[Key, Any]:
        """Return every leaf by its full key."""
        return {as_key(k): spec for k, spec in self.items(True, True) if spec is not None}

    def is_empty(self, recurse: bool = False) -> bool:
        """Tell whether the group has no spec."""
        return not (self.leaves() if recurse else self._specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, key: Any) -> Any:
        path, here = as_key(key), self
        for part in path:
            if not isinstance(here, Composite) or part not in here._specs:
                raise KeyError(f"{key!r} is not in this spec; it has {self.keys(True)}")
            here = here._specs[part]
        return here

    def __setitem__(self, key: NestedKey, spec: Any) -> None:
        self.set(key, spec)

    def set(self, key: NestedKey, spec: Any) -> Composite:
        """Set the spec called ``key``, making groups as they are needed.

        Raises:
            ConfigError: its shape does not begin with that of this group.
        """
        name, *rest = as_key(key)
        if isinstance(spec, Mapping) and not isinstance(spec, Composite):
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

    def __delitem__(self, key: NestedKey) -> None:
        *path, name = as_key(key)
        _ = self[key]
        (self[tuple(path)] if path else self)._specs.pop(name)

    def update(self, specs: Any) -> Composite:  # type: ignore[override]
        """Set all of ``specs``; update existing groups."""
        for key, spec in specs.items():
            mine = self.get(key)
            if isinstance(mine, Composite) and isinstance(spec, Mapping):
                mine.update(spec)
            else:
                self.set(key, spec)
        return self

    # -- values ----------------------------------------------------------------------------------

    def rand(self, shape: Size = ()) -> TensorDict:
        return self._fill("rand", shape)

    def zero(self, shape: Size = ()) -> TensorDict:
        return self._fill("zero", shape)

    def _fill(self, how: str, shape: Size) -> TensorDict:
        size = _size(shape)
        values = {
            name: getattr(spec, how)(size) for name, spec in self._specs.items() if spec is not None
        }
        return TensorDict(values, batch_size=(*size, *self.shape), device=self.device)

    def is_in(self, value: TensorDictBase) -> bool:
        found = ((spec, value.get(key, None)) for key, spec in self.leaves().items())
        return all(item is not None and spec.is_in(item) for spec, item in found)

    def project(self, value: TensorDictBase) -> TensorDictBase:
        for key, spec in self.leaves().items():
            value.set(key, spec.project(value.get(key)))
        return value

    # -- other specs -----------------------------------------------------------------------------

    def clone(self) -> Composite:
        return self._mapped(lambda spec: spec.clone(), self.shape, self.device)

    def to(self, dest: torch.dtype | Device) -> Composite:
        where = self.device
        if not isinstance(dest, torch.dtype):
            dest = where = torch.device("cpu" if dest is None else dest)
        return self._mapped(lambda spec: spec.to(dest), self.shape, where)

    def expand(self, *shape: Any) -> Composite:
        wide = torch.empty(self.shape, device="meta").expand(*shape).shape
        return self._mapped(
            lambda spec: spec.expand((*wide, *spec.shape[self.ndim :])), wide, self.device
        )

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
