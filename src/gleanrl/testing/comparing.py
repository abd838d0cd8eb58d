"""Failures of checks, with the place where two observations or batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gleanrl.core.differences import unlike
from gleanrl.core.errors import CheckFailed, GleanError


def require_same(one: Any, other: Any, name: str, message: str) -> None:
    """Raise `CheckFailed` with ``message``, in which ``{}`` is the first difference, if any."""
    if found := unlike(one, other, name):
        raise CheckFailed(message.format(found))


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Raise errors of this library in the block as `CheckFailed`."""
    try:
        yield
    except CheckFailed:
        raise
    except GleanError as error:
        raise CheckFailed(f"{what}: {error}") from error
