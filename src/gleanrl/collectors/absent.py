"""Names of TorchRL's that do not exist here, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def refuse(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module``: it says what to use instead of ``names``."""

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module} has no {name}: {names[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
