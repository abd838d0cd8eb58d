"""Collectors over nodes of this machine, and learners that are processes of their own."""

import os
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

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


def addresses_listened_on(pid):
    """Return the addresses on which a process listens."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            own.add(os.readlink(fd))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                digits = bytes.fromhex(fields[1].partition(":")[0])
                words = [digits[start : start + 4][::-1] for start in range(0, len(digits), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found
