"""Requests to workers and facts about them, for all collectors except the in-process one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from gleanrl.collectors.arguments import read_flags
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.states import states_of
from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, for_users
from gleanrl.engine.replacing import Replacements
from gleanrl.engine.weight_sync import WeightSync
from gleanrl.transport.network import NetworkBackend


class CollectorWithWorkers(BaseCollector):
    """Base of the collectors whose environments, policies and hooks are in workers."""

    _models: WeightSync

    def _set_up(self) -> None:
        super()._set_up()
        if (relaunches := self._plan.relaunches) is not None:
            backend = cast("NetworkBackend", self._engine.backend)
            self._replacements = Replacements(self._engine, backend, self._models, relaunches)

    def _env_to_record(self) -> Any:
        first = self._plan.functions[0]
        return first if isinstance(first, str) else None

    # -- questions -------------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        return self.map_fn(attr_path, [args] * self.num_workers, [kwargs] * self.num_workers)

    def get_distant_attr(self, attr: str) -> Any:
        if self._is_of_buffer(attr):
            with self._alone():
                return [paths.resolve(self, attr)] * self.num_workers
        return self._engine.request_all(m.Get(attr))

    def _is_of_buffer(self, path: str) -> bool:
        """Whether ``path`` leads into a replay buffer that this process alone writes into."""
        ours = self.replay_buffer is not None and not self._plan.fills
        return ours and re.match(r"replay_buffer\b", path) is not None

    def getattr_policy(self, attr: str) -> Any:
        return self._engine.ask(m.Get(f"policy.{attr}"))

    def getattr_env(self, attr: str) -> Any:
        return self._engine.ask(m.Get(f"env.{attr}"))

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        count = self.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs: list[Any] = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for what, entries in (("argument", args), ("keyword-argument", kwargs)):
            if len(entries) != count:
                raise ConfigError(
                    f"Expected {count} {what} entries, one per worker, got {len(entries)}"
                )
        each = list(zip(args, kwargs, strict=True))
        if self._is_of_buffer(method_name):
            with self._alone():
                return [paths.call(self, method_name, a, k) for a, k in each]
        values = self._engine.request_each(
            {worker: m.Call(method_name, tuple(a), dict(k)) for worker, (a, k) in enumerate(each)}
        )
        return [values.get(worker) for worker in range(count)]

    # -- profiles, which are in the workers ------------------------------------------------------

    def _begin_profile(self, config: Mapping[str, Any]) -> None:
        unknown = sorted(set(config.get("workers", ())) - set(range(self.num_workers)))
        if unknown and self._worker_idx is None:  # a parent means its own workers
            self._profile_config = None
            raise ConfigError(
                f"workers to profile {unknown} must be indices below {self.num_workers}"
            )
        self._tell("enable_profile", **config)

    def _end_profile(self) -> None:
        self._engine.standing.pop("enable_profile", None)
        if not self._engine.closed:
            self._engine.request_all(m.Call("disable_profile"))

    # -- states of each --------------------------------------------------------------------------

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
        chosen = read_flags("reset_idx", reset_idx, self.num_workers)
        self._restart({w: m.Reset(None, kwargs) for w, reset in enumerate(chosen) if reset})

    def _states(self) -> dict[str, Any]:
        return states_of(self._engine)

    def stats(
        self, workers: str = "aggregate", *, timeout: float | None = None
    ) -> dict[str, int | float | bool]:
        engine, stats = self._engine, super().stats(workers)
        stats["worker_frames"] = sum(tally.frames for tally in engine.tallies)
        if workers == "per_worker":
            stats.clear()
        alive = engine.alive
        stats["workers"], stats["workers_alive"] = self.num_workers, len(alive)
        stats["workers_lost"], stats["rollouts_queued"] = engine.losses, engine.gather.queued
        for worker, tally in enumerate(engine.tallies if workers != "aggregate" else ()):
            own = {
                "frames": tally.frames,
                "batches": tally.rollouts,
                "requested_frames_per_batch": engine.sizes[worker],
                "policy_version": tally.policy_version,
                "alive": worker in alive,
                "pid": engine.processes[worker][0],
                **self._watching.measures.stats(worker),
            }
            stats.update({f"worker_{worker}/{name}": value for name, value in own.items()})
        return stats

    def _status(self) -> Mapping[str, Any]:
        return {**super()._status(), "hosts": [host for _, host in self._engine.processes]}
