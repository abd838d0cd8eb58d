"""Where and with what the numbers were made."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

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


def origin() -> dict[str, Any]:
    """Return the time, the versions of everything involved and the machine with its load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **dict(map(_version, _PACKAGES))},
        "machine": {
            "cpu": models[0] if models else platform.machine(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "torch_threads": torch.get_num_threads(),
            "system": platform.platform(terse=True),
            "load_average": list(os.getloadavg()),
        },
    }


def _version(name: str) -> tuple[str, str | None]:
    """Return a package and its version, ``None`` if it is not installed."""
    try:
        return name, metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, "source tree" if name == "gleanrl" else None
