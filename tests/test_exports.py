"""The public surface."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import warm

import gleanrl
import gleanrl.collectors
import gleanrl.data.postprocs
import gleanrl.envs
import gleanrl.testing

OPTIONAL = ["torchrl", "envpool", "ray", "matplotlib", "ale_py", "stable_baselines3", "submitit"]


@pytest.mark.parametrize("module", [gleanrl, gleanrl.collectors, gleanrl.envs, gleanrl.testing])
def test_public_names_are_sorted_and_exist(module):
    names = module.__all__
    assert sorted(names, key=str.casefold) == sorted(set(names), key=str.casefold)
    assert all(getattr(module, name) is not None for name in names)


def test_modules_of_namespaces_need_no_import_of_their_own(monkeypatch):
    for package, module in (("gleanrl", "data"), ("gleanrl.data", "postprocs")):
        monkeypatch.delattr(f"{package}.{module}")  # as if nothing had imported it
    assert gleanrl.data.postprocs.MultiStep is gleanrl.MultiStep
    with pytest.raises(AttributeError, match=r"'gleanrl.data' has no attribute 'postproc'"):
        gleanrl.data.postproc  # noqa: B018


def test_importing_the_package_imports_nothing_optional():
    check = f"import sys; from gleanrl import *; print([m for m in {OPTIONAL} if m in sys.modules])"
    done = subprocess.run(
        [warm.PYTHON, "-c", check], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_version_stands_in_one_place():
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    stands = (root / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert f'__version__ = "{gleanrl.__version__}"' in stands
    assert f"version: {gleanrl.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {gleanrl.__version__} - " in (root / "CHANGELOG.md").read_text()
