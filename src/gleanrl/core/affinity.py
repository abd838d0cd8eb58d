"""The processors that each worker may use."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int

_CPUS = Path("/sys/devices/system/cpu")


class Processors(frozenset[int]):
    """Processors that were read from an argument."""


def read_affinity(name: str, value: Any, workers: int) -> list[Processors] | None:
    """Return the processors of each worker; ``None`` if nothing was said.

    ``value`` has a collection of processors per worker, or is a callable that returns that of a
    worker, or ``"auto"`` for equal shares of what this process may use.
    """
    if value is None:
        return None
    allowed = os.sched_getaffinity(0)
    if isinstance(value, str):
        if value != "auto":
            raise ConfigError(f"{name} ({value!r}) must be 'auto' or processors of each worker")
        return shares(cores(allowed), workers)
    given = list(map(value, range(workers)) if callable(value) else value)
    if len(given) != workers:
        raise ConfigError(f"{name} has {len(given)} entries for {workers} workers")
    return [read_processors(f"{name}[{w}]", own, allowed) for w, own in enumerate(given)]


def read_processors(name: str, value: Any, allowed: Collection[int]) -> Processors:
    """Return processors of ``allowed``."""
    if isinstance(value, Processors):  # by the process that started this one
        return value
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} ({value!r}) must be a collection of processors, such as [0, 1]")
    chosen = Processors(check_int(name, processor, least=0) for processor in value)
    if not chosen or not chosen <= set(allowed):
        raise ConfigError(
            f"{name} ({sorted(chosen)}) must name processors that this process may use: "
            f"{sorted(allowed)} (its affinity, or that of its container or job)"
        )
    return chosen


def cores(allowed: Collection[int], folder: Path = _CPUS) -> list[Processors]:
    """Return the processors of each core, cores of one memory node next to each other."""
    found: dict[tuple[int, ...], set[int]] = {}
    for processor in sorted(allowed):
        own = folder / f"cpu{processor}"
        nodes = sorted(int(node.name[4:]) for node in own.glob("node[0-9]*")) or [0]
        place = [_number(own / "topology" / name) for name in ("physical_package_id", "core_id")]
        alone = [processor] if min(place) < 0 else []  # the kernel does not tell
        found.setdefault((nodes[0], *place, *alone), set()).add(processor)
    return [Processors(found[key]) for key in sorted(found)]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def shares(parts: Sequence[Processors], workers: int) -> list[Processors]:
    """Return the processors of each worker: neighbouring cores, one core for several if need be."""
    first = [worker * len(parts) // workers for worker in range(workers + 1)]
    return [
        Processors(chain(*parts[first[worker] : max(first[worker] + 1, first[worker + 1])]))
        for worker in range(workers)
    ]
