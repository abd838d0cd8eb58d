"""Somebody between a node and its learner, who passes on what they say and meddles with it."""

import select
import socket
import threading
from dataclasses import replace

import pytest
import rig
from node_rig import nodes

from gleanrl import WorkerDied
from gleanrl.transport.launchers.local import LocalLauncher

pytestmark = pytest.mark.usefixtures("tidy_nodes")


class Relay:
    """Passes bytes on between whoever connects and a learner; meddles once when told to."""

    def __init__(self, learner):
        self.learner = learner
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.meddle, self.source, self.done = None, None, threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def next(self, source, meddle):
        """Have ``meddle`` change the next bytes that ``source`` ("node" or "learner") sends."""
        self.source, self.meddle = source, meddle

    def _run(self):
        node, _ = self.listener.accept()
        learner = socket.create_connection(self.learner)
        ends = {node: ("node", learner), learner: ("learner", node)}
        with node, learner, self.listener:
            while True:
                for sock in select.select(list(ends), [], [])[0]:
                    name, other = ends[sock]
                    try:
                        data = sock.recv(1 << 16)
                        other.sendall(self._changed(name, data))
                    except OSError:
                        return
                    if not data:
                        return

    def _changed(self, name, data):
        if name != self.source or not data:
            return data
        self.source = None
        self.done.set()
        return self.meddle(data)


class ThroughRelays(LocalLauncher):
    """Has every node connect to a relay of its own."""

    def launch(self, invitations):
        self.relays = [Relay((each.host, each.port)) for each in invitations]
        super().launch(
            [
                replace(each, port=relay.port)
                for each, relay in zip(invitations, self.relays, strict=True)
            ]
        )


def repeat(data):
    return data + data


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def claim_gigabytes(data):
    return bytes([*data[:2], data[2] ^ 0x7F, data[3] ^ 0x7F, *data[4:]])


def make_up(data):
    return data + bytes(range(200))


@pytest.mark.parametrize("meddle", [repeat, flip, claim_gigabytes, make_up])
@pytest.mark.parametrize("source", ["node", "learner"])
def test_what_is_repeated_changed_or_made_up_on_the_way_ends_the_connection(source, meddle):
    launcher = ThroughRelays()
    with nodes(rig.counting(), launcher=launcher, heartbeat=60.0) as collector:
        pid = collector.map_fn("env.pid")[0]
        for _ in range(3):
            assert collector.next() is not None
        launcher.relays[0].next(source, meddle)
        with rig.in_time(2 * rig.LIMIT), pytest.raises(WorkerDied, match="worker 0") as caught:
            for _ in iter(collector.next, None):
                pass
        assert launcher.relays[0].done.is_set()
        rig.await_end([pid])
    launcher.relays[0].thread.join(rig.LIMIT)
    if source == "node":  # else the node tells nobody but its log
        assert "not authentic" in str(caught.value)


def test_a_relay_that_passes_everything_on_is_not_noticed():
    launcher = ThroughRelays()
    with nodes(rig.counting(), launcher=launcher, total_frames=80) as collector:
        assert [batch.numel() for batch in collector] == [8] * 10
    launcher.relays[0].thread.join(rig.LIMIT)


def test_frames_larger_than_a_record_arrive_whole():
    text = "x" * 5_000_001
    with nodes(rig.counting()) as collector:
        collector.map_fn("env.__setattr__", [("number", text)])
        assert collector.getattr_env("number") == text
