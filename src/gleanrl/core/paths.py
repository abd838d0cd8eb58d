"""Resolve dotted and subscripted attribute paths: ``"env.transform[0]"``."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any


def resolve(root: Any, path: str) -> Any:
    """Follow ``path`` from ``root``.

    Attributes, constant subscripts and nothing else; the text is parsed, never evaluated.
    """
    try:
        tree = ast.parse(f"_.{path}", mode="eval").body
    except SyntaxError as err:
        raise ValueError(f"{path!r} is not an attribute path such as 'env.transform[0]'") from err
    return _follow(root, tree, path)


def _follow(root: Any, node: ast.expr, path: str) -> Any:
    if isinstance(node, ast.Name):
        return root
    if isinstance(node, ast.Attribute):
        return getattr(_follow(root, node.value, path), node.attr)
    if isinstance(node, ast.Subscript):
        try:
            index = ast.literal_eval(node.slice)
        except ValueError:
            index = None
        if isinstance(index, (int, str)):
            return _follow(root, node.value, path)[index]
    raise ValueError(f"{path!r} is not an attribute path such as 'env.transform[0]'")


def is_within(path: str, whole: str) -> bool:
    """Tell whether ``path`` names the object at ``whole`` or a part of it."""
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))


def call(root: Any, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Resolve ``path`` and call the object; return the object if it is not callable."""
    target = resolve(root, path)
    if callable(target):
        return target(*args, **kwargs)
    if args or kwargs:
        raise ValueError(f"{path!r} is not callable ({target!r:.100}), it takes no arguments")
    return target
