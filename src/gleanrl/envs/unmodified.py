"""Checks that an object still behaves as its class was written.

Some environments are taken apart, so that what is inside can be stepped directly. That gives the
same data only if nobody replaced a method: in a subclass, on the instance, or on the class itself.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

C = TypeVar("C", bound=type)


class Methods:
    """Methods and properties of a class at the construction of this object."""

    def __init__(self, cls: type, names: Iterable[str] | None = None) -> None:
        """Remember the methods and properties called ``names``; all by default."""
        self._names = frozenset(names or (name for name in dir(cls) if _counts(cls, name)))
        self._read = operator.attrgetter(*self._names)
        self._found = self._read(cls)

    def kept_by(self, obj: Any) -> bool:
        """Tell whether neither ``obj`` nor its class, a subclass, replaces any of them."""
        return bool(self._read(type(obj)) == self._found) and self._names.isdisjoint(vars(obj))


def _counts(cls: type, name: str) -> bool:
    value = inspect.getattr_static(cls, name)
    if name.startswith("__") and name != "__getattribute__":
        return False
    if vars(nn.Module).get(name) is value:  # none of these is called while stepping
        return False
    # A class method, looked up on a subclass, is another object; they only construct.
    return not isinstance(value, classmethod) and (callable(value) or isinstance(value, property))


_WRITTEN: dict[type, Methods] = {}


def remembered(cls: C) -> C:
    """Remember the methods and properties of ``cls`` as they are now. A class decorator."""
    _WRITTEN[cls] = Methods(cls)
    return cls


def unmodified(obj: Any) -> bool:
    """Tell whether ``obj`` is of a class marked by `remembered`, and no method was replaced.

    A subclass that only adds to its class (a constructor, further methods) passes.
    """
    known = next((_WRITTEN[cls] for cls in type(obj).__mro__ if cls in _WRITTEN), None)
    return known is not None and known.kept_by(obj)
