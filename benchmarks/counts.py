"""Counters that are the same on every machine: calls per step, bytes written, bytes allocated.

Rates depend on the machine and its neighbours, these numbers only on the code, so a test can pin
them. Environments are `Still`: they do nothing, so all calls that are counted are GleanRL's.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.envs import Still


def still_frames() -> Still:
    """Return a `Still` environment with observations the size of four stacked Atari frames."""
    return Still((4, 84, 84), np.uint8)


@dataclass(frozen=True)
class Calls:
    """Numbers of function calls."""

    python: float
    """Calls of functions written in Python."""
    c: float
    """Calls of builtin functions and methods (operators and indexing do not count)."""


def count_calls(run: Callable[[], object]) -> Calls:
    """Count the function calls made by ``run()``, that of ``run`` itself included."""
    python = c = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal python, c
        if event == "call":
            python += 1
        elif event == "c_call":
            c += 1

    before = sys.getprofile()
    enabled = gc.isenabled()
    gc.disable()  # A collection may run finalizers, whose calls are not ours.
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        if enabled:
            gc.enable()
    return Calls(python, c - 1)  # The last one counted is ``sys.setprofile``.


def calls_per_step(envs: int = 16, policy: Any = None, steps: int = 32) -> tuple[Calls, Calls]:
    """Count the calls of a `Collector` over `Still` environments.

    Args:
        envs: Environments in the batch; their own ``step`` calls are not counted.
        policy: The collector's policy; ``None`` acts at random.
        steps: Steps of the shorter of the two batches that are compared.

    Returns:
        Calls per step of all environments together, and calls per batch on top of that.
    """
    short, long = (_batch_calls(envs, policy, factor * steps) for factor in (1, 2))
    python, c = (long.python - short.python) / steps, (long.c - short.c) / steps
    return (
        Calls(python - envs, c),
        Calls(short.python - python * steps, short.c - c * steps),
    )


def calls_of_watching(batches: int = 64) -> Calls:
    """Count the calls per batch that measure a collection, add up its figures and show them.

    The cost of adding up many batches at once is divided by ``batches``.
    """
    watched = _batch_calls(16, None, 8, batches)
    with _unwatched():
        without = _batch_calls(16, None, 8, batches)
    return Calls((watched.python - without.python) / batches, (watched.c - without.c) / batches)


@contextmanager
def _unwatched() -> Iterator[None]:
    """Have collectors measure nothing, add nothing up and show nothing."""
    from gleanrl.core.episode_returns import NONE_ENDED
    from gleanrl.rollout.episode_tracker import Tracker
    from gleanrl.rollout.step_timing import StepClock
    from gleanrl.transport.worker_loop import Worker
    from gleanrl.watch.watching import Watching

    with (
        patch.object(StepClock, "begin", lambda _, act, step: (act, step)),
        patch.object(Worker, "_complete", lambda *_: None),
        patch.object(Tracker, "_ends_of", lambda *_: NONE_ENDED),
        patch.object(Watching, "gathered", lambda *_: None),
    ):
        yield


def _batch_calls(envs: int, policy: Any, steps: int, batches: int = 1) -> Calls:
    from benchmarks.systems.ours import inline

    system = inline([Still] * envs, policy, envs * steps)
    try:
        for _ in range(3):
            system.collect_batch()
        return count_calls(lambda: [system.collect_batch() for _ in range(batches)])
    finally:
        system.close()


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of one rollout."""

    written: Mapping[str, float]
    """Per field, bytes written over bytes delivered: 1.0 is one write of everything."""
    unnamed: int
    """Bytes that torch wrote into memory that is not delivered."""
    transient: int
    """Most bytes that Python and numpy held at once beyond what they held at the start."""


