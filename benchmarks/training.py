"""Whole training, collection and updates: ``python -m benchmarks.training``."""

import sys

from benchmarks.launch import launch

if __name__ == "__main__":
    sys.exit(launch("training"))
