"""Where two observations or batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from gleanrl.core.errors import CheckFailed, GleanError


def _leaves(value: Any, name: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(value, dict | TensorDictBase):
        for key, part in value.items():
            yield from _leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{name}[{index}]")
    else:
        yield name, np.asarray(value)


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


def require_same(one: Any, other: Any, name: str, message: str) -> None:
    """Raise `CheckFailed` with ``message``, in which ``{}`` is the first difference, if any."""
    if found := unlike(one, other, name):
        raise CheckFailed(message.format(found))


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Raise errors of this library in the block as `CheckFailed`; they say what to do."""
    try:
        yield
    except CheckFailed:
        raise
    except GleanError as error:
        raise CheckFailed(f"{what}: {error}") from error
