"""Run the benchmarks: ``python -m benchmarks [--only CASE ...] [--rounds N] [--seconds S]``."""

from __future__ import annotations

import os
import sys

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main() -> int:
    """Limit everybody to one thread, then run.

    Numerical libraries read these variables when they are loaded: nothing may be imported before.
    """
    for name in THREADS:
        os.environ[name] = "1"
    from benchmarks import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
