"""Run them: ``python -m benchmarks.multi [--only CASE ...] [--rounds N] [--seconds S]``."""

from __future__ import annotations

import os
import sys

from benchmarks.__main__ import THREADS


def main() -> int:
    """Limit everybody to one thread per process, then run.

    Numerical libraries read these variables when they are loaded, and worker processes inherit
    them: nothing may be imported before.
    """
    for name in THREADS:
        os.environ[name] = "1"
    from benchmarks.multi import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
