"""The path under which TorchRL has weight updaters. Re-exports only."""

from gleanrl.collectors.compat import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "MultiProcessedWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
