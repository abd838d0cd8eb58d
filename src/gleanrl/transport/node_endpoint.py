"""The process of a node: it finds its learner, authenticates, then serves like any worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import GleanError, error_text
from gleanrl.core.platforms import require_linux
from gleanrl.core.protocols import Stop
from gleanrl.core.window import Window
from gleanrl.transport.authenticated_channel import Channel, ForgedFrameError
from gleanrl.transport.data_plane import Pair, RolloutBlock, Transfer
from gleanrl.transport.handshake import HandshakeError, Invitation, join
from gleanrl.transport.wire import (
    BEAT,
    KEY,
    LEAVE,
    STOP,
    WEIGHTS,
    CommandReader,
    frame_of,
    key_frame,
    read_key,
)
from gleanrl.transport.worker_loop import Boot, Inbox, Received, WeightReceiver, serve
from gleanrl.weights.published_buffers import FlatBuffer

_LAST_WORD_S = 5.0
"""Seconds a node that was asked to end may take to do so once the learner is gone."""


class NodeConnection:
    """A node's end: a thread that reads, shows signs of life, and ends the node with the learner.

    Commands go to ``inbox``; the thread that carries them out answers through `send`.
    """

    def __init__(self, channel: Channel, index: int, own_address: str, timeout_s: float) -> None:
        self._channel, self._timeout_s = channel, timeout_s
        self.index, self.own_address = index, own_address
        self._reader = CommandReader(index)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._keys: dict[str, bytes] = {}
        self.weights_due: deque[bytes] = deque()
        """Announcements of weights that are on their way."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gleanrl connection", daemon=True)
        self._closing = False
        self._patient = False
        """Whether the learner may leave data unread for ever."""
        self.leaving = False
        """Whether this node was told to end, so that nothing is sent any more."""
        self.inbox = Inbox()
        self.stop = bytearray(1)

    def start(self, frames: Sequence[bytes]) -> None:
        """Begin to read, after ``frames``, which have come already."""
        for frame in frames:
            self._take(frame)
        self._thread.start()

    def finish(self) -> None:
        """Let the learner go away from now on."""
        self._over.set()

    def send(self, frame: bytes) -> None:
        """Send ``frame``, waiting until the connection has taken it; any thread may."""
        with self._sending:
            self._channel.send(frame)

    def answer(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Rolled) and reply.report.payload is not None:
            # It may be more than the connection holds, and the learner may be away for long.
            self._patient = True
            self._channel.set_patience(0)
        self.send(frame_of(reply))

    def leave(self, reason: str) -> None:
        """Tell the learner that this node ends; have it do so after the step it is in."""
        self.leaving = True
        self.stop[0] = 1
        self.inbox.put(0, m.Close())
        with contextlib.suppress(OSError):  # the learner is gone as well
            self.send(LEAVE + reason.encode())

    def tell(self, key: str, value: bytes) -> None:
        self.send(key_frame(key, value))

    def key(self, key: str) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._keys, self._timeout_s):
                raise GleanError(f"the learner did not answer for {self._timeout_s} s")
            return self._keys[key]

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read()
        except (EOFError, OSError) as err:
            # A learner goes away as soon as it has the answer to its last command.
            expected = self.leaving or (self._closing and self._over.wait(_LAST_WORD_S))
            if not expected and not self._over.is_set():
                self._abort(
                    str(err) if isinstance(err, ForgedFrameError) else "the learner is gone"
                )
        except BaseException as err:  # even SystemExit: it would end this thread and nothing else
            cause = f"{type(err).__name__}: {error_text(err)}"
            problem = f"failed while it read from its connection ({cause})"
            self._tell_problem(problem)
            self._abort(problem, traceback.format_exc())

    def _tell_problem(self, problem: str) -> None:
        """Tell the learner why this node ends, without waiting for the learner."""
        if self._sending.acquire(timeout=_LAST_WORD_S):
            with contextlib.suppress(Exception):
                self._channel.post(LEAVE + problem.encode())

    def _abort(self, why: str, details: str = "") -> None:
        """End this process at once, even in the middle of a step."""
        with contextlib.suppress(Exception):  # there may be no stderr
            sys.stderr.write(f"{details}node {self.index}: {why}\n")
            sys.stderr.flush()
        os._exit(1)

    def _read(self) -> None:
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        pause = self._timeout_s / 6
        beat = Deadline(0.0)
        while True:
            if beat.expired:
                self.send(BEAT)
                beat = Deadline(pause)
            readable.poll(1000 * beat.left)
            for frame in self._channel.read():
                self._take(frame)

    def _take(self, frame: bytes) -> None:
        kind = frame[:1]
        if kind == STOP:
            self.stop[0] = frame[1]
        elif kind == WEIGHTS:
            self.weights_due.append(frame)
        elif kind == KEY:
            key, value = read_key(frame)
            with self._changed:
                self._keys[key] = value
                self._changed.notify_all()
        else:
            self._command(frame)

    def _command(self, frame: bytes) -> None:
        if self._patient:  # the learner reads again
            self._patient = False
            self._channel.set_patience(self._timeout_s)
        ticket, command = self._reader.read(frame)
        self._closing = isinstance(command, m.Close)
        self.inbox.put(ticket, command)


