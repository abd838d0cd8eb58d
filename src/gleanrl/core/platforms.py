"""Where GleanRL runs: Linux, and macOS without worker processes; and what extras install."""

import sys
from importlib import import_module
from typing import Any

from gleanrl.core.errors import ConfigError, GleanError


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


def imported(module: str, extra: str, needs_it: str, error: type[Exception] = ConfigError) -> Any:
    """Return a module of a package that one of GleanRL's extras installs.

    Args:
        module: The module's name.
        extra: The extra's.
        needs_it: What cannot be done without it, for the message.
        error: Raised if it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as err:
        raise error(
            f"{needs_it} needs a package that cannot be imported here ({err}); "
            f"pip install 'gleanrl[{extra}]'"
        ) from err
