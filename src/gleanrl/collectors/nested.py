"""Collectors inside workers: any object with the collector interface works."""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor

from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.evaluation_episodes import EpisodesPlan
from gleanrl.collectors.in_process_collector import Collector
from gleanrl.collectors.states import unverified
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import paths
from gleanrl.core.episode_returns import NO_EPISODES, Ended, EpisodeSums, episodes_that_ended
from gleanrl.core.errors import ClosedError, ConfigError
from gleanrl.core.keys import MASK, TRAJ_IDS, as_key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.messages import Mishap, Report, Snapshot, Verify
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.core.streams import Streams, preserved
from gleanrl.core.window import Window
from gleanrl.memory.tensordicts import batch_over, copied, groups_of
from gleanrl.transport.verifying import Verifiable
from gleanrl.weights.module_weights import Shapes, cloned, shapes_of


def _serve_nested(
    kind: Any, options: SourceOptions, env: Any, kwargs: Mapping[str, Any], worker: int
) -> NestedSource:
    if options.init_fn is not None and "init_fn" not in kwargs:
        options.init_fn()
    streams = Streams()
    streams.begin(options.stream)
    with preserved(), streams.active():  # those of workers of its own come from these
        collector = kind(env, options.policy, **kwargs)
    if isinstance(collector, BaseCollector):
        collector.worker_idx = worker
    return NestedSource(collector, streams, options.mask)


def serve(plan: WorkerPlan, options: SourceOptions, given: Mapping[str, Any]) -> SourceFactory:
    """Return the factory of a worker of ``plan`` that makes evaluations, or has a whole collector.

    That collector alone gets the arguments ``given``.
    """
    kind, random = plan.collector_class, plan.limits.init_random_frames
    if isinstance(kind, EpisodesPlan):
        return kind.factory(options)
    kind = Collector if kind is None else kind
    if not callable(kind):
        raise ConfigError(f"collector_class ({kind!r}) must be callable")
    own = options.unusual(given)
    if not (plan.remote and plan.collector_class is not None):
        own.pop("init_fn", None)  # else it is called where the environments are
    if random:  # over all workers
        own["init_random_frames"] = -(-random // len(plan.functions))
    stopping = {"interruptor": plan.interruptor, "preemptive_threshold": plan.enough}
    _check_taken(kind, own, [name for name, value in stopping.items() if value is not None])
    kwargs = {
        "policy_factory": options.policy_factory,
        "policy_device": options.policy_device,
        "env_device": options.env_device,
        "exploration_type": options.exploration_type,
        "track_policy_version": options.track_policy_version,
        "frames_per_batch": options.frames_per_batch,
        "total_frames": -1,
    }
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs |= {name: value for name, value in given.items() if name != "init_fn"} | own
    env = options.create_env_fn
    several = isinstance(kind, type) and issubclass(kind, BaseCollector)
    several = several and not issubclass(kind, Collector)
    each = plan.arguments["num_workers_per_collector"]
    if plan.remote and (each > 1 or several):
        env = [env] * each
    return partial(_serve_nested, kind, options, env, kwargs)


def _check_taken(kind: Any, said: Mapping[str, Any], refused: list[str]) -> None:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):  # written in C, or hidden: it will say so itself
        parameters = None
    if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        refused = refused + [name for name in said if name not in parameters]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} cannot be passed on to the collector_class ({kind!r:.100}): "
            "drop them, or set them there"
        )


