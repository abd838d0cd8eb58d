"""What collectors with workers share: what each worker runs, batches, state across workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.collectors import per_worker
from gleanrl.collectors.arguments import (
    Arguments,
    Options,
    Shown,
    WorkersArguments,
    check_callables,
    read_seed,
    source,
)
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.collector import Collector
from gleanrl.collectors.engine_collector import CLOSE_TIMEOUT_S, EngineCollector
from gleanrl.collectors.nested import nested_factory
from gleanrl.collectors.questions import WorkerQuestions
from gleanrl.collectors.worker import (
    FillingFactory,
    WorkerFactory,
    WorkerRole,
)
from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.core.errors import ArgumentTypeError, ConfigError, for_users
from gleanrl.core.options import FrameBudget, seconds
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.engine import MakeBackend
from gleanrl.engine.models import WeightSync
from gleanrl.engine.replacing import Replacements, reseeded
from gleanrl.rollout.build import Initialised, SourceBuilder
from gleanrl.transport.network import NetworkBackend

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
"""Arguments that a worker can have for itself without serving a whole collector."""


class WeightSchedule:
    """When the policy's weights are sent to which workers without being asked for."""

    def __init__(self, workers: int, interval: int | None, after_each: bool) -> None:
        """Send to a worker every ``interval`` batches, or ``after_each`` that it delivered."""
        self._waiting = dict.fromkeys(range(workers), 0)
        self._interval, self._after_each = interval, after_each
        self.due: set[int] = set()
        """Workers that get weights before the next batch."""

    def count(self, delivered: Sequence[int]) -> None:
        """Note a batch, which is made of rollouts of the workers ``delivered``."""
        for worker in self._waiting:
            self._waiting[worker] += 1
            if self._interval is not None and self._waiting[worker] >= self._interval:
                self.due.add(worker)
        if self._after_each:
            self.due.update(delivered)

    def sent(self, workers: Sequence[int]) -> None:
        """Note that ``workers`` were sent weights, for whatever reason."""
        for worker in workers:
            self._waiting[worker] = 0
            self.due.discard(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What the workers of a collector are, and how their rollouts become batches."""

    create_env_fn: Any
    """What workers collect from, as it was given."""
    functions: Sequence[Any]
    """What each worker collects from."""
    policy: Any
    sync: bool
    """Whether a batch holds a rollout of every worker."""
    collector_class: Any = Collector
    """What runs in each worker; `Collector` stands for a `WorkerCollector`."""
    remote: bool = False
    """Whether workers share no memory with this process."""
    kwargs: Sequence[Mapping[str, Any]] = ()
    """Remote workers: further arguments of each worker's collector."""
    workers_each: int = 1
    """Remote workers: the workers of each worker's collector, if it has any."""
    schedule: WeightSchedule | None = None
    """Remote workers: when weights are sent by themselves."""
    tolerant: bool = False
    """Whether collection continues without workers that were lost."""
    relaunches: int | None = None
    """How often a lost worker is replaced; ``None`` if none is."""
    update_each: bool = False
    """Whether weights are sent with every batch."""
    enough: int | None = None
    """How many workers have to finish before the others are stopped; ``None`` for all."""
    interruptor: Any = None
    num_threads: int | None = None
    """torch threads of this process while workers run."""


class WorkersCollector(EngineCollector):
    """A collector whose environments and policies are in workers."""

    cat_results = Shown()
    collector_class = Shown()
    create_env_fn = Shown(doc="What each worker collects from.")
    create_env_kwargs = Shown()
    num_sub_threads = Shown()
    preemptive_threshold = Shown(lambda share: 1.0 if share is None else float(share))
    update_at_each_batch = Shown(bool)

    _hooks_here = False
    _models: WeightSync
    _replacements: Replacements | None = None
    num_workers: int

    # -- construction ----------------------------------------------------------------------------

    def _launch(self, arguments: WorkersArguments, plan: WorkerPlan, make: MakeBackend) -> None:
        """Check the arguments, start the workers and set up everything around them.

        Args:
            arguments: The arguments, as `read` has completed them.
            plan: What workers are.
            make: Builds the backend that starts and reaches them.
        """
        shared = cast("Arguments", arguments)
        self._plan, self.num_workers = plan, len(plan.functions)
        _check(arguments, plan)
        options = Options.of(shared)
        self._devices = per_worker.Devices.read(
            self.num_workers,
            device=arguments["device"],
            storing_device=arguments["storing_device"],
            policy_device=arguments["policy_device"],
            env_device=arguments["env_device"],
        )
        self._asked = asked = per_worker.frames_per_worker(
            arguments["frames_per_batch"], self.num_workers, plan.sync
        )
        frames = arguments["frames_per_batch"]
        if isinstance(frames, Sequence):
            frames = sum(asked) if plan.sync else max(asked)
        limits = FrameBudget.from_arguments(
            frames,
            arguments["total_frames"],
            arguments["init_random_frames"],
        )
        cat = per_worker.read_cat(arguments["cat_results"], plan.sync)
        stacked = plan.sync and cat is None
        self._take(shared, options, self._devices.storing(), stacked=stacked)
        self._fills = self._sink is not None and self._sink.by_workers(plan.remote)
        self._settings["create_env_fn"] = plan.create_env_fn
        self.policy_device = self._devices.policies()
        self.env_device = [device.env for device in self._devices.plans]
        self.interruptor = plan.interruptor
        batches = BatchOptions(
            stacked=stacked,
            cat=-1 if cat is None else cat,
            device=self.storing_device,
            trim=plan.sync and (plan.enough is not None or plan.interruptor is not None),
            single=not plan.sync,
        )
        threads = per_worker.Threads(plan.num_threads, self.num_workers)
        self._threads = weakref.finalize(self, threads.restore)
        with self._threads_back():
            factories = self._factories(arguments, options)
            self._build_engine(make, factories, start_timeout=arguments["start_timeout"])
            with self._starting(options):
                self._set_up(arguments, limits, batches)

    @contextmanager
    def _threads_back(self) -> Iterator[None]:
        """Restore the number of torch threads if the body fails."""
        try:
            yield
        except BaseException:
            self._threads()
            raise

    def _factories(self, arguments: WorkersArguments, options: Options) -> list[SourceFactory]:
        """Return what builds each worker's source, there."""
        count = self.num_workers
        kwargs = per_worker.env_kwargs(arguments["create_env_kwargs"], count)
        makers = per_worker.deal("policy_factory", arguments["policy_factory"], count)
        # Drawn from torch's generator: a seeded script has seeded workers.
        self._stream = int(torch.randint(1 << 62, ()))
        factories: list[SourceFactory] = []
        for worker in range(count):
            own = self._plan.kwargs[worker] if self._plan.kwargs else {}
            merged = cast("WorkersArguments", {**arguments, **own})
            base = source(cast("Arguments", merged)) if own else options.source
            more = per_worker.env_kwargs(own.get("create_env_kwargs"), 1)[0]
            builder = self._builder(base, worker, {**kwargs[worker], **more}, makers[worker])
            factories.append(self._factory(merged, own, worker, builder))
        return factories

    def _builder(
        self,
        base: SourceBuilder,
        worker: int,
        env_kwargs: Mapping[str, Any],
        policy_factory: Callable[[], Any] | None,
    ) -> SourceBuilder:
        """Return what builds the environments and the policy of one worker."""
        plan, devices = self._plan, self._devices.plans[worker]
        return SourceBuilder(
            env=replace(
                base.env,
                create_env_fn=plan.functions[worker],
                create_env_kwargs=env_kwargs,
                device=devices.env,
            ),
            policy=replace(
                base.policy,
                policy=plan.policy if policy_factory is None else None,
                policy_factory=policy_factory,
                device=devices.policy,
            ),
            rollout=replace(
                base.rollout,
                mask=plan.interruptor is not None or plan.enough is not None,
                stream=self._stream + worker,
            ),
        )

    def _factory(
        self,
        arguments: WorkersArguments,
        own: Mapping[str, Any],
        worker: int,
        builder: SourceBuilder,
    ) -> SourceFactory:
        """Return what builds the source of one worker, whose own arguments are ``own``."""
        plan, kind, init_fn = self._plan, self._plan.collector_class, arguments["init_fn"]
        more = {name: own[name] for name in own if name not in _OF_A_WORKER}
        factory: SourceFactory
        if kind is Collector and not more:
            role = WorkerRole(
                frames_per_batch=self._asked[worker],
                pre_collect_hook=arguments["pre_collect_hook"],
                post_collect_hook=arguments["post_collect_hook"],
                replay_buffer=self.replay_buffer if self._fills else None,
                learner_extends=self.replay_buffer is not None and not self._fills,
            )
            factory = WorkerFactory(builder, role)
        else:
            nested = nested_factory(arguments, kind, builder, self._asked[worker], self.num_workers)
            if plan.remote:
                functions: Any = builder.env.create_env_fn
                several = isinstance(kind, type) and issubclass(kind, WorkersCollector)
                if plan.workers_each > 1 or several:
                    functions = [functions] * plan.workers_each
                if init_fn is not None:  # it runs where the environments are
                    more["init_fn"], init_fn = init_fn, None
                nested = replace(nested, create_env_fn=functions, kwargs={**nested.kwargs, **more})
            factory = nested
        if self._sink is not None and self._fills:
            factory = FillingFactory(factory, self._pipeline, self._sink)
        return factory if init_fn is None else Initialised(init_fn, factory)

    def _set_up(
        self, arguments: WorkersArguments, limits: FrameBudget, batches: BatchOptions
    ) -> None:
        """Set up memory, weights and counters, now that the workers are up."""
        engine, plan = self._engine, self._plan
        self._questions = WorkerQuestions(engine, self.num_workers)
        stopped: Callable[[], bool] = bool
        if plan.interruptor is not None:
            plan.interruptor.attach(engine.backend.stop_byte)
            stopped = plan.interruptor.collection_stopped
        engine.dispatcher.tolerant = plan.tolerant
        self._budget = engine.plan(
            limits, self._asked, batches, enough=plan.enough, stopped=stopped
        )
        self._pipeline.share_out(engine.num_envs)
        self._models = WeightSync(
            engine,
            plan.policy,
            made_by_factory=arguments["policy_factory"] is not None,
            schemes=arguments["weight_sync_schemes"],
            version=self._version,
            devices=self.policy_device,
            keep=plan.relaunches is not None,
        )
        if plan.relaunches is not None:
            backend = cast("NetworkBackend", engine.backend)
            self._replacements = Replacements(engine, backend, self._models, plan.relaunches)

    def _env_to_record(self) -> Any:
        first = self._plan.functions[0]
        return first if isinstance(first, str) else None

    # -- batches ---------------------------------------------------------------------------------

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        plan = self._plan
        if plan.schedule is not None:
            return self._gather_on_schedule(plan.schedule, feed)
        if plan.update_each and plan.sync:
            self.update_policy_weights_()
        batch = super()._gather(feed)
        if plan.update_each and not plan.sync:
            self.update_policy_weights_()
        return batch

    def _gather_on_schedule(self, schedule: WeightSchedule, feed: bool) -> TensorDictBase | None:
        """Send the weights that are due, which has the learner's newest; then collect."""
        if schedule.due and self._plan.tolerant:
            self._engine.check()  # workers that were lost meanwhile need no weights
            schedule.due &= set(self._engine.dispatcher.alive)
        if schedule.due and self._models.policy is not None:
            everybody = len(schedule.due) == self.num_workers
            self.update_policy_weights_(worker_ids=None if everybody else sorted(schedule.due))
        before = [tally.rollouts for tally in self._engine.tallies]
        batch = super()._gather(feed)
        after = [tally.rollouts for tally in self._engine.tallies]
        schedule.count([w for w, (a, b) in enumerate(zip(before, after, strict=True)) if a != b])
        return batch

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """Return the frames of one rollout of a worker."""
        return int(self._engine.sizes[worker_idx])

    # -- weights ---------------------------------------------------------------------------------

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        self._touched = True
        with self._engine.turn(None):
            self._models.update(models, version, worker_ids)
        if self._plan.schedule is not None:
            self._plan.schedule.sent(self._models.chosen(worker_ids))

    def _check_workers(self, worker_ids: Any) -> None:
        self._models.chosen(worker_ids)

    # -- state -----------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, action spaces and random streams, and reset all environments.

        See `BaseCollector.set_seed`. Workers that take the place of lost ones get seeds that follow
        from these, which no worker before had.
        """
        with self._engine.turn(None):
            if self._replacements is not None:
                self._replacements.seeds = self._seeds(read_seed(seed), static_seed)
            return super().set_seed(seed, static_seed)

    @for_users
    def reset(self, reset_idx: Sequence[bool] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset all environments of workers; they start new trajectories.

        Rollouts under way are thrown away and counted as discarded.

        Args:
            reset_idx: One bool per worker; all by default.
            **kwargs: Options for `gymnasium.Env.reset`.

        Raises:
            ConfigError: anything but one bool per worker.
        """
        chosen = [True] * self.num_workers
        if reset_idx is not None:
            chosen = _read_flags("reset_idx", reset_idx)
        if len(chosen) != self.num_workers:
            raise ConfigError(f"reset_idx has {len(chosen)} entries for {self.num_workers} workers")
        self._restart({w: m.Reset(None, kwargs) for w, reset in enumerate(chosen) if reset})

    def state_dict(self) -> dict[str, Any]:
        """Return ``worker0``, ``worker1``, …, each with its policy and environment, and counters.

        Waits for rollouts that are under way; they are delivered as if nothing had been asked.
        Where losses are tolerated, the entry of a lost worker says so (``"lost"``) and holds the
        policy of the worker that has the newest: the worker that loads it starts with fresh
        environments, random streams and trajectory ids.
        """
        engine = self._engine
        with engine.turn(None):
            states = engine.request_all(m.GetState())
            policies = engine.request_all(m.Call("policy_state"))
            lives = list(engine.lives)
        asked = zip(states, policies, lives, strict=True)
        entries: dict[int, dict[str, Any]] = {}
        for worker, (state, policy, life) in enumerate(asked):
            if state is not None and policy is not None:
                entries[worker] = {
                    "policy_state_dict": policy,
                    "env_state_dict": state.pop("env"),
                    "policy_version": state["policy_version"],
                    "worker": state,
                    "life": life,
                }
        if not entries:
            raise engine.dispatcher.lost[0]
        newest = max(entries.values(), key=lambda entry: entry["worker"]["policy_version"])
        for worker, life in enumerate(lives):
            entries.setdefault(worker, _of_lost(newest, life + 1))
        named = {f"worker{worker}": entries[worker] for worker in range(self.num_workers)}
        return {**named, "frames": self._budget.delivered, "iter": self._batches}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned; environments restart on fresh resets.

        The learner's own policy is not touched: what it loads is for your script to say.

        Raises:
            ConfigError: the state of another number of workers.
            KeyError: ``strict`` and an entry is missing.
            WeightsError: the policy's weights do not fit; nothing was loaded.
        """
        names = [f"worker{worker}" for worker in range(self.num_workers)]
        saved = sum(str(name).startswith("worker") for name in state_dict)
        if saved != self.num_workers:
            raise ConfigError(f"the state is that of {saved} workers, here are {self.num_workers}")
        missing = [name for name in (*names, "frames", "iter") if name not in state_dict]
        if strict and missing:
            raise KeyError(f"state_dict lacks {missing}; load with strict=False to do without")
        policies: dict[int, tuple[Mapping[str, Any], int]] = {}
        states: dict[int, m.Command] = {}
        for worker, name in enumerate(names):
            entry = state_dict[name]
            version = int(entry["worker"]["policy_version"])
            policies[worker] = (entry.get("policy_state_dict") or {}, version)
            states[worker] = self._restored(worker, entry, strict)
        with self._engine.turn(None):
            frames = int(state_dict.get("frames", self._budget.delivered))
            batches = int(state_dict.get("iter", self._batches))
            self._models.check_restore(state for state, _ in policies.values())
            self._number_lives([state_dict[name] for name in names])
            self._restart(states)
            self._models.restore(policies)
            self._models.continue_from(max(version for _, version in policies.values()))
            self._budget.delivered = frames
            self._batches = batches
            if self._replacements is not None:  # streams are those of the state now
                self._replacements.seeds = {}

    def _restored(self, worker: int, entry: Mapping[str, Any], strict: bool) -> m.Command:
        """Return what restores ``worker`` from ``entry``, or seeds it if that is lost."""
        if entry.get("lost"):
            life = max(int(entry["life"]), self._engine.lives[worker])
            return reseeded(m.Seed(self._stream + worker), life)
        return m.SetState({**entry["worker"], "env": entry.get("env_state_dict", {})}, strict)

    def _number_lives(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Go on counting lives from a state, and with them trajectory ids."""
        engine = self._engine
        alive = engine.dispatcher.alive
        for worker, entry in enumerate(entries):
            life = int(entry.get("life", 0))
            if entry.get("lost"):  # it begins a life, which must not be one that is over
                life = max(life - (worker not in alive), engine.lives[worker])
            engine.lives[worker] = life
        engine.request_each({worker: engine.place(worker) for worker in alive})

    def stats(
        self, workers: str = "aggregate", *, timeout: float | None = None
    ) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars; costs no round trip.

        Args:
            workers: ``"aggregate"``, ``"per_worker"`` (entries ``worker_0/frames``, …) or
                ``"both"``. ``"workers"`` and ``"workers_alive"`` are always there.
            timeout: Accepted for compatibility: no worker is asked.

        Raises:
            ConfigError: another word.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ConfigError(
                f"workers must be one of 'aggregate', 'per_worker' and 'both', not {workers!r}"
            )
        alive, tallies = self._engine.dispatcher.alive, self._engine.tallies
        stats: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            stats = super().stats()
            stats["worker_frames"] = sum(tally.frames for tally in tallies)
        stats["workers"], stats["workers_alive"] = self.num_workers, len(alive)
        stats["workers_lost"] = self._engine.losses
        stats["rollouts_queued"] = self._engine.gather.queued
        if workers != "aggregate":
            for worker, tally in enumerate(tallies):
                stats[f"worker_{worker}/frames"] = tally.frames
                stats[f"worker_{worker}/batches"] = tally.rollouts
                stats[f"worker_{worker}/requested_frames_per_batch"] = self._engine.sizes[worker]
                stats[f"worker_{worker}/policy_version"] = tally.policy_version
                stats[f"worker_{worker}/alive"] = worker in alive
                stats[f"worker_{worker}/pid"] = self._engine.processes[worker][0]
                for name, value in self._watching.stats(worker).items():
                    stats[f"worker_{worker}/{name}"] = value
        return stats

    def _status(self) -> dict[str, Any]:
        hosts = [host for _, host in self._engine.processes]
        return {**super()._status(), "stats": self.stats("both"), "hosts": hosts}

    # -- questions -------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Resolve a path such as ``"env.transform[0]"`` and call it in every worker.

        Returns:
            One result per worker, ``None`` for one that was lost (where that is tolerated).
        """
        count = self.num_workers
        return self.map_fn(attr_path, [args] * count, [kwargs] * count)

    def get_distant_attr(self, attr: str) -> list[Any]:
        """Return what a path names, one entry per worker (``None`` if it was lost).

        Of a replay buffer that the learner writes into, every worker has the learner's.
        """
        return self._questions.attribute(attr, self._learners_buffer)

    @property
    def _learners_buffer(self) -> Any:
        """The replay buffer, if this process alone writes into it."""
        return None if self._fills else self.replay_buffer

    def getattr_policy(self, attr: str) -> Any:
        """Return an attribute of the policy of the first worker that is there."""
        return self._engine.ask(m.Get(f"policy.{attr}"))

    def getattr_env(self, attr: str) -> Any:
        """Return an attribute of the environment of the first worker that is there."""
        return self._engine.ask(m.Get(f"env.{attr}"))

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer, which is asked here."""
        return paths.resolve(self, f"replay_buffer.{attr}")

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once in every worker, each with its own arguments.

        One that was lost (where that is tolerated) answers ``None``.

        Args:
            method_name: A path that begins at the worker's collector, such as ``"env.set_attr"``.
            list_of_args: One entry per worker.
            list_of_kwargs: One entry per worker.

        Raises:
            ConfigError: a list with another number of entries.
            AttributeError: the method does not exist.
        """
        count = self.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs: list[Any] = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for what, entries in (("argument", args), ("keyword-argument", kwargs)):
            if len(entries) != count:
                raise ConfigError(
                    f"Expected {count} {what} entries, one per worker, got {len(entries)}"
                )
        return self._questions.call_each(method_name, args, kwargs, self._learners_buffer)

    # -- hooks -----------------------------------------------------------------------------------

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        """Set `pre_collect_hook`, in every worker."""
        super().set_pre_collect_hook(hook)
        self._tell("set_pre_collect_hook", hook)

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        """Set `post_collect_hook`, in every worker."""
        super().set_post_collect_hook(hook)
        self._tell("set_post_collect_hook", hook)

    def _begin_profile(self, config: Mapping[str, Any]) -> None:
        self._engine.request_all(m.Call("enable_profile", (), config))

    def _end_profile(self) -> None:
        if not self._engine.closed:
            self._engine.request_all(m.Call("disable_profile"))

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of every worker's collector, and of those that will replace lost ones."""
        if not self._engine.closed:
            self._engine.standing[method] = m.Call(method, args)
            self._engine.request_all(self._engine.standing[method])

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End the workers. Idempotent; batches that were handed out stay valid.

        Args:
            timeout: Seconds until workers that do not end by themselves are killed; 10 by default.
            close_env: Only ``True``: environments end with their process.
            raise_on_error: Raise what closing an environment raised.
        """
        if not close_env:
            raise RuntimeError(
                "close_env=False: the environments of workers cannot outlive their process"
            )
        super().shutdown(10.0 if timeout is None else timeout, True, raise_on_error)
        self._threads()

    def _abandon(self) -> None:
        # An interrupt or an error is raised without waiting for a worker that hangs.
        self.shutdown(CLOSE_TIMEOUT_S, raise_on_error=False)


def _of_lost(newest: Mapping[str, Any], life: int) -> dict[str, Any]:
    """Return the entry of a worker that was lost: the policy of another, and its next life."""
    return {
        "policy_state_dict": newest["policy_state_dict"],
        "env_state_dict": {},
        "policy_version": newest["policy_version"],
        "worker": {"policy_version": newest["worker"]["policy_version"]},
        "life": life,
        "lost": True,
    }


def _check(arguments: WorkersArguments, plan: WorkerPlan) -> None:
    """Find contradictions that only collectors with workers can have."""
    factories = arguments["policy_factory"]
    both = plan.policy is not None and factories is not None
    if both and arguments["weight_updater"] is not None:
        raise ArgumentTypeError(
            "policy and policy_factory exclude each other with a weight_updater; drop it, and "
            "weights are taken from policy"
        )
    if isinstance(factories, Sequence):
        check_callables(**{f"policy_factory[{i}]": f for i, f in enumerate(factories)})
    else:
        check_callables(policy_factory=factories)
    check_callables(init_fn=arguments["init_fn"])
    seconds("start_timeout", arguments["start_timeout"])


def _read_flags(name: str, value: Any) -> list[bool]:
    """Return a list or a tensor of bools as a list."""
    try:
        flags = list(value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value)
    except TypeError:
        raise ConfigError(f"{name} ({value!r:.100}) must be a list of bools") from None
    flags = [f.item() if isinstance(f, torch.Tensor | np.generic) else f for f in flags]
    if not all(isinstance(flag, bool) for flag in flags):
        raise ConfigError(
            f"{name} ({value!r:.100}) must hold one bool per worker, no indices: [True, False, ...]"
        )
    return flags
