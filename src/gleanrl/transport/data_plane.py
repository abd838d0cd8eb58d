"""How the tensors of rollouts and weights travel between the learner and its nodes.

Commands and replies travel on each node's connection. Data travel beside it, between two `Pair`s
that a `DataPlane` makes: one in the learner, one in the node. Both sides count what they send and
receive, so nothing says which tensor is which but the order of the calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch

from gleanrl.core.window import Array

ROLLOUT_TAG, WEIGHTS_TAG = 1, 2
"""What a transfer is about; of either the first that is sent is the first that is received."""


class Transfer(Protocol):
    """One tensor on its way."""

    @property
    def over(self) -> bool:
        """Whether it is known to have ended."""

    def finish(self) -> Array | None:
        """Wait for the end of it; once over, do nothing.

        Returns:
            Where it has arrived, uint8, if that is not the memory it was to be received into.

        Raises:
            RuntimeError: the other side is gone, or stood still for too long; the pair is of no
                use any more.
        """


class Pair(Protocol):
    """One side of what carries data."""

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        """Begin to send ``tensor``, which must not change until the transfer is finished.

        Raises:
            RuntimeError: the other side is gone.
        """

    def receive(self, tensor: torch.Tensor, tag: int, whole: bool = False) -> Transfer:
        """Begin to receive into ``tensor``, which is whole once the transfer is finished.

        Args:
            tensor: uint8 memory.
            tag: What it is about.
            whole: Whether ``tensor`` is all of a batch, which may be left where it arrives.
        """

    def close(self) -> None:
        """In a node: take leave of the learner, after `Close` was answered."""


class Connection(Protocol):
    """One side of the connection between learner and node, on which a pair is agreed upon."""

    index: int
    """The node's."""
    here: str
    """This side's address on the network between the two."""

    def tell(self, key: str, value: bytes) -> None:
        """Send ``value`` to the other side."""

    def key(self, key: str) -> bytes:
        """Wait for what the other side tells of ``key``."""

    def fail(self, reason: str) -> None:
        """End the connection, because no data can pass; any thread may."""


class NodesConnection(Connection, Protocol):
    """The node's side of it."""

    def await_end(self) -> None:
        """Wait until the learner has hung up."""


Connect = Callable[[NodesConnection], Pair]


class DataPlane(ABC):
    """A way for data, from the learner's side."""

    def begin(self, host: str, nodes: int, timeout_s: float) -> None:  # noqa: B027
        """Prepare for so many nodes, which come to ``host``."""

    @abstractmethod
    def connect(self, node: int) -> Connect:
        """Return what makes the node's side, there; it is pickled."""

    @abstractmethod
    def pair(self, connection: Connection) -> Pair:
        """Make this side, while the node makes its own."""

    def enter(self, look: Callable[[], None]) -> None:  # noqa: B027
        """Wait until data can pass, once all nodes have joined; ``look`` looks after them."""

    def leave(self) -> None:  # noqa: B027
        """Stop before nodes are told to. Never raises."""

    def close(self) -> None:  # noqa: B027
        """Let go of everything, once nodes are gone."""
