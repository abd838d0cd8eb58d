"""What collectors whose workers are nodes of a network share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tensordict import TensorDictBase

from gleanrl.collectors import workers
from gleanrl.collectors.launch import LaunchedCollector, WorkerParts
from gleanrl.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from gleanrl.collectors.nested import nested_factory
from gleanrl.collectors.single import Collector
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.batches import BatchOptions

KINDS: Mapping[str, Any] = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
}
_OF_A_WORKER = frozenset(
    {
        "auto_register_policy_transforms",
        "categorical_action_encoding",
        "check_finite",
        "compact_obs",
        "compile_policy",
        "create_env_kwargs",
        "cudagraph_policy",
        "fast",
        "init_fn",
        "info_keys",
        "max_frames_per_traj",
        "num_envs",
        "observation_dtype",
        "reset_at_each_iter",
        "set_truncated",
        "track_traj_ids",
        "trust_policy",
    }
)
"""Arguments that a node can have for itself without serving a whole collector."""
_OF_THE_LEARNER = frozenset(
    {"frames_per_batch", "total_frames", "init_random_frames", "replay_buffer", "sync", "backend"}
)


def with_defaults(**given: Any) -> SimpleNamespace:
    """Return ``given`` beside the defaults of `MultiCollector` for what is not given."""
    parameters = inspect.signature(MultiCollector.__init__).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return SimpleNamespace(**{**defaults, **given})


class NodesCollector(LaunchedCollector):
    """A collector over nodes; subclasses say how these are started and reached."""

    _kwargs: Sequence[Mapping[str, Any]]
    _per_node: int
    _update_after: bool
    _interval: int | None
    _tolerant: bool
    """What gathers, with ``sync=False``."""

    # -- arguments -------------------------------------------------------------------------------

    def _read_nodes(self, given: SimpleNamespace) -> list[Any]:
        """Read what only nodes have; return what each of them collects from.

        Raises:
            ConfigError: arguments that contradict each other.
        """
        functions = given.create_env_fn
        several = isinstance(functions, Sequence) and not isinstance(functions, str)
        functions = workers.env_functions(functions, None if several else 1)
        self.num_workers = len(functions)
        self._sync = _flag("sync", given.sync)
        given.collector_class = _kind(given.collector_class)
        self._per_node = check_int(
            "num_workers_per_collector", given.num_workers_per_collector, least=1
        )
        if given.collector_class is Collector and self._per_node > 1:
            raise ConfigError(
                f"num_workers_per_collector ({self._per_node}) needs nodes with several workers: "
                "pass collector_class='sync' or 'async', or num_envs= for one worker with several "
                "environments"
            )
        dealt = workers.per_worker("collector_kwargs", given.collector_kwargs, self.num_workers)
        self._kwargs = [_checked(kwargs, given) for kwargs in dealt]
        self._update_after = _flag("update_after_each_batch", given.update_after_each_batch)
        self._read_failure(given)
        _check_quota(given)
        self._interval = _interval(given.max_weight_update_interval)
        if self._update_after and given.policy is None:
            raise ConfigError(
                "update_after_each_batch=True takes weights from the policy, and there is none: "
                "give policy= (beside policy_factory=, if nodes are to make their own)"
            )
        self._waiting = dict.fromkeys(range(self.num_workers), 0)
        self._due: set[int] = set()
        return functions

    def _read_failure(self, given: SimpleNamespace) -> None:
        """Read what is to be done when a node is lost.

        Raises:
            ConfigError: no way to go on, or none for this collector.
        """
        what = given.on_failure
        if what not in ("raise", "continue", "relaunch"):
            raise ConfigError(f"on_failure ({what!r}) must be 'raise', 'continue' or 'relaunch'")
        if what != "raise" and self._sync:
            raise ConfigError(
                f"on_failure={what!r} needs sync=False: a batch of sync=True has a part of every "
                "node"
            )
        if what == "relaunch":
            raise ConfigError(
                f"on_failure='relaunch' is for DistributedCollector: {type(self).__name__} cannot "
                "let single nodes in later; use 'continue'"
            )
        self._tolerant = what == "continue"

    def _factory(self, given: SimpleNamespace, worker: int, own: WorkerParts) -> SourceFactory:
        kwargs = self._kwargs[worker]
        told = SimpleNamespace(**{**vars(given), **kwargs})
        own = replace(
            own,
            create_env_kwargs={
                **own.create_env_kwargs,
                **workers.env_kwargs(kwargs.get("create_env_kwargs"), 1)[0],
            },
        )
        more = {name: kwargs[name] for name in kwargs if name not in _OF_A_WORKER}
        told.collector_class = None
        if given.collector_class is Collector and not more:
            return super()._factory(told, worker, own)
        init_fn, told.init_fn = told.init_fn, None
        factory = nested_factory(
            SimpleNamespace(**{**vars(told), "collector_class": given.collector_class}),
            self._builder(told, worker, own),
            self._asked[worker],
        )
        functions: Any = own.create_env_fn
        if self._per_node > 1 or _has_workers(given.collector_class):
            functions = [functions] * self._per_node
        if init_fn is not None:
            more["init_fn"] = init_fn
        return replace(factory, create_env_fn=functions, kwargs={**factory.kwargs, **more})

    def _workers_fill(self, replay_buffer: Any) -> bool:
        """Nodes share no memory: the learner writes."""
        return False

    # -- batches ---------------------------------------------------------------------------------

    def _batch_of(self, frames: Sequence[int]) -> int:
        return sum(frames) if self._sync else max(frames)

    def _read_cat(self, cat_results: str | int | None) -> int | None:
        if not self._sync and cat_results not in (None, "stack"):
            raise ConfigError(
                f"cat_results ({cat_results!r}) is for sync=True: otherwise every batch is the "
                "rollout of one node"
            )
        return super()._read_cat(cat_results)

    def _gather_with(self) -> None:
        self._engine.dispatcher.tolerant = self._tolerant
        options = BatchOptions(
            stacked=self._sync and self._cat is None,
            cat=-1 if self._cat is None else self._cat,
            device=self.storing_device,
            single=not self._sync,
        )
        self._budget = self._engine.plan(self._limits, self._asked, options)

    # -- weights ---------------------------------------------------------------------------------

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        if self._due and self._tolerant:
            self._engine.check()  # who was lost meanwhile needs no weights
            self._due &= set(self._engine.dispatcher.alive)
        if self._due and self._models.given is not None:  # it has learned from the last one now
            everybody = len(self._due) == self.num_workers
            self.update_policy_weights_(worker_ids=None if everybody else sorted(self._due))
        tallies = self._engine.tallies
        before = [tally.rollouts for tally in tallies]
        batch = super()._gather(feed)
        after = [tally.rollouts for tally in tallies]
        delivered = [w for w, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        self._count(delivered)
        return batch

    def _count(self, delivered: Sequence[int]) -> None:
        """Note whose weights are to be updated before the next batch."""
        for worker in self._waiting:
            self._waiting[worker] += 1
            if self._interval is not None and self._waiting[worker] >= self._interval:
                self._due.add(worker)
        if self._update_after:
            self._due.update(delivered)

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        super()._publish(models, worker_ids, version)
        for worker in self._models.chosen(worker_ids):
            self._waiting[worker] = 0
            self._due.discard(worker)


def _kind(given: Any) -> Callable[..., Any]:
    if given is None:
        return Collector
    if isinstance(given, str):
        if given not in KINDS:
            raise ConfigError(
                f"collector_class ({given!r}) must be a class or one of {sorted(KINDS)}"
            )
        kind: Callable[..., Any] = KINDS[given]
        return kind
    if not callable(given):
        raise ConfigError(f"collector_class ({given!r:.100}) must be a class or a name")
    found: Callable[..., Any] = given
    return found


def _has_workers(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, MultiCollector)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be True or False")
    return value


def _check_quota(given: SimpleNamespace) -> None:
    """Refuse to wait for the share of environments that may be gone for good."""
    if given.on_failure != "raise" and given.traj_quota is not None:
        raise ConfigError(
            f"traj_quota={given.traj_quota!r} needs trajectories of every environment, and "
            f"on_failure={given.on_failure!r} goes on without those of lost nodes: leave one out"
        )


def _interval(value: Any) -> int | None:
    """Return the number of batches after which weights are sent at the latest; ``None``: never."""
    if value is None or value == -1:
        return None
    return check_int("max_weight_update_interval", value, least=1)


def _checked(kwargs: Any, given: SimpleNamespace) -> Mapping[str, Any]:
    """Check the ``collector_kwargs`` of one node against the collector's own arguments."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"collector_kwargs ({kwargs!r:.100}) must be a mapping, or a list of them"
        )
    defaults = with_defaults()
    for name, value in kwargs.items():
        if name in _OF_THE_LEARNER:
            raise ConfigError(f"collector_kwargs[{name!r}]: give {name}= to the collector itself")
        above = vars(given).get(name)
        if above is not vars(defaults).get(name) and above is not value and above != value:
            raise ConfigError(
                f"collector_kwargs[{name!r}] is {value!r:.100}, but {name}= is {above!r:.100}: "
                "say it once"
            )
    return dict(kwargs)
