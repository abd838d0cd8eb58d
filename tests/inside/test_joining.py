"""Nodes that come in the middle of something else: what is known of them stays whole."""

import gc
import socket
import subprocess
import threading
import time
import warnings
from contextlib import suppress

import pytest
import rig
from node_rig import (
    kill,
    nodes,
    number_in,
    relaunching,
)

from gleanrl.transport.handshake import Invitation, join
from gleanrl.transport.launchers.external import ManualLauncher
from gleanrl.transport.launchers.local import LocalLauncher

pytestmark = pytest.mark.usefixtures("tidy_nodes")


class Stuck:
    """Lets the first node of each index start; of others, a process that does not join."""

    def __init__(self):
        self.inner, self.stuck, self.begun = LocalLauncher(), [], threading.Event()

    def address(self):
        return self.inner.address()

    def launch(self, invitations):
        if len(invitations) > 1:
            self.inner.launch(invitations)
            return
        self.stuck.append(subprocess.Popen(["sleep", "100"]))
        self.begun.set()

    def exit_reason(self, node, timeout):
        return None if self.stuck and node == 1 else self.inner.exit_reason(node, timeout)

    def stop(self, timeout):
        self.inner.stop(timeout)
        for process in self.stuck:
            process.kill()
            process.wait()


@pytest.mark.filterwarnings("ignore:.*without it")
@pytest.mark.parametrize("how", ["launched", "half in", "building"])
def test_shutting_down_while_a_replacement_joins(tmp_path, how):
    def make():
        if how == "building" and (tmp_path / "made").exists():
            (tmp_path / "again").touch()
            rig.hang_quietly()
        (tmp_path / "made").touch()
        return rig.Count(1)

    launcher = "mp" if how == "building" else Stuck()
    threads = threading.active_count()
    with relaunching(rig.counting(0), make, launcher=launcher) as collector:
        collector.next()
        kill(collector, 1)
        with rig.in_time(4 * rig.LIMIT):
            for _ in range(20):  # nobody waits for it
                collector.next()
            if how == "building":
                while not (tmp_path / "again").exists():
                    collector.next()
            else:
                launcher.begun.wait()
        if how == "half in":  # it has shown the secret, and says no more
            sock = join(collector._engine.backend.admitter.invitation(1), 5.0)[0]
            assert sock.recv(10)
            assert number_in(collector.next()) == 0
        begin = time.monotonic()
    assert time.monotonic() - begin < 2 * rig.LIMIT
    if how == "half in":
        sock.close()
    assert threading.active_count() <= threads


def test_somebody_is_asked_to_start_a_node_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GLEANRL_SECRET", raising=False)
    told = []
    launcher = ManualLauncher(told.append)
    invited = [Invitation("127.0.0.1", 1, node, b"x" * 32) for node in range(2)]
    launcher.launch(invited)
    launcher.launch(invited[1:])
    (again,) = [line for line in told[1].splitlines() if "python -m" in line]
    assert again in told[0]
    assert again.endswith("--node 1")
    launcher.stop(0.0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class AmongStrangers(LocalLauncher):
    """Others connect before the nodes do."""

    def launch(self, invitations):
        self.met = []
        for greeting in (b"GET / HTTP/1.0\r\n\r\n", b"\x80" * 100, b"", *[None] * 100):
            stranger = socket.create_connection((invitations[0].host, invitations[0].port))
            self.met.append(stranger)
            if greeting is not None:  # else: says nothing for as long as it is let
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
        super().launch(invitations)


def test_strangers_are_refused_and_delay_nobody():
    launcher = AmongStrangers()
    with rig.in_time(20):  # one by one it would be 200 s
        collector = nodes(rig.counting(0), rig.counting(1), launcher=launcher)
    met = launcher.met
    with collector:
        assert collector.next() is not None
    assert len(met) == 103
    for stranger in met:
        with suppress(ConnectionResetError):
            assert len(stranger.recv(1000)) <= 40  # the greeting, no secret, no pickle
        stranger.close()


@pytest.mark.filterwarnings("ignore:.*without it")
def test_a_collector_nobody_has_any_more_ends_also_after_a_loss():
    launcher = Stuck()
    threads = threading.active_count()
    collector = relaunching(rig.counting(0), rig.counting(1), launcher=launcher)
    collector.next()
    kill(collector, 1)
    while not launcher.begun.is_set():
        collector.next()
    collector.set_seed(1)
    pids = [collector.map_fn("env.pid")[0], launcher.stuck[0].pid]
    del collector
    gc.collect()
    rig.await_end(pids)
    assert threading.active_count() <= threads


@pytest.mark.filterwarnings("ignore:.*without it|.*takes part again")
def test_a_replacement_that_does_not_join_in_time_is_lost_too():
    launcher = Stuck()
    with relaunching(
        rig.counting(0), rig.counting(1), launcher=launcher, start_timeout=10.0, max_relaunches=1
    ) as collector:
        collector._engine.backend.admitter._timeout_s = 0.2
        collector.next()
        kill(collector, 1)
        told = []
        while not any("for good" in text for text in told):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                collector.next()
            told += [str(each.message) for each in caught]
        assert "had not joined within 0.2 s" in told[-1]
