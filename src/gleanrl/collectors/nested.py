"""Collectors inside workers: whatever has the collector interface can be served."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.handing_on import takes_versions, valid_frames, write_batch
from gleanrl.collectors.running import RunningCollector
from gleanrl.collectors.updating import UpdatingCollector
from gleanrl.core import paths
from gleanrl.core.errors import ClosedError, ConfigError
from gleanrl.core.keys import TRAJ_IDS
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Payload, Report, Snapshot
from gleanrl.core.protocols import Stop, Window
from gleanrl.core.streams import preserved
from gleanrl.memory.trees import copied
from gleanrl.rollout.build import SourceBuilder
from gleanrl.rollout.streams import Streams
from gleanrl.weights.snapshot import Shapes, shapes_of


@dataclass(frozen=True, slots=True)
class NestedFactory:
    """Builds a collector of the user's class where its worker is."""

    collector_class: Callable[..., Any]
    create_env_fn: Any
    policy: Any
    kwargs: Mapping[str, Any]
    stream: int | None = None
    """What the worker's random streams are made from; the global ones are used by default."""

    def __call__(self, worker: int) -> NestedSource:
        """Build the collector and serve it."""
        streams = Streams()
        streams.begin(self.stream)
        with preserved(), streams.active():  # those of workers of its own come from these
            collector = self.collector_class(self.create_env_fn, self.policy, **self.kwargs)
        if isinstance(collector, BaseCollector):
            collector.worker_idx = worker
        return NestedSource(collector, streams)


def nested_factory(given: SimpleNamespace, builder: SourceBuilder, frames: int) -> NestedFactory:
    """Return the factory of one worker's collector, built from the same arguments.

    Args:
        given: The arguments of the outer collector.
        builder: The worker's `SourceBuilder`.
        frames: What the worker is asked for.
    """
    if not callable(given.collector_class):
        raise ConfigError(f"collector_class ({given.collector_class!r}) must be callable")
    kwargs: dict[str, Any] = {
        "frames_per_batch": frames,
        "total_frames": -1,
        "create_env_kwargs": dict(builder.env.create_env_kwargs),
        "policy_device": builder.policy.device,
        "env_device": builder.env.device,
        "max_frames_per_traj": given.max_frames_per_traj,
        "reset_at_each_iter": given.reset_at_each_iter,
        "exploration_type": builder.rollout.exploration,
        "set_truncated": given.set_truncated,
        "track_policy_version": given.track_policy_version,
    }
    if builder.policy.policy_factory is not None:
        kwargs["policy_factory"] = builder.policy.policy_factory
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs.update(_passed_on(given))
    return NestedFactory(
        given.collector_class,
        builder.env.create_env_fn,
        builder.policy.policy,
        kwargs,
        builder.rollout.stream,
    )


_PASSED_ON: Mapping[str, Any] = {
    "num_envs": None,
    "track_traj_ids": True,
    "init_random_frames": None,
    "categorical_action_encoding": True,
    "observation_dtype": None,
    "info_keys": (),
    "check_finite": False,
    "fast": True,
    "compact_obs": False,
    "trust_policy": None,
    "compile_policy": None,
    "cudagraph_policy": None,
    "auto_register_policy_transforms": None,
    "pre_collect_hook": None,
    "post_collect_hook": None,
}
"""What concerns the collector in the worker, and its default, which need not be said."""
_KEPT_OUT: Mapping[str, Any] = {"interruptor": None, "preemptive_threshold": None}
"""What would have to stop a rollout, which nobody can do to a collector from outside."""


