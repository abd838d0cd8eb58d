"""Collectors over processes, ours and TorchRL's, as systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.envs import EnvFactory
from benchmarks.harness import Fields, Skip, tensordict_fields
from benchmarks.peers import TORCHRL_SHORTCUTS, torchrl_serial


class Batches:
    """A collector, driven the way a training loop drives it.

    The last batch is held while the next one is made, as ``for batch in collector`` does.
    """

    def __init__(self, collector: Any) -> None:
        self.collector = collector
        self._iterator = iter(collector)
        self.batch: Any = None

    def collect_batch(self) -> int:
        self.batch = next(self._iterator)
        return int(self.batch.numel())

    def fields(self) -> Fields:
        """Return rows of all workers below each other, ``[W * P, T, ...]``."""
        batch = self.batch
        return tensordict_fields(batch.flatten(0, -2) if batch.ndim > 2 else batch)

    def close(self) -> None:
        self.batch = None
        self.collector.shutdown()


def ours(kind: str, factories: Sequence[Any], policy: Any, frames: int, **options: Any) -> Batches:
    """Return our ``MultiSyncCollector`` or ``MultiAsyncCollector`` on one factory per worker.

    Args:
        kind: ``"sync"`` or ``"async"``.
        factories: One per worker.
        policy: The policy, ``None`` for random actions.
        frames: Per batch; in async that is per worker.
        **options: More arguments of the collector.

    Raises:
        Skip: this version has no such collector.
    """
    try:
        from gleanrl import collectors

        found = {"sync": collectors.MultiSyncCollector, "async": collectors.MultiAsyncCollector}
    except (ImportError, AttributeError) as err:
        raise Skip(f"gleanrl.collectors: {err}") from err
    make = found[kind]
    return Batches(
        make(list(factories), policy, frames_per_batch=frames, total_frames=-1, **options)
    )


def inline(envs: Any, policy: Any, frames: int) -> Batches:
    """Return our in-process ``Collector``."""
    from gleanrl.collectors import Collector

    return Batches(Collector(envs, policy, frames_per_batch=frames, total_frames=-1))


def torchrl(
    kind: str,
    factories: Sequence[Sequence[EnvFactory]],
    policy: Any,
    frames: int,
    argument_checks: bool = False,
) -> Batches:
    """Return TorchRL's collector with a ``SerialEnv`` in each worker.

    ``argument_checks`` leaves those of `torch.distributions` on in its workers, where they are by
    default.
    """
    from torchrl import collectors

    make: Any = {"sync": collectors.MultiSyncCollector, "async": collectors.MultiAsyncCollector}
    return Batches(
        make[kind](
            [serial(some) for some in factories],
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            init_fn=None if argument_checks else quiet_worker,
            num_threads=1,
            **TORCHRL_SHORTCUTS,
            **({"cat_results": "stack"} if kind == "sync" else {}),
        )
    )


def serial(factories: Sequence[EnvFactory]) -> Callable[[], Any]:
    return lambda: torchrl_serial(factories)


def quiet_serial(factories: Sequence[EnvFactory]) -> Callable[[], Any]:
    """Return the same for workers that have no ``init_fn``."""
    return partial(_quiet_serial, factories)


def _quiet_serial(factories: Sequence[EnvFactory]) -> Any:
    quiet_worker()
    return torchrl_serial(factories)


def quiet_worker() -> None:
    """What everybody's processes are told: one thread, no argument checks in distributions."""
    torch.set_num_threads(1)
    torch.distributions.Distribution.set_default_validate_args(False)
