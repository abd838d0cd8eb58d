"""Nodes that are admitted: whatever goes wrong, the learner is told, and no thread stays behind."""

import select
import threading

import pytest
import rig
from node_rig import nodes

from gleanrl import WorkerDied
from gleanrl.transport.handshake import join
from gleanrl.transport.joining import NodeAdmitter
from gleanrl.transport.process_group import ProcessGroups


class FakeNode:
    """A node that does what it is told to by a function of the test's."""

    def __init__(self, guest, greet):
        self.index, self.sock, self._greet = guest.node, guest.sock, greet
        self.asked, self.closed, self.hung_up = 0, False, threading.Event()

    def bring_up(self, life):
        self._greet(self)

    def exit_reason(self, reason):
        self.asked += 1
        return f"on node 10.0.0.7 {reason}"

    def hang_up(self):
        self.hung_up.set()

    def close(self):
        self.closed = True
        self.sock.close()


class FakeLauncher:
    """Starts nothing, and knows nothing."""

    def __init__(self, launch=lambda invitations: None):
        self.launch = launch

    def address(self):
        return "127.0.0.1"

    def exit_reason(self, node, timeout):
        return None

    def stop(self, timeout):
        pass


class Rig:
    """An admitter, and what it has made."""

    def __init__(self, launcher=None, greet=lambda node: None, take=None):
        self.nodes = []

        def make(guest):
            self.nodes.append(FakeNode(guest, greet))
            return self.nodes[-1]

        self.admitter = NodeAdmitter(
            "127.0.0.1",
            [0],
            launcher or FakeLauncher(),
            take or make,
            heartbeat=10.0,
            timeout_s=30.0,
        )

    def knock(self, node):
        """Be a node that authenticates; in a thread, because the admitter has to answer."""

        def run():
            sockets.append(join(self.admitter.invitation(node), 10.0)[0])

        sockets = []
        thread = threading.Thread(target=run)
        thread.start()
        return thread, sockets

    def news(self):
        """Return the next thing that the learner is told."""
        assert select.select([self.admitter.bell], [], [], rig.LIMIT)[0], "the learner is not told"
        return self.admitter.pop()


@pytest.fixture
def make():
    threads, made = threading.active_count(), []

    def build(*args, **options):
        made.append(Rig(*args, **options))
        return made[-1]

    yield build
    for each in made:
        each.admitter.stop(rig.LIMIT)
        each.admitter.listener.close()
    rig.until(lambda: threading.active_count() <= threads)


def first_news(made, nodes=1):
    """Have the learner admit nodes at the start; return what it is told first."""
    made.admitter.launch_first(nodes)
    thread, sockets = made.knock(0)
    news = made.news()
    thread.join(rig.LIMIT)
    for sock in sockets:
        sock.close()
    return news


def gone(guest):
    raise OSError("it has gone")


def test_a_node_that_is_gone_as_soon_as_it_had_joined_fails_the_start_at_once(make):
    news = first_news(make(take=gone))
    assert isinstance(news, WorkerDied)
    assert str(news) == "worker 0 was gone as soon as it had joined (it has gone)"
    assert news.worker == 0


@pytest.mark.parametrize("error", [EOFError("cut"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_the_greeting_of_a_node_the_learner_is_told_with_its_address(make, error):
    def greet(node):
        raise error

    made = make(greet=greet)
    news = first_news(made)
    assert isinstance(news, WorkerDied)
    assert str(news).startswith("worker 0 on node 10.0.0.7 was lost while it joined (")
    rig.until(lambda: made.nodes[0].closed)


@pytest.mark.parametrize("error", [ValueError("no quota"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_launcher_raises_later_the_learner_is_told_and_others_can_still_join(
    make, error
):
    calls = []

    def launch(invitations):
        calls.append(invitations)
        if len(calls) == 1:
            raise error

    made = make(FakeLauncher(launch))
    made.admitter.want(1, 1)
    news = made.news()
    assert isinstance(news, WorkerDied)
    assert str(news).startswith("the replacement of worker 1 could not be started (")
    made.admitter.want(1, 2)
    thread, sockets = made.knock(1)
    assert made.news() is made.nodes[0]
    thread.join(rig.LIMIT)
    sockets[0].close()


def test_who_is_joining_at_the_end_is_hung_up_on_and_nobody_asks_why(make):
    def greet(node):
        node.hung_up.wait()
        raise EOFError

    made = make(greet=greet)
    made.admitter.want(0, 1)
    thread, sockets = made.knock(0)
    rig.until(lambda: made.nodes)
    with rig.in_time():
        made.admitter.stop(rig.LIMIT)
    assert made.nodes[0].closed
    assert not made.nodes[0].asked
    thread.join(rig.LIMIT)
    sockets[0].close()


def test_an_interrupt_at_the_end_leaves_nothing_that_nobody_will_close(make):
    released = threading.Event()
    made = make(greet=lambda node: released.wait() if node.index else None)
    made.admitter.want(0, 1)
    made.admitter.want(1, 1)
    knocks = [made.knock(node) for node in range(2)]
    rig.until(lambda: len(made.nodes) == 2 and made.admitter._done)
    join_thread = threading.Thread.join

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    threading.Thread.join = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            made.admitter.stop(rig.LIMIT)
    finally:
        threading.Thread.join = join_thread
    up, joining = sorted(made.nodes, key=lambda node: node.index)
    assert up.closed
    assert joining.hung_up.is_set()
    assert made.admitter.bell == -1
    released.set()
    rig.until(lambda: joining.closed)
    for thread, sockets in knocks:
        thread.join(rig.LIMIT)
        sockets[0].close()


@pytest.mark.usefixtures("tidy_nodes")
def test_a_node_that_fails_while_the_learner_still_connects_says_why(monkeypatch):
    pair, kept = ProcessGroups.pair, []

    def late(plane, connection):
        kept.append(pair(plane, connection))  # else the node may see it end while it connects
        raise RuntimeError("Connection closed by peer")  # as gloo does if the node is quicker

    monkeypatch.setattr(ProcessGroups, "pair", late)
    with pytest.raises(ArithmeticError, match="in the simulator"), rig.in_time():
        nodes(rig.fail, rig.fail)