def _passed_on(given: SimpleNamespace) -> dict[str, Any]:
    """Return the arguments that the user gave and that a worker's collector has to have.

    Raises:
        ConfigError: it cannot have them.
    """
    told = vars(given)
    said = {n: told[n] for n, default in _PASSED_ON.items() if not _same(told[n], default)}
    refused = [n for n, default in _KEPT_OUT.items() if not _same(told[n], default)]
    try:
        parameters = inspect.signature(given.collector_class).parameters
    except (TypeError, ValueError):  # written in C, or hidden: it will say so itself
        parameters = None
    if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        refused += [name for name in said if name not in parameters]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} cannot be passed on to the collector_class "
            f"({given.collector_class!r:.100}): drop them, or set them there"
        )
    if "init_random_frames" in said:  # over all workers
        workers = given.worker_count
        said["init_random_frames"] = -(-int(said["init_random_frames"]) // workers)
    return said


def _same(value: Any, default: Any) -> bool:
    if default == ():
        return isinstance(value, Sequence) and len(value) == 0
    return value is default


class NestedSource:
    """Serves a collector: one of its batches is one rollout.

    Batches of a fixed shape are copied into the learner's memory. Others travel as payloads, and so
    do those of collectors that are not ours.
    """

    def __init__(self, collector: Any, streams: Streams | None = None) -> None:
        """Take over ``collector``; what it draws here comes from ``streams``."""
        self.collector = collector
        self._streams = Streams() if streams is None else streams
        self._batches: Iterator[Any] | None = None
        self._base, self._stride = 0, 1
        self._version = 0
        self._layout: Layout | None = None
        if isinstance(collector, RunningCollector):
            self._layout = collector.batch_layout()

    @property
    def num_envs(self) -> int:
        """The collector's number of environments; 1 if it does not say."""
        return int(getattr(self.collector, "n_env", 1) or 1)

    @property
    def env(self) -> Any:
        """The collector's environment."""
        return self.collector.env

    @property
    def policy(self) -> Any:
        """The collector's policy."""
        return self.collector.policy

    def layout(self) -> Layout | None:
        """Describe the collector's batches; ``None`` if they travel as payloads."""
        return self._layout

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Write the collector's next batch into ``window``, or return it if that has no fields.

        Raises:
            ClosedError: the collector has delivered all it was made for.
            ConfigError: the batch is not what the first ones were.
        """
        batch = self._next()
        frames, version = self._counted(batch)
        if batch is None:  # the collector has put it into a buffer of its own
            return Report(steps, frames, version)
        if self._layout is None or not window.keys():
            # It may be a view of memory that is used again: it is copied before it travels.
            batch = copied(batch)
            ids = batch.get(TRAJ_IDS, None)
            if ids is not None:
                batch.set(TRAJ_IDS, self._numbered(ids))
            return Report(steps, frames, version, payload=Payload(batch))
        taken = write_batch(batch, self._layout, window)
        if TRAJ_IDS in window.keys():
            ids = window.tensor(TRAJ_IDS)
            ids.copy_(self._numbered(ids))
        return Report(taken, frames, version)

    def _counted(self, batch: TensorDictBase | None) -> tuple[int, int]:
        """Return the valid frames of ``batch``, and the version that it was made with."""
        collector = self.collector
        if isinstance(collector, RunningCollector) and takes_versions(collector):
            frames, version = collector.gathered()
            return (frames if batch is None else valid_frames(batch)), version
        return (0 if batch is None else valid_frames(batch)), self._version

    def _next(self) -> TensorDictBase | None:
        if self._batches is None:
            self._batches = iter(self.collector)
        with self._streams.active():
            try:
                batch: TensorDictBase | None = next(self._batches)
            except StopIteration:
                raise ClosedError(self._why_over()) from None
        return batch

    def _why_over(self) -> str:
        name = f"the {type(self.collector).__name__} in this worker"
        if isinstance(self.collector, RunningCollector) and self.collector.closed:
            return f"{name} was shut down, by an earlier failure or by somebody else"
        return (
            f"{name} has delivered its total_frames; leave them to the collector around it, or "
            "make it endless"
        )

    def _numbered(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids < 0, ids, ids * self._stride + self._base)

    def place(self, base: int, stride: int) -> None:
        """Keep trajectory ids apart from those of other workers."""
        self._base, self._stride = base, stride

    def load(self, snapshot: Snapshot) -> None:
        """Hand the weights on to the collector, which passes them to workers of its own."""
        copies = {
            name: {key: _copied(value) for key, value in weights.items()}
            for name, weights in snapshot.models.items()
        }
        if isinstance(self.collector, UpdatingCollector):
            if takes_versions(self.collector):
                self.collector.receive_models(copies, snapshot.version)
            elif copies:
                self.collector.receive_models(copies)
        elif copies:
            self.collector.update_policy_weights_(weights_dict=copies)
        self._version = snapshot.version

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed the collector."""
        with self._streams.active():
            last = int(self.collector.set_seed(seed, static_seed=static))
        self._streams.seed(seed if stream is None else stream)
        return last

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset the collector's environments."""
        with self._streams.active():
            self.collector.reset(envs, **options)

    def state(self) -> dict[str, Any]:
        """Return the collector's state."""
        return {
            "env": {},
            "collector": self.collector.state_dict(),
            "streams": self._streams.state(),
            "policy_version": self._version,
        }

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the collector's state."""
        with self._streams.active():
            if strict or not isinstance(self.collector, BaseCollector):
                self.collector.load_state_dict(state["collector"])
            else:
                self.collector.load_state_dict(state["collector"], strict=False)
        self._streams.load_state(state["streams"])
        self._version = int(state["policy_version"])

    def policy_state(self) -> dict[str, Any]:
        """Return nothing: the policy is part of the collector's state."""
        return {}

    def describe_weights(self, model_id: str) -> Shapes:
        """Return the shapes of a model of the collector."""
        if isinstance(self.collector, UpdatingCollector):
            return self.collector.describe_weights(model_id)
        return shapes_of(self.collector.get_model(model_id))

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Call what ``path`` names, here or on the collector."""
        own = path.partition(".")[0] in _OWN
        return paths.call(self if own else self.collector, path, args, kwargs)

    def get(self, path: str) -> Any:
        """Return what ``path`` names, here or on the collector."""
        own = path.partition(".")[0] in _OWN
        return paths.resolve(self if own else self.collector, path)

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


_OWN = ("num_envs", "describe_weights", "policy_state")


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
