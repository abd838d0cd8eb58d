"""The base of all collectors: iteration, weights, seeds, states, statistics, shutdown."""

from __future__ import annotations

import abc
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.utils.data import IterableDataset

from gleanrl.collectors.arguments import (
    argument_property,
    check_schemes,
    read,
    read_devices,
    read_seed,
)
from gleanrl.collectors.background import BackgroundFilling
from gleanrl.collectors.controls import Controls, PostHook, PreHook, one_of
from gleanrl.collectors.states import entries_of, number_lives, restoring
from gleanrl.collectors.weight_schedule import NothingSent, Sending
from gleanrl.collectors.weight_update import WeightUpdaterBase, read_updater
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import (
    ArgumentTypeError,
    ClosedError,
    ConfigError,
    UnknownModelError,
    WorkerError,
    for_users,
    hide_frames,
)
from gleanrl.core.keys import MASK, as_key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.options import check_int, limit, warn
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import Rollouts
from gleanrl.engine.interruptor import Interruptor
from gleanrl.engine.replacing import Replacements
from gleanrl.engine.session import CLOSE_TIMEOUT_S, MakeBackend
from gleanrl.engine.weight_sync import Models, WeightSync
from gleanrl.memory.tensordicts import groups_of
from gleanrl.transport.inline import InlineBackend
from gleanrl.watch.watching import Watcher, Watching
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import Shapes


@dataclass(frozen=True, eq=False, slots=True)
class _Reader:
    """An iterator over a collector."""

    thread: int


