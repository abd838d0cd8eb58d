"""Collectors whose workers are Ray actors."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Unpack

from gleanrl.collectors.arguments import RayArguments, documents_arguments
from gleanrl.collectors.backend_choice import selects
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.distributed.generic import plan_nodes
from gleanrl.collectors.worker_plan import deal, env_functions_of
from gleanrl.core.errors import ConfigError
from gleanrl.transport.network import NetworkBackend
from gleanrl.transport.ray_nodes import RayActors, check_options, require_ray, session


class RayCollector(BaseCollector):
    """Runs a policy in Ray actors, on this machine or on a cluster, and yields batches.

    Actors act with copies of the policy: call `update_policy_weights_` after each optimizer step.

    One actor per entry of ``create_env_fn``, each with a copy of the policy; it serves like a
    worker of a `MultiCollector`. With ``sync=True`` a batch is a stack of one rollout of every
    actor, otherwise the first rollout to arrive. A rollout is one object in
    Ray's store, which this process copies once into the memory of the batch. Weights are one object
    per update for all actors.

    If this process is not connected to Ray, the collector starts it, or connects to the cluster
    that ``ray_init_config={"address": ...}`` names, and disconnects when it is shut down. Needs
    ``pip install 'gleanrl[ray]'``.

    An actor that dies is named in a `WorkerDied`, with Ray's reason.

    Example::

        collector = RayCollector(
            ["CartPole-v1"] * 4, policy, frames_per_batch=4096, total_frames=1_000_000, num_envs=16
        )
        for batch in collector:
            ...  # learn
            collector.update_policy_weights_()
        collector.shutdown()
    """

    ARGUMENTS = RayArguments

    @documents_arguments(RayArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[RayArguments]
    ) -> None:
        """Create the actors; each builds its environments and resets them once.

        Args:
            create_env_fn: The environments: a list with one entry per actor, or one entry for all
                together with ``num_collectors``. `Collector` lists the kinds of entries.
            policy: The policy. Actors get copies.
            **kwargs: See `gleanrl.collectors.arguments.RayArguments`.

        Raises:
            ImportError: Ray is not installed.
            Exception: as `DistributedCollector`.
        """
        super().__init__(create_env_fn, policy, kwargs)
        require_ray()
        functions = env_functions_of(create_env_fn, self._arguments["num_collectors"])
        self._start_actors(functions)

    def _start_actors(self, functions: list[Any]) -> None:
        arguments = self._arguments
        configs = deal("remote_configs", arguments["remote_configs"] or {}, len(functions))
        options = [check_options(config) for config in configs]
        plan = plan_nodes(arguments, functions)
        self._actors = actors = RayActors(arguments["ray_init_config"], options)
        try:
            self._start(
                plan,
                lambda windows: NetworkBackend(
                    windows,
                    actors,
                    actors,
                    replaces=plan.relaunches is not None,
                    threads=arguments["num_sub_threads"],
                    start_timeout=arguments["start_timeout"],
                ),
            )
        except BaseException:
            actors.stop(1.0)
            raise

    # -- actors ----------------------------------------------------------------------------------

    @property
    def remote_collectors(self) -> list[Any]:
        """The handles of the actors; empty after `shutdown`."""
        return self._actors.handles

    @property
    def num_collectors(self) -> int:
        """The number of actors."""
        return self.num_workers

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Start again with more actors, before the first request to the existing actors.

        Later is not possible: trajectory ids are interleaved over all environments, frames shared
        out over all actors.

        Args:
            create_env_fn: The environments of the new actors: a list, or one entry for all.
            num_envs: Number of actors, if there is one environment for all.
            policy: ``None`` or the collector's own: there is one for all actors.
            collector_kwargs: Further arguments of the new actors' collectors; or a list.
            remote_configs: Options of the new actors; or a list.

        Raises:
            RuntimeError: a batch, an update, a seed or a state was requested before.
            ConfigError: another policy, or arguments that the constructor refuses.
        """
        if self.collection.touched or self.collection.weights.number or self._engine.closed:
            raise RuntimeError(
                "add_collectors() comes before the first batch, update, seed or state: workers "
                "share out frames and trajectory ids from then on; make a new collector"
            )
        if policy is not None and policy is not self.collection.plan.policy:
            raise ConfigError("add_collectors: all actors run the collector's own policy")
        before, new = self.collection.plan.functions, env_functions_of(create_env_fn, num_envs)
        arguments: dict[str, Any] = {
            **self._arguments,
            "create_env_fn": [*before, *new],
            "pre_collect_hook": self.pre_collect_hook,
            "post_collect_hook": self.post_collect_hook,
            "weight_updater": self.weight_updater,
        }
        for name, added in (
            ("collector_kwargs", collector_kwargs),
            ("remote_configs", remote_configs),
        ):
            old = deal(name, arguments[name] or {}, len(before))
            arguments[name] = [*old, *deal(name, added or {}, len(new))]
        session.enter(self, None)  # so that it does not end in between
        try:
            profile = self.profile_config
            self.shutdown()
            self._arguments = arguments
            self._start_actors([*before, *new])
            if profile is not None:
                self.enable_profile(**asdict(profile))
        finally:
            session.leave(self, True)

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool = True,
    ) -> None:
        """Kill the actors. Idempotent; delivered batches stay valid.

        Args:
            timeout: Seconds it may take; 10 by default.
            close_env: Only ``True``: environments end with their actor.
            raise_on_error: Raise the exception of an environment's ``close``.
            shutdown_ray: Disconnect from Ray, where the collector had connected to it and no other
                collector uses it; ``False`` leaves that to you.
        """
        if not shutdown_ray:
            self._actors.ends_ray = False
        super().shutdown(timeout, close_env, raise_on_error)

    def async_shutdown(  # type: ignore[override]  # an awaitable, which can be ignored
        self,
        timeout: float | None = None,
        close_env: bool = True,
        *,
        shutdown_ray: bool = False,
    ) -> Settled:
        """Shut down; the result may be awaited, but the shutdown is complete on return.

        Args:
            timeout: See `shutdown`.
            close_env: See `shutdown`.
            shutdown_ray: See `shutdown`.
        """
        self.shutdown(timeout, close_env, shutdown_ray=shutdown_ray)
        return Settled()

    def stop_remote_collectors(self) -> None:
        """Kill the actors and stay connected to Ray; the same as a `shutdown` that does so."""
        self.shutdown(shutdown_ray=False)


class Settled:
    """An awaitable that is complete from the start."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


selects(RayCollector, "ray")
