"""Names under which TorchRL users look for weight sync schemes. Re-exports only."""

from gleanrl.weights.scheme import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

__all__ = [
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "WeightSyncScheme",
]
