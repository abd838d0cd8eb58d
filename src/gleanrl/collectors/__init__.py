"""The collectors users construct: names and arguments, no behaviour of their own."""

from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from gleanrl.collectors.single import Collector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.engine.interruptor import Interruptor
from gleanrl.engine.profiling import ProfileConfig
from gleanrl.policies.random import RandomPolicy
from gleanrl.weights.version import PolicyVersion

DataCollectorBase = BaseCollector
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "Interruptor",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "PolicyVersion",
    "ProfileConfig",
    "RandomPolicy",
    "SyncDataCollector",
    "aSyncDataCollector",
    "split_trajectories",
]
