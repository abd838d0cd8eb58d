"""Launchers by themselves, and those of them that only Python code chooses."""

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launch_rig import HERE, SOON, TORCHRUN_SCRIPT, collect, private
from node_rig import way_out

from gleanrl import CollectorTimeout, WorkerDied
from gleanrl.collectors import DistributedCollector
from gleanrl.transport.addresses import outward
from gleanrl.transport.handshake import HandshakeError, Invitation, join, new_secret
from gleanrl.transport.launchers import make_launcher
from gleanrl.transport.launchers.external import ManualLauncher, serve_as_rank
from gleanrl.transport.launchers.submitit import (
    SubmititLauncher,
    await_invitation,
    write_invitations,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:port .* is taken")]


@pytest.fixture(autouse=True)
def _warm(python):
    """Have jobs and ranks started in no time."""


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_holds_the_secret_is_the_users_alone(tmp_path, umask):
    launcher = SubmititLauncher({**HERE, "folder": tmp_path, "local_setup": ["exit 3"]})
    before = os.umask(umask)
    try:
        launcher.launch([Invitation("127.0.0.1", 1, 0, new_secret())])
    finally:
        os.umask(before)
    (pickled,) = private(tmp_path).glob("*_submitted.pkl")
    assert stat.S_IMODE(pickled.stat().st_mode) == 0o600
    launcher.stop(SOON)
    assert not pickled.exists()


def test_a_node_that_fails_before_it_joins_is_named_with_its_reason(tmp_path):
    launcher = SubmititLauncher({**HERE, "folder": tmp_path})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    launcher.launch([Invitation("127.0.0.1", port, 0, new_secret(), timeout_s=0.1)])
    assert launcher.exit_reason(0, 0.0) is None
    fate = launcher.exit_reason(0, 60.0)
    launcher.stop(SOON)
    assert re.search(
        r"\(local job \d+, log .*\) failed: .*no learner answers at 127.0.0.1.*refused", fate
    )


def test_delayed_nodes_read_their_invitations_once_the_learner_has_written_them(tmp_path):
    with pytest.raises(CollectorTimeout, match="node 1 found no learner in .* within 0 s"):
        await_invitation(tmp_path, 1, 0.0)
    invitations = [Invitation("10.0.0.5", 10003, n, b"a secret of sixteen bytes") for n in (0, 1)]
    write_invitations(tmp_path, invitations)
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert await_invitation(tmp_path, 1, 0.0) == invitations[1]
    assert await_invitation(tmp_path, 2, 0.0) is None
    write_invitations(tmp_path, ())
    assert "a secret" not in file.read_text()
    assert await_invitation(tmp_path, 0, 0.0) is None


def test_a_file_that_cannot_be_read_for_the_moment_is_waited_for(tmp_path, monkeypatch):
    write_invitations(tmp_path, [Invitation("10.0.0.5", 10003, 0, b"a secret of sixteen bytes")])
    stale, read = OSError(errno.ESTALE, os.strerror(errno.ESTALE)), Path.read_text
    answers = iter([stale, "", '[{"host": "10.0'])

    def read_late(path, *args):
        answer = next(answers, None)
        if isinstance(answer, OSError):
            raise answer
        return read(path, *args) if answer is None else answer

    monkeypatch.setattr(Path, "read_text", read_late)
    assert await_invitation(tmp_path, 0, SOON).port == 10003
    assert next(answers, None) is None


def test_a_rank_that_fails_leaves_its_reason(as_rank):
    store = as_rank(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = {"host": "127.0.0.1", "port": stranger.getsockname()[1]}
        notice = {**place, "secret": "a secret of sixteen bytes"}
        store.set("gleanrl/0/learner", json.dumps(notice))
        stranger.close()
        with pytest.raises(CollectorTimeout, match="no learner answers at .*refused"):
            serve_as_rank(0.2)
    as_rank(0, 2)
    launcher = make_launcher("torchrun", None)
    assert "(rank 1) failed: CollectorTimeout: no learner answers" in launcher.exit_reason(0, 0.0)
    assert launcher.exit_reason(1, 0.0) is None


def test_a_rank_that_is_terminated_tells_the_learner(as_rank, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    as_rank(1, 2)
    node = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "RANK": "1"})
    as_rank(0, 2)
    with DistributedCollector(
        ["CartPole-v1"], frames_per_batch=8, launcher="torchrun", tcp_port=0
    ) as collector:
        collector.next()
        node.terminate()
        with pytest.raises(WorkerDied, match=r"told to end by SIGTERM \(rank 1: torchrun"):
            for _ in iter(collector.next, None):
                pass
    assert node.wait(20) == 128 + signal.SIGTERM


class ByHand:
    """Runs the commands of a `ManualLauncher` after whatever else comes to the port."""

    def __init__(self, before=lambda place: None):
        self.before, self.text, self.nodes = before, "", []

    def __call__(self, text):
        self.text = text
        first, *commands = text.splitlines()
        host, _, port = re.search(r"at (\S+) for", first)[1].rpartition(":")
        self.before((host, int(port)))
        self.nodes = [subprocess.Popen(["bash", "-c", command]) for command in commands]

    def codes(self):
        return [node.wait(20) for node in self.nodes]


def test_nodes_started_by_hand_deliver_whoever_else_comes_to_the_port(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    told = []

    def guess(place):
        try:
            join(Invitation(*place, 0, b"a guess of sixteen bytes"), 60.0)
        except HandshakeError as err:
            told.append(str(err))

    def disturb(place):
        garbage.connect(place)
        garbage.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
        socket.create_connection(place).close()
        guessing.append(threading.Thread(target=guess, args=[place]))
        guessing[0].start()

    guessing = []
    hand = ByHand(disturb)
    with socket.socket() as garbage:
        assert collect(ManualLauncher(hand), host="127.0.0.1") == [(2, 8), (2, 8)]
    guessing[0].join(SOON)
    assert "did not let node 0 in: the secret is not that of its collector" in told[0]
    assert hand.codes() == [0, 0]
    assert not list((tmp_path / ".cache" / "gleanrl").iterdir())


def test_a_node_started_by_hand_says_that_it_was_terminated_and_no_secret_is_shown(monkeypatch):
    monkeypatch.setenv("GLEANRL_SECRET", "my very own secret 123")
    hand = ByHand()
    with DistributedCollector(
        ["CartPole-v1"],
        frames_per_batch=8,
        launcher=ManualLauncher(hand),
        tcp_port=0,
        host="127.0.0.1",
    ) as collector:
        batches = iter(collector)
        next(batches)
        hand.nodes[0].terminate()
        with pytest.raises(WorkerDied, match=r"SIGTERM \(process \d+ on "):
            for _ in batches:
                pass
    assert hand.codes() == [128 + signal.SIGTERM]
    assert "my very own" not in hand.text


def test_the_address_for_others_is_that_of_the_way_out_where_the_name_is_of_the_loopback():
    expected = way_out()
    if expected is None:
        pytest.skip("this machine has no network")
    assert outward("localhost") == expected
    assert not outward().startswith("127.")
