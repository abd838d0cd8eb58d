"""How much memory there is, before it is promised to anybody."""

from __future__ import annotations

from pathlib import Path

from gleanrl.core.errors import ConfigError

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_memory() -> int | None:
    """Return the bytes this process may still use: the machine's or its cgroup's, the smaller.

    ``None`` where the system does not tell.
    """
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")]
    except OSError:
        pass
    for limit, used in _CGROUPS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found, default=None)


def check_memory(nbytes: int, what: str) -> None:
    """Raise `ConfigError` if ``nbytes`` are more than there is; ``what`` says what for."""
    free = available_memory()
    if free is not None and nbytes > free:
        raise ConfigError(
            f"{what} need {nbytes:,} bytes of shared memory, {free:,} are available on this "
            "machine (or in its cgroup); lower frames_per_batch, the number of workers or of "
            "environments"
        )
