"""Frames per second of whole training loops: ``python -m benchmarks.training_rates``."""

import sys

from benchmarks.launch import launch

if __name__ == "__main__":
    sys.exit(launch("training_rates"))
