"""What collectors that run an `Engine` share: iteration, weights, state, remote access."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.collectors import checks
from gleanrl.collectors.background import BackgroundCollector
from gleanrl.collectors.settings import Settings
from gleanrl.collectors.updating import UpdatingCollector
from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError
from gleanrl.core.keys import MASK, as_key
from gleanrl.core.layout import Field, Layout
from gleanrl.engine.gather import Rollouts
from gleanrl.engine.pipeline import Pipeline

PATIENCE = 2.0
"""Seconds environments get to close after a failure, and where nobody called `shutdown`."""


class RunningCollector(UpdatingCollector, BackgroundCollector, Settings):
    """A collector over an engine; subclasses build the parts in their constructor."""

    _pipeline: Pipeline
    _fills = False
    """Whether workers write into the buffer themselves."""
    _as_gathered = False
    """Whether batches are those of the engine. A class says so of itself: subclasses of the user's
    may do anything with them."""
    _reports: Rollouts = {}
    """What workers said of the newest batch."""
    storing_device: torch.device | None

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Run the body with the engine up; if it fails, shut the engine down again."""
        try:
            yield
        except BaseException:
            self._engine.close(5.0)
            raise
        self._batches = 0
        self._ready: deque[Any] = deque()
        # The finalizer must not hold the collector itself, or it would never be collected.
        self._closing = weakref.finalize(self, self._engine.close, PATIENCE)

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
                    self._ready = self._collect()
                held = [self._ready.popleft()]
            # Nothing here may keep the batch alive: its memory returns when the consumer lets go.
            yield held.pop()

    def _collect(self, feed: bool = True) -> deque[Any]:
        """Collect a batch; return what is to be delivered for it."""
        self._announce()
        self._announced = False
        batch = self._gather(feed)
        if batch is None:  # workers have put it into the buffer themselves
            return deque([None])
        return self._pipeline(batch, self.post_collect_hook if self._hooks_here else None)

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        batch, reports = self._engine.collect(self._budget, self._timeout, feed)
        self._reports = reports
        if batch is None or MASK in batch.keys(True) or not self._cut_short(reports):
            self._batches += 1
            return batch
        # Shutting down stopped it, and nothing in it says which of its frames are valid.
        frames = sum(report.frames for report in reports.values())
        self._budget.take_back(frames)
        self._engine.discarded += frames
        raise ClosedError("the collector was shut down while it collected")

    def _cut_short(self, reports: Rollouts) -> bool:
        return any(report.steps < self._engine.steps[worker] for worker, report in reports.items())

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

    def gathered(self) -> tuple[int, int]:
        """Return the valid frames of the newest batch and the oldest policy version in it."""
        reports = self._reports.values()
        frames = sum(report.frames for report in reports)
        return frames, min((report.policy_version for report in reports), default=0)

    # -- state -----------------------------------------------------------------------------------

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
        seed = checks.read_seed(seed)
        commands = self._seeds(seed, static_seed)
        last = self._restart(dict(commands))
        # Of a worker that was lost nobody hears it: it is the last one of as many environments.
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
        with self._engine.turn(None):
            if self._fills:
                self._settle()
            self._ready.clear()
            self._pipeline.forget()
            return self._engine.request_each(commands, discard=self._budget)

    def reset(self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset environments; they start new trajectories.

        Args:
            index: Which environments, by position in the batch; all by default.
            **kwargs: Options for `gymnasium.Env.reset`.
        """
        chosen = None if index is None else checks.read_index(index, self._engine.num_envs)
        self._restart({0: m.Reset(chosen, kwargs)})

    def state_dict(self) -> dict[str, Any]:
        """Return policy and environment state, counters, versions and random streams."""
        worker = self._engine.request(0, m.GetState())
        return {
            "policy_state_dict": self._models.policy_state(),
            "env_state_dict": worker.pop("env"),
            "frames": self._budget.delivered,
            "iter": self._batches,
            "policy_version": worker["policy_version"],
            "worker": worker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned; environments restart on fresh resets.

        Raises:
            KeyError: ``strict`` and an entry is missing.
            WeightsError: the policy's weights do not fit.
        """
        checks.check_state(state_dict, strict)
        policy = state_dict.get("policy_state_dict") or {}
        self._models.check_policy_state(policy)
        if "worker" in state_dict:
            worker = {**state_dict["worker"], "env": state_dict.get("env_state_dict", {})}
            self._restart({0: m.SetState(worker, strict)})
            self._models.continue_from(int(worker["policy_version"]))
        if policy:
            self._models.load_policy_state(policy)
        self._budget.continue_from(int(state_dict.get("frames", self._budget.delivered)))
        self._batches = int(state_dict.get("iter", self._batches))

    def stats(self) -> dict[str, int | float | bool]:
        """Return a flat dictionary of scalars."""
        engine, total = self._engine, self._budget.limits.total_frames
        found: dict[str, int | float | bool] = {
            "frames": self._budget.delivered,
            "batches": self._batches,
            "frames_per_batch": self._budget.limits.frames_per_batch,
            "requested_frames_per_batch": self._budget.limits.frames_per_batch,
            "frames_discarded": engine.discarded + self._pipeline.discarded,
            "batches_copied": engine.copies,
            "memory_bytes": engine.nbytes,
            "num_envs": engine.num_envs,
            "policy_version": self._models.number,
            "completed": self._budget.exhausted,
            "closed": engine.closed,
            "running": self.is_running(),
            "failed": engine.failure is not None,
        }
        if total is not None:
            found["total_frames"] = total
        found.update(self._flow_stats())
        return found

    # -- attributes and remote access ------------------------------------------------------------

    @property
    def env(self) -> Any:
        """The environment, as it was given or made."""
        return self._engine.ask(m.Get("env"))

    @property
    def policy(self) -> Any:
        """The policy that runs."""
        return self._models.running("policy")

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

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a path such as ``"env.transform[0]"`` and call it; return it if not callable.

        Raises:
            AttributeError: an attribute is missing.
            ValueError: arguments for something that is not callable.
        """
        with self._engine.turn(None):  # nothing is collected meanwhile
            return super().cascade_execute(attr_path, *args, **kwargs)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once per entry of the argument lists; see `BaseCollector.map_fn`."""
        with self._engine.turn(None):
            return super().map_fn(method_name, list_of_args, list_of_kwargs)

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
        failure = self._stop_background(limit / 2)
        left = max(0.0, deadline - time.monotonic())
        self._engine.close(left, close_env, raise_on_error and failure is None)
        if self._background is not None:
            self._background.join(1.0)  # it has nothing left to do
        self._closing.detach()
        if failure is not None and raise_on_error:
            raise failure
