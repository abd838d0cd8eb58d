"""Replay buffers: ``python -m benchmarks.replay [--only CASE ...] [--rounds N] [--seconds S]``."""

import sys

from benchmarks.launch import launch

if __name__ == "__main__":
    sys.exit(launch("replay"))
