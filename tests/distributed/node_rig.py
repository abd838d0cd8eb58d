"""Collectors over nodes of this machine, and learners that are processes of their own."""

import os
import subprocess
import sys
import textwrap

import rig
from tensordict.nn import TensorDictModule

from gleanrl import DistributedCollector


def nodes(*envs, policy=None, per_node=8, sync=False, **options):
    options = {"tcp_port": 0, "launcher": "mp", **options}
    frames = per_node * len(envs) if sync else per_node
    return DistributedCollector(list(envs), policy, frames_per_batch=frames, sync=sync, **options)


def encoded(width=1000):
    return TensorDictModule(
        rig.Encoded(width), in_keys=["observation"], out_keys=["action", "seen"]
    )


def run_learner(script, **values):
    """Run a script that prints the processes of its two nodes; return how it ended.

    Those processes have ended, too, by then.
    """
    source = textwrap.dedent(script).format(rig=os.path.dirname(rig.__file__), **values)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    rig.await_end(pids)
    return done
