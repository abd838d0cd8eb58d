"""A running collection: batches that workers make, counted, processed and shown."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from tensordict import TensorDictBase

from gleanrl.collectors.background import BackgroundFilling
from gleanrl.collectors.hooks import Hooks, HooksInWorkers
from gleanrl.collectors.policy_updates import PolicyUpdates
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, ConfigError, GleanError
from gleanrl.core.keys import MASK
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import Rollouts
from gleanrl.engine.pipeline import put_together
from gleanrl.engine.replacing_workers import Replacements, reseeded
from gleanrl.engine.session import Session
from gleanrl.engine.sync_gather import SyncGather
from gleanrl.engine.weight_delivery import WeightDelivery
from gleanrl.transport.inline import InlineBackend
from gleanrl.watch.stack_watch import StackWatch
from gleanrl.watch.watching import Watching

_LOOK_S = 0.2
"""Seconds after which a wait for rollouts looks for losses and late workers."""
_MOST_OLD = 100
"""Batches that are discarded one after another before that is an error."""


class Collection:
    """Collects batches with the workers of an engine.

    Iteration, the background thread, evaluations and a collector around this one work on it. It
    does not know its collector, so that nothing of these keeps that alive.
    """

    restarted: str | None = None
    """Which environments began new episodes with the last loaded state, and why."""
    warned_of_episodes = False
    """Whether the user knows that states have no episodes."""
    batches = 0
    _old_in_a_row = 0
    """Batches discarded since the last one that was not, because of `max_lag`."""
    _unfinished = 0
    """Frames in batches that earlier pipelines dropped."""
    touched = False
    """Whether anything has requested a batch, a seed, a reset or a state."""
    moved = False
    """Whether environments were stepped or reset since they were seeded."""
    _requested_at: float | None = None
    """The time of the request for the current batch, before it is gathered."""
    repeats_seeds = False
    """Whether replacements get the seeds of those before them, to make the same rollouts."""

    def __init__(self, name: str, plan: WorkerPlan, engine: Engine, watching: Watching) -> None:
        """Reserve memory for the batches of ``engine``, whose workers were started by ``plan``."""
        self.plan, self.engine, self.watching, self._name = plan, engine, watching, name
        self._several = not plan.in_process
        # With central inference it bounds a step of the environments, not a rollout.
        self.timeout: float | None = None if plan.central else plan.arguments["timeout"]
        engine.rollout_s = self.timeout
        watched = self.timeout is not None and plan.in_process
        self._late = StackWatch(self.timeout or 0.0) if watched else None
        """Warns of a rollout in this thread that is late."""
        self.ready: deque[Any] = deque()
        """Batches to deliver."""
        self.mishaps: Counter[str] = Counter()
        """Failures in workers that collection has survived, by the counter of `stats`."""
        self.seeds: Mapping[int, m.Seed] = {}
        """The seeds of the workers since their start; none after a loaded state."""
        self._reports: Rollouts = {}
        """The workers' reports about the newest batch."""
        if plan.central is not None:
            engine.told_by(plan.central.start().session)
        stopped: Callable[[], bool] = bool
        if plan.interruptor is not None:
            plan.interruptor.attach(engine.backend.stop_byte)
            stopped = plan.interruptor.collection_stopped
        engine.tolerant = plan.tolerant
        engine.needs_all = plan.relaunches is not None and plan.sync
        self.counts = engine.plan(
            plan.limits, plan.frames, plan.batches, plan.enough, stopped, plan.blanks
        )
        self.pipeline = plan.pipeline
        self.pipeline.share_out(engine.num_envs)
        self.weights = PolicyUpdates(engine, plan, watching)
        if plan.relaunches is not None:
            commands = partial(Collection._commands_for, weakref.proxy(self))
            Replacements(engine, plan.relaunches, commands)
        self.filling = BackgroundFilling(engine, self.counts, self.timeout)
        hooks = plan.arguments["pre_collect_hook"], plan.arguments["post_collect_hook"]
        self.hooks = Hooks(*hooks) if plan.in_process else HooksInWorkers(*hooks, engine)

    def serve(self, plan: WorkerPlan) -> None:
        """Continue with the workers that were started by ``plan``, which the engine has now."""
        self.plan, self._late = plan, None
        self.pipeline.forget()
        self._unfinished += self.pipeline.discarded
        self.pipeline = plan.pipeline
        self.pipeline.share_out(self.engine.num_envs)
        self.hooks = HooksInWorkers(self.hooks.pre, self.hooks.post, self.engine)
        self.hooks.iterated = True
        self.weights.serve(plan)

    # -- batches ---------------------------------------------------------------------------------

    def announce(self) -> None:
        """Note the time of a request for a batch, once per batch, after the pre-collect hook."""
        if self._requested_at is None:
            if self.plan.in_process and self.hooks.pre is not None:
                self.hooks.pre()
            self._requested_at = time.monotonic()

    def collect(self, feed: bool = True) -> deque[Any]:
        """Collect a batch; return the batches to deliver."""
        self.announce()
        batch = self.gather(feed)
        if batch is None:  # workers have put it into the buffer themselves
            return deque([None])
        return self.pipeline(batch, self.hooks.post if self.plan.in_process else None)

    def gather(self, feed: bool = True) -> TensorDictBase | None:
        """Collect a batch from the workers, without further processing."""
        self.touched = self.moved = True
        weights = self.weights
        if weights.schedule is not None:
            weights.send(weights.schedule.before())
        requested_at, self._requested_at = self._requested_at or time.monotonic(), None
        if self._late is None:
            batch, reports = self.engine.collect(self.counts, self.timeout, feed)
        else:
            with self._late:
                batch, reports = self.engine.collect(self.counts, self.timeout, feed)
        while self.plan.max_lag is not None and feed and self._is_old(batch, reports):
            batch, reports = self.engine.collect(self.counts, self.timeout, feed)
        cut_short = any(r.steps < self.engine.steps[worker] for worker, r in reports.items())
        if cut_short and batch is not None and MASK not in batch.keys(True):
            # Shutting down stopped it, and nothing in it says which of its frames are valid.
            frames = sum(report.frames for report in reports.values())
            self.counts.delivered -= frames
            self.engine.discards["stop"] += frames
            raise ClosedError("the collector was shut down while it collected")
        self._reports = reports
        self.batches += 1
        self._note_mishaps(reports)
        self.watching.gathered(reports, weights.number, requested_at, self.status)
        if weights.schedule is not None:
            weights.send(weights.schedule.after(reports))
        return batch

    def _is_old(self, batch: TensorDictBase | None, reports: Rollouts) -> bool:
        """Tell whether a batch was made with weights that are too old, and is discarded."""
        most = self.plan.max_lag
        assert most is not None
        lag = self.weights.number - min(report.policy_version for report in reports.values())
        if lag <= most:
            self._old_in_a_row = 0
            return False
        frames = sum(report.frames for report in reports.values())
        self.counts.delivered -= frames
        self.engine.discards["lag"] += frames
        self.pipeline.forget(batch)
        self._note_mishaps(reports)
        self._old_in_a_row += 1
        if self._old_in_a_row == _MOST_OLD:
            raise GleanError(
                f"{_MOST_OLD} batches in a row were discarded: their weights were more than "
                f"max_lag={most} versions old; send weights to all workers, less often, or make "
                "batches smaller"
            )
        return True

    def _note_mishaps(self, reports: Rollouts) -> None:
        for worker, report in reports.items():
            for counter, text in report.mishaps:
                self.mishaps[counter] += 1
                where = f"in {self.engine.name_of(worker)}, " if self._several else ""
                self.engine.note(counter, f"{where}{text}")

    def unprocessed(self) -> TensorDictBase | None:
        """Collect a batch that goes around the pipeline, which drops unfinished trajectories."""
        self.announce()
        parts = [self.gather() for _ in range(self.plan.batches.joined)]
        found = [part for part in parts if part is not None]  # none of workers that store them
        batch = put_together(found) if len(found) > 1 else parts[0]
        self.pipeline.forget(batch)  # these frames are missing from trajectories
        return batch

    @property
    def oldest_version(self) -> int:
        """The oldest policy version in the newest batch."""
        return min((report.policy_version for report in self._reports.values()), default=0)

    def fake_tensordict(self) -> TensorDictBase:
        """Return a batch of zeros with the layout of the real ones.

        Raises:
            NotImplementedError: batches have no fixed shape (``trajs_per_batch``, ragged data).
        """
        if self.pipeline.varies:
            raise NotImplementedError(
                "with trajs_per_batch the shape of a batch is that of its longest trajectory"
            )
        batch, count = self.engine.batches.fake_batch(), self.plan.batches.joined
        return self.pipeline.finish(batch if count == 1 else put_together([batch] * count))

    def failed(self) -> None:
        """Show that an exception ended collection."""
        self.watching.failed(self.status)

    # -- seeds and resets ------------------------------------------------------------------------

    def restart(self, commands: dict[int, m.Command]) -> dict[int, Any]:
        """Carry out commands that begin new trajectories; discard rollouts under way."""
        self.touched = self.moved = True
        with self.engine.turn(None):
            if self.plan.fills:  # rows that are in the buffer are counted
                self._finish()
            self.ready.clear()
            self.pipeline.forget()
            return self.engine.restart(commands, self.counts)

    def settle(self) -> None:
        """Collect the rollouts under way that cannot be part of a state."""
        if self.plan.fills or isinstance(self.engine.gather, SyncGather):
            self._finish()

    def _finish(self) -> None:
        """Collect all rollouts under way."""
        engine = self.engine
        while not engine.gather.idle:
            if not engine.ready(self.counts, False, self.timeout):
                engine.wait(_LOOK_S)  # workers that are lost meanwhile deliver nothing
                continue
            delivered = self.collect(feed=False)
            if not self.filling.is_running():
                self.ready += delivered

    def seed(self, seed: int, static: bool) -> int:
        """Seed all workers, whose environments are reset; return the last seed."""
        commands: dict[int, m.Seed] = {}
        base = seed
        for worker, envs in enumerate(self.engine.envs):
            # Streams differ from worker to worker, whatever the environments are seeded with.
            commands[worker] = m.Seed(seed if static else base, static, base)
            base += envs
        with self.engine.turn(None):
            self.seeds = commands
            last = self.restart(dict(commands))
            self.moved = False
        if self.plan.sink is not None:
            self.plan.sink.seeded(seed, static)
        # A worker that was lost does not answer: the last seed is that of the last environment.
        return int(last.get(len(commands) - 1, seed if static else base - 1))

    def _commands_for(self, worker: int) -> list[m.Command]:
        """Return the commands that bring the replacement of ``worker`` up to date.

        It gets the newest weights, and random streams and trajectory ids that no life before has
        used, both a function of the seed, the worker and the number of lives.
        """
        engine, models = self.engine, cast("WeightDelivery", self.weights.models)
        # `Bind` comes first: with any other command the worker looks at published weights.
        commands = [*models.catch_up(worker), engine.place(worker), *engine.standing.values()]
        if (seed := self.seeds.get(worker)) is not None:
            commands.append(seed if self.repeats_seeds else reseeded(seed, engine.lives[worker]))
        elif any(isinstance(one, m.Load) and one.snapshot.of_environments for one in commands):
            commands.append(m.Reset())  # its first observations were made without these weights
        return commands

    # -- what it shows ---------------------------------------------------------------------------

    def describe(self) -> str:
        """Return class, workers, environments, progress and state in one line."""
        engine, total = self.engine, self.counts.limits.total_frames
        frames = f"{self.counts.delivered:,}" + (f"/{total:,}" if total else "")
        workers = "" if type(engine.backend) is InlineBackend else f"workers={engine.workers}, "
        return f"{self._name}({workers}envs={engine.num_envs}, frames={frames}, {self._state()})"

    def _state(self) -> str:
        if self.engine.failure is not None:
            return "failed"
        if self.engine.closed:
            return "closed"
        if self.filling.is_running():
            return "paused" if self.filling.paused else "collecting in the background"
        return "completed" if self.counts.exhausted else "collecting"

    def status(self) -> Mapping[str, Any]:
        """Return the values that ``gleanrl top`` shows."""
        status = self.watching.status(self.describe(), self.stats("both"))
        hosts = {self._prefix(w): host for w, (_, host) in enumerate(self.engine.processes)}
        return {**status, "hosts": hosts} if self._several else status

    def stats(
        self, workers: str = "aggregate", *, timeout: float | None = None
    ) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars. Safe in any thread; waits for nothing.

        ``fps`` is the rate over the last four seconds (eight batches, if these take longer),
        ``fps_mean`` the rate since the request for the first batch, and ``episodes`` the number of
        ended episodes. ``return_mean|min|max`` and ``length_mean|min|max`` describe the last 100
        episodes; they are NaN before the first has ended. ``time_env``, ``time_policy``,
        ``time_transfer`` and ``time_wait`` are shares of the workers' time, and ``time_reset`` is
        the part of ``time_env`` that resets take. ``lag`` is the age of the weights of the newest
        batch's oldest frame, in versions; ``lag_mean`` and ``lag_max`` are about the last
        100 batches. With asynchronous central inference, ``drift_max`` is the most steps that an
        environment was ahead of the slowest one when it ended a rollout; else it is 0.

        Args:
            workers: With workers, ``"aggregate"``, ``"per_worker"`` (entries ``worker_0/frames``,
                …; of a policy process ``policy_process/frames``) or ``"both"``. ``"workers"`` and
                ``"workers_alive"`` are always there.
            timeout: Accepted for compatibility; the call sends nothing to workers.

        Raises:
            ConfigError: another word.
        """
        if workers not in ("aggregate", "per_worker", "both"):
            raise ConfigError(
                f"workers must be one of 'aggregate', 'per_worker' and 'both', not {workers!r}"
            )
        if not self._several:
            return self._totals() | self._env_workers(workers != "aggregate")
        stats = {} if workers == "per_worker" else self._totals()
        if workers != "per_worker":
            stats["worker_frames"] = self.watching.measures.frames
        stats |= self._losses(self.engine)
        stats["rollouts_queued"] = len(self.engine.gather.waiting())
        for worker in range(self.engine.workers if workers != "aggregate" else 0):
            own = {
                "requested_frames_per_batch": self.engine.sizes[worker],
                "alive": worker in self.engine.alive,
                "pid": self.engine.processes[worker][0],
                **self.watching.measures.stats(worker),
            }
            prefix = self._prefix(worker)
            stats |= {f"{prefix}/{name}": value for name, value in own.items()}
        return stats

    def _env_workers(self, each: bool) -> dict[str, int | float | bool]:
        """Return the state of the processes of environments, with central inference."""
        if self.plan.central is None:
            return {}
        session = self.plan.central.start().session
        stats = self._losses(session)
        for worker in range(session.workers if each else 0):
            stats[f"worker_{worker}/alive"] = worker in session.alive
            stats[f"worker_{worker}/pid"] = session.processes[worker][0]
        return stats

    def _losses(self, session: Session) -> dict[str, int | float | bool]:
        return {
            "workers": session.workers,
            "workers_alive": len(session.alive),
            "workers_lost": session.losses + self.mishaps["workers_lost"],
            "relaunches": sum(session.lives) + self.mishaps["relaunches"],
        }

    def _totals(self) -> dict[str, int | float | bool]:
        engine, limits = self.engine, self.counts.limits
        total = limits.total_frames
        return {
            **self._ledger(),
            "batches": self.batches,
            "frames_per_batch": limits.frames_per_batch,
            "requested_frames_per_batch": limits.frames_per_batch,
            "env_restarts": self.mishaps["env_restarts"],
            "batches_copied": engine.gather.copies,
            "memory_bytes": engine.gather.nbytes,
            "num_envs": engine.num_envs,
            "policy_version": self.weights.number,
            "completed": self.counts.exhausted and not self.filling.busy,
            "closed": engine.closed,
            "running": self.filling.is_running(),
            "failed": engine.failure is not None,
            **self.watching.measures.stats(),
            **({} if total is None else {"total_frames": total}),
            **self.filling.stats(),
        }

    def _ledger(self) -> dict[str, int]:
        """Return the frames that workers have reported: delivered, waiting, discarded and so on."""
        engine, delivered = self.engine, self.counts.delivered
        waiting = sum(report.frames for report in engine.gather.waiting())
        stopped, waiting = (waiting, 0) if engine.closed else (0, waiting)
        unfinished = self._unfinished + self.pipeline.discarded
        discards = {
            "reset": engine.discards["reset"],
            "loss": engine.gather.dropped,
            "lag": engine.discards["lag"],
            "ahead": engine.discards["ahead"],
            "stop": engine.discards["stop"] + stopped,
        }
        lost = sum(discards.values())
        return {
            "frames": delivered,
            "frames_stepped": delivered + lost + waiting,
            "frames_under_way": waiting,
            "frames_discarded": lost + unfinished,
            **{f"frames_discarded_{why}": frames for why, frames in discards.items()},
            "frames_discarded_unfinished": unfinished,
        }

    def ledger_state(self) -> dict[str, Any]:
        """Return the counts of frames that were stepped and not delivered."""
        return {
            "discards": dict(self.engine.discards),
            "dropped": self.engine.gather.dropped,
            "unfinished": self._unfinished + self.pipeline.discarded,
        }

    def load_ledger(self, state: Mapping[str, Any]) -> None:
        """Continue from counts of `ledger_state`: frames since then were never stepped."""
        self.engine.discards = Counter(state["discards"])
        self.engine.gather.dropped = int(state["dropped"])
        self._unfinished = int(state["unfinished"]) - self.pipeline.discarded

    def _prefix(self, worker: int) -> str:
        """Return how the names of the worker's statistics begin."""
        return self.engine.name_of(worker).replace(" ", "_")
