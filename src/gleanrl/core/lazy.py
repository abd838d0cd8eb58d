"""Public names of a package that are imported at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_exports(
    package: str, names: Collection[str], modules: Sequence[str]
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package`` (PEP 562).

    Each of ``names`` is from the first module that has it. Submodules are also imported on demand.
    """

    def find(name: str) -> Any:
        if name in names:
            found = (getattr(import_module(module), name, None) for module in modules)
            value = next(value for value in found if value is not None)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("__") and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
