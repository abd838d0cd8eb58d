"""Workers that put what they collect into a buffer themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from gleanrl.collectors.worker import SourceAround, WorkerSource, batch_over
from gleanrl.core.keys import MASK
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report
from gleanrl.core.protocols import Source, SourceFactory, Stop, Window
from gleanrl.engine.pipeline import Pipeline
from gleanrl.memory.arena import RolloutWindow
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.storages import LazyTensorStorage
from gleanrl.memory.replay.writers import RoundRobinWriter


@dataclass(frozen=True, slots=True)
class FillingFactory:
    """Builds a source whose rollouts go into a buffer where they are made."""

    factory: SourceFactory
    pipeline: Pipeline
    """What rollouts go through there; its sink is the buffer."""

    def __call__(self, worker: int) -> FillingSource:
        """Build the source and connect it to the buffer."""
        return FillingSource(self.factory(worker), self.pipeline)


class FillingSource(SourceAround):
    """A source that delivers into a buffer: what it reports are counts."""

    def __init__(self, source: Source, pipeline: Pipeline) -> None:
        """Serve ``source``; its rollouts are written into memory of this worker's own first."""
        super().__init__(source)
        self._pipeline = pipeline
        # A collector of the user's class calls its hooks itself.
        self._hook = source.hand_over_hook() if isinstance(source, WorkerSource) else _no_hook
        self._layout = source.layout()
        self._window: RolloutWindow | None = None
        self._batch: TensorDictBase | None = None
        self._dropped = 0

    def layout(self) -> Layout | None:
        """Return ``None``: nothing travels to the learner."""
        return None

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Collect a rollout and store what became of it."""
        if self._layout is None:
            report = self._source.collect(window, steps, stop, random)
            assert report.payload is not None
            batch: TensorDictBase = report.payload.handle
        else:
            steps = self._layout.steps or steps
            own, batch = self._memory(self._layout, steps)
            report = self._source.collect(own, steps, stop, random)
            if report.payload is not None:  # it did not fit the layout
                batch = report.payload.handle
        if report.steps < steps and MASK not in batch.keys(True):
            batch = batch[..., : report.steps]
        self._pipeline(batch, self._hook())
        dropped, self._dropped = self._pipeline.discarded - self._dropped, self._pipeline.discarded
        discarded = report.discarded + dropped
        return Report(report.steps, report.frames, report.policy_version, discarded)

    def _memory(self, layout: Layout, steps: int) -> tuple[RolloutWindow, TensorDictBase]:
        if self._window is None or self._batch is None or self._window.steps != steps:
            self._window = RolloutWindow.allocate(layout.fields, layout.num_envs, steps)
            self._batch = batch_over(self._window, layout)
        return self._window, self._batch

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed everything; trajectories in the making are dropped."""
        self._pipeline.forget()
        return super().seed(seed, static, stream)

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments; trajectories in the making are dropped."""
        self._pipeline.forget()
        super().reset(envs, options)

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the source's state."""
        self._pipeline.forget()
        super().load_state(state, strict)


def _no_hook() -> None:
    return None


def shared_with_workers(buffer: Any) -> bool:
    """Tell whether workers can write into ``buffer`` themselves; it is shared then.

    Rows of several workers go where there is room, so it has to be a buffer of rows, not one of
    ``[env, time]`` or one that keeps the best, on the CPU, and one of ours: others are extended
    by the learner.
    """
    if not isinstance(buffer, ReplayBuffer):
        return False
    storage = buffer.storage
    if not isinstance(storage, LazyTensorStorage) or storage.ndim != 1:
        return False
    if not isinstance(buffer.writer, RoundRobinWriter) or storage.device.type != "cpu":
        return False
    buffer.share()
    return True
