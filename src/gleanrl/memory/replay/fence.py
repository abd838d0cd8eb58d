"""Order of loads: what keeps a reader's second look at a stamp behind its copying."""

from __future__ import annotations

import platform
import threading

if platform.machine() in {"x86_64", "AMD64"}:

    def fence() -> None:
        """Keep what was read before from being read after: x86-64 never does that."""

else:
    _fence = threading.Lock()

    def fence() -> None:
        """Keep what was read before from being read after: two turns of a lock order loads."""
        for _ in range(2):
            with _fence:
                pass
