"""Platforms of GleanRL: Linux, and macOS without worker processes; limits; extras."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from gleanrl.core.errors import ConfigError, GleanError


def check_import() -> None:
    """Make ``import gleanrl`` fail at once on platforms without support."""
    if sys.platform == "win32":
        raise ImportError(
            "GleanRL does not run on Windows: use Linux, which WSL 2 provides there "
            "(https://learn.microsoft.com/windows/wsl)"
        )


def require_linux(what: str) -> None:
    """Refuse features that need Linux's anonymous memory files, process descriptors and events."""
    if sys.platform != "linux":
        raise GleanError(
            f"{what} need Linux, not {sys.platform}; Collector without workers, replay buffers "
            "that are not shared and Recorder need no worker processes"
        )


_LIMITS = {
    errno.EMFILE: ("RLIMIT_NOFILE", "ulimit -n"),
    errno.ENOMEM: ("RLIMIT_AS", "ulimit -v"),
    errno.EAGAIN: ("RLIMIT_NPROC", "ulimit -u"),
}
"""The limit of a process that an error number tells of, and how a shell shows and sets it."""


@contextmanager
def naming_limits() -> Iterator[None]:
    """Have an `OSError` of the body that tells of a limit of this process name the limit."""
    try:
        yield
    except OSError as err:
        if err.errno not in _LIMITS:
            raise
        import resource  # not on every platform

        name, shell = _LIMITS[err.errno]
        soft, hard = (
            "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"
            for limit in resource.getrlimit(getattr(resource, name))
        )
        raise ConfigError(
            f"{err.strerror}: {name} ({shell}) of this process is {soft} and may be raised to "
            f"{hard}; raise it, or use fewer workers"
        ) from err


def imported(module: str, extra: str, needs_it: str, error: type[Exception] = ConfigError) -> Any:
    """Return a module that an ``extra`` installs, which ``needs_it``, or raise ``error``."""
    try:
        return import_module(module)
    except ImportError as err:
        raise error(
            f"{needs_it} needs a package that cannot be imported here ({err}); "
            f"pip install 'gleanrl[{extra}]'"
        ) from err
