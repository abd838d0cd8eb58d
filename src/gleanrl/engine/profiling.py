"""Profile the first rollouts of a collector with `torch.profiler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gleanrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """The settings of a profile, and the place of its trace."""

    workers: Sequence[int] = (0,)
    """Indices of the workers to profile; only worker 0 by default."""
    num_rollouts: int = 3
    """Rollouts to run under the profiler, warm-up included."""
    warmup_rollouts: int = 1
    """Rollouts at the start that are not recorded."""
    save_path: str | Path | None = None
    """File of a worker's Chrome trace; ``{worker_idx}`` is replaced by the worker's index."""
    activities: Sequence[str] = ("cpu", "cuda")
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], None] | None = None
    """Receives the profiler; then no file is written."""

    def __post_init__(self) -> None:
        """Check the counts and names."""
        if self.warmup_rollouts < 0:
            raise ConfigError(f"warmup_rollouts must be >= 0, not {self.warmup_rollouts}")
        if self.num_rollouts <= self.warmup_rollouts:
            raise ConfigError(
                f"num_rollouts ({self.num_rollouts}) must be greater than warmup_rollouts "
                f"({self.warmup_rollouts}), or nothing is recorded"
            )
        unknown = sorted(set(self.activities) - {"cpu", "cuda"})
        if unknown:
            raise ConfigError(f"activities {unknown} must be 'cpu' or 'cuda'")

    def get_save_path(self, worker_idx: int) -> Path:
        """Return the file of one worker's trace."""
        pattern = str(self.save_path or "./collector_profile_{worker_idx}.json")
        return Path(pattern.format(worker_idx=worker_idx))

    def get_activities(self) -> list[ProfilerActivity]:
        """Return the activities this machine can record."""
        known = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
        cuda = torch.cuda.is_available()
        return [known[name] for name in self.activities if name == "cpu" or cuda]

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Tell whether a worker is to be profiled."""
        return worker_idx in self.workers


class RolloutProfiler:
    """A post-collect hook that steps a profiler and writes its trace after the last rollout."""

    def __init__(
        self, config: ProfileConfig, worker_idx: int, inner: Callable[[Any], None] | None
    ) -> None:
        """Start recording; ``inner`` is the user's own hook, which is still called."""
        self._inner = inner
        self._config = config
        self._worker_idx = worker_idx
        self._left = config.num_rollouts
        self._profiler = profile(
            activities=config.get_activities(),
            schedule=schedule(
                wait=0,
                warmup=config.warmup_rollouts,
                active=config.num_rollouts - config.warmup_rollouts,
                repeat=1,
            ),
            on_trace_ready=config.on_trace_ready or self._write,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        self._profiler.start()

    def __call__(self, batch: Any) -> None:
        """Count one rollout."""
        if self._left > 0:
            self._left -= 1
            self._profiler.step()
            if self._left == 0:
                self._profiler.stop()
        if self._inner is not None:
            self._inner(batch)

    def close(self) -> Callable[[Any], None] | None:
        """Stop recording early if necessary; return the user's hook."""
        if self._left > 0:
            self._left = 0
            self._profiler.stop()
        return self._inner

    def _write(self, profiler: Any) -> None:
        path = self._config.get_save_path(self._worker_idx)
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
