"""One step of environments in several workers, in memory that all of them share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError
from gleanrl.core.keys import NEXT, Key
from gleanrl.core.layout import Layout
from gleanrl.engine.dispatch import Ticket
from gleanrl.engine.engine import Engine
from gleanrl.memory.slab import Order, Slab
from gleanrl.rollout.env_worker import RESET, TODO, Todo, grouped


class Exchange:
    """Tells workers what to do with the row they share with the learner, and waits for them.

    The memory is environment-major over all workers, so what they wrote is one tensor per field.
    """

    def __init__(
        self,
        engine: Engine,
        layouts: Sequence[Layout],
        groups: Mapping[Key, tuple[int, ...]],
    ) -> None:
        """Reserve the row.

        Args:
            engine: Its workers are up.
            layouts: Of each worker; the same fields everywhere.
            groups: Per nested group, the dimensions its batch has beyond those of environments.
        """
        memory = engine.backend.memory
        if memory is None:
            raise GleanError("the backend's workers share no memory with the learner")
        slab = Slab(layouts, [1] * len(layouts), Order.ENVS)
        base = memory.reserve(slab.nbytes)
        raw = np.frombuffer(memory.map(), np.uint8, slab.nbytes, base)
        time_dim = len(layouts[0].batch_shape)
        self.views: dict[Key, torch.Tensor] = {
            view.key: torch.from_numpy(raw[view.start : view.stop])
            .view(view.dtype)
            .view(view.shape)
            .squeeze(time_dim)
            for view in slab.views[0]
        }
        """Every field, ``[N, ...]``; workers write it while they are at work."""
        self._batch = tuple(self.views[TODO].shape)
        self._groups = groups
        self._commands = [
            m.Collect(slab.reference(0, worker, base, 0)) for worker in range(len(layouts))
        ]
        self._dispatcher = engine.dispatcher
        self._todo: Todo | None = None
        self._underway: list[Ticket] = []
        special = (TODO, RESET)
        self.after = self._group({k[1:]: v for k, v in self.views.items() if k[0] == NEXT})
        """What a step led to."""
        root = {k: v for k, v in self.views.items() if k[0] != NEXT and k not in special}
        self.root = self._group({k: v for k, v in root.items() if (NEXT, *k) in self.views})
        """What the next step begins with."""

    def _group(self, views: Mapping[Key, torch.Tensor]) -> TensorDictBase:
        return grouped(views, self._batch, self._groups)

    def write(self, data: TensorDictBase, keys: Iterable[Key]) -> bool:
        """Copy entries of ``data`` into the row; ``False`` if one is missing or does not fit."""
        for key in keys:
            value, view = data.get(key, None), self.views[key]
            if (
                not isinstance(value, torch.Tensor)
                or value.shape != view.shape
                or value.dtype != view.dtype
            ):
                return False
            view.copy_(value.detach())
        return True

    def carry_out(
        self, todo: Todo, workers: Sequence[int], timeout: float | None
    ) -> dict[int, m.Payload]:
        """Have ``workers`` do something and wait until all of them have.

        Returns:
            By worker, results that did not fit the row.

        Raises:
            WorkerDied: a worker's process ended.
            CollectorTimeout: a worker took more than ``timeout`` seconds.
            Exception: what the first worker to fail raised; all were heard out.
        """
        if todo is not self._todo:
            self.views[TODO].fill_(int(todo))
            self._todo = todo
        commands, post = self._commands, self._dispatcher.post
        self._underway = tickets = [post(worker, commands[worker]) for worker in workers]
        self.settle(timeout)
        left = {}
        for ticket in tickets:
            if isinstance(ticket.reply, m.Failed):
                raise ticket.reply.error
            if isinstance(ticket.reply, m.Rolled) and ticket.reply.report.payload is not None:
                left[ticket.worker] = ticket.reply.report.payload
        return left

    def settle(self, timeout: float | None) -> None:
        """Wait for what is under way: after an interrupt workers may still be at it.

        Raises:
            WorkerDied: a worker's process ended.
            CollectorTimeout: a worker took more than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while late := [ticket.worker for ticket in self._underway if ticket.reply is None]:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._dispatcher.wait(left) and left is not None and left <= 0:
                raise self._dispatcher.give_up(
                    late, f"workers {late} did not finish their step within {timeout} s"
                )
        self._underway = []
