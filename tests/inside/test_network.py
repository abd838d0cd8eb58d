"""Two hosts with a cable between them, made of network namespaces: what happens when it is cut."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import rig
import second_host
from second_host import ip

from gleanrl import CollectorTimeout, DistributedCollector, WorkerDied
from gleanrl.transport.worker_loop import Surroundings
from gleanrl.transport.zygote import NODE, Zygote

BEAT = 2.0


@pytest.fixture(scope="module")
def host():
    with second_host.second_host() as name:
        yield name


def zygote_on(host):
    """Start a zygote on that host. A thread is on one host, and what it starts is there too."""

    def start():
        second_host.enter(host)
        return Zygote()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(start).result()


class Elsewhere:
    """Starts nodes on the second host."""

    def __init__(self, host):
        self.zygote, self.nodes = zygote_on(host), []

    def address(self):
        return second_host.HERE

    def launch(self, invitations):
        for invitation in invitations:
            with open(os.memfd_create("invitation"), "w+b") as told:
                told.write(pickle.dumps((invitation, Surroundings())))
                told.seek(0)
                self.nodes.append(self.zygote.fork([told.fileno()], 60.0, NODE))

    def exit_reason(self, node, timeout):
        return None  # nobody here hears of processes of another host

    def stop(self, timeout):
        """Do nothing: a node of another host has to end by itself."""

    def ends(self, seconds):
        """Return the exit codes of the nodes, which have so long for it."""
        return [self.zygote.exit_status(node, seconds) for node in self.nodes]


@pytest.fixture(scope="module")
def there(host, python):
    """The means to start nodes there."""
    launcher = Elsewhere(host)
    yield launcher
    launcher.zygote.close()


@pytest.fixture
def elsewhere(there, host):
    ip("link", "set", f"{host}-a", "up")
    yield there
    for node in there.nodes:
        there.zygote.kill(node)
    there.nodes.clear()


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
    # A busy machine takes torch apart for seconds.
    assert elsewhere.ends(4 * rig.LIMIT) == [0, 0]


@pytest.mark.parametrize("sync", [True, False])
def test_a_cable_that_is_cut(elsewhere, host, sync):
    collector = collect(elsewhere, sync=sync)
    collector.next()
    ip("link", "set", f"{host}-a", "down")
    with rig.in_time(BEAT + 3), pytest.raises(WorkerDied, match="no sign of life|connection"):
        for _ in collector:
            pass
    # Nobody tells the nodes either: they find that their learner is gone.
    assert elsewhere.ends(BEAT + 5) == [1, 1]
    with pytest.raises(Exception, match="shut down|no sign|connection"):
        collector.update_policy_weights_()


@pytest.mark.filterwarnings("ignore:collection|worker")
@pytest.mark.parametrize("sync", [True, False])
def test_nodes_behind_a_cut_cable_are_replaced_when_it_is_whole_again(elsewhere, host, sync):
    with collect(elsewhere, sync=sync, on_failure="relaunch", max_relaunches=20) as collector:
        collector.set_seed(1)
        old = set(collector.next()["collector", "traj_ids"].flatten().tolist())
        ip("link", "set", f"{host}-a", "down")
        timer = threading.Timer(BEAT + 1, ip, ("link", "set", f"{host}-a", "up"))
        timer.start()
        with rig.in_time(4 * rig.LIMIT):
            while collector.stats()["relaunches"] < 2:
                batch = collector.next()
        timer.join()
        ledger = collector.stats()
        parts = ("frames", "frames_under_way", "frames_discarded")
        assert ledger["frames_stepped"] == sum(ledger[part] for part in parts)
        assert batch.numel() == 8
        assert not old & set(collector.next()["collector", "traj_ids"].flatten().tolist())


def test_a_host_that_cannot_be_reached_is_not_waited_for_beyond_the_deadline(elsewhere, host):
    ip("link", "set", f"{host}-a", "down")
    with rig.in_time(8), pytest.raises((CollectorTimeout, Exception), match="did not join|listen"):
        collect(elsewhere, start_timeout=2.0)
