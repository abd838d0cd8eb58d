"""Where, when and with which commit the numbers were made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import gleanrl

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
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
    """Return the time, the commit, the versions of everything and the machine with its load."""
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    found = metadata.distributions()
    installed = {each.name.lower().replace("_", "-"): each.version for each in found}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "python": platform.python_version(),
            "gleanrl": gleanrl.__version__,
            **{name: installed.get(name) for name in _PACKAGES},
        },
        "machine": {
            "cpu": model[1] if model else platform.machine(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(terse=True),
            "load_average": list(os.getloadavg()),
        },
    }


def _commit() -> dict[str, Any] | None:
    """Return the checkout's commit and whether a Python file differs; ``None`` without git."""

    def git(*arguments: str) -> str:
        command = "git", "-C", str(ROOT), *arguments
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"id": git("rev-parse", "HEAD"), "changed": bool(git("status", "-s", "--", "*.py"))}
    except (OSError, subprocess.CalledProcessError):
        return None
