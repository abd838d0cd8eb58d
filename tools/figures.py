"""How large the project is, and how much of its suite reaches inside: ``python -m tools.figures``.

Code lines hold neither comments nor docstrings alone. A function is a ``def``, nested or not. A
test reaches inside if its file imports modules that are not public.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("src", "src/gleanrl/*", "tests", "benchmarks", "tools", "examples")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
PUBLIC = {
    "gleanrl",
    "gleanrl.collectors",
    "gleanrl.collectors.distributed",
    "gleanrl.collectors.utils",
    "gleanrl.collectors.weight_update",
    "gleanrl.data",
    "gleanrl.data.postprocs",
    "gleanrl.envs",
    "gleanrl.envs.common",
    "gleanrl.envs.libs",
    "gleanrl.envs.libs.gym",
    "gleanrl.envs.utils",
    "gleanrl.modules",
    "gleanrl.testing",
    "gleanrl.weight_update",
}
OTHERS = {"gleanrl", "benchmarks", "tools"}
"""Packages that hold no helpers of the suite."""
MAIN = "gleanrl.cli.main"
"""Public is its ``main`` alone."""


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


@dataclass(frozen=True)
class File:
    """A file of the suite."""

    path: Path
    tests: int
    """Test functions."""
    inner: frozenset[str]
    """Modules that are not public, imported here or by the helpers that are imported here."""


def read(tests: Path = ROOT / "tests") -> list[File]:
    """Return every file of the suite that holds tests."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(tests.rglob("*.py"))}
    found = {path: _look(tree) for path, tree in trees.items()}
    imports = {path: names for path, (names, _) in found.items()}
    helpers = {p.stem: p for p in trees if not p.stem.startswith(("test_", "__"))}

    def inner(path: Path, seen: frozenset[Path]) -> set[str]:
        reached = {name for name in imports[path] if name.split(".")[0] == "gleanrl"} - PUBLIC
        for name in imports[path]:
            helper = helpers.get(name.split(".")[-1])
            if helper and helper not in seen and name.split(".")[0] not in OTHERS:
                reached |= inner(helper, seen | {helper})
        return reached

    files = [
        File(path, tests, frozenset(inner(path, frozenset({path}))))
        for path, (_, tests) in found.items()
    ]
    return [file for file in files if file.tests]


def share(files: list[File]) -> float:
    """Return which part of all test functions is in files that reach inside."""
    return sum(f.tests for f in files if f.inner) / sum(f.tests for f in files)


def _look(tree: ast.Module) -> tuple[set[str], int]:
    """Return the modules that are imported, or reached into by ``setattr``; count the tests."""
    found, tests = set(), 0
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            tests += node.name.startswith("test_")
        elif isinstance(node, ast.Call):
            found |= _patched(node)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            found |= {node.module} - ({MAIN} if names == {"main"} else set())
            if node.module.split(".")[0] != "gleanrl":  # `from tests.zoo import policies`
                found |= {f"{node.module}.{name}" for name in names}
    return found, tests


def _patched(call: ast.Call) -> set[str]:
    """Return the module of ``monkeypatch.setattr("module.name", ...)``."""
    match call:
        case ast.Call(ast.Attribute(attr="setattr"), [ast.Constant(str(target)), *_]):
            return {target.rpartition(".")[0]}
    return set()


def main() -> None:
    """Print a row per part, and the tests that reach inside with the modules they import."""
    print("| part | lines | code lines | files | functions |\n|---|---:|---:|---:|---:|")
    for folder in sorted(folder for part in PARTS for folder in ROOT.glob(part)):
        if found := [count(path.read_text()) for path in folder.rglob("*.py")]:
            lines, code, functions = map(sum, zip(*found, strict=True))
            name = folder.relative_to(ROOT)
            print(f"| {name} | {lines:,} | {code:,} | {len(found)} | {functions:,} |")
    files = sorted((file for file in read() if file.inner), key=lambda file: -file.tests)
    for file in files:
        print(f"{file.tests:4} {file.path.relative_to(ROOT)}: {', '.join(sorted(file.inner))}")
    print(f"{share(read()):.1%} of all test functions reach inside.")


if __name__ == "__main__":
    main()
