"""TensorDicts over tensors whose shapes are known to fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from gleanrl.core.keys import TIME, Key, as_key
from gleanrl.core.layout import EnvLayout, Group, Layout
from gleanrl.core.window import Window


def nest(flat: Mapping[Key, Any]) -> dict[str, Any]:
    """Turn ``{("next", "reward"): x}`` into ``{"next": {"reward": x}}``."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return tree


def tensordict_over(
    flat: Mapping[Key, torch.Tensor],
    shape: Sequence[int],
    names: Sequence[str | None],
    groups: Iterable[Group] = (),
) -> TensorDict:
    """Return the nested `TensorDict` over ``flat``, whose tensors all begin with ``shape``.

    The public constructor checks every tensor, which costs as much as collecting a short rollout;
    the tensors of a slab were laid out to fit. A test compares the result with that constructor's.
    """
    tree = nest(dict(zip(flat, range(len(flat)), strict=True)))
    inner = {group.key: group for group in groups}
    return build(tree, [*flat.values()], torch.Size(shape), names, inner)


def env_root(
    env: EnvLayout, shown: Mapping[Key, torch.Tensor], device: torch.device | None = None
) -> TensorDict:
    """Return root data of ``env``: entries as ``shown``, and no end flag set."""
    flags = {
        key: torch.zeros((*env.batch_shape, *group.shape), dtype=torch.bool, device=device)
        for group in env.dones
        for key in group.keys()
    }
    names = [None] * len(env.batch_shape)
    return tensordict_over({**flags, **shown}, env.batch_shape, names, env.groups)


def batch_over(window: Window, layout: Layout) -> TensorDict:
    """Return ``window`` with ``layout`` as a batch over the same memory."""
    shape = (*layout.batch_shape, window.steps)
    views = {
        field.key: window.tensor(field.key).view((*shape, *field.shape)) for field in layout.fields
    }
    names = [None] * (len(shape) - 1) + [TIME]
    return tensordict_over(views, shape, names, layout.groups)


def build(
    tree: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    shape: torch.Size,
    names: Sequence[str | None] | None,
    groups: Mapping[Key, Group],
    device: torch.device | None = None,
    at: Key = (),
    around: Group | None = None,
) -> TensorDict:
    """Return the `TensorDict` of ``tree``, which has indices of ``values`` at its leaves.

    Args:
        tree: As `nest` makes it.
        values: Tensors that all begin with ``shape``.
        shape: The batch size, of nested parts outside any group as well.
        names: The names of its dimensions.
        groups: Nested parts with further dimensions, by key.
        device: Of all tensors, or ``None`` if the result is to have none.
        at: The key of ``tree``.
        around: The group that it is in.
    """
    source: dict[str, Any] = {}
    group = groups.get(at, around) if groups else None
    for name, part in tree.items():
        leaf = part.__class__ is int  # no call
        source[name] = (
            values[part]
            if leaf
            else build(part, values, shape, names, groups, device, (*at, name), group)
        )
    named = None if names is None else [*names]
    if group is not None:
        named = [*(named or [None] * len(shape)), *group.names]
        shape = torch.Size((*shape, *group.shape))
    return TensorDict._new_unsafe(source=source, batch_size=shape, names=named, device=device)


def groups_of(data: TensorDictBase) -> list[Group]:
    """Return the nested parts of ``data`` whose batch size is not that of ``data``."""
    ndim = data.ndim
    nested = ((k, v) for k, v in data.items(True) if isinstance(v, TensorDictBase))
    return [
        Group(as_key(key), tuple(value.batch_size[ndim:]), tuple(value.names[ndim:]))
        for key, value in nested
        if value.ndim > ndim
    ]


def copied(data: TensorDictBase) -> TensorDictBase:
    """Copy ``data``, bit for bit: `TensorDict.clone` loses the sign of zeros if it has a device.

    >>> data = TensorDict({"a": torch.tensor(-0.0)}, device="cpu")
    >>> copied(data)["a"].signbit().item()
    True
    """
    if type(data) is not TensorDict:
        return data.apply(torch.clone, filter_empty=False)
    source = {
        name: value.clone() if isinstance(value, torch.Tensor) else copied(value)
        for name, value in data.items()
    }
    names = data.names if data._has_names() else None
    return TensorDict._new_unsafe(
        source=source, batch_size=data.batch_size, names=names, device=data.device
    )


def described(value: Any) -> str:
    """Describe an entry of a TensorDict in an error."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    if isinstance(value, TensorDictBase):
        names = f", named {value.names}" if any(value.names) else ""
        return f"{type(value).__name__} of batch size {tuple(value.batch_size)}{names}"
    return "nothing" if value is None else f"{value!r:.100}"


def stacked(parts: Sequence[TensorDictBase], dim: int) -> TensorDictBase:
    """Stack ``parts`` along ``dim``: densely where they agree, lazily where they do not."""
    if _mixed(parts):  # stacked densely, entries of which a lazy part has only some would be lost
        return LazyStackedTensorDict.lazy_stack(list(parts), dim)
    return LazyStackedTensorDict.maybe_dense_stack(list(parts), dim)


def _mixed(parts: Sequence[TensorDictBase]) -> bool:
    """Tell whether something is dense in some of ``parts`` and a lazy stack in others."""
    lazy = {isinstance(part, LazyStackedTensorDict) for part in parts}
    if lazy != {False}:
        return len(lazy) > 1
    nested = [name for name, value in parts[0].items() if isinstance(value, TensorDictBase)]
    found = [[part.get(name, None) for part in parts] for name in nested]
    return any(_mixed([v for v in values if isinstance(v, TensorDictBase)]) for values in found)


def time_named(batch: TensorDictBase, dim: int) -> TensorDictBase:
    """Call dimension ``dim`` of ``batch`` time; nested parts keep names of their own."""
    if isinstance(batch, LazyStackedTensorDict) and batch.stack_dim == dim:
        # Setting names would take those of nested parts from every step.
        return LazyStackedTensorDict.lazy_stack(batch.tensordicts, dim, stack_dim_name=TIME)
    if batch.names[dim] != TIME:
        batch.names = [None] * dim + [TIME]
    return batch


_ALIKE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same bits in a dtype that torch can copy by index, as it lacks some."""
    return tensor.view(_ALIKE.get(tensor.dtype, tensor.dtype))
