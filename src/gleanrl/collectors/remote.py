"""What a collector with several workers does across them: state, resets, questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gleanrl.collectors import checks
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.running import PATIENCE, RunningCollector
from gleanrl.collectors.settings import WorkerSettings
from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.core.errors import ConfigError
from gleanrl.engine.models import WeightSync
from gleanrl.engine.replacing import reseeded


class RemoteCollector(RunningCollector, WorkerSettings):
    """A `RunningCollector` whose environments and policies are in workers."""

    _hooks_here = False
    num_workers: int
    _models: WeightSync
    _threads: Any
    _sync: bool
    _stream: int
    """What the random streams of the workers were made from."""

    @contextmanager
    def _threads_back(self) -> Iterator[None]:
        """Restore the number of torch threads if the body fails."""
        try:
            yield
        except BaseException:
            self._threads()
            raise

    def frames_per_batch_worker(self, worker_idx: int = 0) -> int:
        """Return the frames of one rollout of a worker."""
        return int(self._engine.sizes[worker_idx])

    # -- weights ---------------------------------------------------------------------------------

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        with self._engine.turn(None):
            self._models.update(models, version, worker_ids)

    def _check_update(self, worker_ids: Any, kwargs: Mapping[str, Any]) -> None:
        if kwargs:
            raise TypeError(
                f"unexpected arguments {sorted(kwargs)}: there is no weight updater to take them"
            )

    def _check_workers(self, worker_ids: Any) -> None:
        self._models.chosen(worker_ids)

    # -- state -----------------------------------------------------------------------------------

    def reset(  # type: ignore[override]  # workers, not environments
        self, reset_idx: Sequence[bool] | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
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
            chosen = checks.read_flags("reset_idx", reset_idx)
        if len(chosen) != self.num_workers:
            raise ConfigError(f"reset_idx has {len(chosen)} entries for {self.num_workers} workers")
        self._restart({w: m.Reset(None, kwargs) for w, reset in enumerate(chosen) if reset})

    def state_dict(self) -> dict[str, Any]:
        """Return ``worker0``, ``worker1``, …, each with its policy and environment, and counters.

        Waits for rollouts that are under way; they are delivered as if nothing had been asked.
        Where losses are tolerated, the entry of a lost worker says so (``"lost"``) and holds the
        policy of the worker that has the newest: whoever loads it starts there with fresh
        environments, random streams and trajectory ids.
        """
        engine = self._engine
        with engine.turn(None):
            states = engine.request_all(m.GetState())
            policies = engine.request_all(m.Call("policy_state"))
            lives = list(engine.lives)
        asked = zip(states, policies, lives, strict=True)
        found: dict[int, dict[str, Any]] = {}
        for worker, (state, policy, life) in enumerate(asked):
            if state is not None and policy is not None:
                found[worker] = {
                    "policy_state_dict": policy,
                    "env_state_dict": state.pop("env"),
                    "policy_version": state["policy_version"],
                    "worker": state,
                    "life": life,
                }
        if not found:
            raise engine.dispatcher.lost[0]
        newest = max(found.values(), key=lambda entry: entry["worker"]["policy_version"])
        for worker, life in enumerate(lives):
            found.setdefault(worker, _of_lost(newest, life + 1))
        entries = {f"worker{worker}": found[worker] for worker in range(self.num_workers)}
        return {**entries, "frames": self._budget.delivered, "iter": self._batches}

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
            self._budget.continue_from(frames)
            self._batches = batches

    def _restored(self, worker: int, entry: Mapping[str, Any], strict: bool) -> m.Command:
        """Return what has ``worker`` go on from ``entry``, or begin afresh if that is lost."""
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
        found: dict[str, int | float | bool] = {}
        if workers != "per_worker":
            found = super().stats()
            found["worker_frames"] = sum(tally.frames for tally in tallies)
        found["workers"], found["workers_alive"] = self.num_workers, len(alive)
        if workers != "aggregate":
            for worker, tally in enumerate(tallies):
                found[f"worker_{worker}/frames"] = tally.frames
                found[f"worker_{worker}/batches"] = tally.rollouts
                found[f"worker_{worker}/requested_frames_per_batch"] = self._engine.sizes[worker]
                found[f"worker_{worker}/policy_version"] = tally.policy_version
                found[f"worker_{worker}/alive"] = worker in alive
        return found

    # -- questions -------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """The learner's policy; workers have copies."""
        return self._models.running("policy")

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
        if self._keeps_buffer(attr):
            with self._engine.turn(None):
                return [paths.resolve(self, attr)] * self.num_workers
        return self._engine.request_all(m.Get(attr))

    def _keeps_buffer(self, path: str) -> bool:
        """Tell whether ``path`` leads into a replay buffer that this process alone writes into."""
        return (
            self.replay_buffer is not None
            and not self._fills
            and path.partition(".")[0] == "replay_buffer"
        )

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
        for what, given in (("argument", args), ("keyword-argument", kwargs)):
            if len(given) != count:
                raise ConfigError(
                    f"Expected {count} {what} entries, one per worker, got {len(given)}"
                )
        if self._keeps_buffer(method_name):
            with self._engine.turn(None):
                return [
                    paths.call(self, method_name, a, k) for a, k in zip(args, kwargs, strict=True)
                ]
        calls = {w: m.Call(method_name, tuple(args[w]), dict(kwargs[w])) for w in range(count)}
        values = self._engine.request_each(dict(calls))
        return [values.get(worker) for worker in range(count)]

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
        # Whoever interrupted, or waits for the error, does not wait for a worker that hangs.
        self.shutdown(PATIENCE, raise_on_error=False)


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
