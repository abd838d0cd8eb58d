"""A path under which TorchRL has its collectors. Re-exports only."""

from tensordict.nn import InteractionType

from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.collector import Collector
from gleanrl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from gleanrl.engine.interruptor import Interruptor

DEFAULT_EXPLORATION_TYPE = InteractionType.RANDOM
DataCollectorBase = BaseCollector
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__all__ = [
    "DEFAULT_EXPLORATION_TYPE",
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
    "SyncDataCollector",
    "aSyncDataCollector",
]
