"""What ``collect`` runs and ``bench`` compares: workers with environments, and a policy."""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from gleanrl.cli.display import plural
from gleanrl.collectors import BaseCollector, Collector, Interruptor
from gleanrl.core.errors import ConfigError
from gleanrl.memory.shared import check_memory

RANDOM = "random"
"""The policy that is none."""
_BATCH_FRAMES = 500
_WORKER_FRAMES = 1000
"""More, because a batch of several processes has to be handed over and waited for."""
_MIN_STEPS = 8
_ENV_BYTES, _WORKER_BYTES = 5_000, 20_000_000
"""What the smallest environments and their processes take."""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Topology:
    """Environments, and the processes they are in."""

    workers: int = 0
    """Worker processes or nodes; 0 for this process."""
    num_envs: int = 1
    """Environments of each worker, or of this process."""
    asynchronous: bool = False
    backend: str = "process"
    """Where workers are: ``"process"``, ``"distributed"`` or ``"ray"``."""
    launcher: str = "mp"
    """What starts distributed nodes."""

    @property
    def num_envs_total(self) -> int:
        """Environments that one batch spans."""
        return self.num_envs * (1 if self.asynchronous else max(1, self.workers))

    def __str__(self) -> str:
        """Spell it in a few words."""
        envs = plural(self.num_envs, "environment")
        if not self.workers:
            return f"{envs} in this process"
        kind = "worker" if self.backend == "process" else f"{self.backend} node"
        kind = f"asynchronous {kind}" if self.asynchronous else kind
        return f"{plural(self.workers, kind)} with {envs}{' each' * (self.workers > 1)}"

    def check_memory(self) -> None:
        """Refuse what this machine cannot hold, before anything is built.

        Raises:
            ConfigError: the least memory that it would take is more than there is.
        """
        if self.workers and self.backend != "process":
            return  # it may be on other machines
        least = max(1, self.workers) * self.num_envs * _ENV_BYTES + self.workers * _WORKER_BYTES
        check_memory(least, str(self), "ask for fewer (--num-envs, --workers)", "memory")

    def steps(self, most: int) -> int:
        """Return the steps of a batch that shows progress often, at most ``most``."""
        frames = _WORKER_FRAMES if self.workers else _BATCH_FRAMES
        return min(most, max(_MIN_STEPS, frames // self.num_envs))

    def make(
        self,
        env: str,
        policy: Any,
        frames_per_batch: int,
        total_frames: int = -1,
        interruptor: Interruptor | None = None,
    ) -> BaseCollector:
        """Start a collector."""
        more: dict[str, Any] = {}
        if self.workers:
            more = {
                "backend": self.backend,
                "num_collectors": self.workers,
                "sync": not self.asynchronous,
            }
        if self.backend == "distributed":
            more["backend_options"] = {"launcher": self.launcher}
        if self.backend == "process":
            more["interruptor"] = interruptor
        return Collector(
            env,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            num_envs=self.num_envs if self.num_envs > 1 else None,
            **more,
        )

    def command(self, env: str, policy: str) -> str:
        """Return the ``gleanrl collect`` command that collects like this."""
        parts = ["gleanrl", "collect", env]
        parts += [] if policy == RANDOM else ["--policy", policy]
        parts += ["--workers", str(self.workers)] if self.workers else []
        parts += ["--num-envs", str(self.num_envs)] if self.num_envs > 1 else []
        return shlex.join([*parts, *(["--async"] if self.asynchronous else [])])

    def call(self, env: str, policy: str, frames_per_batch: int) -> str:
        """Return the Python call that collects like this; ``policy`` stands for the user's."""
        parts = [repr(env)] if policy == RANDOM else [repr(env), "policy"]
        parts += [f"num_workers={self.workers}"] if self.workers else []
        parts += [f"num_envs={self.num_envs}"] if self.num_envs > 1 else []
        kind = f"Multi{'Async' if self.asynchronous else 'Sync'}" if self.workers else ""
        return f"{kind}Collector({', '.join(parts)}, frames_per_batch={frames_per_batch})"


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def default_workers(cores: int) -> tuple[int, ...]:
    """Return the numbers of workers worth trying.

    >>> default_workers(1), default_workers(2), default_workers(16)
    ((1,), (2,), (8, 16))
    """
    return tuple(sorted({max(cores // 2, min(cores, 2)), cores}))


def load_policy(text: str) -> Any:
    """Return the policy that ``text`` names; ``None`` acts at random.

    The file is run. A class, or a function without parameters to fill, is called to make the
    policy; anything else that can be called is the policy itself.

    Raises:
        ConfigError: the file or the name does not exist, or is not callable.
        Exception: whatever the file raises.
    """
    if text == RANDOM:
        return None
    file, found, name = text.rpartition(":")
    path = Path(file)
    if not found or not name.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"--policy {text!r} is neither 'random' nor FILE.py:NAME")
    if not path.is_file():
        raise ConfigError(f"--policy {text!r}: there is no file {file!r}")
    module = _run(path)
    if name not in vars(module):
        raise ConfigError(f"--policy {text!r}: {file} does not define {name!r}")
    made = vars(module)[name]
    if _makes_policy(made):
        made = made()
    if not callable(made):
        raise ConfigError(f"--policy {text!r}: a {type(made).__name__} cannot be called")
    return made


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What the file defines may look itself up in `sys.modules` (dataclasses do), and what stands
    # beside it should be importable, as if the file had been run as a script.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _makes_policy(made: Any) -> bool:
    if isinstance(made, nn.Module) or not callable(made):
        return False
    if inspect.isclass(made):
        return True
    try:
        parameters = inspect.signature(made).parameters.values()
    except ValueError:
        return False
    # ``*args`` is a parameter to fill: a policy may be written that way.
    return all(p.kind is p.VAR_KEYWORD or p.default is not p.empty for p in parameters)
