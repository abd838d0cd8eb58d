"""Numbered messages between the learner and its nodes, by RPC.

RPCs overtake each other: those of one sender carry numbers and are handed over in that order, so
that weights published before a command are there when it is. An RPC only puts its message down;
nothing of the user's ever runs in a thread of the RPC agent.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import rpc

from gleanrl.core.errors import GleanError
from gleanrl.rollout.rpc_world import World

_LARGE = 1 << 16
"""Bytes from which on a frame travels beside the pickle."""
Sink = Callable[[int, bytes, torch.Tensor | None], None]
Lost = Callable[[int, str], None]
_here: Post | None = None


class Post:
    """One member's end."""

    def __init__(self, world: World, rank: int, sink: Sink, lost: Lost) -> None:
        """Be the end at which messages to this process arrive, from now on.

        Args:
            world: Whose members exchange them.
            rank: Of this process.
            sink: Called, in the order of sending, with who sent it, a frame and maybe a tensor; in
                any thread, one at a time for each sender.
            lost: Called with a member and what went wrong when a message did not reach it.
        """
        global _here
        self._world, self._rank = world, rank
        self._sink, self._lost = sink, lost
        self._sending = threading.RLock()
        self._sent: dict[int, int] = defaultdict(int)
        self._arriving: dict[int, _InOrder] = defaultdict(_InOrder)
        self._under_way = 0
        self._settled = threading.Condition(self._sending)
        _here = self

    def send(
        self,
        peer: int,
        frame: bytes,
        data: torch.Tensor | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; waits for nobody.

        Args:
            peer: Who gets it.
            frame: The message.
            data: A CPU tensor that goes with it; it must not change before ``done``.
            done: Called once the message has arrived or was lost; in any thread.
        """
        with self._sending:
            self._sent[peer] += 1
            self._under_way += 1
            number = self._sent[peer]
        try:
            future = rpc.rpc_async(
                self._world.name(peer),
                _deliver,
                args=(self._rank, number, _packed(frame), data),
                timeout=self._world.message_timeout,
            )
        except RuntimeError as err:  # the agent knows already that it cannot
            self._finished(peer, str(err), done)
            return
        future.add_done_callback(lambda ended: self._finished(peer, _problem(ended), done))

    def _finished(self, peer: int, problem: str | None, done: Callable[[], None] | None) -> None:
        with self._sending:
            self._under_way -= 1
            self._settled.notify_all()
        if done is not None:
            done()
        if problem is not None:
            self._lost(peer, problem)

    def settle(self, timeout: float) -> bool:
        """Wait until all messages have arrived; return whether they have."""
        with self._settled:
            return self._settled.wait_for(lambda: self._under_way == 0, timeout)

    def take(self, sender: int, number: int, frame: bytes, data: torch.Tensor | None) -> None:
        """Take in a message; hand over those whose turn it is."""
        with self._sending:
            arriving = self._arriving[sender]
        with arriving.lock:
            arriving.early[number] = frame, data
            while arriving.due in arriving.early:
                message = arriving.early.pop(arriving.due)
                arriving.due += 1
                self._sink(sender, *message)

    def close(self) -> None:
        """Take no more messages."""
        global _here
        if _here is self:
            _here = None


class _InOrder:
    """What has come from one sender before its turn."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.due = 1
        self.early: dict[int, tuple[bytes, torch.Tensor | None]] = {}


def _deliver(
    sender: int, number: int, frame: bytes | torch.Tensor, data: torch.Tensor | None
) -> None:
    """Put a message down here; this is what an RPC runs."""
    post = _here
    if post is None:
        raise GleanError("nobody takes messages here any more")
    post.take(sender, number, _unpacked(frame), data)


def _packed(frame: bytes) -> bytes | torch.Tensor:
    if len(frame) < _LARGE:
        return frame
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def _unpacked(frame: bytes | torch.Tensor) -> bytes:
    return frame if isinstance(frame, bytes) else frame.numpy().tobytes()


def _problem(future: Any) -> str | None:
    try:
        future.value()
    except Exception as err:  # also what `_deliver` raised there
        return f"{type(err).__name__}: {err}"
    return None
