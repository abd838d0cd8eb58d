"""Collectors over nodes that use torch.distributed.rpc."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, cast

from gleanrl.collectors.arguments import (
    DistributedArguments,
    RPCArguments,
    shows,
)
from gleanrl.collectors.distributed.generic import DistributedCollector
from gleanrl.collectors.launch import deal
from gleanrl.collectors.weight_update import RPCWeightUpdater
from gleanrl.core.errors import ConfigError
from gleanrl.transport.data_plane import DataPlane
from gleanrl.transport.launchers import Launcher

__all__ = ["RPCCollector", "RPCDataCollector", "RPCWeightUpdater"]

_OPTIONS = {"num_worker_threads", "rpc_timeout", "device_maps", "devices"}
_HIDDEN_OPTIONS = {"_transports", "_channels"}
"""Torch's own, without a promise that they stay."""


class RPCCollector(DistributedCollector):
    """Like a `DistributedCollector`, with rollouts and weights by RPC (TensorPipe).

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

    ARGUMENTS = RPCArguments
    _can_replace = False

    @shows(RPCArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[RPCArguments]
    ) -> None:
        """Start the nodes; each builds its environments and resets them once.

        Args:
            create_env_fn: See `DistributedCollector`.
            policy: See `DistributedCollector`.
            **kwargs: See `gleanrl.collectors.arguments.RPCArguments`.

        Raises:
            ConfigError: torch.distributed.rpc is initialised in this process already; or see
                `DistributedCollector`.
        """
        super().__init__(create_env_fn, policy, **cast("DistributedArguments", kwargs))

    def _data_plane(self, launcher: Launcher) -> DataPlane:
        # Only here: torch.distributed.rpc takes a while to import, and not every build has it.
        from gleanrl.transport.rpc import RpcPlane

        arguments = self._arguments
        options, devices = _read_options(arguments["tensorpipe_options"]), None
        if arguments["visible_devices"] is not None:
            dealt = deal("visible_devices", list(arguments["visible_devices"]), self.num_workers)
            devices = [list(d) if isinstance(d, list | tuple) else [d] for d in dealt]
        return RpcPlane(arguments["host"] or launcher.address(), options, devices)


RPCDataCollector = RPCCollector


def _read_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check ``tensorpipe_options``."""
    checked = dict(options or {})
    if "init_method" in checked:
        raise ConfigError(
            "tensorpipe_options['init_method']: nodes find each other through this process; say "
            "tcp_port= and host= instead"
        )
    unknown = set(checked) - _OPTIONS - _HIDDEN_OPTIONS
    if unknown:
        raise ConfigError(f"tensorpipe_options has {sorted(unknown)}; known are {sorted(_OPTIONS)}")
    timeout = checked.get("rpc_timeout")
    if timeout is not None and not timeout > 0:
        raise ConfigError(
            f"tensorpipe_options['rpc_timeout'] ({timeout!r}) must be a positive number of seconds"
        )
    return checked
