"""GleanRL gathers experience for reinforcement learning in PyTorch."""

from gleanrl.collectors import (
    BaseCollector,
    Collector,
    DataCollectorBase,
    Interruptor,
    PolicyVersion,
    RandomPolicy,
    SyncDataCollector,
    split_trajectories,
)
from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    EnvError,
    GleanError,
    PolicyError,
    PolicyTypeError,
    UnknownEnvError,
    WeightsError,
    WorkerDied,
    WorkerError,
)
from gleanrl.data.postprocs import MultiStep
from gleanrl.envs import EnvCreator, GymEnv, SerialEnv
from gleanrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

__version__ = "0.1.0"

__all__ = [
    "BaseCollector",
    "ClosedError",
    "Collector",
    "CollectorTimeout",
    "ConfigError",
    "DataCollectorBase",
    "EnvCreator",
    "EnvError",
    "ExplorationType",
    "GleanError",
    "GymEnv",
    "Interruptor",
    "MultiStep",
    "PolicyError",
    "PolicyTypeError",
    "PolicyVersion",
    "RandomPolicy",
    "SerialEnv",
    "SyncDataCollector",
    "UnknownEnvError",
    "WeightsError",
    "WorkerDied",
    "WorkerError",
    "__version__",
    "exploration_type",
    "set_exploration_type",
    "split_trajectories",
]
