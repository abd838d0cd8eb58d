"""Runs TorchRL's own collector tests against GleanRL.

``python -m tools.torchrl_suite PATH [--all] [-k EXPR] [--torchrl]``

PATH is a checkout of TorchRL, or its ``test_collectors.py``. A copy of the test file in a temporary
directory imports collectors and weight synchronisation from GleanRL (``tools.rebind``), everything
else from TorchRL. The checkout is only read. A test that takes too long ends its process, and
pytest-xdist goes on with the next one in another process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.processes import session

from tools.rebind import environment, rebind

PUBLIC = Path(__file__).with_name("torchrl_public_tests.txt")
PLACES = ("test/test_collectors.py", "test/collectors/test_collectors.py", "test_collectors.py")
OPTIONS = (
    "-n 1 --max-worker-restart 500 -p tools.torchrl_suite -p no:cacheprovider "
    "-o faulthandler_timeout=0 --timeout-method=thread --tb=short --disable-warnings -qrfE"
)
LISTED = "GLEANRL_LISTED_TESTS"
"""Environment variable: a file with the names of the tests to run."""


def find_tests(path: Path) -> Path:
    """Return the test file in a checkout, or ``path`` itself if it is one."""
    for found in (path, *(path / place for place in PLACES)):
        if found.is_file():
            return found
    raise SystemExit(f"{path} holds none of {', '.join(PLACES)}: pass a checkout of TorchRL")


def prepare(tests: Path, into: Path, *, torchrl: bool) -> None:
    """Write the tests and the files that pytest needs beside them."""
    source = tests.read_text()
    if not torchrl:
        rebound = rebind(source)
        source = rebound.source
        print(f"left with TorchRL, as GleanRL has no such name: {', '.join(rebound.kept) or '-'}")
    (into / tests.name).write_text(source)
    (into / "pytest.ini").write_text("[pytest]\n")
    for near in (tests.parent.parent, tests.parent):
        for name in ("conftest.py", "pytest.ini"):
            if (near / name).is_file():
                shutil.copy(near / name, into / name)


def read_list(path: Path) -> set[str]:
    """Return the names of tests in ``path``, one a line; ``#`` begins a comment."""
    lines = path.read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the list, where the runner names one; this module is pytest's plugin."""
    if LISTED in os.environ:
        listed = read_list(Path(os.environ[LISTED]))
        items[:] = [item for item in items if item.nodeid.partition("::")[2] in listed]


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.torchrl_suite", description=__doc__)
    parser.add_argument("path", type=Path, help="a checkout of TorchRL, or its test_collectors.py")
    parser.add_argument("-k", metavar="EXPR", help="only tests that match, as pytest's -k")
    parser.add_argument("--all", action="store_true", help="every test, not those of public names")
    parser.add_argument("--torchrl", action="store_true", help="run them against TorchRL itself")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds a test may take")
    given = parser.parse_args(arguments)
    tests = find_tests(given.path)
    chosen = ["-k", given.k] if given.k else []
    limit = f"--timeout={given.timeout}"
    command = [sys.executable, "-m", "pytest", tests.name, *OPTIONS.split(), limit, *chosen]
    listed = {} if given.all else {LISTED: str(PUBLIC)}
    with tempfile.TemporaryDirectory(prefix="torchrl-suite-") as directory:
        prepare(tests, Path(directory), torchrl=given.torchrl)
        with session(command, cwd=directory, env=environment(**listed)) as process:
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
