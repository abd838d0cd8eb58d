"""What a node runs: find the learner, show who it is, then serve like any other worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.protocols import Array
from gleanrl.memory.arena import window_over
from gleanrl.memory.landing import mark_of, pieces_of
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.handshake import HandshakeError, Invitation, join, keep_alive
from gleanrl.rollout.inbox import Addressed, work
from gleanrl.rollout.leaving import Leaving
from gleanrl.rollout.link import Link, key_frame, weights_frame
from gleanrl.rollout.pair import NODE, ConnectionStore, Pair, Transfer
from gleanrl.rollout.sealed import SealedChannel
from gleanrl.rollout.serve import Surroundings, settle
from gleanrl.rollout.streams import enter_life
from gleanrl.rollout.worker import Worker
from gleanrl.weights.flat import FlatReader

_FOR_EVER = 1e8
"""Seconds a rollout may wait for the learner to take it: as long as there is one, which the link
sees to."""
ROLLOUT_TAG, BOARD_TAG = 1, 2
"""Tags of transfers: rollouts; and from here on, weights of board 0, 1, ..."""


@dataclass(frozen=True, slots=True)
class Going:
    """What a process that becomes a node is told: where to go, and what it inherits."""

    invitation: Invitation
    surroundings: Surroundings | None = None
    """Those of the process that started it, where it was forked earlier."""


class Boot(Protocol):
    """What the learner tells a node that it has let in: what to be."""

    @property
    def threads(self) -> int:
        """Return the number of torch threads of the node."""
        ...

    @property
    def path(self) -> tuple[str, ...]:
        """Return where the learner imports from."""
        ...

    def serve(self, connection: Link, node: int, address: str) -> None:
        """Serve the learner until it says `Close`.

        Args:
            connection: To the learner.
            node: This node's index.
            address: This node's address on the network between the two.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeBoot:
    """What a node whose data travel through a process group of two is told."""

    threads: int
    kind: str
    """Of process group."""
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""
    life: int = 0
    """How often this worker was lost before."""

    def serve(self, connection: Link, node: int, address: str) -> None:
        """Serve the learner until it says `Close`."""

        def tell(key: str, value: bytes) -> None:
            connection.send(key_frame(key, value))

        enter_life(self.life)
        pair = Pair(self.kind, ConnectionStore(tell, connection.key), NODE, address, _FOR_EVER)
        _Node(connection, pair, node, self.factory).run()


def main(fd: int) -> None:
    """Be the node that is described, pickled as `Going`, behind descriptor ``fd``."""
    with os.fdopen(fd, "rb") as told:
        going: Going = pickle.load(told)
    if going.surroundings is not None:
        going.surroundings.enter()
    run_node(going.invitation)


def run_node(
    invitation: Invitation,
    signals: Sequence[signal.Signals] = (),
    label: str = "",
    note: Callable[[str], object] = bool,
) -> None:
    """Serve the learner that ``invitation`` is from, until it says so or goes away.

    Args:
        invitation: Where to go.
        signals: That make the node end in order, after it has told the learner; only in the main
            thread. Others do what they did before.
        label: Of what this process belongs to, for the learner when a signal came.
        note: Told why the node leaves then, besides the learner.

    Raises:
        HandshakeError: who answers there is not the learner, or does not want this node.
        OSError: nobody answers.
        SystemExit: one of ``signals`` came.
    """
    sock, keys, patience = join(invitation, invitation.patience)
    keep_alive(sock, patience)
    address = str(sock.getsockname()[0])
    channel = SealedChannel(sock, sends=keys.node, receives=keys.learner)
    try:
        first, *others = channel.wait()
    except EOFError:
        raise HandshakeError(
            f"the learner at {invitation.host}:{invitation.port} has no place for node "
            f"{invitation.node}: it has joined already, or is one too many"
        ) from None
    # The learner has authenticated, and so is all that comes: its pickles are loaded.
    boot: Boot = pickle.loads(first)
    sys.path.extend(entry for entry in boot.path if entry not in sys.path)
    settle(boot.threads)
    link = Link(channel, invitation.node, patience)
    link.start(others)
    with Leaving(link, signals, label, note) if signals else contextlib.nullcontext():
        boot.serve(link, invitation.node, address)
    link.finish()
    channel.close()


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """Memory of a rollout that is to be sent."""

    window: RolloutWindow
    pieces: Sequence[torch.Tensor]
    """In which it is sent."""
    mark: Array
    """Ends the last one; says which rollout it is."""


