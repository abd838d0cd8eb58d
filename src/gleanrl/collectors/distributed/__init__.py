"""Collectors whose workers are nodes: other machines, or processes reached like them."""

from gleanrl.collectors.distributed.groups import DistributedCollector, DistributedSyncCollector
from gleanrl.engine.launchers.delayed import submitit_delayed_launcher

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "submitit_delayed_launcher",
]
