"""The collector inside a worker, its hooks, and workers that fill a replay buffer themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors.arguments import read_index, read_seed
from gleanrl.collectors.controls import Controls
from gleanrl.collectors.hooks import Hooks, PostHook
from gleanrl.collectors.remote_attributes import AttributeAccess
from gleanrl.core.keys import MASK
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report, Snapshot, Verify
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Source, SourceFactory, Stop
from gleanrl.core.window import Window
from gleanrl.engine.buffer_or_recorder import Sink
from gleanrl.engine.pipeline import Pipeline
from gleanrl.memory.tensordicts import batch_over
from gleanrl.rollout.source_builder import SourceBuilder
from gleanrl.transport.verifying import Verifiable, difference
from gleanrl.weights.module_weights import cloned, weights_of


def _update(
    source: Source, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
) -> None:
    """Load weights into the models of ``source``."""
    if worker_ids is not None or kwargs:
        unknown = sorted({*kwargs, "worker_ids"} if worker_ids is not None else kwargs)
        raise TypeError(f"unexpected arguments {unknown}: this is the collector of one worker")
    newest = {name: cloned(weights_of(w)) for name, w in models.items() if w is not None}
    source.load(Snapshot(int(source.get("policy_version")) + 1, newest))


class WorkerCollector(Controls):
    """The collector of one worker, which makes rollouts for the learner's collector.

    ``"env.spec.id"``, ``"policy.module"``, ``"replay_buffer.__len__"``, ``"worker_idx"`` or
    ``"stats"`` are paths that start here.
    """

    def __init__(self, source: Source, worker: int, options: SourceOptions) -> None:
        """Represent ``source``, the environments and the policy of this worker."""
        self._hooks = Hooks(options.pre_collect_hook, options.post_collect_hook)
        self._attributes = AttributeAccess(weakref.proxy(self))
        self._update = partial(_update, source)
        self._source = source
        self._worker_idx = worker
        self._options = options
        self._frames = self._batches = 0

    def count(self, report: Report) -> None:
        self._frames += report.frames
        self._batches += 1

    @property
    def env(self) -> Any:
        return self._source.get("env")

    @property
    def policy(self) -> Any:
        return self._source.get("policy")

    @property
    def replay_buffer(self) -> Any:
        """The buffer that this worker writes into, ``None`` if there is none."""
        if self._options.learner_extends:
            raise AttributeError(
                "workers do not have this replay buffer, the learner's process writes into it: use "
                "the collector's replay_buffer there"
            )
        return self._options.replay_buffer

    @property
    def num_envs(self) -> int:
        layout = self._source.layout()
        return int(self._source.get("num_envs")) if layout is None else layout.all_envs

    n_env = num_envs

    @property
    def frames_per_batch(self) -> int:
        return self._options.frames_per_batch

    requested_frames_per_batch = frames_per_batch

    @property
    def policy_version(self) -> int:
        """The version of the weights that this worker acts with."""
        return int(self._source.get("policy_version"))

    def get_policy_version(self) -> int:
        return self.policy_version

    def stats(self) -> dict[str, int | float | bool]:
        return {
            "frames": self._frames,
            "batches": self._batches,
            "requested_frames_per_batch": self.frames_per_batch,
            "num_envs": self.num_envs,
            "policy_version": self.policy_version,
        }

    # -- weights and state -----------------------------------------------------------------------

    def get_model(self, model_id: str) -> Any:
        return self._source.get(model_id)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        return self._source.seed(read_seed(seed), static_seed)

    def reset(self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any) -> None:
        chosen = None if index is None else read_index(index, self.num_envs)
        self._source.reset(chosen, kwargs)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        self._source.load_state(state_dict, strict)


def serve_worker(options: SourceOptions, worker: int) -> WorkerSource:
    """Build the source of a worker with its collector."""
    source = SourceBuilder(options)(worker)
    return WorkerSource(source, WorkerCollector(source, worker, options))


class WorkerSource:
    """A source with a worker's collector: its hooks see rollouts, paths start at it."""

    def __init__(self, source: Source, collector: WorkerCollector) -> None:
        self._source, self.collector = source, collector
        self.layout, self.place, self.load = source.layout, source.place, source.load
        self.seed, self.reset, self.close = source.seed, source.reset, source.close
        self.state, self.load_state = source.state, source.load_state
        self._layout = source.layout()
        self._shows = True

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Call the pre-collect hook, collect a rollout and pass it to the post-collect hook."""
        collector = self.collector
        if (before := collector.pre_collect_hook) is not None:
            before()
        report = self._source.collect(window, steps, stop, random)
        collector.count(report)
        if self._shows and (after := collector.post_collect_hook) is not None:
            after(self._batch(window, report))
        return report

    def hand_over_hook(self) -> Callable[[], PostHook | None]:
        """Leave the post-collect hook to the caller; return a function that returns it."""
        self._shows = False
        return lambda: self.collector.post_collect_hook

    def _batch(self, window: Window, report: Report) -> TensorDictBase:
        """Return the rollout as a batch, a view of ``window``; it takes no other entries."""
        if report.payload is not None:
            payload: TensorDictBase = report.payload
            return payload
        assert self._layout is not None
        batch = batch_over(window, self._layout)
        if report.steps < window.steps and MASK not in window.keys():
            batch = batch[..., : report.steps]
        return batch.lock_()

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if path in _OF_THE_SOURCE:
            return self._source.call(path, *args, **kwargs)
        return self.collector.cascade_execute(path, *args, **kwargs)

    def get(self, path: str) -> Any:
        return self.collector.get_distant_attr(path)


_OF_THE_SOURCE = ("describe_weights", "explain", "policy_state")
"""Requests of the learner's collector itself."""


