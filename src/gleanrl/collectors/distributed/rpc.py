"""Collectors over nodes that talk by torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gleanrl.collectors import workers
from gleanrl.collectors.distributed.groups import DistributedCollector
from gleanrl.collectors.legacy import RPCWeightUpdater
from gleanrl.core.errors import ConfigError

if TYPE_CHECKING:
    from gleanrl.transport.rpc import RPCBackend

__all__ = ["RPCCollector", "RPCDataCollector", "RPCWeightUpdater"]

_OPTIONS = {"num_worker_threads", "rpc_timeout", "device_maps", "devices"}
_HIDDEN_OPTIONS = {"_transports", "_channels"}
"""Torch's own, without a promise that they stay."""


class RPCCollector(DistributedCollector):
    """Like a `DistributedCollector`, with commands, rollouts and weights by RPC (TensorPipe).

    Nodes are started, let in and watched in the same way; then they and this process enter a world
    of torch.distributed.rpc, of which a process can be in one only: there can be one `RPCCollector`
    at a time. It uses no default process group and leaves yours alone.

    **Torch's RPC agents and their store do not authenticate, and agents unpickle what anybody sends
    who reaches their ports**, on this machine and on every node. Such a message can run code as
    you. They listen on the interface of ``host`` only, unless ``TP_SOCKET_IFNAME`` names another.
    With ``launcher="mp"`` that is the loopback interface, which other users of the machine reach;
    for any other a warning says so once. `DistributedCollector` unpickles only what is
    authenticated.

    Example:
        >>> from gleanrl.collectors import RPCCollector
        >>> with RPCCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                   sync=True, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    _can_replace = False

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        visible_devices: Sequence[Any] | None = None,
        tensorpipe_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Have the nodes started; each builds its environments and resets them once.

        Args:
            create_env_fn: See `DistributedCollector`.
            policy: See `DistributedCollector`.
            visible_devices: Per node, the CUDA device, or a list of them, that its RPC agent
                synchronises with. Rollouts cross as CPU memory.
            tensorpipe_options: Arguments of `torch.distributed.rpc.TensorPipeRpcBackendOptions`, in
                every process: ``num_worker_threads``, ``rpc_timeout`` (seconds any single message
                may take; by default ``heartbeat`` towards nodes and an hour towards a learner that
                may be busy), ``device_maps``, ``devices``. This process is ``"TRAINER_NODE"``
                there, nodes are ``"COLLECTOR_NODE_1"``, ….
            **kwargs: Further arguments of `DistributedCollector`. ``backend`` is accepted for
                compatibility: there is no process group.

        Raises:
            ConfigError: torch.distributed.rpc is initialised in this process already; or see
                `DistributedCollector`.
        """
        self._tensorpipe = _checked(tensorpipe_options)
        self._visible = visible_devices
        super().__init__(create_env_fn, policy, **kwargs)

    def _read_nodes(self, given: Any) -> list[Any]:
        functions = super()._read_nodes(given)
        if self._visible is not None:
            dealt = workers.per_worker("visible_devices", list(self._visible), self.num_workers)
            self._visible = [list(d) if isinstance(d, list | tuple) else [d] for d in dealt]
        return functions

    def _make_backend(self, *args: Any, **kwargs: Any) -> RPCBackend:
        # Only here: torch.distributed.rpc takes a while to import, and not every build has it.
        from gleanrl.transport.rpc import RPCBackend

        kwargs.pop("kind")
        return RPCBackend(*args, rpc_options=self._tensorpipe, devices=self._visible, **kwargs)


RPCDataCollector = RPCCollector


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check ``tensorpipe_options``."""
    found = dict(options or {})
    if "init_method" in found:
        raise ConfigError(
            "tensorpipe_options['init_method']: nodes find each other through this process; say "
            "tcp_port= and host= instead"
        )
    unknown = set(found) - _OPTIONS - _HIDDEN_OPTIONS
    if unknown:
        raise ConfigError(f"tensorpipe_options has {sorted(unknown)}; known are {sorted(_OPTIONS)}")
    timeout = found.get("rpc_timeout")
    if timeout is not None and not timeout > 0:
        raise ConfigError(
            f"tensorpipe_options['rpc_timeout'] ({timeout!r}) must be a positive number of seconds"
        )
    return found
