"""How much of the suite reaches inside: tests in files that import modules which are not public.

``python -m tools.inside`` prints, for each file that does, which modules those are.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
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
    "gleanrl.policies",
    "gleanrl.weight_update",
}
MAIN = "gleanrl.cli.main"
"""Public is its ``main`` alone."""


@dataclass(frozen=True)
class File:
    """A file of the suite."""

    path: Path
    tests: int
    """Test functions."""
    inner: frozenset[str]
    """Modules that are not public, imported here or by the helpers that are imported here."""


def read(tests: Path = TESTS) -> list[File]:
    """Return every file of the suite that holds tests."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(tests.rglob("*.py"))}
    found = {path: _look(tree) for path, tree in trees.items()}
    imports = {path: names for path, (names, _) in found.items()}
    helpers = {p.stem: p for p in trees if not p.stem.startswith(("test_", "__"))}

    def inner(path: Path, seen: frozenset[Path]) -> set[str]:
        reached = {name for name in imports[path] if name.split(".")[0] == "gleanrl"} - PUBLIC
        for name in imports[path]:
            helper = helpers.get(name.split(".")[-1])
            if name.split(".")[0] != "gleanrl" and helper and helper not in seen:
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
    """Print files that reach inside, and their share."""
    files = read()
    for file in sorted(files, key=lambda file: -file.tests):
        if file.inner:
            name = file.path.relative_to(TESTS)
            print(f"{file.tests:4} {name}: {', '.join(sorted(file.inner))}")
    inside = sum(file.tests for file in files if file.inner)
    print(f"{inside} of {sum(f.tests for f in files)} test functions: {share(files):.1%}")


if __name__ == "__main__":
    main()
