"""A path under which TorchRL has `DistributedSyncCollector`. Re-exports only."""

from gleanrl.collectors.distributed.default_configs import DEFAULT_SLURM_CONF, TCP_PORT
from gleanrl.collectors.distributed.generic import DistributedSyncCollector

DistributedSyncDataCollector = DistributedSyncCollector

__all__ = [
    "DEFAULT_SLURM_CONF",
    "TCP_PORT",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
]