# -- workers that fill a buffer --------------------------------------------------------------------


def serve_filling(
    factory: SourceFactory, pipeline: Pipeline, sink: Sink, worker: int
) -> _BufferSource:
    """Build a source that passes its rollouts through ``pipeline`` into ``sink`` in the worker."""
    source = factory(worker)
    sink.serve(worker, source)
    return _BufferSource(source, pipeline, partial(difference, source, factory, worker))


class FillingSource:
    """A source whose rollouts stay in the worker: a pipeline, or `Episodes`, takes them in."""

    def __init__(self, source: Source, pipeline: Any) -> None:
        """Serve ``source``; first write its rollouts into this worker's own memory."""
        self._source = source
        self.load = source.load
        self.call, self.close = source.call, source.close
        self._pipeline = pipeline
        # A collector of the user's class calls its hooks itself.
        self._hook = source.hand_over_hook() if isinstance(source, WorkerSource) else lambda: None
        self._layout = source.layout()
        self._window: Window | None = None
        self._batch: TensorDictBase | None = None
        self._dropped = 0

    def layout(self) -> Layout | None:
        """Return ``None``, because no data travel to the learner."""
        return None

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Collect a rollout and store its frames."""
        if self._layout is None:
            report = self._source.collect(window, steps, stop, random)
            assert report.payload is not None
            batch: TensorDictBase = report.payload
        else:
            steps = self._layout.steps or steps
            own, batch = self._memory(self._layout, steps)
            report = self._source.collect(own, steps, stop, random)
            if report.payload is not None:  # it did not fit the layout
                batch = report.payload
        if report.steps < steps and MASK not in batch.keys(True):
            batch = batch[..., : report.steps]
        self._pipeline(batch, self._hook())
        dropped, self._dropped = self._pipeline.discarded - self._dropped, self._pipeline.discarded
        discarded = report.discarded + dropped
        return replace(report, discarded=discarded, payload=None)

    def _memory(self, layout: Layout, steps: int) -> tuple[Window, TensorDictBase]:
        if self._window is None or self._batch is None or self._window.steps != steps:
            self._window = Window.allocate(layout.fields, layout.num_envs, steps)
            self._batch = batch_over(self._window, layout)
        return self._window, self._batch

    def get(self, path: str) -> Any:
        return self._source.get(path)

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed everything; drop unfinished trajectories."""
        self._pipeline.forget()
        return self._source.seed(seed, static, stream)

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments; drop unfinished trajectories."""
        self._pipeline.forget()
        self._source.reset(envs, options)


class _BufferSource(FillingSource, Verifiable):
    """A source that delivers into the learner's buffer, which copies of it must not touch."""

    def __init__(
        self, source: Source, pipeline: Pipeline, check: Callable[[Verify], str | None]
    ) -> None:
        """Serve ``source``, which ``check`` compares without the buffer."""
        super().__init__(source, pipeline)
        self._check = check

    def place(self, base: int, stride: int) -> None:
        self._pipeline.share_out(stride)
        self._source.place(base, stride)

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        return {**self._source.state(allow_pickle), "trajectories": self._pipeline.state()}

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> str | None:
        self._pipeline.forget()
        why = self._source.load_state(state, strict, allow_pickle)
        if "trajectories" in state:
            self._pipeline.load_state(state["trajectories"])
        return why

    def verify(self, command: Verify) -> str | None:
        return self._check(command)
