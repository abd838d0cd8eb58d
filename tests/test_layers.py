"""Imports go inward only."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gleanrl"
ALLOWED = {
    "core": {"core"},
    "memory": {"core", "memory"},
    "operations": {"core", "operations"},
    "envs": {"core", "memory", "operations", "envs"},
    "policies": {"core", "memory", "operations", "policies"},
    "weights": {"core", "memory", "weights"},
    "rollout": {"core", "memory", "operations", "envs", "policies", "weights", "rollout"},
}
ALLOWED["transport"] = ALLOWED["rollout"] | {"transport"}
ALLOWED["engine"] = ALLOWED["transport"] | {"engine"}
ALLOWED["parallel"] = ALLOWED["engine"] | {"parallel"}
ALLOWED["recording"] = ALLOWED["engine"] | {"recording"}
ALLOWED["watch"] = ALLOWED["recording"] | {"watch"}
ALLOWED["collectors"] = ALLOWED["watch"] | {"parallel", "collectors"}
ALLOWED["testing"] = ALLOWED["collectors"] | {"testing"}
ALLOWED["cli"] = ALLOWED["collectors"] | {"cli"}
RE_EXPORTS = {"data", "modules", "weight_update"}
# Namespaces: what users import. They may re-export from any ring, and hold nothing of their own.
NAMESPACES = [
    *(path for name in sorted(RE_EXPORTS) for path in sorted((SOURCE / name).rglob("*.py"))),
    SOURCE / "envs" / "__init__.py",
    SOURCE / "envs" / "utils.py",
    SOURCE / "collectors" / "utils.py",
]
FILES = sorted(SOURCE.rglob("*.py"))
RINGS = {path.relative_to(SOURCE).parts[0]: [] for path in FILES}
"""The files of each ring; modules of the package itself are rings of their own."""
for path in FILES:
    RINGS[path.relative_to(SOURCE).parts[0]].append(path)


@functools.cache
def imports(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imported(path: Path) -> set[str]:
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("ring", [ring for ring in RINGS if not ring.endswith(".py")])
def test_imports_go_inward(ring):
    rings = {p.stem for p in SOURCE.iterdir()}  # modules of the package itself are outermost
    for path in RINGS[ring]:
        if path in NAMESPACES:  # it may import all others
            continue
        assert ring in ALLOWED, f"which packages may {ring} import? Say so above"
        used = {
            parts[1]
            for parts in (name.split(".") for name in imported(path))
            if parts[0] == "gleanrl" and len(parts) > 1 and parts[1] in rings
        }
        assert used <= ALLOWED[ring], f"{path} may not import {sorted(used - ALLOWED[ring])}"


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_files_import_each_other_in_no_circle():
    """Imports inside functions and under TYPE_CHECKING count: a reader follows them, too."""
    modules = {module_of(path) for path in FILES}
    # "from package import module" counts as an import of the module, not of the package's own file.
    graph = {module_of(path): set() for path in FILES}
    for path in FILES:
        for node in imports(path):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                whole = [f"{node.module}.{name}" for name in names]
                names = [name if name in modules else node.module for name in whole]
            graph[module_of(path)] |= modules & set(names) - {module_of(path)}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files


@pytest.mark.parametrize("ring", sorted(ALLOWED["engine"]))
def test_inner_rings_import_modules_never_namespaces(ring):
    for path in set(RINGS[ring]) - set(NAMESPACES):
        froms = {node.module for node in imports(path) if isinstance(node, ast.ImportFrom)}
        assert not froms & {"gleanrl.envs", *(f"gleanrl.{name}" for name in RE_EXPORTS)}, path


def test_the_package_never_imports_torchrl():
    found = [path for path in FILES if any(n.split(".")[0] == "torchrl" for n in imported(path))]
    assert found == []


@pytest.mark.parametrize("path", NAMESPACES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_namespaces_hold_nothing_of_their_own(path):
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    body = ast.parse(path.read_text()).body
    typing = [node for part in body if isinstance(part, ast.If) for node in part.body]
    assert all(isinstance(node, kinds) for node in (*body, *typing) if not isinstance(node, ast.If))
