"""Runs TorchRL's own collector tests against GleanRL.

``python -m tools.torchrl_suite PATH [-k EXPR] [--list FILE] [--torchrl]``

PATH is a checkout of TorchRL, or its ``test_collectors.py``. A copy of the test file in a temporary
directory imports collectors and weight synchronisation from GleanRL (``tools.rebind``), everything
else from TorchRL. The checkout is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import session

from tools.outcomes import FILE
from tools.rebind import rebind

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = Path(__file__).with_name("torchrl_public_tests.txt")
PLACES = ("test/test_collectors.py", "test/collectors/test_collectors.py", "test_collectors.py")
_GRACE_S = 30.0
_POLL_S = 0.2
_STARTUP_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """How one test ended: ``passed``, ``failed``, ``skipped``, ``timeout`` or ``crashed``."""

    test: str
    outcome: str
    reason: str = ""
    details: str = ""
    seconds: float = 0.0


def find_tests(path: Path) -> Path:
    """Return the test file in a checkout, or ``path`` itself if it is one."""
    if path.is_file():
        return path
    for place in PLACES:
        if (path / place).is_file():
            return path / place
    raise SystemExit(f"{path} holds none of {', '.join(PLACES)}: pass a checkout of TorchRL")


def prepare(tests: Path, into: Path, *, torchrl: bool) -> tuple[str, ...]:
    """Write the tests and what pytest needs beside them, and return the names left with TorchRL."""
    source = tests.read_text()
    kept: tuple[str, ...] = ()
    if not torchrl:
        rebound = rebind(source)
        source, kept = rebound.source, rebound.kept
    (into / tests.name).write_text(source)
    for near in (tests.parent, tests.parent.parent):
        for name in ("conftest.py", "pytest.ini"):
            if (near / name).is_file() and not (into / name).exists():
                shutil.copy(near / name, into / name)
    if not (into / "pytest.ini").exists():
        (into / "pytest.ini").write_text("[pytest]\n")
    return kept


class Run:
    """Runs tests in one process after another until each has an outcome."""

    def __init__(self, directory: Path, file: str, timeout: float) -> None:
        self._directory, self._file, self._timeout = directory, file, timeout
        self._log = directory / "outcomes.jsonl"

    def collect(self, expression: str | None) -> list[str]:
        """Return the names of the tests that ``expression`` selects, without the file's."""
        command = [*self._pytest(), "--collect-only", "-q", self._file]
        command += ["-k", expression] if expression else []
        done = subprocess.run(
            command, cwd=self._directory, env=self._environment(), text=True, capture_output=True
        )
        prefix = f"{self._file}::"
        lines = done.stdout.splitlines()
        names = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        if not names:
            raise SystemExit(f"no test was collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return names

    def run(self, names: list[str]) -> dict[str, Outcome]:
        """Return each test's outcome; a test that ends its process is ``crashed``."""
        outcomes: dict[str, Outcome] = {}
        left = names
        while left:
            found = self._once(left)
            if not found:
                why = "the process that runs the tests ended before it"
                found = {left[0]: Outcome(left[0], "crashed", why)}
            outcomes |= found
            left = [name for name in left if name not in outcomes]
            if left:
                print(f"  … {len(outcomes)} of {len(names)} done", file=sys.stderr, flush=True)
        return outcomes

    def _once(self, names: list[str]) -> dict[str, Outcome]:
        self._log.unlink(missing_ok=True)
        self._log.touch()
        arguments = self._directory / "tests.txt"
        arguments.write_text("\n".join(f"{self._file}::{name}" for name in names))
        command = [*self._pytest(), f"--timeout={self._timeout}", "--timeout-method=signal"]
        command += ["--tb=short", "-q", f"@{arguments}"]
        with (self._directory / "output.txt").open("w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            room = {"cwd": self._directory, "env": self._environment()}
            with session(command, **room, **streams) as process:
                hung = self._wait(process)
        return self._read("timeout" if hung else "crashed")

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until all tests ran, or one stays beyond its deadline; return whether one did."""
        size, since = 0, time.monotonic() + _STARTUP_S
        while process.poll() is None:
            now = self._log.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > self._timeout + _GRACE_S:
                return True
            time.sleep(_POLL_S)
        return False

    def _read(self, unfinished: str) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        begun: str | None = None
        for line in map(json.loads, self._log.read_text().splitlines()):
            name = line["test"].removeprefix(f"{self._file}::")
            if line["outcome"] == "begun":
                begun = name
                continue
            begun = None
            outcome = "timeout" if line["reason"].startswith("Failed: Timeout") else line["outcome"]
            if name not in found or found[name].outcome == "passed":
                found[name] = Outcome(
                    name, outcome, line["reason"], line["details"], line["seconds"]
                )
        if begun is not None:
            found[begun] = Outcome(begun, unfinished, f"the test's process was lost ({unfinished})")
        return found

    def _pytest(self) -> list[str]:
        options = ["-p", "tools.outcomes", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
        return [sys.executable, "-m", "pytest", *options, f"--rootdir={self._directory}"]

    def _environment(self) -> dict[str, str]:
        path = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        return {
            "OMP_NUM_THREADS": "1",
            "MUJOCO_GL": "disabled",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            FILE: str(self._log),
        }


def read_list(path: Path) -> list[str]:
    """Return the names of tests in ``path``, one a line; ``#`` begins a comment."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def report(outcomes: dict[str, Outcome], *, verbose: bool) -> None:
    """Print what did not pass, and the counts."""
    for name in sorted(outcomes):
        outcome = outcomes[name]
        if outcome.outcome in ("passed", "skipped"):
            continue
        print(f"{outcome.outcome:8} {name}\n         {outcome.reason[:200]}")
        if verbose:
            print("\n".join(f"         | {line}" for line in outcome.details.splitlines()))
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()), end="")
    print(f" of {len(outcomes)} tests")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(prog="python -m tools.torchrl_suite", description=__doc__)
    parser.add_argument("path", type=Path, help="a checkout of TorchRL, or its test_collectors.py")
    parser.add_argument("-k", metavar="EXPR", help="only tests that match, as pytest's -k")
    parser.add_argument(
        "--list",
        type=Path,
        default=PUBLIC,
        metavar="FILE",
        help="the tests to run, one name a line (default: those that touch public names only)",
    )
    parser.add_argument("--all", action="store_true", help="every test of the file, not the list's")
    parser.add_argument("--torchrl", action="store_true", help="run them against TorchRL itself")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds a test may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to FILE")
    parser.add_argument("-v", action="store_true", help="show the ends of the tracebacks")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the tests and return 0 if none of them failed."""
    given = parse(arguments)
    tests = find_tests(given.path)
    with tempfile.TemporaryDirectory(prefix="torchrl-suite-") as directory:
        kept = prepare(tests, Path(directory), torchrl=given.torchrl)
        run = Run(Path(directory), tests.name, given.timeout)
        names = run.collect(given.k)
        if not given.all:
            listed = read_list(given.list)
            absent = sorted(set(listed) - set(names)) if given.k is None else []
            names = [name for name in names if name in set(listed)]
            if absent:
                print(f"not in {tests}: {', '.join(absent)}")
        outcomes = run.run(names)
    if kept:
        print(f"left with TorchRL, as GleanRL has no such name: {', '.join(kept)}")
    report(outcomes, verbose=given.v)
    if given.json:
        found = [vars(outcomes[name]) for name in names]
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(o.outcome not in ("passed", "skipped") for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
