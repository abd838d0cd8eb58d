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
    imports = {path: _imported(tree) for path, tree in trees.items()}
    helpers = {p.stem: p for p in trees if not p.stem.startswith(("test_", "__"))}

    def inner(path: Path, seen: frozenset[Path]) -> set[str]:
        found = {name for name in imports[path] if name.split(".")[0] == "gleanrl"} - PUBLIC
        for name in imports[path]:
            helper = helpers.get(name.split(".")[-1])
            if name.split(".")[0] != "gleanrl" and helper and helper not in seen:
                found |= inner(helper, seen | {helper})
        return found

    files = [
        File(path, _tests(tree), frozenset(inner(path, frozenset({path}))))
        for path, tree in trees.items()
    ]
    return [file for file in files if file.tests]


def share(files: list[File]) -> float:
    """Return which part of all test functions is in files that reach inside."""
    return sum(f.tests for f in files if f.inner) / sum(f.tests for f in files)


def _imported(tree: ast.Module) -> set[str]:
    """Return the dotted names of modules that are imported, or reached into by ``setattr``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "monkeypatch.setattr":
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                found.add(target.value.rpartition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            found |= {node.module} - ({MAIN} if names == {"main"} else set())
            if node.module.split(".")[0] != "gleanrl":  # `from tests.zoo import policies`
                found |= {f"{node.module}.{name}" for name in names}
    return found


def _tests(tree: ast.Module) -> int:
    return sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for node in ast.walk(tree)
    )


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