class BaseCollector(Controls, IterableDataset[Any]):
    """Base of all collectors. Iterate over it, or call `next`; use it as a context manager.

    A loop that was left early can be entered again, and continues. After ``total_frames``,
    iteration yields nothing more, but all other calls still work. After `shutdown`, iteration
    raises `ClosedError`. All iterators share one stream, so each batch goes to one of them. Two
    iterators that take turns cause one warning.
    """

    cat_results = argument_property("cat_results")
    collector_class = argument_property("collector_class")
    compact_obs = argument_property("compact_obs", bool)
    compiled_policy = argument_property("compile_policy", bool, "Whether the policy is compiled.")
    create_env_fn = argument_property(
        "create_env_fn", doc="The argument ``create_env_fn``, unchanged."
    )
    create_env_kwargs = argument_property("create_env_kwargs")
    cudagraphed_policy = argument_property(
        "cudagraph_policy", bool, "Whether it runs as a CUDA graph."
    )
    device = argument_property("device", read_devices)
    extend_buffer = argument_property("extend_buffer")
    max_frames_per_traj = argument_property("max_frames_per_traj", lambda steps: limit(steps) or 0)
    no_cuda_sync = argument_property("no_cuda_sync", bool)
    num_sub_threads = argument_property("num_sub_threads")
    postproc = argument_property("postproc")
    preemptive_threshold = argument_property(
        "preemptive_threshold", lambda share: 1.0 if share is None else float(share)
    )
    reset_at_each_iter = argument_property("reset_at_each_iter", bool)
    reset_when_done = argument_property("reset_when_done")
    set_truncated = argument_property("set_truncated", bool)
    split_trajs = argument_property("split_trajs", bool)
    track_traj_ids = argument_property("track_traj_ids")
    traj_format = argument_property("traj_format")
    trajs_per_batch = argument_property("trajs_per_batch")
    trajs_per_write = argument_property("trajs_per_write")
    trust_policy = argument_property("trust_policy", bool)
    update_at_each_batch = argument_property("update_at_each_batch", bool)
    verbose = False

    ARGUMENTS: ClassVar[Any]
    """The dictionary of the constructor's arguments."""
    _as_gathered = False
    """Whether batches are those of the engine. A class says so of itself: subclasses of the user's
    may do anything with them."""
    _reader: _Reader | None = None
    """The newest iterator."""
    _warned_of_readers = False
    _asked: float | None = None
    """The time of the request for the current batch, before the collector gathers it."""
    _touched = False
    """Whether anything has requested a batch, an update of weights, a seed, a reset or a state."""
    _reports: Rollouts = {}
    """The workers' reports about the newest batch."""
    _models: Models
    _sending: Sending | None
    """Sends weights around each batch."""
    _replacements: Replacements | None = None
    _seeds: Mapping[int, m.Seed] = {}
    """The seeds of the workers since their start or since a state was loaded."""
    _moved = False
    """Whether environments were stepped or reset since they were seeded."""
    _updater: WeightUpdaterBase | None = None
    _receivers: Mapping[str, WeightSyncScheme] = {}
    """Which models a parent may update, by model id; all if there are none."""

    def __init__(self, create_env_fn: Any, policy: Any, given: Mapping[str, Any]) -> None:
        """Complete the arguments."""
        arguments = read(self.ARGUMENTS, type(self).__name__, given)
        self._arguments = {**arguments, "create_env_fn": create_env_fn, "policy": policy}
        super().__init__(arguments["pre_collect_hook"], arguments["post_collect_hook"])

    # -- the beginning ---------------------------------------------------------------------------

    def _start(self, plan: WorkerPlan, make: MakeBackend) -> None:
        """Start the workers and set up everything around them.

        Args:
            plan: What is started.
            make: Builds the backend that starts and reaches the workers.
        """
        arguments, self._plan = self._arguments, plan
        self._version, self._timeout = plan.version, arguments["timeout"]
        self._worker_idx = arguments["worker_idx"]
        self._sink, self._pipeline = plan.sink, plan.pipeline
        self._ready: deque[Any] = deque()
        self._batches = 0
        self.replay_buffer = arguments["replay_buffer"]
        self.storing_device = plan.storing_device
        self.policy_device, self.env_device = plan.policy_device, plan.env_device
        self.exploration_type = plan.exploration
        self.interruptor = plan.interruptor
        self.num_workers = len(plan.factories)
        self.register_scheme_receiver(arguments["weight_recv_schemes"] or {})
        self._watching = Watching(type(self).__name__, arguments["progress"], arguments["logger"])
        with ExitStack() as undo:
            # Only workers that are processes of this machine take cores from this one.
            alone = plan.here or plan.remote
            wanted = torch.get_num_threads() if alone else arguments["num_threads"]
            threads = _Threads(wanted, self.num_workers)
            self._threads = undo.callback(weakref.finalize(self, threads.restore))
            with self._watching.starting():
                self._engine = engine = Engine(
                    make, plan.factories, start_timeout=arguments["start_timeout"]
                )
            undo.callback(engine.close, 5.0)
            undo.callback(self._watching.end_progress)
            self._set_up()
            undo.pop_all()
        # The finalizer must not hold the collector itself, or it would never be collected.
        self._closing = weakref.finalize(self, self._background.end, CLOSE_TIMEOUT_S)
        self._watching.begin(engine, self._budget, self._status)

    def _set_up(self) -> None:
        """Set up memory, weights and counters after the start of the workers."""
        engine, plan = self._engine, self._plan
        stopped: Callable[[], bool] = bool
        if isinstance(plan.interruptor, Interruptor):
            plan.interruptor.attach(engine.backend.stop_byte)
            stopped = plan.interruptor.collection_stopped
        engine.tolerant = self._arguments["on_failure"] != "raise"
        self._budget = engine.plan(
            plan.limits, plan.frames, plan.batches, enough=plan.enough, stopped=stopped
        )
        self._pipeline.share_out(engine.num_envs)
        self._models = self._make_models()
        self._background = BackgroundFilling(engine, self._budget, self._timeout)
        self.weight_updater = plan.updater
        self._choose_sending()
        if self._sink is not None:
            self._sink.attach(self, self._env_to_record, engine.num_envs)

    def _choose_sending(self) -> None:
        """Choose the object that sends weights around each batch, or warns if none does."""
        self._sending = self._plan.sending
        if self._sending is None and self._updater is None:
            copied = self._models.copied_parameters()
            self._sending = NothingSent(copied) if copied else None

    def _make_models(self) -> Models:
        """Return the object that publishes weights."""
        arguments, plan = self._arguments, self._plan
        schemes = arguments["weight_sync_schemes"]
        if plan.here:
            return Models(self._engine, plan.policy, schemes, self._version)
        return WeightSync(
            self._engine,
            plan.policy,
            made_by_factory=arguments["policy_factory"] is not None,
            schemes=schemes,
            version=self._version,
            devices=plan.policy_device,
            keep=plan.relaunches is not None,
        )

    def _env_to_record(self) -> Any:
        """Return the environment to record, ``None`` if environments are in other processes."""
        return self.env

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, because it holds running "
            "environments: make one where it is needed, and give that the state_dict() of this one"
        )

    def __repr__(self) -> str:
        """Return class, workers, environments, progress and state in one line."""
        if "_closing" not in vars(self):
            return f"{type(self).__name__}(starting)"
        engine, total = self._engine, self._budget.limits.all_frames
        frames = f"{self._budget.delivered:,}" + (f"/{total:,}" if total else "")
        workers = "" if type(engine.backend) is InlineBackend else f"workers={engine.workers}, "
        return (
            f"{type(self).__name__}({workers}envs={engine.num_envs}, frames={frames}, "
            f"{self._state()})"
        )

    def _state(self) -> str:
        engine, thread = self._engine, self._background.thread
        if engine.failure is not None:
            return "failed"
        if engine.closed:
            return "closed"
        if thread is not None and thread.running:
            return "paused" if thread.paused else "collecting in the background"
        return "completed" if self._budget.exhausted else "collecting"

    def _status(self) -> Mapping[str, Any]:
        """Return the values that ``gleanrl top`` shows."""
        return self._watching.status(repr(self), self.stats("both"))

    def _failed(self) -> None:
        """Show that an exception ended collection."""
        self._watching.failed(self._status)

    # -- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Continue iteration; if collection fails, the collector closes."""
        self._iterating = True
        self._reader = reader = _Reader(threading.get_ident())
        iterator = self.iterator()
        while True:
            self._check_not_started()  # a mistake, which ends nothing
            if self._reader is not reader:
                self._warn_of_readers(reader)
            try:
                held = [next(iterator)]
            except StopIteration:
                return
            except BaseException as err:
                hide_frames(err)
                raise
            # Popped, so that this frame does not keep the batch's memory while the user works.
            yield held.pop()

    def _warn_of_readers(self, reader: _Reader) -> None:
        """Warn once of two iterators in one thread; threads may share the batches on purpose."""
        newest = self._reader
        if newest is not None and newest.thread == reader.thread and not self._warned_of_readers:
            self._warned_of_readers = True
            warn(
                "two iterators take turns over one collector: each batch goes to only one of them; "
                "iterate once and hand the batches on"
            )

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are reached.

        Raises:
            RuntimeError: the collector collects in the background.
            ClosedError: it was shut down.
        """
        if self.closed and self._engine.failure is None:  # also if it has delivered everything
            raise ClosedError("the collector was shut down; make a new one to collect more")
        while True:
            with self._engine.turn(None):
                self._check_not_started()
                while not self._ready:
                    if self._budget.exhausted:
                        return
                    try:
                        self._ready = self._collect()
                    except BaseException as err:
                        self._close_after(err)
                        raise
                held = [self._ready.popleft()]
            # Nothing here may keep the batch alive: its memory returns when the consumer lets go.
            yield held.pop()

    def _close_after(self, err: BaseException) -> None:
        """Close the collector without waiting for a worker that hangs."""
        self._failed()
        self.shutdown(CLOSE_TIMEOUT_S, raise_on_error=False)
        if isinstance(err, StopIteration):  # a generator would hide its message
            raise WorkerError(
                f"an environment, the policy or a hook raised StopIteration: {err}"
            ) from err

    @for_users
    def next(self) -> TensorDictBase | None:
        """Return the next batch, or ``None`` once ``total_frames`` are reached."""
        # No iterator is kept: it would keep this collector alive in turn. Its place is in us.
        reader = self._reader  # a loop that calls this in its body goes on
        batch: TensorDictBase | None = next(iter(self), None)
        self._reader = reader
        return batch

    def _announce(self) -> None:
        """Note the time of a request for a batch, once per batch, after the pre-collect hook."""
        if self._asked is None:
            if self._plan.here and self._pre_hook is not None:
                self._pre_hook()
            self._asked = time.monotonic()

    def _collect(self, feed: bool = True) -> deque[Any]:
        """Collect a batch; return the batches to deliver."""
        self._announce()
        batch = self._gather(feed)
        if batch is None:  # workers have put it into the buffer themselves
            return deque([None])
        return self._pipeline(batch, self._post_hook if self._plan.here else None)

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        """Collect a batch from the workers, without further processing."""
        self._touched = self._moved = True
        sending = self._sending
        if sending is not None:
            sending.before(self)
        asked, self._asked = self._asked or time.monotonic(), None
        batch, reports = self._engine.collect(self._budget, self._timeout, feed)
        cut_short = any(r.steps < self._engine.steps[worker] for worker, r in reports.items())
        if cut_short and batch is not None and MASK not in batch.keys(True):
            # Shutting down stopped it, and nothing in it says which of its frames are valid.
            frames = sum(report.frames for report in reports.values())
            self._budget.delivered -= frames
            self._engine.discarded += frames
            raise ClosedError("the collector was shut down while it collected")
        self._reports = reports
        self._batches += 1
        self._watching.gathered(reports, self._models.number, asked, self._status)
        if sending is not None:
            sending.after(self, reports)
        return batch

    @for_users
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch and return it without further processing.

        The frames count, and the environments continue after them. ``split_trajs``, ``postproc``,
        hooks and the replay buffer are left out. Unfinished trajectories of ``trajs_per_batch`` are
        dropped and counted as discarded. Returns ``None`` if workers write into a buffer.
        """
        with self._engine.turn(None):
            self._check_not_started()
            try:
                batch = self._gather()
            except BaseException as err:
                self._close_after(err)
                raise
            self._pipeline.forget(batch)  # these frames will be missing from its trajectories
            return batch

    def __len__(self) -> int:
        """Return the number of batches of a full iteration.

        Raises:
            TypeError: the collector is endless.
        """
        batches = self._budget.limits.batches
        if batches is None:
            raise TypeError("this collector is endless (total_frames=-1): it has no length")
        return batches

    def fake_tensordict(self) -> TensorDictBase:
        """Return a batch of zeros with the layout of the real ones.

        Raises:
            NotImplementedError: batches have no fixed shape (``trajs_per_batch``, ragged data).
        """
        if self._pipeline.varies:
            raise NotImplementedError(
                "with trajs_per_batch the shape of a batch is that of its longest trajectory"
            )
        return self._pipeline.finish(self._engine.batches.fake_batch())

    def _batch_layout(self) -> Layout | None:
        """Return the layout of every batch, ``None`` if it is not known beforehand.

        It can where batches are delivered as they were collected: not with ``postproc``, a hook, a
        replay buffer, trajectories cut out, or data of no fixed shape, and not by a subclass.
        """
        hooked = self._plan.here and self._post_hook is not None
        own = vars(type(self)).get("_as_gathered", False) and not hooked
        here = self.storing_device is None or self.storing_device.type == "cpu"
        if not (own and here and self._pipeline.plain and self._engine.batches.uniform):
            return None
        fake = self.fake_tensordict()
        fields = tuple(
            Field(as_key(key), tuple(value.shape[fake.ndim :]), value.dtype)
            for key, value in fake.items(include_nested=True, leaves_only=True)
        )
        groups = tuple(groups_of(fake))
        return Layout(tuple(fake.shape[:-1]), fields, fake.shape[-1], self.n_env, groups)

    def _gathered(self) -> tuple[int, int]:
        """Return the valid frames of the newest batch and the oldest policy version in it."""
        reports = self._reports.values()
        frames = sum(report.frames for report in reports)
        return frames, min((report.policy_version for report in reports), default=0)

    # -- in the background -----------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until `shutdown`.

        Environments and policy run in worker processes, so that they share no setting and no random
        generator with this process. Meanwhile you may update weights and query the workers. After
        an error, ``stats()["failed"]`` is True, and the next call of the collector raises it.

        Raises:
            RuntimeError: there is no replay buffer.
            ConfigError: workers are in this process (``backend="inline"``).
            ClosedError: after `shutdown`.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() collects into a replay buffer: give replay_buffer=")
        with self._engine.turn(None):
            self._engine.check()
            if not self.is_running():
                self._leave_process()
                self._background.start(self, self.replay_buffer)
                # Earlier than finalizers: these are looked through while no thread may make any.
                atexit.register(self._closing)

    def _leave_process(self) -> None:
        """Make sure that no environment and no policy runs in the learner's process.

        Raises:
            ConfigError: they do.
        """
        if self._engine.backend.inline:
            raise ConfigError(
                "start() collects while the learner goes on, with which environments and policy of "
                "backend='inline' would share random generators, exploration type and other "
                "settings; use backend='process'"
            )

    def is_running(self) -> bool:
        """Tell whether the collector collects in the background (also while paused)."""
        thread = self._background.thread
        return thread is not None and thread.running and self._engine.failure is None

    def pause(self) -> AbstractContextManager[None]:
        """Suspend background collection for the length of a ``with`` block.

        Inside the block all collected frames are in the buffer, and no rollout is under way.
        Collection continues after the block, also if its body raises. After ``total_frames`` the
        call has no effect.

        Raises:
            RuntimeError: the collector was not started, or a hook or an environment of its own
                asks for this.
        """
        return self._background.pause()

    def _check_not_started(self) -> None:
        """Raise `RuntimeError` if the collector collects in the background."""
        if self.is_running():
            raise RuntimeError(
                "this collector collects in the background (start()): there is nothing to iterate "
                "over; sample from its replay buffer"
            )

    # -- hooks, which run where rollouts are made ------------------------------------------------

    def set_pre_collect_hook(self, hook: PreHook | None) -> None:
        super().set_pre_collect_hook(hook)
        self._tell("set_pre_collect_hook", hook)

    def set_post_collect_hook(self, hook: PostHook | None) -> None:
        super().set_post_collect_hook(hook)
        self._tell("set_post_collect_hook", hook)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every worker's collector, and of the replacements of lost workers."""
        if not (self._plan.here or self._engine.closed):
            self._engine.standing[method] = m.Call(method, args, kwargs)
            self._engine.request_all(self._engine.standing[method])

    # -- weights ---------------------------------------------------------------------------------

    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        asked = time.monotonic()
        with self._engine.turn(None):
            if self._updater is not None and not self._models.updater_runs:
                self._models.chosen(worker_ids)  # refuses those that do not exist
                with self._models.one_version(by_updater=True) as update:
                    self._updater(
                        policy_or_weights=models["policy"], worker_ids=worker_ids, **kwargs
                    )
                    if not update.published:  # it went another way: only the version is ours
                        self._publish({}, worker_ids)
            elif kwargs:
                raise ArgumentTypeError(
                    f"unexpected arguments {sorted(kwargs)}: no weight updater takes them"
                )
            else:
                self._publish(models, worker_ids)
        self._watching.published(asked, self._models.number)

    def _publish(self, models: Mapping[str, Any], worker_ids: Any) -> None:
        """Publish weights by model id."""
        self._touched = True
        workers = self._models.update(models, worker_ids)
        if self._sending is not None:
            self._sending.sent(workers)

    def deliver_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Publish weights of the policy without the weight updater; updaters call this.

        Args:
            weights: A module, a `TensorDict`, a state dict, or ``None`` for the learner's policy.
            worker_ids: Which workers; see `update_policy_weights_`.

        Raises:
            WeightsError: weights that do not fit; nothing was changed.
        """
        with self._engine.turn(None):
            self._publish({"policy": weights}, worker_ids)

    @property
    def weight_updater(self) -> Any:
        """The legacy weight updater, ``None`` (as a rule) if there is none.

        Set it to an updater, to a callable that returns one, or to ``None``.
        """
        return self._updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._updater = read_updater(value)
        if self._updater is not None:
            self._updater.register_collector(self)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass the arguments to the legacy updater's ``init``; without one, do nothing."""
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Set the models that the collector around this one may update.

        The weights of a parent arrive by themselves: for all models, unless some were named here.

        Args:
            weight_recv_schemes: By model id; those registered before under other ids stay. A
                `NoWeightSyncScheme` ignores what arrives.
            synchronize_weights: Accepted for compatibility: there is nothing to wait for.

        Raises:
            ConfigError: a value is not a scheme.
        """
        check_schemes(weight_recv_schemes)
        self._receivers = {**self._receivers, **weight_recv_schemes}

    def receive_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Apply weights of the policy and pass them on to the workers.

        Without weights the call does nothing, because the weights of a parent arrive by themselves.

        Raises:
            ConfigError: there are weights, and `register_scheme_receiver` has named their sender.
        """
        source = one_of(policy_or_weights, weights, policy)
        if source is None:
            return
        if self._receivers:
            raise ConfigError(
                f"weights of {sorted(self._receivers)} come from a parent "
                "(weight_recv_schemes); use update_policy_weights_ for your own"
            )
        self.update_policy_weights_(source)

    def receive_models(self, models: Mapping[str, Any], version: int | None = None) -> None:
        """Apply the weights that a parent sent, by model id: all of them or none.

        Args:
            models: Per model id a dictionary of weights; may be empty.
            version: The parent's number for them, which batches made with them carry from here on,
                and which counting continues from. By default it is the next one.

        Raises:
            UnknownModelError: a model that `register_scheme_receiver` did not name.
        """
        for name in models:
            self._check_receiver(name)
        known = self._receivers
        wanted = {name: w for name, w in models.items() if not known or known[name].applies}
        with self._engine.turn(None), self._models.one_version(version):
            if self._updater is not None and set(wanted) == {"policy"}:
                self.update_policy_weights_(wanted["policy"])
            elif wanted:
                self.update_policy_weights_(weights_dict=wanted)
            elif version is not None:  # only the version moves
                self._publish({}, None)

    def _check_receiver(self, model_id: str) -> None:
        """Raise `UnknownModelError` if a parent may not update ``model_id``."""
        if self._receivers and model_id not in self._receivers:
            raise UnknownModelError(
                f"no model {model_id!r} is received by this collector: its weight_recv_schemes "
                f"name {sorted(self._receivers)}"
            )

    def _describe_weights(self, model_id: str) -> Shapes:
        """Return shape and kind (``True``: parameter) of a model's weights by dotted name.

        Raises:
            UnknownModelError: there is none, or a parent may not update it.
        """
        self._check_receiver(model_id)
        return self._models.shapes(model_id)

    @property
    def learner_policy(self) -> Any:
        """The learner's policy, ``None`` if workers made theirs or act at random."""
        return self._models.policy

    @property
    def policy_weights(self) -> TensorDictBase:
        """The weights of the learner's policy; empty if it has none."""
        policy = self._models.policy
        if not isinstance(policy, nn.Module):
            return TensorDict()
        weights: TensorDictBase = TensorDict.from_module(policy).data
        return weights

    @property
    def policy_version_tracker(self) -> Any:
        """The counter of policy versions, ``None`` if they are not tracked."""
        return self._version

    @property
    def policy_version(self) -> int | str | None:
        """The policy version of the next batch, ``None`` if versions are not tracked."""
        return None if self._version is None else self._version.version

    def get_policy_version(self) -> int | str | None:
        """Return `policy_version` (a method, for handles without properties)."""
        return self.policy_version

    def increment_version(self) -> None:
        """Move to the next policy version without touching the weights."""
        with self._engine.turn(None):
            self._models.update({})

    def get_model(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``.

        Raises:
            KeyError: there is none.
        """
        return self._models.running(model_id)

    @property
    def policy(self) -> Any:
        """The policy that runs; with several workers the learner's, which they copy."""
        return self.get_model("policy")

    # -- seeds and state -------------------------------------------------------------------------

    @for_users
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, action spaces and random streams, and reset all environments.

        From then on this collector draws from streams of its own, and not from the global ones of
        torch, numpy and Python. Replacements of lost workers get new seeds that follow from these.

        Args:
            seed: Environment ``i`` (over all workers) gets ``seed + i``.
            static_seed: Give every environment ``seed`` itself.

        Returns:
            The last seed used: ``seed + n_envs - 1``, or ``seed`` if static.

        Example:
            >>> from gleanrl.collectors import Collector
            >>> collector = Collector("Pendulum-v1", num_envs=6, frames_per_batch=60)
            >>> collector.set_seed(1)
            6
            >>> collector.shutdown()
        """
        seed = read_seed(seed)
        commands: dict[int, m.Seed] = {}
        base = seed
        for worker, envs in enumerate(self._engine.envs):
            # Streams differ from worker to worker, whatever the environments are seeded with.
            commands[worker] = m.Seed(seed if static_seed else base, static_seed, base)
            base += envs
        with self._engine.turn(None):
            if self._replacements is not None:
                self._replacements.seeds = commands
            last = self._restart(dict(commands))
            self._seeds, self._moved = commands, False
        if self._sink is not None:
            self._sink.seeded(seed, static_seed)
        # A worker that was lost does not answer: the last seed is that of the last environment.
        return int(last.get(len(commands) - 1, seed if static_seed else base - 1))

    @abc.abstractmethod
    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Reset environments; they start new trajectories."""

    def _restart(self, commands: dict[int, m.Command]) -> dict[int, Any]:
        """Carry out commands that begin new trajectories; discard rollouts under way."""
        self._touched = self._moved = True
        with self._engine.turn(None):
            self._finish_filling()
            self._ready.clear()
            self._pipeline.forget()
            return self._engine.restart(commands, self._budget)

    def _finish_filling(self) -> None:
        """Collect the rollouts under way that workers write to the buffer, and count their rows."""
        while self._plan.fills and not self._engine.gather.idle:
            delivered = self._collect(feed=False)
            if not self.is_running():
                self._ready += delivered

    def state_dict(self) -> dict[str, Any]:
        """Return policy and environment state, counters, statistics, versions and random streams.

        With workers, the states are in ``worker0``, ``worker1``, …. The call waits for rollouts
        under way, which are delivered afterwards. If losses are tolerated, the entry of a lost
        worker has ``"lost": True`` and the newest policy. A worker that loads it starts with new
        environments, random streams and trajectory ids.

        Raises:
            ClosedError: the collector was shut down, and its workers with it.
        """
        if self.closed and not self._plan.here and self._engine.failure is None:
            raise ClosedError(
                "the collector was shut down, as an error or Ctrl-C in its loop does, so it has no "
                "state: keep the state_dict() from after each batch"
            )
        with self._engine.turn(None):
            self._finish_filling()  # the state counts every row that is in the buffer
            states = self._states()
            counts = {"frames": self._budget.delivered, "iter": self._batches}
            return {**states, **counts, "statistics": self._watching.measures.state_dict()}

    @abc.abstractmethod
    def _states(self) -> dict[str, Any]:
        """Return the entries of `state_dict` about policy and environments."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore a state from `state_dict`; environments restart on fresh resets.

        The learner's own policy does not change; your script loads it.

        Raises:
            ConfigError: the state of another number of workers.
            KeyError: ``strict`` and an entry is missing.
            WeightsError: the policy's weights do not fit; nothing was loaded.
        """
        engine = self._engine
        entries = entries_of(state_dict, self.num_workers, strict)
        policies: dict[int, tuple[Mapping[str, Any], int]] = {}
        states: dict[int, m.Command] = {}
        for worker, entry in enumerate(entries):
            version = self._models.number
            if "worker" in entry:
                states[worker] = restoring(engine, worker, entry, self._plan.stream, strict)
                version = int(entry["worker"]["policy_version"])
            policies[worker] = entry.get("policy_state_dict") or {}, version
        with engine.turn(None):
            frames = int(state_dict.get("frames", self._budget.delivered))
            batches = int(state_dict.get("iter", self._batches))
            self._models.check_restore(state for state, _ in policies.values())
            number_lives(engine, entries)
            self._restart(states)
            self._models.restore(policies)
            if self._sending is not None:
                self._sending.restored(range(self.num_workers))
            self._models.continue_from(max(version for _, version in policies.values()))
            self._budget.delivered = frames
            self._batches = batches
            self._watching.load_state_dict(state_dict.get("statistics"), frames)
            self._seeds = {}  # streams are those of the state now
            if self._replacements is not None:
                self._replacements.seeds = {}

    # -- what it shows ---------------------------------------------------------------------------

    def stats(
        self, workers: str = "aggregate", *, timeout: float | None = None
    ) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars. Safe in any thread; waits for nothing.

        ``fps`` is the rate over the last four seconds (eight batches, if these take longer),
        ``fps_mean`` the rate since the request for the first batch, and ``episodes`` the number of
        ended episodes. ``return_mean|min|max`` and ``length_mean|min|max`` describe the last 100
        episodes; they are NaN before the first has ended. ``time_env``, ``time_policy``,
        ``time_transfer`` and ``time_wait`` are shares of the workers' time, and ``time_reset`` is
        the part of ``time_env`` that resets take. ``lag`` is the age of the newest batch's weights,
        in versions.

        Args:
            workers: With workers, ``"aggregate"``, ``"per_worker"`` (entries ``worker_0/frames``,
                …) or ``"both"``. ``"workers"`` and ``"workers_alive"`` are always there.
            timeout: Accepted for compatibility; the call sends nothing to workers.

        Raises:
            ConfigError: another word.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ConfigError(
                f"workers must be one of 'aggregate', 'per_worker' and 'both', not {workers!r}"
            )
        engine, total = self._engine, self._budget.limits.all_frames
        stats: dict[str, int | float | bool] = {
            "frames": self._budget.delivered,
            "batches": self._batches,
            "frames_per_batch": self.frames_per_batch,
            "requested_frames_per_batch": self.frames_per_batch,
            "frames_discarded": engine.discarded + engine.gather.dropped + self._pipeline.discarded,
            "batches_copied": engine.gather.copies,
            "memory_bytes": engine.gather.nbytes,
            "num_envs": engine.num_envs,
            "policy_version": self._models.number,
            "completed": self._budget.exhausted,
            "closed": engine.closed,
            "running": self.is_running(),
            "failed": engine.failure is not None,
            **self._watching.measures.stats(),
        }
        if total is not None:
            stats["total_frames"] = total
        stats.update(self._background.stats())
        return stats

    def watch(self, watcher: Watcher) -> None:
        """Call ``watcher`` for every batch, in the thread that gathers it.

        Args:
            watcher: A function of the reports of the batch's rollouts, by worker, and of the newest
                policy version. It delays the batch. ``gleanrl top`` does not show the collection
                any more; the watcher may.
        """
        self._watching.delegate(watcher)

    def report(self, path: str | Path) -> None:
        """Write a page about the collection so far: one HTML file that needs no network.

        It shows returns and lengths of episodes, frames per second, policy lag, the workers' time
        and lost workers. Of more than 1000 batches or episodes it keeps every second, every fourth,
        and so on. The call works at any time, also in another thread and after `shutdown`.

        Args:
            path: The path of the file; an existing file is replaced at once.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> from gleanrl.collectors import Collector
            >>> with Collector("CartPole-v1", frames_per_batch=100, total_frames=500) as collector:
            ...     batches = list(collector)
            >>> collector.report(f"{tempfile.mkdtemp()}/report.html")
        """
        self._watching.report(path, self._status())

    def timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Write a trace of the workers' and the learner's activity during a ``with`` block.

        The file opens in https://ui.perfetto.dev and in ``chrome://tracing``, also after a kill of
        the process. Each worker has a row with its rollouts, their parts in environment and policy,
        waiting and new weights. The learner's row has waits for batches, published weights, and
        other work.

        Args:
            path: The path of the file, which is overwritten.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another trace is being written.

        Example:
            >>> import tempfile
            >>> from gleanrl.collectors import Collector
            >>> collector = Collector("CartPole-v1", frames_per_batch=100, total_frames=500)
            >>> with collector.timeline(f"{tempfile.mkdtemp()}/trace.json"):
            ...     batches = list(collector)
            >>> collector.shutdown()
        """
        return self._watching.timeline(path)

    def explain(self) -> str:
        """List the parts of environment and policy that are called unmodified, with the reasons.

        All other parts are replaced by faster ones that are proven to give the same data. With
        several workers, the list is that of the first.
        """
        text: str = self._engine.ask(m.Call("explain"))
        return text

    @property
    def env(self) -> Any:
        """The environment of this process; with several workers that of the first worker."""
        return self._engine.ask(m.Get("env"))

    @property
    def n_env(self) -> int:
        """Environments stepped at once."""
        return self._engine.num_envs

    @property
    def frames_per_batch(self) -> int:
        """Frames of one batch, rounded up to whole steps."""
        return self._budget.limits.frames_per_batch

    requested_frames_per_batch = frames_per_batch

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """Return the frames of one rollout of a worker."""
        return int(self._engine.sizes[worker_idx])

    @property
    def total_frames(self) -> int | float:
        """Frames of all batches, rounded up to whole ones; infinity if endless."""
        total = self._budget.limits.all_frames
        return float("inf") if total is None else total

    @property
    def init_random_frames(self) -> int:
        """Frames at the start with random actions, without a call of the policy."""
        return self._budget.limits.init_random_frames

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._engine.closed

    def _alone(self) -> AbstractContextManager[Any]:
        return self._engine.turn(None)

    # -- the end ---------------------------------------------------------------------------------

    def __enter__(self) -> BaseCollector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown(raise_on_error=exc[0] is None)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down a collector that was started with `start`."""
        self.shutdown(timeout=timeout, close_env=close_env)

    @for_users
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Close environments and workers. Idempotent; delivered batches stay valid.

        Args:
            timeout: Seconds after which workers that do not end by themselves are killed: 10 by
                default, 60 without workers.
            close_env: ``False`` leaves environments that you passed open. With workers only
                ``True``, because their environments end with their process.
            raise_on_error: Raise the exception of an environment's ``close``.
        """
        here = self._plan.here or self._engine.set_aside is not None
        if not (close_env or here):
            raise RuntimeError(
                "close_env=False: the environments of workers cannot outlive their process"
            )
        limit = (60.0 if here else 10.0) if timeout is None else timeout
        deadline = Deadline(limit)
        self._ready.clear()
        failure = self._background.stop(limit / 2)
        atexit.unregister(self._closing)
        try:
            self._engine.close(deadline.left, close_env, raise_on_error and failure is None)
        finally:
            self._watching.close()
            self._threads()
        if self._background.thread is not None:
            self._background.thread.join(1.0)  # it has nothing left to do
        self._closing.detach()
        if failure is not None and raise_on_error:
            raise failure


class _Threads:
    """The learner's torch threads: fewer while workers run, the old number after all have ended."""

    _all: ClassVar[list[_Threads]] = []
    """Changes in force, in the order of their making."""

    def __init__(self, wanted: int | None, workers: int) -> None:
        """Leave cores to ``workers`` workers, unless a number is ``wanted``."""
        self._before = torch.get_num_threads()
        default = max(1, self._before - workers)
        self._set = default if wanted is None else check_int("num_threads", wanted, least=1)
        torch.set_num_threads(self._set)
        self._all.append(self)

    def restore(self) -> None:
        """Restore the number, unless the user has changed it since. Idempotent.

        If another collector has changed it since, the number is put back when that one ends.
        """
        if self not in self._all:
            return
        later = self._all[self._all.index(self) + 1 :]
        self._all.remove(self)
        if later and later[0]._before == self._set:
            later[0]._before = self._before
        elif not later and torch.get_num_threads() == self._set:
            torch.set_num_threads(self._before)
