"""Settings under TorchRL's names: pass them, or changed copies."""

from typing import Any

from gleanrl.transport.addresses import TCP_PORT

DEFAULT_SLURM_CONF: dict[str, Any] = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}
"""For ``slurm_kwargs=``: the jobs of nodes."""

DEFAULT_SLURM_CONF_MAIN: dict[str, Any] = {**DEFAULT_SLURM_CONF, "slurm_gpus_per_node": 1}
"""For `submitit_delayed_launcher`: the job of the learner."""

DEFAULT_TENSORPIPE_OPTIONS: dict[str, Any] = {
    "num_worker_threads": 16,
    "rpc_timeout": 10_000,
    "_transports": ["uv"],
}
"""Without effect: an `RPCCollector` does not use RPC."""

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "DEFAULT_TENSORPIPE_OPTIONS",
    "TCP_PORT",
]
