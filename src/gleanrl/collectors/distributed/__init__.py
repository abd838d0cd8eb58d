"""Collectors whose workers are nodes: other machines, or processes addressed in the same way."""

from gleanrl.collectors.distributed.default_configs import DEFAULT_SLURM_CONF
from gleanrl.collectors.distributed.generic import DistributedCollector, DistributedSyncCollector
from gleanrl.collectors.distributed.ray import RayCollector
from gleanrl.collectors.distributed.rpc import RPCCollector
from gleanrl.collectors.weight_update import DistributedWeightUpdater, RPCWeightUpdater
from gleanrl.core.errors import refuse
from gleanrl.transport.launchers.submitit import submitit_delayed_launcher

DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector

__getattr__ = refuse(
    __name__,
    {
        "RayEvalWorker": "evaluate with a RayCollector of one actor and "
        "exploration_type=ExplorationType.DETERMINISTIC"
    },
)

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCDataCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "submitit_delayed_launcher",
]
