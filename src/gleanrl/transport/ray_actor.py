"""A node in a Ray actor, whose data go through Ray's object store.

An actor unpickles its class first. So this module imports nothing large: `RayNode` imports the rest
in the quickest way.
"""

from __future__ import annotations

import itertools
import queue
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gleanrl.transport.zygote import preload

if TYPE_CHECKING:
    import torch

    from gleanrl.core.window import Array
    from gleanrl.transport.data_plane import Connection, Transfer
    from gleanrl.transport.handshake import Invitation

GROUPS: Mapping[str, str] = {"serve": "work", "take": "out", "give": "in"}
"""Per method of an actor its concurrency group: one thread each."""


class RayNode:
    """A node as the methods of an actor with a few threads."""

    def __init__(self) -> None:
        preload()

    def serve(self, invitation: Invitation) -> str:
        """Be a node until the learner says so or goes away; return another reason of its end."""
        from gleanrl.transport.node_endpoint import run_node

        try:
            run_node(invitation)
        except BaseException as err:  # `SystemExit` of a user's, which Ray would not explain
            traceback.print_exc()
            return f"its code ended it with {err!r}"
        return ""

    def take(self) -> tuple[int, Array]:
        """Wait for the next tensor that the node sends; return its number and it."""
        return next(_numbers), _out.get().array()

    def give(self, number: int, refs: Sequence[Any]) -> None:
        """Receive the learner's tensor ``number``, which ``refs`` refers to."""
        # Here: of each reference that outlives its call, Ray keeps some bytes in the learner.
        given = import_module("ray").get(refs[0])
        with _came:
            _given[number] = given
            _came.notify_all()


# What the threads of this process share, if it is an actor.
_out: queue.SimpleQueue[_OutTransfer] = queue.SimpleQueue()
_numbers = itertools.count()
_given: dict[int, Array] = {}
_came = threading.Condition()


class _OutTransfer:
    """A `Transfer` out of an actor.

    Ray serialises the result of a method after the method has returned: the transfer is over when
    the returned array is gone.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._array: Array = tensor.numpy()
        self._gone = threading.Event()

    def array(self) -> Array:
        array = self._array[:]
        gone = self._gone
        self._returned = weakref.ref(array, lambda _: gone.set())
        return array

    @property
    def over(self) -> bool:
        return self._gone.is_set()

    def finish(self) -> None:
        self._gone.wait()


class _InTransfer:
    """A `Transfer` into an actor."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self._number, self._tensor = number, tensor

    @property
    def over(self) -> bool:
        return self._number in _given

    def finish(self) -> None:
        with _came:
            _came.wait_for(lambda: self.over)
            given = _given.pop(self._number)
        # Copied, because Ray's are read-only and occupy its store while they are held.
        self._tensor.numpy()[:] = given


class ActorPair:
    """An actor's side of the way for data."""

    def __init__(self, connection: Connection) -> None:
        self._received = 0

    def send(self, tensor: torch.Tensor) -> Transfer:
        leaving = _OutTransfer(tensor)
        _out.put(leaving)
        return leaving

    def receive(self, tensor: torch.Tensor) -> Transfer:
        self._received += 1
        return _InTransfer(self._received - 1, tensor)
