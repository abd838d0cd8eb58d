"""How much memory there is, before it is promised to anybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gleanrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Version:
    """How a version of the kernel's control groups says what a group may use."""

    limit: str
    used: str
    cache: tuple[str, ...]
    """What of ``used``, in ``memory.stat``, the kernel gives up when memory is needed."""


_VERSIONS = {
    1: _Version(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: _Version("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes this process may still use: the machine's or a container's, the smallest.

    ``None`` where the system does not tell.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    lines = _lines(root / "proc/meminfo")
    found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for version, folder in _groups(root):
        free = _free(_VERSIONS[version], folder)
        if free is not None:
            found.append(free)
    return min(found, default=None)


def check_memory(
    nbytes: int, what: str, advice: str, kind: str = "shared memory", root: Path = Path("/")
) -> None:
    """Refuse what this machine or container has no memory for.

    Args:
        nbytes: How much is needed.
        what: What for, plural.
        advice: What to do about it.
        kind: What kind of memory.
        root: As for `available_memory`.

    Raises:
        ConfigError: there is less.
    """
    free = available_memory(root)
    if free is not None and nbytes > free:
        raise ConfigError(
            f"{what} need {nbytes:,} bytes of {kind}, {free:,} are available on this machine (or "
            f"in its container); {advice}"
        )


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the control groups that bound this process, from its own to the outermost."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            own[1 if controllers else 2] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in own or (version == 1 and "memory" not in options.split(",")):
            continue
        mounted, place = before.split(" ")[3:5]
        top = root / place.lstrip("/")
        # A container sees its own group as the top, and may be told a path outside of it.
        path = own[version].removeprefix(mounted) if mounted != "/" else own[version]
        folder = top / path.lstrip("/")
        if ".." in path or not folder.is_dir():
            folder = top
        while folder != top:
            yield version, folder
            folder = folder.parent
        yield version, top


def _free(version: _Version, group: Path) -> int | None:
    try:
        limit = int((group / version.limit).read_text())
        used = int((group / version.used).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
    return max(0, limit - used + sum(int(stat.get(name, 0)) for name in version.cache))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
