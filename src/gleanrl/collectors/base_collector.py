"""The base of all collectors: construction, iteration and shutdown over the parts they share."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset

from gleanrl.collectors.arguments import (
    argument_property,
    read,
    read_devices,
    read_flags,
    read_seed,
)
from gleanrl.collectors.background import BackgroundFilling
from gleanrl.collectors.controls import Controls, method_of, property_of
from gleanrl.collectors.policy_updates import PolicyUpdates
from gleanrl.collectors.remote_attributes import AttributeAccess, WorkerAttributeAccess
from gleanrl.collectors.running_collection import Collection
from gleanrl.collectors.save_on_sigterm import Preemption
from gleanrl.collectors.state_files import check_saves
from gleanrl.collectors.states import read_from, restore, save_to, state_of, unverified
from gleanrl.collectors.weight_update import WeightUpdaterBase, read_updater
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ClosedError, ConfigError, WorkerError, for_users, hide_frames
from gleanrl.core.options import check_int, limit, warn
from gleanrl.engine.engine import Engine
from gleanrl.engine.session import CLOSE_TIMEOUT_S, MakeBackend
from gleanrl.envs.simulator_state import StateError
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.watch.watching import Watching


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
    collection: Collection
    """The running collection: batches, weights, hooks and counters; for GleanRL's own parts."""
    _watching: Watching
    _weights: PolicyUpdates
    _preemption: Preemption | None = None
    _reader: SimpleNamespace | None = None
    """The newest iterator: its ``thread``."""
    _warned_of_readers = False

    def __init__(self, create_env_fn: Any, policy: Any, given: Mapping[str, Any]) -> None:
        """Complete the arguments."""
        super().__init__()
        arguments = read(self.ARGUMENTS, type(self).__name__, given)
        self._arguments = {**arguments, "create_env_fn": create_env_fn, "policy": policy}

    def _start(self, plan: WorkerPlan, make: MakeBackend) -> None:
        """Start the workers of ``plan``, which ``make`` reaches, and set up all around them."""
        arguments, name = self._arguments, type(self).__name__
        self._worker_idx, self.replay_buffer = arguments["worker_idx"], arguments["replay_buffer"]
        self.storing_device = plan.storing_device
        self.policy_device, self.env_device = plan.policy_device, plan.env_device
        self.exploration_type, self.interruptor = plan.exploration, plan.interruptor
        self.num_workers = len(plan.factories)
        self._watching = Watching(name, arguments["progress"], arguments["logger"])
        with ExitStack() as undo:
            # Only workers that are processes of this machine take cores from this one.
            alone, wanted = plan.in_process or plan.remote, arguments["num_threads"]
            wanted = torch.get_num_threads() if alone and wanted is None else wanted
            threads = _Threads(wanted, self.num_workers)
            self._threads = undo.callback(weakref.finalize(self, threads.restore))
            with self._watching.starting():
                self._engine = engine = Engine(
                    make, plan.factories, start_timeout=plan.arguments["start_timeout"]
                )
            undo.callback(engine.close, 5.0)
            undo.callback(self._watching.end_progress)
            self.collection = collection = Collection(name, plan, engine, self._watching)
            self._hooks, self._weights = collection.hooks, collection.weights
            self._update = collection.weights.update
            self._background = collection.filling
            self._attributes = (
                AttributeAccess(weakref.proxy(self), lambda: engine.turn(None))
                if plan.in_process and not plan.central
                else WorkerAttributeAccess(engine, self.replay_buffer, plan.fills)
            )
            self.weight_updater = plan.updater
            collection.weights.warn_if_never_sent()
            if plan.sink is not None:
                plan.sink.attach(self, self._env_to_record, engine.num_envs)
            undo.pop_all()
        # The finalizer must not hold the collector itself, or it would never be collected.
        self._closing = weakref.finalize(self, self._background.end, CLOSE_TIMEOUT_S)
        self._watching.begin(engine, collection.counts, collection.status)
        if arguments["preemption_path"] is not None:
            self._preemption = self._handle_sigterm()
            weakref.finalize(self, self._preemption.end)

    def _handle_sigterm(self) -> Preemption:
        path = os.path.abspath(self._arguments["preemption_path"])
        with_buffer = isinstance(self.replay_buffer, ReplayBuffer)
        reference = weakref.ref(self)  # a handler must not keep the collector

        def save() -> None:
            collector = reference()
            if collector is not None:
                collector.save(path, replay_buffer=with_buffer)

        running = self._background.is_running
        return Preemption(self._arguments["grace"], save, self._engine.turn, running)

    def _env_to_record(self) -> Any:
        """Return the environment to record, ``None`` if workers make it by a function."""
        first = self.collection.plan.functions[0]
        return first if isinstance(first, str) else None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, because it holds running "
            "environments: make one where it is needed, and give that the state_dict() of this one"
        )

    def __repr__(self) -> str:
        """Return class, workers, environments, progress and state in one line."""
        if "_closing" not in vars(self):
            return f"{type(self).__name__}(starting)"
        return self.collection.describe()

    # -- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Continue iteration; if collection fails, the collector closes."""
        self._hooks.iterated = True
        self._reader = reader = SimpleNamespace(thread=threading.get_ident())
        iterator = self.iterator()
        while True:
            self._background.check_not_running()  # a mistake, which ends nothing
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

    def _warn_of_readers(self, reader: SimpleNamespace) -> None:
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
        collection, engine = self.collection, self._engine
        if self.closed and engine.failure is None:  # also if it has delivered everything
            raise ClosedError("the collector was shut down; make a new one to collect more")
        while True:
            with engine.turn(None):
                self._background.check_not_running()
                if self._preemption is not None:
                    self._preemption.reached()
                while not collection.ready:
                    if collection.counts.exhausted:
                        return
                    try:
                        collection.ready = collection.collect()
                    except BaseException as err:
                        self._close_after(err)
                        raise
                held = [collection.ready.popleft()]
            # Nothing here may keep the batch alive: its memory returns when the consumer lets go.
            yield held.pop()

    def _close_after(self, err: BaseException) -> None:
        """Close the collector without waiting for a worker that hangs."""
        self.collection.failed()
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

    @for_users
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch and return it without further processing.

        The frames count, and the environments continue after them. ``split_trajs``, ``postproc``,
        hooks and the replay buffer are left out. Unfinished trajectories of ``trajs_per_batch`` are
        dropped and counted as discarded. Returns ``None`` if workers write into a buffer.
        """
        with self._engine.turn(None):
            self._background.check_not_running()
            if self._preemption is not None:
                self._preemption.reached()
            try:
                return self.collection.unprocessed()
            except BaseException as err:
                self._close_after(err)
                raise

    def __len__(self) -> int:
        """Return the number of batches of a full iteration; stopped rollouts make more batches.

        Raises:
            TypeError: the collector is endless.
        """
        limits = self.collection.counts.limits
        if limits.total_frames is None:
            raise TypeError("this collector is endless (total_frames=-1): it has no length")
        return limits.total_frames // limits.frames_per_batch

    fake_tensordict = method_of("collection", Collection.fake_tensordict)

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
            if not self._background.is_running():
                self._leave_process()
                self._background.start(self.replay_buffer, self.collection)
                # Earlier than finalizers: these are looked through while no thread may make any.
                atexit.register(self._closing)

    def _leave_process(self) -> None:
        """Make sure that no environment and no policy runs in the learner's process."""
        if self._engine.backend.inline:
            raise ConfigError(
                "start() collects while the learner goes on, with which a policy in this process "
                "would share random generators, exploration type and other settings; use "
                + (
                    "backend='process'"
                    if self.collection.plan.central is None
                    else "policy_process=True (of an AsyncBatchedCollector: policy_factory=)"
                )
            )

    is_running = method_of("_background", BackgroundFilling.is_running)
    pause = method_of("_background", BackgroundFilling.pause)

    # -- weights ---------------------------------------------------------------------------------

    @property
    def weight_updater(self) -> Any:
        """The legacy weight updater, ``None`` (as a rule) if there is none.

        Set it to an updater, to a callable that returns one, or to ``None``.
        """
        return self.collection.weights.updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        updater: WeightUpdaterBase | None = read_updater(value)
        self.collection.weights.updater = updater
        if updater is not None:
            updater.register_collector(self)

    init_updater = method_of("_weights", PolicyUpdates.init_updater)
    deliver_weights = method_of("_weights", PolicyUpdates.deliver_weights)
    register_scheme_receiver = method_of("_weights", PolicyUpdates.register_scheme_receiver)
    receive_weights = method_of("_weights", PolicyUpdates.receive_weights)
    receive_models = method_of("_weights", PolicyUpdates.receive_models)
    learner_policy = property_of("_weights", PolicyUpdates.learner_policy)
    policy_weights = property_of("_weights", PolicyUpdates.policy_weights)
    policy_version_tracker = property_of("_weights", PolicyUpdates.policy_version_tracker)
    policy_version = property_of("_weights", PolicyUpdates.policy_version)
    get_policy_version = method_of("_weights", PolicyUpdates.get_policy_version)
    increment_version = method_of("_weights", PolicyUpdates.increment_version)
    get_model = method_of("_weights", PolicyUpdates.get_model)
    policy = property_of("_weights", PolicyUpdates.policy)

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
        return self.collection.seed(read_seed(seed), static_seed)

    @for_users
    def reset(self, reset_idx: Sequence[bool] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset all environments of workers; they start new trajectories.

        Rollouts under way are thrown away and counted as discarded.

        Args:
            reset_idx: One bool per worker; all by default.
            **kwargs: Arguments of the environment's ``reset``; Gymnasium's takes ``options={...}``.

        Raises:
            ConfigError: anything but one bool per worker.
        """
        chosen = read_flags("reset_idx", reset_idx, self._engine.workers)
        resets = {worker: m.Reset(None, kwargs) for worker, reset in enumerate(chosen) if reset}
        self.collection.restart(dict(resets))

    def state_dict(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Return all that a collector needs to continue as this one would.

        That is policies, environments in the middle of their episodes, counters, statistics,
        versions, random streams, partial trajectories and undelivered rollouts. With workers, their
        states are in ``worker0``, ``worker1``, …. The call waits for rollouts under way, which are
        delivered afterwards. If losses are tolerated, the entry of a lost worker has ``"lost":
        True`` and the newest policy. A worker that loads it starts with new environments, random
        streams and trajectory ids.

        Args:
            allow_pickle: Pickle objects of environments that cannot be saved in another way.

        Raises:
            ClosedError: the collector was shut down, and its workers with it.
        """
        return state_of(self.collection, allow_pickle)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        allow_pickle: bool = False,
        environments: bool = True,
    ) -> None:
        """Restore a state from `state_dict`; the batches are then those of the other collector.

        Environments whose state cannot be restored begin new episodes, and a warning says why. The
        learner's own policy does not change; your script loads it.

        Args:
            state_dict: The state.
            strict: Whether all entries must be there.
            allow_pickle: Unpickle objects of environments, which can run any code.
            environments: With ``False`` the state may be that of any number of workers and
                environments. All environments begin new episodes, with random streams and
                trajectory ids that the state has not used. Every worker gets the newest policy of
                the state. Counts of frames, batches and episodes, versions, statistics and the
                rest of ``init_random_frames`` continue. Partial trajectories and undelivered
                rollouts are left out.

        Raises:
            ConfigError: the state of another number of workers, or of something else.
            MissingEntryError: ``strict`` and an entry is missing (a `KeyError` too).
            WeightsError: the policy's weights do not fit; nothing was loaded.
        """
        options = {"allow_pickle": allow_pickle, "environments": environments}
        self._restore(state_dict, strict, **options)

    def _restore(self, state_dict: Mapping[str, Any], strict: bool, **options: Any) -> None:
        why = restore(self.collection, state_dict, strict, **options)
        if why is not None and self._worker_idx is None:  # else the outer one says so
            warn(why)

    @for_users
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        replay_buffer: bool = False,
        keep: int = 1,
        allow_pickle: bool = False,
        verify: bool = False,
    ) -> None:
        """Write the `state_dict` to a file, without pickle.

        The file at ``path`` is a complete one at any moment, whatever ends the program. It holds
        numbers, strings and tensors, and a checksum.

        Args:
            path: The file; with ``replay_buffer=True`` a directory.
            replay_buffer: Write the replay buffer as well, of the same moment. The collector
                collects nothing meanwhile, also in the background.
            keep: The number of states to keep: earlier ones are ``path.1``, ``path.2`` and so on;
                in a directory ``path/state.1``, ``path/state.2``, each with its buffer.
            allow_pickle: Pickle objects of environments that cannot be saved in another way.
            verify: First have new environments load the present state, and step them beside forked
                copies of the present ones, in each process that has environments. Calls of the
                policy, and of hooks in workers, are made in these copies; with central inference
                and in a `ParallelEnv`, actions are random. Environments must not talk to other
                processes. A worker that is lost meanwhile, and tolerated, is not compared.

        Raises:
            ConfigError: there is no replay buffer of tensors to write; ``path`` is a directory
                instead of a file, or the reverse; or the environments cannot be verified.
            NeedsPickle: names an object of an environment that can only be pickled. Nothing was
                written, as after a `StateError`.
            StateError: names a part that cannot be saved; or with ``verify`` the worker, and the
                first entry by which its new environments differ.
            OSError: the disk is full, or there is no such folder. Earlier files stay.

        Example:
            >>> import tempfile
            >>> from gleanrl.collectors import Collector
            >>> path = f"{tempfile.mkdtemp()}/collector.state"
            >>> with Collector("CartPole-v1", frames_per_batch=100) as collector:
            ...     first = collector.next()
            ...     collector.save(path)
            ...     second = collector.next()
            >>> with Collector("CartPole-v1", frames_per_batch=100) as collector:
            ...     collector.load(path)
            ...     collector.stats()["frames"]
            100
        """
        keep = check_int("keep", keep, least=1)
        buffer = check_saves(self.replay_buffer) if replay_buffer else None
        state = partial(self.state_dict, allow_pickle=allow_pickle)
        if verify and (found := unverified(self.collection, allow_pickle)) is not None:
            raise StateError(f"nothing was saved: {found}")
        save_to(self.collection, Path(path), type(self).__name__, state, keep, buffer)

    @for_users
    def load(
        self,
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        allow_pickle: bool = False,
        environments: bool = True,
    ) -> None:
        """Continue from a file of `save`; see `load_state_dict`.

        If the file was saved with its replay buffer, the rows of this collector's buffer are
        replaced.

        Args:
            path: The file, or the directory.
            strict: See `load_state_dict`.
            allow_pickle: See `load_state_dict`.
            environments: See `load_state_dict`.

        Raises:
            FileNotFoundError: no such file.
            ConfigError: a damaged file, one of a later version or with pickled objects, which are
                not allowed; or the replay buffer does not fit. Nothing was loaded.
            Exception: as `load_state_dict`.
        """
        options: dict[str, Any] = {"allow_pickle": allow_pickle, "environments": environments}
        name = type(self).__name__
        state, folder = read_from(self.collection, Path(path), name, **options)
        if folder is not None:
            options["load_buffer"] = partial(check_saves(self.replay_buffer).loads, folder)
        self._restore(state, strict, **options)

    # -- what it shows ---------------------------------------------------------------------------

    stats = method_of("collection", Collection.stats)
    watch = method_of("_watching", Watching.watch)
    timeline = method_of("_watching", Watching.timeline)

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
        self._watching.report(path, self.collection.status())

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
        return self.collection.counts.limits.frames_per_batch

    requested_frames_per_batch = frames_per_batch

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """Return the frames of one rollout of a worker."""
        return int(self._engine.sizes[worker_idx])

    @property
    def total_frames(self) -> int | float:
        """Frames after which iteration ends, rounded up to whole batches; infinity if endless."""
        total = self.collection.counts.limits.total_frames
        return float("inf") if total is None else total

    @property
    def init_random_frames(self) -> int:
        """Frames at the start with random actions, without a call of the policy."""
        return self.collection.counts.limits.init_random_frames

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._engine.closed

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
            raise_on_error: Raise the exception of an environment's ``close``, or the error that
                ended collection in the background, unless another call has raised that.
        """
        if self._preemption is None:
            self._shutdown(timeout, close_env, raise_on_error)
            return
        try:
            if self._engine.failure is None and not self.closed:
                self._preemption.save_once()
        finally:
            try:
                self._shutdown(timeout, close_env, raise_on_error)
            finally:
                if self.closed:
                    self._preemption.end()
        self._preemption.end(raise_on_error)

    def _shutdown(self, timeout: float | None, close_env: bool, raise_on_error: bool) -> None:
        plan = self.collection.plan
        in_process = (plan.in_process and not plan.central) or self._engine.set_aside is not None
        if not (close_env or in_process):
            raise RuntimeError(
                "close_env=False: the environments of workers cannot outlive their process"
            )
        limit = (60.0 if in_process else 10.0) if timeout is None else timeout
        deadline = Deadline(limit)
        self.collection.ready.clear()
        failure = self._background.stop(limit / 2)
        atexit.unregister(self._closing)
        for env in plan.functions if plan.central else ():  # have processes that are late killed
            env.shutdown_timeout = deadline.left
        try:
            self._engine.close(deadline.left, close_env, raise_on_error and failure is None)
        finally:
            self._watching.close()
            self._threads()
            self._background.join(1.0)  # it has nothing left to do
            if self._engine.closed:  # else it was interrupted, and the finalizer ends the rest
                self._closing.detach()
        raised = self._background.error_raised or self._engine.failure_raised
        if failure is not None and raise_on_error and not raised:
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
