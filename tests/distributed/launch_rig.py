"""Collectors whose nodes schedulers, torchrun or people start."""

import stat

from gleanrl.collectors import DistributedCollector

SOON = 5.0
"""Seconds within which bad news is there."""
HERE = {"cluster": "local", "timeout_min": 5}
TORCHRUN_SCRIPT = """\
import os, sys
from gleanrl.collectors import DistributedCollector
learner = os.environ["RANK"] == "0"
envs = ["CartPole-v1"] * 2 if learner else None
collector = DistributedCollector(envs, frames_per_batch=16, total_frames=32, launcher="torchrun",
                                 sync=True, tcp_port=0)
assert learner, "this is a node, which serves and goes"
print([tuple(batch.shape) for batch in collector])
collector.shutdown()
"""


def collect(launcher, nodes=2, **kwargs):
    """Return the shapes of all batches."""
    with DistributedCollector(
        ["CartPole-v1"] * nodes,
        frames_per_batch=16,
        total_frames=32,
        sync=True,
        launcher=launcher,
        tcp_port=0,
        **kwargs,
    ) as collector:
        return [tuple(batch.shape) for batch in collector]


def private(folder):
    (run,) = folder.iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    return run
