"""Starts a suite with one thread per process for everybody."""

from __future__ import annotations

import os
from importlib import import_module

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def launch(name: str) -> int:
    """Run the suite of `benchmarks.cases` of that name; return the exit code.

    Numerical libraries read these variables when they are loaded, and worker processes inherit
    them: nothing may be imported before.
    """
    for variable in THREADS:
        os.environ[variable] = "1"
    suites = import_module("benchmarks.suites")
    code: int = suites.main(import_module(f"benchmarks.cases.{name}").SUITE)
    return code
