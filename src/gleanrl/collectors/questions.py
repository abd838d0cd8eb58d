"""What is asked of all workers at once: attributes and calls, by path."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class WorkerQuestions:
    """Asks every worker's collector, or the learner's replay buffer for all of them."""

    engine: Engine
    workers: int

    def attribute(self, path: str, learners_buffer: Any) -> list[Any]:
        """Return what ``path`` names, one entry per worker (``None`` if it was lost).

        Args:
            path: Begins at a worker's collector.
            learners_buffer: The replay buffer, if workers do not have it.
        """
        if not _leads_into_buffer(path, learners_buffer):
            return self.engine.request_all(m.Get(path))
        with self.engine.turn(None):
            return [paths.resolve(_Buffer(learners_buffer), path)] * self.workers

    def call_each(
        self,
        path: str,
        args: Sequence[Sequence[Any]],
        kwargs: Sequence[Mapping[str, Any]],
        learners_buffer: Any,
    ) -> list[Any]:
        """Call what ``path`` names once per worker, each with its own arguments."""
        if _leads_into_buffer(path, learners_buffer):
            with self.engine.turn(None):
                return [
                    paths.call(_Buffer(learners_buffer), path, a, k)
                    for a, k in zip(args, kwargs, strict=True)
                ]
        calls: dict[int, m.Command] = {
            worker: m.Call(path, tuple(args[worker]), dict(kwargs[worker]))
            for worker in range(self.workers)
        }
        values = self.engine.request_each(calls)
        return [values.get(worker) for worker in range(self.workers)]


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Where paths into the learner's replay buffer begin."""

    replay_buffer: Any


def _leads_into_buffer(path: str, buffer: Any) -> bool:
    return buffer is not None and re.match(r"replay_buffer\b", path) is not None
