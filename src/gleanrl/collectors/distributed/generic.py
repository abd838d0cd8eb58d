"""A path under which TorchRL has `DistributedCollector`. Re-exports only."""

from gleanrl.collectors.distributed.default_configs import (
    DEFAULT_SLURM_CONF,
    DEFAULT_SLURM_CONF_MAIN,
    TCP_PORT,
)
from gleanrl.collectors.distributed.groups import DistributedCollector
from gleanrl.collectors.legacy import DistributedWeightUpdater

DistributedDataCollector = DistributedCollector

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "TCP_PORT",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedWeightUpdater",
]
