"""Names under which TorchRL users look for weight sync schemes. Re-exports only."""

from gleanrl.weights.scheme import NoWeightSyncScheme, WeightSyncScheme

__all__ = ["NoWeightSyncScheme", "WeightSyncScheme"]
