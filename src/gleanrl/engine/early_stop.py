"""The user's flag that ends rollouts before their last step."""

from __future__ import annotations

import weakref
from typing import NoReturn

from gleanrl.core.protocols import Stop


class Interruptor:
    """A flag that ends rollouts after their current step.

    Hand it to a collector and call `stop_collection` from another thread, a hook or the
    environment. A stopped rollout keeps its shape. Steps that it did not reach are zero, have
    trajectory id -1 and are False in ``("collector", "mask")``.
    """

    def __init__(self) -> None:
        """Start with collection allowed."""
        self._byte = bytearray(1)
        self._attached: list[weakref.ref[Stop]] = []
        """The bytes of collectors."""

    def attach(self, byte: Stop) -> None:
        """Make ``byte``, which workers read, follow the flag while ``byte`` exists."""
        byte[0] = self._byte[0]
        alive = [attached for attached in self._attached if attached() is not None]
        self._attached = [*alive, weakref.ref(byte)]

    def start_collection(self) -> None:
        """Let rollouts run to their full length."""
        self._set(0)

    def stop_collection(self) -> None:
        """End running rollouts after their current step, and later ones after one step."""
        self._set(1)

    def _set(self, value: int) -> None:
        self._byte[0] = value
        for attached in self._attached:
            byte = attached()
            if byte is not None:
                byte[0] = value

    def collection_stopped(self) -> bool:
        """Tell whether `stop_collection` was called last."""
        return bool(self._byte[0])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Interruptor cannot be sent to another process: call stop_collection() in the "
            "process of its collector, which reaches the workers"
        )
