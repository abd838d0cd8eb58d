"""GleanRL gathers experience for reinforcement learning in PyTorch."""

from typing import TYPE_CHECKING

from gleanrl.core.lazy import lazy_exports
from gleanrl.core.platforms import check_import
from gleanrl.core.version import __version__

if TYPE_CHECKING:  # of these names, those in `__all__`
    from gleanrl.collectors import *
    from gleanrl.core.errors import *
    from gleanrl.data import *
    from gleanrl.data.postprocs import *
    from gleanrl.envs import *
    from gleanrl.envs.utils import *
    from gleanrl.recording.dataset import load_dataset
    from gleanrl.recording.recorder import Recorder
    from gleanrl.watch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

__all__ = [
    "ArgumentTypeError",
    "AsyncCollector",
    "BaseCollector",
    "CSVLogger",
    "ClosedError",
    "Collector",
    "CollectorTimeout",
    "ConfigError",
    "DataCollectorBase",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "DistributedWeightSyncScheme",
    "EnvCreator",
    "EnvError",
    "Evaluation",
    "Evaluator",
    "ExplorationType",
    "GleanError",
    "GymEnv",
    "Interruptor",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Logger",
    "MissingEntryError",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "MultiStep",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "NoWeightSyncScheme",
    "ParallelEnv",
    "PolicyError",
    "PolicyTypeError",
    "PolicyVersion",
    "Preempted",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RPCCollector",
    "RPCDataCollector",
    "RPCWeightSyncScheme",
    "RandomPolicy",
    "RandomSampler",
    "RateLimiter",
    "RayCollector",
    "RayWeightSyncScheme",
    "Recorder",
    "RemoteModuleWeightUpdater",
    "ReplayBuffer",
    "ReplayError",
    "RoundRobinWriter",
    "SamplerWithoutReplacement",
    "SerialEnv",
    "SharedMemWeightSyncScheme",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "SyncDataCollector",
    "TensorBoardLogger",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "UnknownEnvError",
    "UnknownModelError",
    "VanillaWeightUpdater",
    "WandbLogger",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "WeightsError",
    "WorkerDied",
    "WorkerError",
    "__version__",
    "aSyncDataCollector",
    "exploration_type",
    "load_dataset",
    "set_exploration_type",
    "split_trajectories",
]

check_import()
# Nothing is imported before it is used: the command line starts without torch.
__getattr__ = lazy_exports(
    __name__,
    __all__,
    [
        f"gleanrl.{name}"
        for name in (
            "collectors",
            "core.errors",
            "data",
            "data.postprocs",
            "envs",
            "envs.utils",
            "recording.dataset",
            "recording.recorder",
            "watch.loggers",
        )
    ],
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
