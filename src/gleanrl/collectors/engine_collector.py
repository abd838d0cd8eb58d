"""What collectors with an `Engine` share: iteration, weights, seeds, life."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.collectors.arguments import Arguments, CommonArguments, Options, Shown, read_seed
from gleanrl.collectors.background import BackgroundFilling
from gleanrl.collectors.base import BaseCollector, one_of
from gleanrl.collectors.weights import WeightUpdates
from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, ConfigError, WorkerError, for_users
from gleanrl.core.keys import MASK, as_key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.options import limit, read_device
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.budget import Budget
from gleanrl.engine.engine import Engine, MakeBackend
from gleanrl.engine.gather import Rollouts
from gleanrl.engine.pipeline import Pipeline
from gleanrl.engine.sink import Sink, make_sink
from gleanrl.transport.inline import InlineBackend
from gleanrl.watch.watching import Watcher, Watching
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import Shapes

CLOSE_TIMEOUT_S = 2.0
"""Seconds environments get to close after a failure, and where nobody called `shutdown`."""


def read_devices(arguments: Any) -> Any:
    """Return the default device; those of the workers as a list, if they were given as one."""
    if isinstance(arguments, list | tuple):
        return [read_devices(one) for one in arguments]
    return read_device("device", arguments)


class EngineCollector(BaseCollector):
    """A collector over an engine. Subclasses build the engine and the models in `__init__`."""

    compact_obs = Shown(bool)
    compiled_policy = Shown(bool, "compile_policy", "Whether the policy is compiled.")
    cudagraphed_policy = Shown(bool, "cudagraph_policy", "Whether it runs as a CUDA graph.")
    device = Shown(read_devices)
    extend_buffer = Shown()
    max_frames_per_traj = Shown(lambda steps: limit(steps) or 0)
    no_cuda_sync = Shown(bool)
    postproc = Shown()
    reset_at_each_iter = Shown(bool)
    reset_when_done = Shown()
    set_truncated = Shown(bool)
    split_trajs = Shown(bool)
    track_traj_ids = Shown()
    traj_format = Shown()
    trajs_per_batch = Shown()
    trajs_per_write = Shown()
    trust_policy = Shown(bool)
    verbose = False

    ARGUMENTS: ClassVar[Any]
    """The dictionary of the constructor's arguments."""
    _engine: Engine
    _models: Any
    _budget: Budget
    _background: BackgroundFilling
    _hooks_here = True
    """Whether hooks run in this process, not in workers."""
    _as_gathered = False
    """Whether batches are those of the engine. A class says so of itself: subclasses of the user's
    may do anything with them."""
    _sink: Sink | None
    """What takes batches in place of the user."""
    _fills = False
    """Whether workers store them there themselves."""
    _announced = False
    _touched = False
    """Whether a batch, an update of weights, a seed, a reset or a state was asked for."""
    _reports: Rollouts = {}
    """What workers said of the newest batch."""

    def __init__(self, arguments: CommonArguments) -> None:
        """Take what stays if the workers are started anew."""
        super().__init__(arguments["pre_collect_hook"], arguments["post_collect_hook"])
        self._updates = WeightUpdates()

    def _take(
        self,
        arguments: Arguments,
        options: Options,
        storing: torch.device | None,
        *,
        stacked: bool = False,
    ) -> None:
        """Take the arguments that concern this process.

        Args:
            arguments: The arguments.
            options: The groups made of them.
            storing: Where batches are delivered.
            stacked: Whether the first dimension of batches is that of workers.
        """
        everything: Mapping[str, Any] = arguments
        self._settings = {name: everything.get(name) for name in Shown.arguments}
        self._version = options.version
        self._worker_idx = arguments["worker_idx"]
        self._timeout = arguments["timeout"]
        self._watching = Watching(type(self).__name__, arguments["progress"], arguments["logger"])
        self.replay_buffer = arguments["replay_buffer"]
        self.storing_device = storing
        self.exploration_type = options.source.rollout.exploration
        self._sink = make_sink(self.replay_buffer, options.extend, stacked)
        self._pipeline = Pipeline(
            options.trajectories,
            arguments["postproc"],
            self._sink,
            storing,
            episodes_end=arguments["reset_at_each_iter"],
        )
        self.register_scheme_receiver(arguments["weight_recv_schemes"] or {})

    def _build_engine(
        self, make: MakeBackend, factories: Sequence[SourceFactory], start_timeout: float = 120.0
    ) -> Engine:
        """Start the workers, and show meanwhile that this is going on."""
        with self._watching.starting():
            self._engine = Engine(make, factories, start_timeout=start_timeout)
        return self._engine

    @contextmanager
    def _starting(self, options: Options) -> Iterator[None]:
        """Run the body with the engine up; if it fails, shut the engine down again."""
        try:
            yield
            self._background = BackgroundFilling(self._engine, self._budget, self._timeout)
            self._updates.use(options.updater, self)
            if self._sink is not None:
                self._sink.attach(self, self._env_to_record, self._engine.num_envs)
        except BaseException:
            self._watching.end_progress()
            self._engine.close(5.0)
            raise
        self._batches = 0
        self._ready: deque[Any] = deque()
        # The finalizer must not hold the collector itself, or it would never be collected.
        self._closing = weakref.finalize(self, self._engine.close, CLOSE_TIMEOUT_S)
        self._watching.begin(self._engine, self._budget, self._status)

    def __repr__(self) -> str:
        """Say what this is, what it consists of, how far it is and what it does."""
        engine = vars(self).get("_engine")
        if engine is None or "_batches" not in vars(self):
            return f"{type(self).__name__}(starting)"
        total = self._budget.limits.total_frames
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
        """Return what ``gleanrl top`` shows."""
        return self._watching.status(repr(self), self.stats())

    def _failed(self) -> None:
        """Show that collection was ended by an exception."""
        self._watching.failed(self._status)

    def _env_to_record(self) -> Any:
        """Return what a recording in this process is made of, ``None`` if that is elsewhere."""
        return self.env

    # -- iteration -------------------------------------------------------------------------------

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
                    except StopIteration as err:  # a generator would hide its message
                        raise WorkerError(
                            f"an environment, the policy or a hook raised StopIteration: {err}"
                        ) from err
                    except BaseException:
                        self._failed()
                        raise
                held = [self._ready.popleft()]
            # Nothing here may keep the batch alive: its memory returns when the consumer lets go.
            yield held.pop()

    def _announce(self) -> None:
        """Call the hook that runs before a batch is collected, once for each."""
        if self._hooks_here and self.pre_collect_hook is not None and not self._announced:
            self.pre_collect_hook()
        self._announced = True

    def _collect(self, feed: bool = True) -> deque[Any]:
        """Collect a batch; return what is to be delivered for it."""
        self._announce()
        self._announced = False
        batch = self._gather(feed)
        if batch is None:  # workers have put it into the buffer themselves
            return deque([None])
        return self._pipeline(batch, self.post_collect_hook if self._hooks_here else None)

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        self._touched = True
        asked = time.monotonic()
        batch, reports = self._engine.collect(self._budget, self._timeout, feed)
        if self._cut_short(reports) and batch is not None and MASK not in batch.keys(True):
            # Shutting down stopped it, and nothing in it says which of its frames are valid.
            frames = sum(report.frames for report in reports.values())
            self._budget.delivered -= frames
            self._engine.discarded += frames
            raise ClosedError("the collector was shut down while it collected")
        self._reports = reports
        self._batches += 1
        self._watching.gathered(reports, self._models.number, asked, self._status)
        return batch

    def _cut_short(self, reports: Rollouts) -> bool:
        return any(report.steps < self._engine.steps[worker] for worker, report in reports.items())

    @for_users
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch and return it as it was collected.

        The environments move on and the frames count, but ``split_trajs``, ``postproc``, hooks and
        the replay buffer are left out, and trajectories in the making for ``trajs_per_batch`` are
        dropped (and counted as discarded). ``None`` where workers put everything into a buffer.
        """
        with self._engine.turn(None):
            self._check_not_started()
            self._pipeline.forget()  # these frames will be missing from trajectories in the making
            return self._gather()

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

    def batch_layout(self) -> Layout | None:
        """Return what every batch will look like, ``None`` if that cannot be told beforehand.

        It can where batches are delivered as they were collected: not with ``postproc``, a hook, a
        replay buffer, trajectories cut out, or data of no fixed shape, and not by a subclass.
        """
        hooked = self._hooks_here and self.post_collect_hook is not None
        own = vars(type(self)).get("_as_gathered", False) and not hooked
        here = self.storing_device is None or self.storing_device.type == "cpu"
        if not (own and here and self._pipeline.plain):
            return None
        if not self._engine.batches.uniform:
            return None
        fake = self.fake_tensordict()
        fields = tuple(
            Field(as_key(key), tuple(value.shape[fake.ndim :]), value.dtype)
            for key, value in fake.items(include_nested=True, leaves_only=True)
        )
        return Layout(tuple(fake.shape[:-1]), fields, fake.shape[-1], self.n_env)

    def watch(self, watcher: Watcher) -> None:
        """Have ``watcher`` called for every batch that is gathered, by whoever collects it.

        Args:
            watcher: Gets the reports of the batch's rollouts, by worker, and the newest policy
                version. It delays the batch. From now on it is up to it to show the collection:
                ``gleanrl top`` does not.
        """
        self._watching.delegate(watcher)

    def report(self, path: str | Path) -> None:
        """Write a page about the collection so far: one HTML file that needs no network.

        It shows returns and lengths of episodes, frames per second, policy lag, where workers spent
        their time and which were lost; of more than 1000 batches or episodes, every second, fourth,
        ... one. Works at any time, also in another thread and after `shutdown`.

        Args:
            path: Of the file; one that is there is replaced at once.

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
        """Write what workers and the learner do inside a ``with`` block as a trace.

        The file opens in https://ui.perfetto.dev and in ``chrome://tracing``, also that of a
        process that was killed. Each worker has a row with its rollouts, what of them was
        environment and policy, waiting and new weights; the learner has one with the time that it
        waited for each batch, published weights, and did other things.

        Args:
            path: Of the file, which is overwritten.

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

    def gathered(self) -> tuple[int, int]:
        """Return the valid frames of the newest batch and the oldest policy version in it."""
        reports = self._reports.values()
        frames = sum(report.frames for report in reports)
        return frames, min((report.policy_version for report in reports), default=0)

    # -- in the background -----------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, until told to stop.

        Weights can be updated and everything can be asked meanwhile. What goes wrong is raised by
        the next call of anything, and shows in ``stats()["failed"]``.

        Raises:
            RuntimeError: there is no replay buffer.
            ClosedError: after `shutdown`.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() collects into a replay buffer: give replay_buffer=")
        with self._engine.turn(None):
            self._engine.check()
            if not self.is_running():
                self._prepare_background()
                self._background.start(self, self.replay_buffer)

    def _prepare_background(self) -> None:
        """Take care that the learner's policy is not the one that acts in the background."""

    def is_running(self) -> bool:
        """Tell whether the collector collects in the background (also while paused)."""
        thread = self._background.thread
        return thread is not None and thread.running and self._engine.failure is None

    def pause(self) -> AbstractContextManager[None]:
        """Suspend background collection for the length of a ``with`` block.

        Inside, everything that was collected is in the buffer and nothing is under way. Collection
        continues afterwards, also if the body raises. Where ``total_frames`` were reached there is
        nothing to suspend, and nothing happens.

        Raises:
            RuntimeError: the collector was not started, or a hook or an environment of its own
                asks for this.
        """
        return self._background.pause()

    def _check_not_started(self) -> None:
        if self.is_running():
            raise RuntimeError(
                "this collector collects in the background (start()): there is nothing to iterate "
                "over; sample from its replay buffer"
            )

    # -- weights ---------------------------------------------------------------------------------

    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        asked = time.monotonic()
        self._updates.update(self, models, worker_ids, kwargs)
        self._watching.published(asked, self._models.number)

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        """Publish weights by model id, under ``version`` or the next one."""
        raise NotImplementedError

    def _check_workers(self, worker_ids: Any) -> None:
        """Refuse workers that do not exist."""

    def deliver_weights(self, weights: Any, worker_ids: Any = None) -> None:
        """Publish weights of the policy, past the weight updater: what updaters call.

        Args:
            weights: A module, a `TensorDict`, a state dict, or ``None`` for the learner's policy.
            worker_ids: Which workers; see `update_policy_weights_`.

        Raises:
            WeightsError: weights that do not fit; nothing was changed.
        """
        self._updates.deliver(self, weights, worker_ids)

    @property
    def weight_updater(self) -> Any:
        """The legacy weight updater, ``None`` (as a rule) if there is none.

        Set it to an updater or to something that returns one; to ``None`` to be without.
        """
        return self._updates.updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        self._updates.use(value, self)

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass the arguments to the legacy updater's ``init``; without one, do nothing."""
        if self.weight_updater is not None:
            self.weight_updater.init(*args, **kwargs)

    def register_scheme_receiver(
        self,
        weight_recv_schemes: Mapping[str, WeightSyncScheme],
        *,
        synchronize_weights: bool = True,
    ) -> None:
        """Say which models may be updated by a collector that this one is a worker of.

        What a parent publishes arrives by itself, for all models unless some were named here.

        Args:
            weight_recv_schemes: By model id; those registered before under other ids stay. A
                `NoWeightSyncScheme` ignores what arrives.
            synchronize_weights: Accepted for compatibility: there is nothing to wait for.

        Raises:
            ConfigError: one that is no scheme.
        """
        self._updates.register(weight_recv_schemes)

    def receive_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        *,
        weights: TensorDictBase | Mapping[str, Any] | None = None,
        policy: nn.Module | None = None,
    ) -> None:
        """Apply weights of the policy and pass them on to workers, if there are any.

        Without weights nothing is to be done: what a parent publishes arrives by itself.

        Raises:
            ConfigError: weights, where `register_scheme_receiver` has named who sends them.
        """
        source = one_of(policy_or_weights, weights, policy)
        if source is None:
            return
        if self._updates.receivers:
            raise ConfigError(
                f"weights of {sorted(self._updates.receivers)} come from a parent "
                "(weight_recv_schemes); use update_policy_weights_ for your own"
            )
        self.update_policy_weights_(source)

    def receive_models(self, models: Mapping[str, Any], version: int | None = None) -> None:
        """Apply what a parent sent, by model id: all of it or nothing.

        Args:
            models: Per model id a dictionary of weights; may be empty.
            version: The parent's number for them, which batches made with them carry from here on,
                and which counting continues from. By default it is the next one.

        Raises:
            UnknownModelError: a model that `register_scheme_receiver` did not name.
        """
        self._updates.receive(self, models, version)

    def describe_weights(self, model_id: str) -> Shapes:
        """Return shape and kind (``True``: parameter) of a model's weights by dotted name.

        Raises:
            UnknownModelError: there is none, or a parent may not update it.
        """
        self._updates.check_receiver(model_id)
        shapes: Shapes = self._models.shapes(model_id)
        return shapes

    @property
    def learner_policy(self) -> Any:
        """The policy the collector was given, ``None`` if workers made theirs or act at random."""
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
        """The version the next batch is made with, ``None`` if versions are not tracked."""
        return None if self._version is None else self._version.version

    def get_policy_version(self) -> int | str | None:
        """Return `policy_version` (a method, for handles without properties)."""
        return self.policy_version

    def increment_version(self) -> None:
        """Move to the next policy version without touching the weights."""
        self._models.update({})

    def get_model(self, model_id: str) -> Any:
        """Return the model that runs under ``model_id``.

        Raises:
            KeyError: there is none.
        """
        return self._models.running(model_id)

    @property
    def policy(self) -> Any:
        """The policy that runs; with several workers the learner's, of which they have copies."""
        return self.get_model("policy")

    # -- state -----------------------------------------------------------------------------------

    @for_users
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, action spaces and random streams, and reset all environments.

        See `BaseCollector.set_seed`. From then on this collector draws from streams of its own and
        leaves torch's, numpy's and Python's global ones alone.

        Example:
            >>> from gleanrl.collectors import Collector
            >>> collector = Collector("Pendulum-v1", num_envs=6, frames_per_batch=60)
            >>> collector.set_seed(1)
            6
            >>> collector.shutdown()
        """
        seed = read_seed(seed)
        commands = self._seeds(seed, static_seed)
        last = self._restart(dict(commands))
        if self._sink is not None:
            self._sink.seeded(seed, static_seed)
        # A worker that was lost does not answer: the last seed is that of the last environment.
        end = seed if static_seed else seed + self._engine.num_envs - 1
        return int(last.get(len(commands) - 1, end))

    def _seeds(self, seed: int, static: bool) -> dict[int, m.Seed]:
        """Return what each worker is seeded with."""
        commands = {}
        base = seed
        for worker, envs in enumerate(self._engine.envs):
            # Streams differ from worker to worker, whatever the environments are seeded with.
            commands[worker] = m.Seed(seed if static else base, static, base)
            base += envs
        return commands

    def _restart(self, commands: dict[int, m.Command]) -> dict[int, Any]:
        """Carry out commands that begin new trajectories; what was under way is discarded."""
        self._touched = True
        with self._engine.turn(None):
            while self._fills and not self._engine.gather.idle:
                self._collect(feed=False)  # it is in the buffer, or will be
            self._ready.clear()
            self._pipeline.forget()
            return self._engine.request_each(commands, discard=self._budget)

    def stats(self) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars. Safe in any thread; waits for nothing.

        ``fps`` are frames per second over the last seconds (batches, if these take longer),
        ``fps_mean`` over all; ``episodes`` have ended; ``return_mean|min|max`` and
        ``length_mean|min|max`` are of the last 100 and NaN before the first; ``time_env``,
        ``time_policy``, ``time_transfer`` and ``time_wait`` are shares of the workers' time;
        ``lag`` is how many versions old the weights of the newest batch were.
        """
        engine, total = self._engine, self._budget.limits.total_frames
        stats: dict[str, int | float | bool] = {
            "frames": self._budget.delivered,
            "batches": self._batches,
            "frames_per_batch": self.frames_per_batch,
            "requested_frames_per_batch": self.frames_per_batch,
            "frames_discarded": engine.discarded + self._pipeline.discarded,
            "batches_copied": engine.gather.copies,
            "memory_bytes": engine.gather.nbytes,
            "num_envs": engine.num_envs,
            "policy_version": self._models.number,
            "completed": self._budget.exhausted,
            "closed": engine.closed,
            "running": self.is_running(),
            "failed": engine.failure is not None,
            **self._watching.stats(),
        }
        if total is not None:
            stats["total_frames"] = total
        stats.update(self._background.stats())
        return stats

    # -- attributes ------------------------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The environment, as it was given or made; with several workers that of the first."""
        return self._engine.ask(m.Get("env"))

    @property
    def n_env(self) -> int:
        """Environments stepped at once."""
        return self._engine.num_envs

    @property
    def frames_per_batch(self) -> int:
        """Frames of one batch, rounded up to whole steps."""
        return self._budget.limits.frames_per_batch

    @property
    def requested_frames_per_batch(self) -> int:
        """Frames of one batch, rounded up to whole steps."""
        return self._budget.limits.frames_per_batch

    @property
    def total_frames(self) -> int | float:
        """Frames after which iteration ends; infinity if endless."""
        total = self._budget.limits.total_frames
        return float("inf") if total is None else total

    @property
    def init_random_frames(self) -> int:
        """Frames for which the policy is not called."""
        return self._budget.limits.init_random_frames

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._engine.closed

    def explain(self) -> str:
        """Say which parts of the environment and the policy are called as they are, and why.

        Every part is either called as it is, or replaced by something faster that is proven to give
        the same data. With several workers, it is the first one's answer.
        """
        text: str = self._engine.ask(m.Call("explain"))
        return text

    @for_users
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Close the environments. Idempotent; batches that were handed out stay valid.

        Args:
            timeout: Seconds it may take; 60 by default.
            close_env: ``False`` leaves environments the user handed over open.
            raise_on_error: Raise what closing an environment raised.
        """
        limit = 60.0 if timeout is None else timeout
        deadline = time.monotonic() + limit
        self._ready.clear()
        failure = self._background.stop(limit / 2)
        left = max(0.0, deadline - time.monotonic())
        try:
            self._engine.close(left, close_env, raise_on_error and failure is None)
        finally:
            self._watching.close()
        if self._background.thread is not None:
            self._background.thread.join(1.0)  # it has nothing left to do
        self._closing.detach()
        if failure is not None and raise_on_error:
            raise failure
