"""Names under which TorchRL users look for weight sync schemes. Re-exports only."""

from gleanrl.core.errors import refuse
from gleanrl.weights.sync_schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

_TRANSPORT = "a collector moves the weights of its schemes; there are no transports to build"

__getattr__ = refuse(
    __name__,
    {
        "DistributedTransport": _TRANSPORT,
        "InitialSyncTransport": _TRANSPORT,
        "MPTransport": _TRANSPORT,
        "RPCTransport": _TRANSPORT,
        "RayModuleTransformScheme": "use RayWeightSyncScheme under the model's path, such as "
        "weight_sync_schemes={'env.transform[0]': RayWeightSyncScheme()}",
        "RayTransport": _TRANSPORT,
        "SharedMemTransport": _TRANSPORT,
        "TransportBackend": _TRANSPORT,
        "WeightStrategy": "give strategy='tensordict' or 'state_dict' to the scheme",
        "WeightSyncBackend": "WeightSyncScheme.from_backend takes the name of a backend",
    },
)

__all__ = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]
