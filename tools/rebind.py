"""Rewrites a program's imports of TorchRL's collectors into GleanRL's, and nothing else."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# GleanRL replaces these packages. Environments, modules, data and losses stay TorchRL's.
REPLACED = ("collectors", "weight_update")
_IMPORT = re.compile(
    rf"\bfrom torchrl(\.(?:{'|'.join(REPLACED)})\b[\w.]*) import "
    r"(\((?:#.*|[^)#])*\)|(?:\\\n|[^\n(;])+)"
)
_NAME = re.compile(r"(\w+)(?:\s+as\s+(\w+))?")


@dataclass(frozen=True)
class Rebound:
    """A program with its imports rewritten.

    Attributes:
        source: the program; every line has the number it had.
        moved: the names that now come from GleanRL, as the program binds them.
        kept: the dotted names that GleanRL does not have, which still come from TorchRL.
    """

    source: str
    moved: tuple[str, ...]
    kept: tuple[str, ...]


def rebind(source: str) -> Rebound:
    """Return ``source`` with every ``from torchrl.collectors... import`` naming GleanRL's classes.

    Statements anywhere in the program are rewritten, also in scripts that it holds as strings. A
    name from one of TorchRL's private modules is looked up in the public package, and a private
    name under its public spelling.
    """
    moved: list[str] = []
    kept: list[str] = []

    def statement(found: re.Match[str]) -> str:
        module, text = found[1], re.sub(r"#.*", "", found[2].strip("()"))
        if set(text) & set("{*"):  # a script to be formatted, or all names
            return f"from gleanrl{module} import {found[2]}"
        parts = []
        for name, alias in _NAME.findall(text):
            bound = alias or name
            place, spelling = _place(module, name)
            known = place.startswith("gleanrl")
            (moved if known else kept).append(bound if known else f"{place}.{name}")
            parts.append(
                f"from {place} import {spelling}" + (f" as {bound}" if bound != spelling else "")
            )
        # Empty lines take the place of a long statement's other lines, so line numbers stay.
        return "; ".join(parts) + "\n" * found[2].count("\n")

    return Rebound(_IMPORT.sub(statement, source), tuple(moved), tuple(kept))


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a program that imports this checkout, and ``more``."""
    root = Path(__file__).parent.parent
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    plain = {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disabled"}
    return {**plain, **os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _place(module: str, name: str) -> tuple[str, str]:
    """Return a name's module and spelling: GleanRL's, in the same module or else the public one."""
    own = f"gleanrl{module}"
    for place in (own, ".".join(own.split(".")[:2])):
        for spelling in (name, name.lstrip("_")):
            if _exists(place, spelling):
                return place, spelling
    return f"torchrl{module}", name


def _exists(module: str, name: str) -> bool:
    if any(part.startswith("_") for part in module.split(".")):
        return False
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