_STEP_EXIT_S = 5.0
"""Seconds an environment gets to end its step and to close."""


_caught: Sequence[signal.Signals] = ()
"""Signals that make the node in this process leave."""


def _forget() -> None:
    """In a child that an environment has forked, let signals have their default effect."""
    global _caught
    caught, _caught = _caught, ()
    if caught:
        signal.set_wakeup_fd(-1)
    for number in caught:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)


os.register_at_fork(  # signals wait meanwhile, so that the child hears none before `_forget`
    before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _caught),
    after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _caught),
    after_in_child=_forget,
)


@contextlib.contextmanager
def _leaving_on(
    signals: Sequence[signal.Signals], connection: NodeConnection, label: str
) -> Iterator[None]:
    """Have ``signals`` make the node leave meanwhile. For the main thread.

    Python runs handlers in the main thread between two of its instructions, and a step of an
    environment may take long. So the handlers here do nothing: the number of the signal arrives
    through the wake-up descriptor at once, and another thread reads it.
    """
    global _caught
    came: list[signal.Signals] = []
    read, write = os.pipe()

    def wait() -> None:
        while (got := os.read(read, 1)[0]) != 0:
            if got not in signals:
                continue
            number = signal.Signals(got)
            end = threading.Timer(_STEP_EXIT_S, os._exit, [128 + number])
            end.daemon = True
            end.start()
            came.append(number)
            connection.leave(f"was told to end by {number.name} ({label}) and left")
            return

    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    _caught = signals
    thread = threading.Thread(target=wait, name="gleanrl leaving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _caught = ()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(write, bytes(1))
        thread.join()
        os.close(write)
        os.close(read)
        if came:  # in place of any error on the way out, because the node ends as it was told to
            raise SystemExit(128 + came[0])


def main(fd: int) -> None:
    """Be a node in a forked process; ``fd`` has its `Invitation` and `Surroundings`, pickled."""
    with os.fdopen(fd, "rb") as told:
        invitation, surroundings = pickle.load(told)
    surroundings.enter()
    run_node(invitation)


def run_node(
    invitation: Invitation, signals: Sequence[signal.Signals] = (), label: str = ""
) -> None:
    """Serve the learner that ``invitation`` is from, until it says so or goes away.

    Args:
        invitation: The learner's address, and the secret.
        signals: Make the node end in order, after it has told the learner; only in the main thread.
        label: The job of this process, for the message to the learner when a signal came.

    Raises:
        CollectorTimeout: there is no answer.
        SystemExit: one of ``signals`` came.
    """
    require_linux("nodes")
    sock, keys, timeout_s = join(invitation, invitation.timeout_s)
    own_address = str(sock.getsockname()[0])
    channel = Channel(sock, keys)
    channel.keep_alive(timeout_s)
    try:
        first, *others = channel.wait()
    except EOFError:
        raise HandshakeError(
            f"the learner at {invitation.host}:{invitation.port} has no place for node "
            f"{invitation.node}: it has joined already, or is one too many"
        ) from None
    # The learner has authenticated, and so is all that comes: its pickles are loaded.
    boot: Boot = pickle.loads(first)
    boot.prepare()
    connection = NodeConnection(channel, invitation.node, own_address, timeout_s)
    connection.start(others)
    try:
        leaving = _leaving_on(signals, connection, label)
        with leaving if signals else contextlib.nullcontext():
            assert boot.connect is not None
            pair = boot.connect(connection)
            endpoint = NodeEndpoint(connection, pair)
            last = serve(boot, endpoint)
            endpoint.deliver()
            connection.finish()
            endpoint.answer(last)
    finally:  # this process may live on
        connection.finish()
        channel.hang_up()
        channel.close()


class NodeEndpoint:
    """An `Endpoint`: messages over the connection, rollouts and weights through a pair."""

    def __init__(self, connection: NodeConnection, pair: Pair) -> None:
        self._connection, self._pair = connection, pair
        self.stop: Stop = connection.stop
        self.weights: WeightReceiver | None = NodeWeights(connection, pair)
        self._blocks: dict[int, RolloutBlock] = {}
        """Per slot of the learner's."""
        self._sending: dict[int, list[Transfer]] = {}
        self._due: m.WindowRef | None = None
        """Of the rollout that is being carried out."""

    def next(self) -> tuple[int, Received]:
        ticket, command = self._connection.inbox.next()
        if isinstance(command, m.Collect) and command.window.blocks:
            self._due = command.window
        return ticket, command

    def window(self, reference: m.WindowRef) -> Window:
        self._await_taken(reference.slot)
        return self._block(reference).window

    def _block(self, reference: m.WindowRef) -> RolloutBlock:
        block = self._blocks.get(reference.slot)
        if block is None:
            block = self._blocks[reference.slot] = RolloutBlock(reference)
        return block

    def _await_taken(self, slot: int) -> None:
        """Wait until the learner has taken the last rollout in ``slot``."""
        for transfer in self._sending.pop(slot, ()):
            transfer.finish()

    def deliver(self) -> None:
        """Wait until the learner has taken all announced rollouts."""
        if not self._connection.leaving:
            for slot in list(self._sending):
                self._await_taken(slot)

    def answer(self, reply: m.Reply) -> None:
        connection = self._connection
        if connection.leaving:
            return
        due, self._due = self._due, None
        if due is not None:
            # Also after a failure: the learner has been expecting data since it sent the command.
            block = self._block(due)
            self._await_taken(due.slot)
            block.mark[0] = reply.ticket
            sending = [self._pair.send(piece) for piece in block.pieces]
            self._sending[due.slot] = sending
            if not connection.inbox:  # without other commands, announce it when it is on the way
                self._await_taken(due.slot)
        connection.answer(reply)


class NodeWeights:
    """A `WeightReceiver`: weights come through the pair, announced on the connection."""

    def __init__(self, connection: NodeConnection, pair: Pair) -> None:
        self._connection, self._pair = connection, pair
        self._model_id = ""
        self._buffers: list[FlatBuffer] = []
        """The first is the one that weights arrive in while the other is read."""
        self._coming: Transfer | None = None

    def bind(self, model_id: str, ref: m.WeightsRef) -> None:
        self._model_id, self._buffers = model_id, [FlatBuffer(ref), FlatBuffer(ref)]
        self._expect()

    def _expect(self) -> None:
        """Begin to receive the next weights."""
        self._buffers.reverse()
        self._coming = self._pair.receive(self._buffers[0].bytes)

    def newest(self) -> m.Snapshot | None:
        snapshot = None
        while self._connection.weights_due and self._coming is not None:
            self._connection.weights_due.popleft()
            self._coming.finish()
            snapshot = self._buffers[0].snapshot(self._model_id)
            self._expect()
            self._connection.send(WEIGHTS)
        return snapshot
