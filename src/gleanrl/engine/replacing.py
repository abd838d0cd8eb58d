"""Replacements of lost workers: their number, and the commands that they receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError
from gleanrl.core.streams import renewed
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import AsyncGather
from gleanrl.engine.weight_sync import WeightSync
from gleanrl.transport.network import NetworkBackend

_SEEDS = 1 << 31
"""Seeds that every kind of environment takes."""


class Replacements:
    """Replaces lost workers.

    A replacement is a worker of its own: nothing of what the lost one had in it is left. It gets
    the newest weights, and random streams and trajectory ids that no life before has used, both a
    function of the seed, the worker and the number of lives.
    """

    def __init__(
        self,
        engine: Engine,
        backend: NetworkBackend,
        models: WeightSync,
        most: int,
    ) -> None:
        """Replace workers of ``engine`` from now on, including workers lost before.

        Args:
            engine: Its batches are rollouts of single workers.
            backend: That of the engine.
            models: Knows the newest weights.
            most: Replacements per worker.
        """
        self._engine, self._backend, self._models = engine, backend, models
        self._most = most
        self._started = [0] * engine.workers
        self.seeds: Mapping[int, m.Seed] = {}
        """The seeds of the workers since their start or since a state was loaded."""
        engine.replacing = self
        for worker in set(range(engine.workers)) - set(engine.alive):
            self.replace(worker)

    def replace(self, worker: int) -> str:
        """Start a replacement unless the limit is reached; return the end of the warning.

        Never waits. The worker is `Engine.joining` from then on.
        """
        if self._started[worker] == self._most:
            return f", for good (max_relaunches={self._most})"
        self._started[worker] += 1
        # First: an interrupt meanwhile must not have it come unexpected.
        self._engine.joining.add(worker)
        self._backend.replace(worker, self._engine.lives[worker] + 1)
        return f" until replacement {self._started[worker]} of {self._most} has joined"

    def welcome(self, reply: m.Ready) -> list[m.Command]:
        """Return the commands that bring a replacement up to date, before any other command.

        Raises:
            GleanError: its steps do not look like those of the one that was lost.
        """
        engine, worker = self._engine, reply.worker
        if reply.layout != engine.layouts[worker]:
            raise GleanError(
                f"its steps are {reply.layout}, those of the lost one were {engine.layouts[worker]}"
            )
        engine.lives[worker] += 1
        cast("AsyncGather", engine.gather).renew(worker)
        # `Bind` comes first: with any other command the worker looks at published weights.
        commands = [
            *self._models.catch_up(worker),
            engine.place(worker),
            *engine.standing.values(),
        ]
        if worker in self.seeds:
            commands.append(reseeded(self.seeds[worker], engine.lives[worker]))
        elif any(isinstance(one, m.Load) and one.snapshot.of_environments for one in commands):
            commands.append(m.Reset())  # its first observations were made without these weights
        return commands


def reseeded(seed: m.Seed, life: int) -> m.Seed:
    """Return the seed of a worker that was lost ``life`` times since it would have got ``seed``."""
    stream = renewed(seed.seed if seed.stream is None else seed.stream, life)
    return m.Seed(stream % _SEEDS, seed.static, stream)
