"""Where GleanRL runs: all of it on Linux, what needs no worker processes on macOS."""

import sys

from gleanrl.core.errors import GleanError


def check_import() -> None:
    """Have ``import gleanrl`` fail at once where nothing works.

    Raises:
        ImportError: on Windows.
    """
    if sys.platform == "win32":
        raise ImportError(
            "GleanRL does not run on Windows: use Linux, which WSL 2 provides there "
            "(https://learn.microsoft.com/windows/wsl)"
        )


def require_linux(what: str) -> None:
    """Refuse what is built on anonymous memory files, process descriptors and events of Linux.

    Raises:
        GleanError: on another platform.
    """
    if sys.platform != "linux":
        raise GleanError(
            f"{what} need Linux, not {sys.platform}; Collector without workers, replay buffers "
            "that are not shared and Recorder need no worker processes"
        )
