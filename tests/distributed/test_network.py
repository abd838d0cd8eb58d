"""Two hosts with a cable between them, made of network namespaces: what happens when it is cut."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest
import rig

from gleanrl import CollectorTimeout, DistributedCollector, WorkerDied
from gleanrl.rollout.node import Going
from gleanrl.rollout.serve import Surroundings

HERE, THERE = "10.213.7.1", "10.213.7.2"
BEAT = 2.0


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=10)


@pytest.fixture
def host():
    """Make a second host; return its name. The cable's end on this one is called ``{name}-a``."""
    name = f"gl{os.getpid() % 100_000}"
    if shutil.which("ip") is None or ip("netns", "add", name).returncode:
        pytest.skip("network namespaces need iproute2 and the right to make them")
    try:
        ip("link", "add", f"{name}-a", "type", "veth", "peer", "name", f"{name}-b")
        ip("link", "set", f"{name}-b", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", f"{name}-a")
        ip("link", "set", f"{name}-a", "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", f"{name}-b")
        ip("-n", name, "link", "set", f"{name}-b", "up")
        if ip("-n", name, "link", "set", "lo", "up").returncode:
            pytest.skip("a cable between network namespaces cannot be made here")
        yield name
    finally:
        ip("link", "del", f"{name}-a")
        ip("netns", "del", name)


class Elsewhere:
    """Starts nodes on the second host."""

    def __init__(self, host):
        self.host, self.processes = host, {}

    def address(self):
        return HERE

    def launch(self, invitations):
        for invitation in invitations:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.host, sys.executable, "-c",
                 "from gleanrl.rollout.node import main; main(0)"],
                stdin=subprocess.PIPE,
            )  # fmt: skip
            with process.stdin as told:
                told.write(pickle.dumps(Going(invitation, Surroundings.here())))
            self.processes[invitation.node] = process

    def fate(self, node, timeout):
        return None  # nobody here hears of processes of another host

    def stop(self, timeout):
        """Do nothing: a node of another host has to end by itself."""


@pytest.fixture
def elsewhere(host):
    launcher = Elsewhere(host)
    yield launcher
    for process in launcher.processes.values():
        process.kill()
        process.wait()


def collect(launcher, **options):
    return DistributedCollector(
        [rig.counting(0), rig.counting(1)],
        rig.Encoded(10),
        frames_per_batch=8,
        launcher=launcher,
        tcp_port=0,
        heartbeat=BEAT,
        **options,
    )


def test_nodes_on_another_host(elsewhere):
    with collect(elsewhere, total_frames=8 * 20) as collector:
        for batch in collector:
            assert batch.shape == (8,)
            collector.update_policy_weights_()
    for process in elsewhere.processes.values():
        assert process.wait(rig.LIMIT) == 0


@pytest.mark.parametrize("sync", [True, False])
def test_a_cable_that_is_cut(elsewhere, host, sync):
    collector = collect(elsewhere, sync=sync)
    collector.next()
    ip("link", "set", f"{host}-a", "down")
    with rig.in_time(BEAT + 3), pytest.raises(WorkerDied, match="no sign of life|connection"):
        for _ in collector:
            pass
    # Nobody tells the nodes either: they find that their learner is gone.
    for process in elsewhere.processes.values():
        assert process.wait(BEAT + 5) == 1
    with pytest.raises(Exception, match="shut down|no sign|connection"):
        collector.update_policy_weights_()


def test_a_host_that_cannot_be_reached_is_not_waited_for_beyond_the_deadline(elsewhere, host):
    ip("link", "set", f"{host}-a", "down")
    with rig.in_time(8), pytest.raises((CollectorTimeout, Exception), match="did not join|listen"):
        collect(elsewhere, start_timeout=2.0)
