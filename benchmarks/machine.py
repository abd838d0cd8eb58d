"""Where and with what the numbers were made."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = (
    "gleanrl",
    "torch",
    "tensordict",
    "gymnasium",
    "numpy",
    "torchrl",
    "envpool",
    "stable-baselines3",
    "ale-py",
    "mujoco",
    "minatar",
    "mpe2",
)


def versions() -> dict[str, str | None]:
    """Return the versions of everything involved; ``None`` for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["gleanrl"] is None:
        found["gleanrl"] = "source tree"
    return found


def machine() -> dict[str, object]:
    """Return processor, cores, threads and load."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "load_average": list(os.getloadavg()),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
