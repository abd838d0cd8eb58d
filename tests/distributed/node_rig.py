"""Collectors over nodes of this machine, and learners that are processes of their own."""

import os
import signal
import socket
import subprocess
import textwrap
from contextlib import suppress
from pathlib import Path

import rig
import warm

from gleanrl import (
    DistributedCollector,
)


def nodes(*envs, policy=None, per_node=8, sync=False, **options):
    options = {"tcp_port": 0, "launcher": "mp", **options}
    frames = per_node * len(envs) if sync else per_node
    return DistributedCollector(list(envs), policy, frames_per_batch=frames, sync=sync, **options)


def run_learner(script, **values):
    """Run a script that prints the processes of its two nodes; return how it ended.

    Those processes have ended, too, by then.
    """
    source = textwrap.dedent(script).format(rig=os.path.dirname(rig.__file__), **values)
    done = subprocess.run(
        [str(warm.START), "-c", source], capture_output=True, text=True, timeout=60, check=False
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


def number_in(batch):
    return int(batch["next", "observation"][0, 0])


def ids_in(batch):
    return set(batch["collector", "traj_ids"].flatten().tolist())


def kill(collector, worker):
    """Kill a node and wait until it has ended."""
    pid = collector.map_fn("env.pid")[worker]
    os.kill(pid, signal.SIGKILL)
    rig.await_end([pid])


def relaunching(*envs, **options):
    return nodes(*envs, on_failure="relaunch", **options)


def until_back(collector, worker, seen=None):
    """Collect until a rollout of a replacement of ``worker`` is delivered; return that."""
    lives = collector._engine.lives[worker]
    with rig.in_time(4 * rig.LIMIT):
        while True:
            batch = collector.next()
            if seen is not None:
                seen.append(batch)
            if collector._engine.lives[worker] > lives and number_in(batch) == worker:
                return batch


def collect_for_ever(collector):
    with rig.in_time():
        while True:
            collector.rollout()


def way_out():
    """Return the address of this machine on its way to others, ``None`` where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]
