"""How large the project is: ``python -m tools.figures [ROOT]`` prints a table of its parts.

Code lines hold neither comments nor docstrings alone. A function is a ``def``, nested or not.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

from tools import inside

PARTS = ("src", "src/gleanrl/*", "tests", "benchmarks", "tools", "examples")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def count(source: str) -> tuple[int, int, int]:
    """Return the lines, the code lines and the functions of a file."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE | {tokenize.ENDMARKER}:
            code.update(range(token.start[0], token.end[0] + 1))
    functions = 0
    for node in ast.walk(ast.parse(source)):
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return source.count("\n"), len(code), functions


def main() -> None:
    """Print one row per part, and how many tests reach inside."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print("| part | lines | code lines | files | functions |\n|---|---:|---:|---:|---:|")
    for part in PARTS:
        folders = sorted(p for p in root.glob(part) if p.is_dir() and p.name[0] not in "._")
        for folder in folders:
            found = [count(path.read_text()) for path in folder.rglob("*.py")]
            if found:
                lines, code, functions = (sum(column) for column in zip(*found, strict=True))
                name = folder.relative_to(root)
                print(f"| {name} | {lines:,} | {code:,} | {len(found)} | {functions:,} |")
    files = inside.read(root / "tests")
    reaching = sum(file.tests for file in files if file.inner)
    print(f"\n{reaching} of {sum(f.tests for f in files)} test functions reach inside", end=" ")
    print(f"({inside.share(files):.1%}).")


if __name__ == "__main__":
    main()
