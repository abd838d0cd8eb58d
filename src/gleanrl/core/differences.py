"""Where two observations or batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase


def _leaves(value: Any, name: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(value, dict | TensorDictBase):
        for key, part in value.items():
            yield from _leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}[{index}]")
    else:
        wide = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
        yield name, np.asarray(value.float() if wide else value)


def unlike(one: Any, other: Any, name: str) -> str | None:
    """Say where two nested values differ first; ``None`` if they are equal bit for bit."""
    left, right = dict(_leaves(one, name)), dict(_leaves(other, name))
    if left.keys() != right.keys():
        return f"only one has {sorted(left.keys() ^ right.keys())}"
    for key, a in left.items():
        b = right[key]
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{key} is {a.dtype} {a.shape} / {b.dtype} {b.shape}"
        if a.dtype == object or a.tobytes() == b.tobytes():  # objects have no bits to compare
            continue
        nans = a.dtype.kind in "fc"
        places = np.argwhere(~np.isclose(a, b, 0, 0, nans)) if nans else np.argwhere(a != b)
        if len(places):
            at = tuple(map(int, places[0]))
            return f"{key} at {at} is {a[at]} / {b[at]}"
    return None
