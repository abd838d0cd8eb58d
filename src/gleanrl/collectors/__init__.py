"""The collectors that users construct: names and arguments without further behaviour."""

from gleanrl.collectors.async_batched_collector import AsyncBatchedCollector
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.distributed import (
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    DistributedSyncDataCollector,
    RayCollector,
    RPCCollector,
    RPCDataCollector,
)
from gleanrl.collectors.evaluator import Evaluation, Evaluator
from gleanrl.collectors.in_process_collector import Collector
from gleanrl.collectors.multi_collector import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from gleanrl.collectors.save_on_sigterm import Preempted
from gleanrl.collectors.utils import split_trajectories
from gleanrl.collectors.weight_update import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from gleanrl.core.errors import refuse
from gleanrl.engine.early_stop import Interruptor
from gleanrl.engine.profiling import ProfileConfig
from gleanrl.policies.random import RandomPolicy
from gleanrl.weights.module_weights import PolicyVersion
from gleanrl.weights.sync_schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

DataCollectorBase = BaseCollector
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector

__getattr__ = refuse(
    __name__,
    {
        "LLMCollector": "use TorchRL's collectors for language models",
    },
)

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "DistributedWeightSyncScheme",
    "Evaluation",
    "Evaluator",
    "Interruptor",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "NoWeightSyncScheme",
    "PolicyVersion",
    "Preempted",
    "ProfileConfig",
    "RPCCollector",
    "RPCDataCollector",
    "RPCWeightSyncScheme",
    "RandomPolicy",
    "RayCollector",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "SharedMemWeightSyncScheme",
    "SyncDataCollector",
    "VanillaWeightUpdater",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "aSyncDataCollector",
    "split_trajectories",
]
