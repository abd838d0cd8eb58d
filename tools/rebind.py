"""Rewrites a program's imports of TorchRL's collectors into GleanRL's, and nothing else."""

from __future__ import annotations

import ast
import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

# GleanRL replaces these packages. Environments, modules, data and losses stay TorchRL's.
REPLACED = ("collectors", "weight_update")
_IN_STRING = re.compile(rf"^(\s*from )torchrl(\.(?:{'|'.join(REPLACED)})\b[\w.]* import )")


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

    Statements anywhere in the program are rewritten, and lines of scripts that it holds as
    strings. A name from one of TorchRL's private modules is looked up in the public package, and a
    private name under its public spelling.
    """
    moved: list[str] = []
    kept: list[str] = []
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    _rewrite_scripts(tree, lines)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not _replaced(node):
            continue
        text = _statement(node, moved, kept)
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [head + text + tail] + ["\n"] * (last - first)
        # Empty lines take the place of a long statement's other lines, so line numbers stay.
    return Rebound("".join(lines), tuple(moved), tuple(kept))


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a program that imports this checkout, and ``more``."""
    root = Path(__file__).parent.parent
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    plain = {"OMP_NUM_THREADS": "1", "MUJOCO_GL": "disabled"}
    return {**plain, **os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _replaced(node: ast.ImportFrom) -> bool:
    package, *rest = (node.module or "").split(".")
    return package == "torchrl" and bool(rest) and rest[0] in REPLACED and not node.level


def _rewrite_scripts(tree: ast.AST, lines: list[str]) -> None:
    """Rewrite the import lines of scripts that the program holds as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = _IN_STRING.sub(r"\1gleanrl\2", lines[number])


def _statement(node: ast.ImportFrom, moved: list[str], kept: list[str]) -> str:
    parts: list[str] = []
    for alias in node.names:
        bound = alias.asname or alias.name
        place = _place(node.module or "", alias.name)
        if place is None:
            kept.append(f"{node.module}.{alias.name}")
            place = (node.module or "", alias.name)
        else:
            moved.append(bound)
        module, name = place
        parts.append(f"from {module} import {name}" + (f" as {bound}" if bound != name else ""))
    return "; ".join(parts)


def _place(module: str, name: str) -> tuple[str, str] | None:
    """Return where GleanRL has ``name``: the same module, else the public package."""
    own = "gleanrl" + module.removeprefix("torchrl")
    public = ".".join(own.split(".")[:2])
    for place in (own, public):
        for spelling in (name, name.lstrip("_")):
            if _exists(place, spelling):
                return place, spelling
    return None


def _exists(module: str, name: str) -> bool:
    if any(part.startswith("_") for part in module.split(".")):
        return False
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
