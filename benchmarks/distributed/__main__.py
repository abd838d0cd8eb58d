"""Run them: ``python -m benchmarks.distributed [--only CASE ...] [--rounds N]``."""

from __future__ import annotations

import os
import sys

from benchmarks.__main__ import THREADS


def main() -> int:
    """Limit everybody to one thread per process, then run; see `benchmarks.multi`."""
    for name in THREADS:
        os.environ[name] = "1"
    from benchmarks.distributed.cases import all_cases
    from benchmarks.distributed.weights import sending
    from benchmarks.multi import cli
    from benchmarks.multi.figures import Measurement

    weights = Measurement("weights", "weights to two nodes against a bare broadcast", sending)
    return cli.main(suite=cli.Suite("benchmarks.distributed", all_cases, [weights]))


if __name__ == "__main__":
    sys.exit(main())