class _Node:
    """The worker of one node."""

    def __init__(self, link: Link, pair: Pair, index: int, factory: bytes) -> None:
        self._link, self._pair, self._index, self._factory = link, pair, index, factory
        self._blocks: dict[int, _Outgoing] = {}
        """Per slot of the learner's."""
        self._sending: dict[int, list[Transfer]] = {}
        self._due: m.WindowRef | None = None
        """Of the rollout that is being carried out."""
        self._closing = False

    def run(self) -> None:
        work(self._index, self._build, self._following, self._answer)

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._factory)
        mailbox = Weights(self._link, self._pair)
        return Worker(self._index, factory, self._open, self._link.stop, mailbox)

    def _following(self) -> Addressed:
        ticket, command = self._link.inbox.next()
        if isinstance(command, m.Collect) and command.window.blocks:
            self._due = command.window
        self._closing = isinstance(command, m.Close)
        return ticket, command

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        """Return memory of this node's own for a rollout; what was in it has to be gone first."""
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        self._finish(reference.slot)
        return self._block(reference).window

    def _block(self, reference: m.WindowRef) -> _Outgoing:
        found = self._blocks.get(reference.slot)
        if found is None:
            plan, nbytes = packed(reference)
            block = torch.zeros(nbytes, dtype=torch.uint8)
            pieces = [block[start:end] for start, end in pieces_of(reference)]
            found = _Outgoing(window_over(block, plan), pieces, mark_of(block))
            self._blocks[reference.slot] = found
        return found

    def _finish(self, slot: int) -> None:
        """Wait until the learner has taken what was in ``slot``."""
        for transfer in self._sending.pop(slot, ()):
            transfer.finish()

    def _answer(self, reply: m.Reply) -> None:
        if self._link.leaving:
            return
        if self._closing and not isinstance(reply, m.Begun):
            for slot in list(self._sending):  # what was announced is delivered
                self._finish(slot)
            self._link.finish()  # the learner goes away when it has this answer
        due, self._due = self._due, None
        if due is not None:
            # Also after a failure: the learner has been expecting the rollout since it asked.
            outgoing = self._block(due)
            self._finish(due.slot)
            outgoing.mark[0] = reply.ticket
            self._sending[due.slot] = [
                self._pair.send(piece, ROLLOUT_TAG) for piece in outgoing.pieces
            ]
            if not self._link.inbox:  # nothing else to do: announce it when it is on the way
                self._finish(due.slot)
        self._link.answer(reply)


class Weights:
    """The weights that the learner publishes; a `Mailbox`."""

    def __init__(self, link: Link, pair: Pair) -> None:
        """Take weights from ``pair`` when ``link`` says that some are on their way."""
        self._link, self._pair = link, pair
        self._readers: dict[int, FlatReader] = {}
        self._coming: dict[int, Transfer] = {}

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Expect weights of ``model_id`` from now on."""
        number = board.offset
        self._readers[number] = FlatReader(model_id, board)
        self._expect(number)

    def _expect(self, number: int) -> None:
        """Have the next weights arrive whatever this node does meanwhile."""
        target = self._readers[number].next_buffer()
        self._coming[number] = self._pair.receive(target, BOARD_TAG + number)

    def newest(self) -> m.Snapshot | None:
        """Return the newest weights that are here or on their way, if there are new ones."""
        snapshot: m.Snapshot | None = None
        while (number := self._link.pop_board()) is not None:
            self._coming[number].finish()
            read = self._readers[number].read()
            models = {**(snapshot.models if snapshot else {}), **read.models}
            snapshot = replace(read, models=models)
            self._expect(number)
            self._link.send(weights_frame(number))
        return snapshot
