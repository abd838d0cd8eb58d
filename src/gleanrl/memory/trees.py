"""TensorDicts over tensors whose shapes are known to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from gleanrl.core.keys import Key


def nest(flat: Mapping[Key, torch.Tensor]) -> dict[str, object]:
    """Turn ``{("next", "reward"): x}`` into ``{"next": {"reward": x}}``."""
    tree: dict[str, object] = {}
    for key, value in flat.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})  # type: ignore[assignment]  # inner nodes are dicts
        node[key[-1]] = value
    return tree


def tensordict_over(
    flat: Mapping[Key, torch.Tensor], shape: Sequence[int], names: Sequence[str | None]
) -> TensorDict:
    """Return the nested `TensorDict` over ``flat``, whose tensors all begin with ``shape``.

    The public constructor checks every tensor, which costs as much as collecting a short rollout;
    what comes from a slab was laid out by us. A test holds this against that constructor.
    """
    return _build(nest(flat), torch.Size(shape), list(names))


def _build(tree: dict[str, Any], shape: torch.Size, names: list[str | None]) -> TensorDict:
    for key, value in tree.items():
        if isinstance(value, dict):
            tree[key] = _build(value, shape, names)
    return TensorDict._new_unsafe(source=tree, batch_size=shape, names=list(names))
