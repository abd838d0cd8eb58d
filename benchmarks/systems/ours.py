"""Collectors as systems: anything that is iterated over, and ours of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import Fields, System


class Batches(System):
    """A collector, driven the way a training loop drives it.

    The last batch is held while the next one is made, as ``for batch in collector`` does.
    """

    def __init__(self, collector: Any) -> None:
        self.collector = collector
        self.batch: Any = None
        self._iterator = iter(collector)
        super().__init__(self._next, self._fields, collector.shutdown)

    def _next(self) -> int:
        self.batch = next(self._iterator)
        return int(self.batch.numel())

    def _fields(self) -> Fields:
        """Return rows of all workers below each other, ``[W * P, T, ...]``.

        Flags and rewards lose their last dimension, which is 1.
        """
        batch, found = self.batch, {}
        batch = batch.unsqueeze(0) if batch.ndim == 1 else batch.flatten(0, -2)
        for key, value in batch.items(include_nested=True, leaves_only=True):
            name = key if isinstance(key, str) else ".".join(key)
            flag = name.rsplit(".", 1)[-1] in ("reward", "done", "terminated", "truncated")
            found[name] = (value.squeeze(-1) if flag else value).detach().cpu().numpy()
        return found


def inline(env: Any, policy: Any, frames: int, **options: Any) -> Batches:
    """Return our ``Collector`` in this process."""
    from gleanrl.collectors import Collector

    return Batches(Collector(env, policy, frames_per_batch=frames, total_frames=-1, **options))


def over(
    where: str, kind: str, factories: Sequence[Any], policy: Any, frames: int, **options: Any
) -> Batches:
    """Return our collector with one factory per worker.

    Args:
        where: ``"process"``, ``"nodes"`` or ``"ray"``.
        kind: ``"sync"`` or ``"async"``.
        factories: One per worker.
        policy: The policy, ``None`` for random actions.
        frames: Per batch; in async that is per worker.
        **options: More arguments of the collector.
    """
    import gleanrl

    name = {"nodes": "DistributedCollector", "ray": "RayCollector"}.get(where)
    options |= {"frames_per_batch": frames, "total_frames": -1}
    options |= {"sync": kind == "sync"} if name else {"num_threads": 1}
    options |= {"launcher": "mp"} if where == "nodes" else {}
    make = getattr(gleanrl, name or f"Multi{kind.capitalize()}Collector")
    return Batches(make(list(factories), policy, **options))


def quiet_worker() -> None:
    """Set one thread and no argument checks in distributions, as in all workers."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
