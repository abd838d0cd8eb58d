"""Collectors whose workers are nodes: other machines, or processes reached like them."""

from gleanrl.collectors.distributed.groups import DistributedCollector, DistributedSyncCollector

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
]
