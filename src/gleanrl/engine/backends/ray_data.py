"""What passes between the learner and Ray actors: rollouts and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.messages import BoardRef, WindowRef
from gleanrl.core.protocols import Array
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.weights.flat import FlatBuffer, check_fit


class Landing:
    """Where in the learner's memory the bytes of one window's rollouts belong."""

    def __init__(self, window: RolloutWindow, reference: WindowRef) -> None:
        """Prepare for rollouts into ``window``, which ``reference`` describes."""
        plan, _ = packed(reference)
        self._parts: list[tuple[Array, slice]] = []
        for block in plan.blocks:
            target = window.tensor(block.field.key)
            if target.numel():
                rows = target.flatten(1).view(torch.uint8).numpy()
                self._parts.append((rows, slice(block.offset, block.offset + rows.size)))

    def fill(self, block: Array) -> None:
        """Copy a rollout, which came as uint8 ``[nbytes]``."""
        for rows, part in self._parts:
            np.copyto(rows, block[part].reshape(rows.shape))


class RayBoard:
    """The weights of one model, published to all actors."""

    def __init__(
        self,
        ref: BoardRef,
        put: Callable[[Array], Any],
        tell: Callable[[int, Any], None],
    ) -> None:
        """Publish what ``put`` has stored by means of ``tell``, under the number in ``ref``."""
        self.ref = ref
        self._put = put
        self._tell = tell
        self._buffer = FlatBuffer(ref)
        self._newest: Any = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, into one object and tell all actors of it.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        self._buffer.fill(tensors, version, serial)
        self._newest = self._put(self._buffer.bytes.numpy())
        self._tell(self.ref.offset, self._newest)
