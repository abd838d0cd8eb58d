"""Which weights travel, and over which channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gleanrl.core.errors import ConfigError


class WeightSyncScheme:
    """How one model's weights reach the workers that use it.

    A scheme is a description: one and the same object can be given to several collectors. Weights
    are sent by ``update_policy_weights_``; every copy is complete and carries one version, and a
    worker changes over between two rollouts, never within one.

    In one process nothing has to be sent: the scheme only says whether updates apply.
    """

    applies = True
    """Whether updates reach the model."""
    shared = True
    """Whether weights are published in shared memory, where the workers can share any."""

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        """Describe the scheme.

        Args:
            strategy: ``"tensordict"`` or ``"state_dict"``: what callers used to have to choose;
                weights of either kind are accepted by every scheme.
            sync: Accepted for compatibility. What it stood for always holds: once
                ``update_policy_weights_`` has returned, rollouts that begin use the new weights.

        Raises:
            ConfigError: an unknown strategy.
        """
        if strategy not in ("tensordict", "state_dict"):
            raise ConfigError(f"strategy ({strategy!r}) must be 'tensordict' or 'state_dict'")
        self.strategy = strategy
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


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Publish weights in shared memory; workers copy them when their next rollout begins.

    The default. Publishing costs one copy, whatever the number of workers, and waits for nobody.
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            per_worker_weights: Accepted for compatibility: ``weights={0: ..., 1: ...}`` always
                gives each worker its own.
        """
        super().__init__(strategy, sync)
        self.per_worker_weights = per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Send weights to each worker as a message."""

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

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            backend: Accepted for compatibility: the collector's is used.
            timeout: Accepted for compatibility: no update waits, and a node that takes no weights
                counts as dead when it shows no sign of life.
        """
        super().__init__(strategy, sync)
        self.backend, self.timeout = backend, timeout


class RPCWeightSyncScheme(WeightSyncScheme):
    """Send weights to nodes as one flat tensor, by torch.distributed.rpc.

    The default of RPC collectors. A node acts with them from its next rollout on.
    """


class RayWeightSyncScheme(WeightSyncScheme):
    """Put weights into Ray's object store once per update, for all actors.

    The default of Ray collectors. An actor fetches the newest ones when its next rollout begins.
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, backend: str = "gloo"
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            backend: Accepted for compatibility: there is no process group.
        """
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
