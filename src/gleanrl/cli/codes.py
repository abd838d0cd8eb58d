"""Exit codes of the ``gleanrl`` command."""

from __future__ import annotations

FAILURE = 1
USAGE_ERROR = 2
INTERRUPTED = 130
"""After Ctrl-C, as shells have it."""
