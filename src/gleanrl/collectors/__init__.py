"""The collectors users construct: names and arguments, no behaviour of their own."""

from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.single import Collector
from gleanrl.collectors.utils import split_trajectories
from gleanrl.engine.interruptor import Interruptor
from gleanrl.engine.profiling import ProfileConfig
from gleanrl.policies.random import RandomPolicy
from gleanrl.weights.version import PolicyVersion

DataCollectorBase = BaseCollector
SyncDataCollector = Collector

__all__ = [
    "BaseCollector",
    "Collector",
    "DataCollectorBase",
    "Interruptor",
    "PolicyVersion",
    "ProfileConfig",
    "RandomPolicy",
    "SyncDataCollector",
    "split_trajectories",
]
