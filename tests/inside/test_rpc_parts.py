"""What threads of the RPC agent put down for the learner."""

import time
from types import SimpleNamespace

import pytest

from gleanrl import WorkerDied
from gleanrl.core import messages as m
from gleanrl.transport.frames import write_reply
from gleanrl.transport.launchers.external import ManualLauncher
from gleanrl.transport.rpc import RPCBackend


class FakeNode(SimpleNamespace):
    """A node whose connection is sound."""

    def nothing(self, *args):
        pass

    listen = close = copy_in = nothing

    def exit_reason(self, reason, timeout):
        return reason


def test_a_message_that_was_lost_is_told_after_the_replies_that_came_before():
    backend = RPCBackend(None, ManualLauncher(), host="127.0.0.1")
    channel = SimpleNamespace(fileno=lambda: -1)
    node = FakeNode(
        index=0, address="10.0.0.7", gone=False, heard=time.monotonic(), channel=channel
    )
    node.announced = []
    backend._peers = [node]
    try:
        backend._take(1, write_reply(m.Done(0, 7, "answer")), ())
        backend._note_lost(1, "cut")
        assert backend.receive(0.0) == m.Done(0, 7, "answer")
        with pytest.raises(WorkerDied, match=r"10\.0\.0\.7 cannot be reached by RPC \(cut\)"):
            backend.receive(0.5)
    finally:
        backend._peers = []
        backend.stop(0.0)
