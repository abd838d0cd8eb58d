"""Background collection: ``python -m benchmarks.background``."""

import sys

from benchmarks.launch import launch

if __name__ == "__main__":
    sys.exit(launch("background"))
