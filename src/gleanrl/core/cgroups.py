"""What the kernel's control groups allow this process: containers and jobs of a cluster are such.

A limit of any group around the process binds it. Version 1 has a tree of groups per controller,
version 2 one tree; both may be in use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/")
"""Where ``proc`` and ``sys`` are."""


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of each group around this process, from its own to the outermost.

    ``controller`` is the resource: ``"memory"``, ``"cpu"`` or ``"pids"``.
    """
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        # A container sees its own group as the top, and may be told a path outside of it.
        if ".." in path or not folder.is_dir():
            folder = top
        version = 1 if controllers else 2
        while folder != top:
            yield version, folder
            folder = folder.parent
        yield version, top


def limits(
    controller: str, files: Mapping[int, tuple[str, str]], root: Path = ROOT
) -> Iterator[tuple[int, int, Path]]:
    """Yield limit, use and folder of every group with a limit; ``files`` name these, by version."""
    for version, group in groups(controller, root):
        try:
            limit, used = (int((group / name).read_text()) for name in files[version])
        except (OSError, ValueError):  # no such file, or "max"
            continue
        yield limit, used, group


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use, by its affinity and its groups' quotas."""
    quotas = [quota for folder in groups("cpu", root) if (quota := _quota(*folder)) is not None]
    return min([len(os.sched_getaffinity(0)), *(max(1, math.ceil(quota)) for quota in quotas)])


def _quota(version: int, group: Path) -> float | None:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return quota / period if quota > 0 else None


def lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's, none if it is not there."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
