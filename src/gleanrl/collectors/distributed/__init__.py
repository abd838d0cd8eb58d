"""Collectors whose workers are nodes: other machines, or processes reached like them."""

from gleanrl.collectors.distributed.groups import DistributedCollector, DistributedSyncCollector
from gleanrl.collectors.distributed.ray import RayCollector
from gleanrl.collectors.distributed.rpc import RPCCollector
from gleanrl.engine.launchers.delayed import submitit_delayed_launcher

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RPCCollector",
    "RPCDataCollector",
    "RayCollector",
    "submitit_delayed_launcher",
]