def count_traffic(
    factories: Sequence[Callable[[], Any]], steps: int, policy: Any = None
) -> Traffic:
    """Run one rollout in memory that counts every write.

    Args:
        factories: One callable per environment.
        steps: Steps of the rollout.
        policy: ``None`` acts at random.
    """
    source, fields = _source(factories, policy)
    try:
        plain, counting = (
            _window(fields, len(factories), steps, counted) for counted in (False, True)
        )
        stop = bytearray(1)
        for _ in range(2):
            source.collect(plain, steps, stop, policy is None)
        transient = _transient(lambda: source.collect(plain, steps, stop, policy is None))
        with _torch_writes() as elsewhere:
            source.collect(counting, steps, stop, policy is None)
    finally:
        source.close()
    names = {counting.tensor(key).untyped_storage().data_ptr(): key for key in counting.keys()}
    written: Counter[Any] = Counter(counting.written)
    for pointer, size in elsewhere.items():
        written[names.get(pointer)] += size
    # Root row T, the next rollout's first one, lies in memory of its own.
    unnamed = written.pop(None, 0)
    return Traffic(
        {".".join(key): written[key] / counting.tensor(key).nbytes for key in counting.keys()},
        unnamed,
        transient,
    )


def _source(factories: Sequence[Callable[[], Any]], policy: Any) -> tuple[Any, Any]:
    from gleanrl.core.options import SourceOptions
    from gleanrl.rollout.source_builder import SourceBuilder

    source = SourceBuilder(SourceOptions(create_env_fn=list(factories), policy=policy))(0)
    layout = source.layout()
    assert layout is not None, "this environment has no fixed layout"
    return source, layout.fields


def _window(fields: Any, envs: int, steps: int, counted: bool) -> Any:
    from gleanrl.core.window import Window

    class CountingWindow(Window):
        """Hands out arrays that add the bytes written through them to ``written``."""

        written: Counter[Any]

        def array(self, key: Any) -> Any:
            array = super().array(key).view(_CountingArray)
            array.key, array.written = key, self.written
            return array

    if not counted:
        return Window.allocate(fields, envs, steps)
    CountingWindow.written = Counter()
    return CountingWindow.allocate(fields, envs, steps)


class _CountingArray(np.ndarray[Any, Any]):
    """Counts assignments, fills, and itself as the ``out`` of functions.

    A write around these shows as a field written less than once.
    """

    key: Any = None
    written: Counter[Any] | None = None

    def __array_finalize__(self, base: Any) -> None:
        if isinstance(base, _CountingArray):
            self.key, self.written = base.key, base.written

    def __setitem__(self, index: Any, value: Any) -> None:
        part = super().__getitem__(index)
        self._count(getattr(part, "nbytes", self.itemsize))
        super().__setitem__(index, value)

    def fill(self, value: Any) -> None:
        self._count(self.nbytes)
        super().fill(value)

    def _count(self, size: int) -> None:
        if self.written is not None:
            self.written[self.key] += size

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        target = args[0] if function is np.copyto else kwargs.get("out")
        if isinstance(target, _CountingArray):
            target._count(target.nbytes)
        return super().__array_function__(function, types, args, kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs.get("out", ())
        for target in outputs:
            if isinstance(target, _CountingArray):
                target._count(target.nbytes)
        if outputs:
            kwargs["out"] = tuple(map(_bare, outputs))
        return getattr(ufunc, method)(*map(_bare, inputs), **kwargs)


def _bare(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _CountingArray) else value


@contextmanager
def _torch_writes() -> Iterator[Counter[int]]:
    """Count bytes torch writes in place, by the address of the memory written to."""
    written: Counter[int] = Counter()

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            schema = function._schema.arguments
            for position, argument in enumerate(schema):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                target = args[position] if position < len(args) else kwargs.get(argument.name)
                if isinstance(target, torch.Tensor):
                    written[target.untyped_storage().data_ptr()] += target.nbytes
            return function(*args, **kwargs)

    with Watch():  # type: ignore[no-untyped-call]
        yield written


def _transient(run: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()


def main() -> None:
    """Print the counters of the dense loop."""
    from benchmarks import policies

    net = policies.categorical_policy(policies.mlp(4, 2))
    for name, policy in (("random", None), ("64-64 MLP", net)):
        step, batch = calls_per_step(policy=policy)
        print(f"{name}: calls per step {step}, per batch {batch}")
        traffic = count_traffic([Still] * 16, 64, policy)
        print(f"{name}: written {json.dumps(traffic.written)}, transient {traffic.transient} bytes")
    print(f"watching: calls per batch {calls_of_watching()}")
    traffic = count_traffic([still_frames] * 8, 16)
    print(f"frames: written {json.dumps(traffic.written)}, transient {traffic.transient} bytes")


if __name__ == "__main__":
    main()
