"""What a node of an RPC world runs.

The connection on which it was let in shows signs of life and raises the stop byte; commands,
replies, rollouts and weights travel by RPC.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout import link
from gleanrl.rollout.inbox import work
from gleanrl.rollout.link import Link
from gleanrl.rollout.rpc_post import Post
from gleanrl.rollout.rpc_world import LEARNER, World, leave, without_farewells
from gleanrl.rollout.serve import frame_of, unreadable
from gleanrl.rollout.wire import CommandReader, head_of
from gleanrl.rollout.worker import Worker
from gleanrl.weights.flat import FlatBuffer

LEAVE = "leave"
"""What the learner tells on the connection once it has left the world."""


@dataclass(frozen=True, slots=True)
class RpcBoot:
    """What the learner tells a node that it has let in."""

    threads: int
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""
    world: World

    def serve(self, connection: Link, node: int, address: str) -> None:
        """Enter the world and serve the learner until it says `Close`."""
        member = _Member(connection, node, self)
        self.world.enter(node + 1, self.world.connect(), address)
        member.run()
        connection.finish()
        with without_farewells(), contextlib.suppress(GleanError):
            member.settle()
            connection.key(LEAVE)
        leave()


class _Member:
    """The worker of one node."""

    def __init__(self, connection: Link, index: int, boot: RpcBoot) -> None:
        self._link, self._index, self._boot = connection, index, boot
        self._inbox = connection.inbox  # where a signal has this node end, too
        self._reader = CommandReader()
        self._weights = Arrivals()
        self._blocks: dict[int, _Block] = {}
        self._slot = 0
        self._over = False
        self._post = Post(boot.world, index + 1, self._take, self._lost)

    def run(self) -> None:
        """Build the source and answer commands."""
        work(self._index, self._build, self._inbox.next, self._answer)

    def settle(self) -> None:
        """Wait until the learner has all answers, or has left."""
        self._over = True
        self._post.settle(self._boot.world.message_timeout)

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._boot.factory)
        return Worker(self._index, factory, self._open, self._link.stop, self._weights)

    def _take(self, sender: int, frame: bytes, data: torch.Tensor | None) -> None:
        if frame[:1] == link.WEIGHTS:
            assert data is not None
            self._weights.put(link.read_weights(frame), data)
            return
        try:
            command = self._reader.read(frame)
        except Exception as err:  # whatever the user's objects do when unpickled
            self._answer(m.Failed(self._index, head_of(frame)[0], unreadable(err)))
            return
        self._over = self._over or isinstance(command, m.Close)
        self._inbox.put(head_of(frame)[0], command)

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        """Return memory of this node's own for a rollout; what was in it has to be gone first."""
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        self._slot = reference.slot
        block = self._blocks.get(reference.slot)
        if block is None:
            block = self._blocks[reference.slot] = _Block(reference)
        block.free.wait()  # as long as the RPC may take, whose end sets it
        return block.window

    def _answer(self, reply: m.Reply) -> None:
        block = self._blocks.get(self._slot)
        if isinstance(reply, m.Rolled) and reply.report.payload is None and block is not None:
            block.free.clear()
            self._post.send(LEARNER, frame_of(reply), block.bytes, block.free.set)
        else:
            self._post.send(LEARNER, frame_of(reply))

    def _lost(self, peer: int, problem: str) -> None:
        if self._over:  # the learner has left, maybe before its acknowledgement
            return
        sys.stderr.write(f"node {self._index}: a message did not reach the learner ({problem})\n")
        sys.stderr.flush()
        # Whatever the environment is doing: what the learner waits for will never come.
        os._exit(1)


class _Block:
    """Memory for the rollouts of one slot, as they travel."""

    def __init__(self, reference: m.WindowRef) -> None:
        plan, nbytes = packed(reference)
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.window = window_over(self.bytes, plan)
        self.free = threading.Event()
        self.free.set()


class Arrivals:
    """The newest weights that have arrived, of every board; a `Mailbox`."""

    def __init__(self) -> None:
        """Expect nothing yet."""
        self._boards: dict[int, tuple[str, m.BoardRef]] = {}
        self._new: dict[int, torch.Tensor] = {}

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Expect weights of ``model_id`` from now on."""
        self._boards[board.offset] = model_id, board

    def put(self, number: int, data: torch.Tensor) -> None:
        """Take in weights of board ``number``; any thread may."""
        self._new[number] = data

    def newest(self) -> m.Snapshot | None:
        """Return what is new."""
        arrived = []
        for number in list(self._new):
            model_id, ref = self._boards[number]
            buffer = FlatBuffer(ref, self._new.pop(number))
            version, serial = buffer.stamp
            arrived.append((serial, version, model_id, buffer.views))
        if not arrived:
            return None
        serial, version, _, _ = max(arrived, key=lambda one: one[0])
        return m.Snapshot(version, {model_id: views for _, _, model_id, views in arrived}, serial)
