"""Methods and properties of a collector that one of its parts has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def method_of(
    part: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return a method with signature and docstring of ``method``, which calls that of a part."""
    find, name = attrgetter(part), method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(find(self), name)(*args, **kwargs)
        return result

    return call


def property_of(part: str, shown: Any) -> Any:
    """Return a read-only property with the docstring of the property ``shown`` of a part."""
    find = attrgetter(f"{part}.{shown.fget.__name__}")
    return property(lambda self: find(self), doc=shown.__doc__)
