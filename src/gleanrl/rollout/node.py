"""What a node runs: find the learner, show who it is, then serve like any other worker."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass, replace

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.channel import Channel
from gleanrl.rollout.handshake import Invitation, join, keep_alive
from gleanrl.rollout.inbox import work
from gleanrl.rollout.link import Link, key_frame, weights_frame
from gleanrl.rollout.pair import NODE, ConnectionStore, Pair, Transfer
from gleanrl.rollout.serve import Surroundings, settle
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


@dataclass(frozen=True, slots=True)
class NodeBoot:
    """What the learner tells a node that it has let in."""

    threads: int
    kind: str
    """Of process group."""
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""


def main(fd: int) -> None:
    """Be the node that is described, pickled as `Going`, behind descriptor ``fd``."""
    with os.fdopen(fd, "rb") as told:
        going: Going = pickle.load(told)
    if going.surroundings is not None:
        going.surroundings.enter()
    run_node(going.invitation)


def run_node(invitation: Invitation) -> None:
    """Serve the learner that ``invitation`` is from, until it says so or goes away.

    Raises:
        HandshakeError: who answers there is not the learner.
        OSError: nobody answers.
    """
    sock = join(invitation, invitation.patience)
    keep_alive(sock, invitation.patience)
    address = str(sock.getsockname()[0])
    channel = Channel(sock)
    # The other side has shown that it is the learner: from here on its pickles are loaded.
    first, *others = channel.wait()
    boot: NodeBoot = pickle.loads(first)
    sys.path.extend(entry for entry in boot.path if entry not in sys.path)
    settle(boot.threads)
    link = Link(channel, invitation.node, invitation.patience)
    link.start(others)
    store = ConnectionStore(lambda key, value: link.send(key_frame(key, value)), link.key)
    pair = Pair(boot.kind, store, NODE, address, _FOR_EVER)
    _Node(link, pair, invitation.node, boot.factory).run()
    link.finish()
    channel.close()


class _Node:
    """The worker of one node."""

    def __init__(self, link: Link, pair: Pair, index: int, factory: bytes) -> None:
        self._link, self._pair, self._index, self._factory = link, pair, index, factory
        self._blocks: dict[int, tuple[RolloutWindow, torch.Tensor]] = {}
        self._sending: dict[int, Transfer] = {}
        self._slot = 0

    def run(self) -> None:
        work(self._index, self._build, self._link.inbox.next, self._answer)

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._factory)
        mailbox = Weights(self._link, self._pair)
        return Worker(self._index, factory, self._open, self._link.stop, mailbox)

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        """Return memory of this node's own for a rollout; what was in it has to be gone first."""
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        slot = self._slot = reference.slot
        if slot not in self._blocks:
            plan, nbytes = packed(reference)
            block = torch.zeros(nbytes, dtype=torch.uint8)
            self._blocks[slot] = window_over(block, plan), block
        elif slot in self._sending:
            self._sending.pop(slot).finish()
        return self._blocks[slot][0]

    def _answer(self, reply: m.Reply) -> None:
        self._link.answer(reply)
        if isinstance(reply, m.Rolled) and reply.report.payload is None and self._blocks:
            block = self._blocks[self._slot][1]
            self._sending[self._slot] = self._pair.send(block, ROLLOUT_TAG)


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
