"""The collector inside a worker: its hooks, and what paths of `map_fn` and others start at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors import checks
from gleanrl.collectors.base import BaseCollector, PostHook, PreHook
from gleanrl.core.keys import MASK, TIME
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report, Snapshot
from gleanrl.core.protocols import Source, SourceFactory, Stop, Window
from gleanrl.memory.trees import tensordict_over
from gleanrl.weights.snapshot import Shapes, cloned, weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRole:
    """What a worker's collector is told of the collector around it."""

    frames_per_batch: int
    """Frames that the worker is asked for at a time."""
    pre_collect_hook: PreHook | None = None
    post_collect_hook: PostHook | None = None
    replay_buffer: Any = None
    """The buffer that the worker writes into."""
    learner_extends: bool = False
    """Whether there is a buffer, but in the learner's process."""


class WorkerCollector(BaseCollector):
    """The collector of one worker; the collector in the learner's process asks it for rollouts.

    ``"env.spec.id"``, ``"policy.module"``, ``"replay_buffer.__len__"``, ``"worker_idx"`` or
    ``"stats"`` are paths that start here.
    """

    def __init__(self, source: Source, worker: int, role: WorkerRole) -> None:
        """Speak for ``source``, the environments and the policy of this worker."""
        super().__init__(role.pre_collect_hook, role.post_collect_hook)
        self._source = source
        self._worker_idx = worker
        self._role = role
        self._frames = self._batches = 0

    def count(self, report: Report) -> None:
        """Note a rollout."""
        self._frames += report.frames
        self._batches += 1

    @property
    def env(self) -> Any:
        """The environment of this worker."""
        return self._source.get("env")

    @property
    def policy(self) -> Any:
        """The policy that runs in this worker."""
        return self._source.get("policy")

    @property
    def replay_buffer(self) -> Any:
        """The buffer that this worker writes into, ``None`` if there is none.

        Raises:
            AttributeError: there is one, but the learner writes.
        """
        if self._role.learner_extends:
            raise AttributeError(
                "workers do not have this replay buffer, the learner's process writes into it: use "
                "the collector's replay_buffer there"
            )
        return self._role.replay_buffer

    @property
    def num_envs(self) -> int:
        """Environments of this worker."""
        layout = self._source.layout()
        return int(self._source.get("num_envs")) if layout is None else layout.all_envs

    @property
    def n_env(self) -> int:
        """Environments of this worker."""
        return self.num_envs

    @property
    def frames_per_batch(self) -> int:
        """Frames that this worker is asked for at a time."""
        return self._role.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames that this worker is asked for at a time."""
        return self._role.frames_per_batch

    @property
    def policy_version(self) -> int:
        """The version of the weights that this worker acts with."""
        return int(self._source.get("policy_version"))

    def get_policy_version(self) -> int:
        """Return `policy_version`."""
        return self.policy_version

    def stats(self) -> dict[str, int | float | bool]:
        """Return what this worker has made, as scalars."""
        return {
            "frames": self._frames,
            "batches": self._batches,
            "requested_frames_per_batch": self.frames_per_batch,
            "num_envs": self.num_envs,
            "policy_version": self.policy_version,
        }

    # -- weights and state -----------------------------------------------------------------------

    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        checks.check_update(worker_ids, kwargs)
        given = {name: cloned(weights_of(w)) for name, w in models.items() if w is not None}
        self._source.load(Snapshot(self.policy_version + 1, given))

    def get_model(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``."""
        return self._source.get(model_id)

    def describe_weights(self, model_id: str) -> Shapes:
        """Return the shapes of a model."""
        shapes: Shapes = self._source.call("describe_weights", model_id)
        return shapes

    def policy_state(self) -> dict[str, Any]:
        """Return the policy's state dict, empty if it has none."""
        state: dict[str, Any] = self._source.call("policy_state")
        return state

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed this worker's environments and random streams, and reset its environments."""
        return self._source.seed(checks.read_seed(seed), static_seed)

    def reset(self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset environments of this worker; all by default."""
        chosen = None if index is None else checks.read_index(index, self.num_envs)
        self._source.reset(chosen, kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker's environments, counters and random streams."""
        return self._source.state()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned."""
        self._source.load_state(state_dict, strict)

    # -- what the learner's process does ---------------------------------------------------------

    def iterator(self) -> Iterator[Any]:
        """Refuse: rollouts are asked for by the collector around this one.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the collector inside a worker is not iterated over: iterate over the one that has the "
            "workers"
        )

    def __len__(self) -> int:
        """Refuse: it goes on for as long as it is asked.

        Raises:
            TypeError: always.
        """
        raise TypeError("the collector inside a worker has no length")

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Close the environments of this worker."""
        self._source.close()


@dataclass(frozen=True, slots=True)
class WorkerFactory:
    """Builds the source of a worker with its collector."""

    factory: SourceFactory
    role: WorkerRole

    def __call__(self, worker: int) -> WorkerSource:
        """Build both."""
        source = self.factory(worker)
        return WorkerSource(source, WorkerCollector(source, worker, self.role))


class SourceAround:
    """A source around another one, which does what is not done here."""

    def __init__(self, source: Source) -> None:
        """Pass everything on to ``source``."""
        self._source = source

    def layout(self) -> Layout | None:
        """Describe one step."""
        return self._source.layout()

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Collect a rollout."""
        return self._source.collect(window, steps, stop, random)

    def place(self, base: int, stride: int) -> None:
        """Number the environments among those of all workers."""
        self._source.place(base, stride)

    def load(self, snapshot: Snapshot) -> None:
        """Load weights; the next rollout is made with them."""
        self._source.load(snapshot)

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed everything and reset."""
        return self._source.seed(seed, static, stream)

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments."""
        self._source.reset(envs, options)

    def state(self) -> dict[str, Any]:
        """Return the source's state."""
        return self._source.state()

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the source's state."""
        self._source.load_state(state, strict)

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what ``path`` names."""
        return self._source.call(path, *args, **kwargs)

    def get(self, path: str) -> Any:
        """Return what ``path`` names."""
        return self._source.get(path)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class WorkerSource(SourceAround):
    """A source with a worker's collector: its hooks see rollouts, paths start at it."""

    def __init__(self, source: Source, collector: WorkerCollector) -> None:
        """Serve ``source`` as ``collector``."""
        super().__init__(source)
        self.collector = collector
        self._layout = source.layout()
        self._shows = True

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Call the hook, collect a rollout and show it to the other hook."""
        collector = self.collector
        if (before := collector.pre_collect_hook) is not None:
            before()
        report = self._source.collect(window, steps, stop, random)
        collector.count(report)
        if self._shows and (after := collector.post_collect_hook) is not None:
            after(self._batch(window, report))
        return report

    def hand_over_hook(self) -> Callable[[], PostHook | None]:
        """Leave the hook that sees rollouts to the caller; return what gives it."""
        self._shows = False
        return lambda: self.collector.post_collect_hook

    def _batch(self, window: Window, report: Report) -> TensorDictBase:
        """Return the rollout as a batch, a view of ``window``; it takes no other entries."""
        if report.payload is not None:
            payload: TensorDictBase = report.payload.handle
            return payload
        assert self._layout is not None
        batch = batch_over(window, self._layout)
        if report.steps < window.steps and MASK not in window.keys():
            batch = batch[..., : report.steps]
        return batch.lock_()

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what ``path`` names, beginning at the worker's collector."""
        return self.collector.cascade_execute(path, *args, **kwargs)

    def get(self, path: str) -> Any:
        """Return what ``path`` names, beginning at the worker's collector."""
        return self.collector.get_distant_attr(path)


def batch_over(window: Window, layout: Layout) -> TensorDictBase:
    """Return ``window`` as a batch over the same memory."""
    shape = (*layout.batch_shape, window.steps)
    views = {
        field.key: window.tensor(field.key).view((*shape, *field.shape)) for field in layout.fields
    }
    names = [None] * (len(shape) - 1) + [TIME]
    return tensordict_over(views, shape, names, layout.groups)
