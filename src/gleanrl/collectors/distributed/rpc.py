"""`DistributedCollector` under the names that TorchRL's scripts use for collectors over RPC."""

from __future__ import annotations

from typing import Any, Unpack, cast

from gleanrl.collectors.arguments import DistributedArguments, RPCArguments, documents_arguments
from gleanrl.collectors.backend_choice import selects
from gleanrl.collectors.distributed.generic import DistributedCollector
from gleanrl.collectors.weight_update import RPCWeightUpdater

__all__ = ["RPCCollector", "RPCDataCollector", "RPCWeightUpdater"]


class RPCCollector(DistributedCollector):
    """A `DistributedCollector` that accepts the arguments of TorchRL's `RPCCollector`.

    Nothing travels by torch.distributed.rpc, whose agents unpickle messages of strangers.

    Example:
        >>> from gleanrl.collectors import RPCCollector
        >>> with RPCCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                   sync=True, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    ARGUMENTS = RPCArguments

    @documents_arguments(RPCArguments, like=DistributedCollector)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[RPCArguments]
    ) -> None:
        super().__init__(create_env_fn, policy, **cast("DistributedArguments", kwargs))


RPCDataCollector = RPCCollector
selects(RPCCollector, "rpc", launcher="mp")
