"""A pytest plugin that appends each test's outcome to a file as it is known, one JSON line each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

FILE = "GLEANRL_OUTCOMES"
_LINES = 40


class Outcomes:
    """Writes down which test begins, and how each ends."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test that runs from now on, in case its process does not outlive it."""
        self._write(test=nodeid, outcome="begun", at=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed, and whatever else a phase of it came to."""
        if report.when != "call" and report.passed:
            return
        reason = "" if report.passed else _reason(report)
        details = "" if report.passed or report.skipped else report.longreprtext
        self._write(
            test=report.nodeid,
            outcome=report.outcome,
            reason=reason,
            details="\n".join(details.splitlines()[-_LINES:]),
            seconds=round(report.duration, 2),
        )


def _reason(report: pytest.TestReport) -> str:
    """Return what a test failed or was skipped for in one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    return next((line for line in text.splitlines() if line.strip()), "")


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer for the file that the parent process names."""
    config.pluginmanager.register(Outcomes(Path(os.environ[FILE])), "outcomes-to-file")