class NestedSource(Verifiable):
    """Serves a collector; each of its batches is one rollout.

    Batches of a fixed shape are copied into the learner's memory. Others travel as payloads, and so
    do those that differ from what was announced, and those of collectors that are not ours.
    """

    def __init__(self, collector: Any, streams: Streams, masks: bool) -> None:
        """Take over ``collector``; it draws random numbers in this process from ``streams``.

        With ``masks``, batches without a mask get one, because those around it may need it.
        """
        self.collector = collector
        self._streams = streams
        self._masks = masks
        self._batches: Iterator[Any] | None = None
        self._base, self._stride = 0, 1
        self._begun: torch.Tensor | None = None
        """Trajectories that each environment of a collector not ours has begun."""
        self._newest: torch.Tensor
        """The newest id of each environment."""
        self._version = 0
        self._layout: Layout | None = None
        self._reports: list[tuple[int, Report]] = []
        """Per worker of the collector, for the batch that it gathers."""
        self._sums: defaultdict[int, EpisodeSums] = defaultdict(EpisodeSums)
        self._mishaps: deque[Mishap] = deque()
        """Those of the collector, which tells nobody else."""
        self._takes_versions = False
        """Whether it takes a parent's versions; one with its own way to receive may not."""
        if isinstance(collector, BaseCollector):
            self._layout = _layout_of(collector, masks)
            self._takes_versions = type(collector).receive_models is BaseCollector.receive_models
            engine, reports = collector.collection.engine, self._reports
            engine.warns, self._mishaps = False, engine.mishaps
            collector.watch(lambda new, _: reports.extend(new.items()))

    @property
    def num_envs(self) -> int:
        """The collector's number of environments; 1 if it has no such attribute."""
        return int(getattr(self.collector, "n_env", 1) or 1)

    def layout(self) -> Layout | None:
        return self._layout

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Write the collector's next batch into ``window``, or return it if that has no fields."""
        begin = monotonic()
        batch = self._next()
        measured, ended = self._measured(monotonic() - begin), self._episodes()
        frames, version = self._counted(batch)
        drift = max((report.drift for _, report in self._reports), default=0)
        self._reports.clear()
        mishaps = tuple(self._mishaps.popleft() for _ in range(len(self._mishaps)))
        report = Report(steps, frames, version, 0, None, ended, measured=measured, mishaps=mishaps)
        report.drift = drift
        if batch is None:  # the collector has put it into a buffer of its own
            return report
        if self._layout is not None and window.keys() and _fits(batch, self._layout, window):
            _write(batch, self._layout, window)
            if TRAJ_IDS in window.keys():
                ids = window.tensor(TRAJ_IDS)
                ids.copy_(self._numbered(ids))
            report.steps = int(batch.shape[-1])
            return report
        # It may be a view of memory that is used again: it is copied before it travels.
        batch = copied(batch)
        if (ids := batch.get(TRAJ_IDS, None)) is not None:
            batch.set(TRAJ_IDS, self._numbered(ids))
        report.payload = batch
        return report

    def _episodes(self) -> Ended:
        each = [self._sums[worker].add([report.ended])[0] for worker, report in self._reports]
        return episodes_that_ended(np.concatenate([NO_EPISODES, *each]))

    def _measured(self, seconds: float) -> tuple[float, float, float]:
        """Divide ``seconds`` in the proportions of its workers' busy time."""
        inner = self._reports
        env, policy, rest, resets = (sum(r.seconds[p] for _, r in inner) for p in (0, 1, 2, 4))
        share = seconds / (env + policy + rest or 1.0)
        return env * share, policy * share, resets * share

    def _counted(self, batch: TensorDictBase | None) -> tuple[int, int]:
        reports = [report for _, report in self._reports]
        frames = sum(r.frames for r in reports) if batch is None else _valid_frames(batch)
        oldest = min((report.policy_version for report in reports), default=0)
        return frames, oldest if self._takes_versions else self._version

    def _next(self) -> TensorDictBase | None:
        if self._batches is None:
            self._batches = iter(self.collector)
        with self._streams.active():
            try:
                batch: TensorDictBase | None = next(self._batches)
            except StopIteration:
                raise ClosedError(self._why_over()) from None
        if self._masks and batch is not None and MASK not in batch.keys(True):
            batch = batch.copy().set(MASK, torch.ones(batch.shape, dtype=torch.bool))
        return batch

    def _why_over(self) -> str:
        name = f"the {type(self.collector).__name__} in this worker"
        if isinstance(self.collector, BaseCollector) and self.collector.closed:
            return f"{name} was shut down, by an earlier failure or a call of shutdown"
        return (
            f"{name} has delivered its total_frames; leave them to the collector around it, or "
            "make it endless"
        )

    def _numbered(self, ids: torch.Tensor) -> torch.Tensor:
        # Environment `i` of the collector, which ids of ours tell, is `base + i` of all.
        envs = self.num_envs
        if not isinstance(self.collector, BaseCollector) and ids.shape[:-1].numel() == envs:
            ids = self._by_row(ids.reshape(envs, -1)).reshape(ids.shape)
        return torch.where(ids < 0, ids, ids // envs * self._stride + self._base + ids % envs)

    def _by_row(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids ``[env, time]`` as collectors of ours number trajectories."""
        envs, valid = len(ids), ids >= 0
        if self._begun is None:
            self._begun, self._newest = ids.new_zeros(envs), ids.new_full((envs,), -1)
        before = torch.cat([self._newest.unsqueeze(1), ids], 1)
        begun = ((ids != before[:, :-1]) & valid).cumsum(1) + self._begun.unsqueeze(1)
        self._begun = begun[:, -1]
        self._newest = before.gather(1, valid.sum(1, keepdim=True)).squeeze(1)
        return torch.where(valid, (begun - 1) * envs + torch.arange(envs).unsqueeze(1), ids)

    def place(self, base: int, stride: int) -> None:
        self._base, self._stride = base, stride

    def load(self, snapshot: Snapshot) -> None:
        """Pass the weights to the collector, which passes them to its own workers."""
        copies = {name: cloned(weights) for name, weights in snapshot.models.items()}
        if self._takes_versions:
            self.collector.receive_models(copies, snapshot.version)
        elif copies and isinstance(self.collector, BaseCollector):
            self.collector.receive_models(copies)
        elif copies:
            self.collector.update_policy_weights_(weights_dict=copies)
        self._version = snapshot.version

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        with self._streams.active():
            last = int(self.collector.set_seed(seed, static_seed=static))
        self._streams.seed(seed if stream is None else stream)
        return last

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        with self._streams.active():
            self.collector.reset(envs, **options)

    def state(self, allow_pickle: bool = False) -> dict[str, Any]:
        ours = isinstance(self.collector, BaseCollector)
        pickling = {"allow_pickle": True} if allow_pickle and ours else {}
        return {
            "env": {},
            "collector": self.collector.state_dict(**pickling),
            "streams": self._streams.state(),
            "policy_version": self._version,
            "begun": self._begun,
            "sums": {worker: sums.state() for worker, sums in self._sums.items()},
        }

    def load_state(
        self, state: Mapping[str, Any], strict: bool = True, allow_pickle: bool = False
    ) -> str | None:
        why: str | None = None
        with self._streams.active():
            if isinstance(self.collector, BaseCollector):
                pickling = {"allow_pickle": True} if allow_pickle else {}
                self.collector.load_state_dict(state["collector"], strict, **pickling)
                why = self.collector.collection.restarted
            else:
                self.collector.load_state_dict(state["collector"])
        self._streams.load_state(state["streams"])
        self._version = int(state["policy_version"])
        if (begun := state.get("begun")) is not None:  # those that were running are over
            self._begun, self._newest = begun.clone(), torch.full_like(begun, -1)
        self._sums.clear()
        for worker, sums in state.get("sums", {}).items() if why is None else ():
            self._sums[worker].load_state(sums)
        return why

    def verify(self, command: Verify) -> str | None:
        if isinstance(self.collector, BaseCollector):
            return unverified(self.collector.collection, command.allow_pickle)
        return f"a {type(self.collector).__name__} cannot be checked"

    def policy_state(self) -> dict[str, Any]:
        """Return nothing: the policy is part of the collector's state."""
        return {}

    def describe_weights(self, model_id: str) -> Shapes:
        if isinstance(self.collector, BaseCollector):
            return self.collector.collection.weights.shapes(model_id)
        return shapes_of(self.collector.get_model(model_id))

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        own = path.partition(".")[0] in _OWN
        return paths.call(self if own else self.collector, path, args, kwargs)

    def get(self, path: str) -> Any:
        own = path.partition(".")[0] in _OWN
        return paths.resolve(self if own else self.collector, path)

    def close(self) -> None:
        self.collector.shutdown()


_OWN = ("num_envs", "describe_weights", "policy_state")


def _layout_of(collector: BaseCollector, masks: bool) -> Layout | None:
    """Return the layout of every batch of a collector, ``None`` if it is not known beforehand.

    It can where batches are delivered as they were collected: not with ``postproc``, a hook, a
    replay buffer, trajectories cut out, or data of no fixed shape, and not by a class of the user.
    """
    collection, storing = collector.collection, collector.storing_device
    ours = type(collector).__module__.startswith("gleanrl.")
    hooked = collection.plan.in_process and collection.hooks.post is not None
    on_cpu = storing is None or storing.type == "cpu"
    plain = collection.pipeline.plain and collection.engine.batches.uniform
    if not (ours and on_cpu and plain) or hooked:
        return None
    fake = collector.fake_tensordict()
    if masks and MASK not in fake.keys(True):
        fake.set(MASK, torch.ones(fake.shape, dtype=torch.bool))
    fields = tuple(
        Field(as_key(key), tuple(value.shape[fake.ndim :]), value.dtype)
        for key, value in fake.items(include_nested=True, leaves_only=True)
    )
    groups = tuple(groups_of(fake))
    return Layout(tuple(fake.shape[:-1]), fields, fake.shape[-1], collector.n_env, groups)


def _fits(batch: TensorDictBase, layout: Layout, window: Window) -> bool:
    """Tell whether ``batch`` fits the announced layout and has at most ``window``'s steps."""
    found = {
        as_key(key): (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        for key, value in batch.items(True, leaves_only=True, is_leaf=is_leaf_nontensor)
    }
    shape = (*layout.batch_shape, batch.shape[-1])
    fields = {field.key: ((*shape, *field.shape), field.dtype) for field in layout.fields}
    return batch.shape == shape and batch.shape[-1] <= window.steps and found == fields


def _write(batch: TensorDictBase, layout: Layout, window: Window) -> None:
    """Copy ``batch`` into ``window``, and empty the steps after it."""
    taken = int(batch.shape[-1])
    batch_over(window, layout)[..., :taken].update_(batch)
    if taken < window.steps:
        window.zero_from(taken)
        if TRAJ_IDS in window.keys():
            window.tensor(TRAJ_IDS)[:, taken:] = -1


def _valid_frames(batch: TensorDictBase) -> int:
    mask = batch.get(MASK, None)
    if isinstance(mask, torch.Tensor) and mask.shape == batch.shape:
        return int(mask.sum())
    frames: int = batch.numel()
    return frames
