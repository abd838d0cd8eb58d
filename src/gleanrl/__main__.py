"""``python -m gleanrl`` is the ``gleanrl`` command."""

from __future__ import annotations

import sys

from gleanrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
