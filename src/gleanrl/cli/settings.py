"""How many workers with how many environments: what ``collect`` runs and ``bench`` compares."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleanrl.cli.progress import plural
from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.collector import Collector
from gleanrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from gleanrl.engine.interruptor import Interruptor

_BATCH_FRAMES = 500
_WORKER_FRAMES = 1000
"""More, because a batch of several processes has to be handed over and waited for."""
_MIN_STEPS = 8
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Setting:
    """Environments, and the processes they are in."""

    workers: int = 0
    """Worker processes; 0 for this process."""
    num_envs: int = 1
    """Environments of each worker, or of this process."""
    asynchronous: bool = False
    backend: str = "process"
    """How workers are reached: ``"process"``, or ``"distributed"`` or ``"ray"`` for nodes."""
    launcher: str = "mp"
    """What starts distributed nodes."""

    @property
    def lanes(self) -> int:
        """Environments that one batch spans."""
        return self.num_envs * (1 if self.asynchronous else max(1, self.workers))

    def __str__(self) -> str:
        """Spell it in a few words."""
        envs = plural(self.num_envs, "environment")
        if not self.workers:
            return f"{envs} in this process"
        kind = "worker" if self.backend == "process" else f"{self.backend} node"
        kind = f"asynchronous {kind}" if self.asynchronous else kind
        each = envs if self.workers == 1 else f"{envs} each"
        return f"{plural(self.workers, kind)} with {each}"

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
        options: dict[str, Any] = {
            "frames_per_batch": frames_per_batch,
            "total_frames": total_frames,
            "num_envs": self.num_envs if self.num_envs > 1 else None,
        }
        if self.backend != "process":
            more = {"launcher": self.launcher} if self.backend == "distributed" else {}
            return Collector(
                env,
                policy,
                backend=self.backend,
                num_collectors=max(1, self.workers),
                sync=not self.asynchronous,
                backend_options=more,
                **options,
            )
        options["interruptor"] = interruptor
        if not self.workers:
            return Collector(env, policy, **options)
        kind = MultiAsyncCollector if self.asynchronous else MultiSyncCollector
        return kind(env, policy, num_workers=self.workers, **options)

    def options(self) -> str:
        """Return the options of ``gleanrl collect`` that choose this setting."""
        parts = [f"--workers {self.workers}"] if self.workers else []
        parts += [f"--num-envs {self.num_envs}"] if self.num_envs > 1 else []
        return " ".join([*parts, *(["--async"] if self.asynchronous else [])])

    def command(self, env: str, policy: str) -> str:
        """Return the ``gleanrl collect`` command for this setting."""
        chosen = [] if policy == "random" else ["--policy", shlex.quote(policy)]
        return " ".join(
            part for part in ("gleanrl collect", shlex.quote(env), *chosen, self.options()) if part
        )

    def call(self, env: str, policy: str, frames_per_batch: int) -> str:
        """Return the Python call for this setting; ``policy`` stands for the user's."""
        parts = [repr(env)] if policy == "random" else [repr(env), "policy"]
        parts += [f"num_workers={self.workers}"] if self.workers else []
        parts += [f"num_envs={self.num_envs}"] if self.num_envs > 1 else []
        kind = "Collector"
        if self.workers:
            kind = "MultiAsyncCollector" if self.asynchronous else "MultiSyncCollector"
        return f"{kind}({', '.join(parts)}, frames_per_batch={frames_per_batch})"


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
