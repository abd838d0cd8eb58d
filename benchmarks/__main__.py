"""Runs a suite: ``python -m benchmarks [SUITE] [--only CASE ...] [--rounds N] [--seconds S]``."""

import os
import sys

if __name__ == "__main__":
    # Numerical libraries read these when they are loaded, and worker processes inherit them.
    for library in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    from benchmarks.suites import main

    sys.exit(main())
