"""Weight sync schemes: descriptions of the way by which weights reach a collector's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from gleanrl.core.errors import ConfigError, for_users
from gleanrl.core.options import check_word


class WeightSyncScheme:
    """The way of one model's weights to the workers that use it.

    A scheme is a description: one and the same object can be given to several collectors. Weights
    are sent by ``update_policy_weights_``; every copy is complete and carries one version, and a
    worker changes over between two rollouts, never within one.

    In one process nothing is sent, and the scheme only says whether updates apply.
    """

    applies = True
    """Whether updates reach the model."""
    shared = True
    """Whether weights are published in shared memory, if the workers can share any."""

    @for_users
    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        """Describe the scheme.

        Args:
            strategy: ``"tensordict"`` or ``"state_dict"``, for compatibility. Every scheme accepts
                weights of either kind.
            sync: Accepted for compatibility. Rollouts that begin after the return of
                ``update_policy_weights_`` always use the new weights.

        Raises:
            ConfigError: an unknown strategy.
        """
        self.strategy = check_word("strategy", strategy, ("tensordict", "state_dict"))
        self.sync = sync

    @staticmethod
    def from_backend(backend: str, **kwargs: Any) -> WeightSyncScheme:
        """Return the scheme that fits a backend.

        Args:
            backend: ``"none"`` or ``"direct"`` (nothing is sent), ``"inline"``, ``"shared"``,
                ``"thread"``, ``"process"``, ``"multiprocessing"``, ``"distributed"``, ``"rpc"`` or
                ``"ray"``.
            **kwargs: Arguments of the scheme.

        Raises:
            ConfigError: no such backend.
        """
        if backend not in _SCHEMES:
            raise ConfigError(
                f"Unsupported weight-sync backend {backend!r}: it must be one of {sorted(_SCHEMES)}"
            )
        return _SCHEMES[backend](**kwargs)

    def init_on_sender(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because the collector sets up its schemes and sends by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} describes how a collector sends weights and cannot send "
            "without one: give it to the collector as weight_sync_schemes={'policy': ...} and "
            "call the collector's update_policy_weights_()"
        )

    init_on_receiver = connect = synchronize_weights = send = receive = init_on_sender
    apply_weights = shutdown = init_on_sender


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Publish weights in shared memory; workers copy them when their next rollout begins.

    The default. Publishing costs one copy for any number of workers, and never waits.
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        ``per_worker_weights`` is accepted for compatibility: ``weights={0: ..., 1: ...}`` always
        gives each worker its own.
        """
        super().__init__(strategy, sync)
        self.per_worker_weights = per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Send weights to each worker of a collector as a message of its own."""

    shared = False


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Send weights to nodes as one flat tensor, over torch.distributed.

    The default of distributed collectors. A node gets the next weights while it works, and acts
    with them from its next rollout on.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        backend: str = "gloo",
        timeout: float = 3600.0,
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        ``backend`` and ``timeout`` are accepted for compatibility: the collector's backend is used,
        and no update waits.
        """
        super().__init__(strategy, sync)
        self.backend, self.timeout = backend, timeout


class RPCWeightSyncScheme(WeightSyncScheme):
    """Send weights to the nodes of an `RPCCollector`, as a `DistributedWeightSyncScheme` does."""


class RayWeightSyncScheme(WeightSyncScheme):
    """Put weights into Ray's object store once per update, for all actors.

    The default of Ray collectors. An actor fetches the newest ones when its next rollout begins.
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, backend: str = "gloo"
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`. ``backend`` has no effect."""
        super().__init__(strategy, sync)
        self.backend = backend


class NoWeightSyncScheme(WeightSyncScheme):
    """Never update the model: a fixed policy."""

    applies = False


_SCHEMES: Mapping[str, type[WeightSyncScheme]] = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "inline": WeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}
