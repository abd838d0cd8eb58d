"""GleanRL's `Collector` as one of the systems."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Fields, Skip, tensordict_fields


class Ours:
    """A `Collector` in this process, driven the way a training loop drives it.

    The last batch is held while the next one is made, as ``for batch in collector`` does.
    """

    def __init__(self, env: Any, policy: Any, frames: int, **options: Any) -> None:
        try:
            from gleanrl.collectors import Collector
        except ImportError as err:
            raise Skip(f"gleanrl.collectors.Collector: {err}") from err
        self.collector = Collector(env, policy, frames_per_batch=frames, total_frames=-1, **options)
        self._iterator = iter(self.collector)
        self.batch: Any = None

    def collect_batch(self) -> int:
        self.batch = next(self._iterator)
        return int(self.batch.numel())

    def fields(self) -> Fields:
        return tensordict_fields(self.batch)

    def close(self) -> None:
        self.collector.shutdown()
