"""Times systems against each other: alternating windows, one rate per system and round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Fields = Mapping[str, np.ndarray[Any, Any]]
"""A batch for comparison: dotted names to ``[P, T, ...]`` arrays."""


class System(Protocol):
    """Something that fills batches, built once per case and driven by `measure`."""

    def collect_batch(self) -> int:
        """Collect one batch and return how many agent steps it holds."""
        ...

    def fields(self) -> Fields:
        """Return the last batch for comparison. Not timed."""
        ...

    def close(self) -> None:
        """Release environments."""
        ...


class Skip(Exception):
    """Raised by a builder whose requirements are not installed."""


Build = Callable[[], System]
"""Builds a system; its requirements are imported inside."""


Clock = Callable[[], float]


@contextmanager
def in_process(_: System) -> Iterator[Clock]:
    """A turn of a system that lives in this process: nothing but its CPU clock is needed."""
    yield time.process_time


@dataclass(frozen=True)
class Reference:
    """What ours is held against, and by how much it has to win."""

    name: str
    build: Build
    target: float | None = None
    """Least acceptable median of ``ours / reference``; ``None`` only informs."""


@dataclass(frozen=True)
class Case:
    """One workload."""

    name: str
    title: str
    ours: Build
    references: Sequence[Reference]
    check: Callable[[Mapping[str, System]], list[str]] | None = None
    """Compares the first batches of all systems; lines that start with `WRONG` are errors."""
    extra: Callable[[], dict[str, Any]] | None = None
    """More numbers to report, measured outside the rounds."""
    turn: Callable[[System], AbstractContextManager[Clock]] = in_process
    """Surrounds each window of a system; gives the clock of the CPU time it takes."""


@dataclass
class Ratio:
    """``ours / reference`` over the rounds."""

    target: float | None
    rounds: list[float]

    def summary(self) -> dict[str, Any]:
        """Return median, quartiles, extremes and whether the target was met."""
        low, middle, high = quartiles(self.rounds)
        return {
            "target": self.target,
            "median": middle,
            "q1": low,
            "q3": high,
            "min": min(self.rounds),
            "max": max(self.rounds),
            "met": None if self.target is None else middle >= self.target,
            "rounds": self.rounds,
        }


@dataclass
class Result:
    """Everything measured for one case."""

    name: str
    title: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    """Agent steps per second of wall time, one per round."""
    cpu_rates: dict[str, list[float]] = field(default_factory=dict)
    """The same per second of the system's CPU time, which stolen cores do not touch."""
    targets: dict[str, float | None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    agreement: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    """Load averages of the machine after the case."""

    def ratios(self, cpu: bool = False) -> dict[str, Ratio]:
        """Return ours against every reference that ran."""
        rates = self.cpu_rates if cpu else self.rates
        ours = rates.get(OURS)
        if not ours:
            return {}
        return {
            name: Ratio(self.targets.get(name), [a / b for a, b in zip(ours, theirs, strict=True)])
            for name, theirs in rates.items()
            if name != OURS
        }


OURS = "gleanrl"
WRONG = "WRONG"


def run_case(
    case: Case, rounds: int, seconds: float, tick: Callable[[str], None] = lambda _: None
) -> Result:
    """Build the systems of ``case``, compare their batches, time them, close them.

    Args:
        case: What to run.
        rounds: Windows per system.
        seconds: Least length of one window.
        tick: Called with a short text after every window, for a progress bar.
    """
    result = Result(case.name, case.title)
    systems = _build(case, result)
    try:
        if case.check is not None and systems:
            result.agreement = case.check(systems)
        _measure(case, systems, result, rounds, seconds, tick)
        if case.extra is not None:
            result.extra = _optional(case.extra)
    finally:
        for system in systems.values():
            system.close()
    return result


def _build(case: Case, result: Result) -> dict[str, System]:
    builders = {OURS: case.ours, **{item.name: item.build for item in case.references}}
    result.targets = {item.name: item.target for item in case.references}
    systems: dict[str, System] = {}
    for name, build in builders.items():
        try:
            systems[name] = build()
        except (Skip, ImportError) as err:
            result.skipped[name] = str(err) or type(err).__name__
        except Exception as err:
            result.skipped[name] = f"{WRONG} {type(err).__name__}: {err}"
    return systems


def _optional(extra: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return extra()
    except (Skip, ImportError) as err:
        return {"skipped": str(err)}


def _measure(
    case: Case,
    systems: Mapping[str, System],
    result: Result,
    rounds: int,
    seconds: float,
    tick: Callable[[str], None],
) -> None:
    for system in systems.values():
        _window(case, system, min(seconds, 0.2))
    order = list(systems)
    for number in range(rounds):
        # Every other round runs backwards, so that a drift of the machine favours nobody.
        for name in order if number % 2 == 0 else reversed(order):
            rate, cpu_rate = _window(case, systems[name], seconds)
            result.rates.setdefault(name, []).append(rate)
            result.cpu_rates.setdefault(name, []).append(cpu_rate)
            tick(f"{result.name}: {name} {rate:,.0f}/s")


def _window(case: Case, system: System, seconds: float) -> tuple[float, float]:
    gc.collect()
    collect, clock = system.collect_batch, time.perf_counter
    frames = 0
    with case.turn(system) as cpu:
        cpu_start, start = cpu(), clock()
        end = start
        while end - start < seconds:
            frames += collect()
            end = clock()
        spent = cpu() - cpu_start
    return frames / (end - start), frames / max(spent, 1e-9)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def tensordict_fields(batch: Any) -> Fields:
    """Return the leaves of a batch as ``[P, T, ...]``; flags and rewards lose their last 1."""
    if batch.ndim == 1:
        batch = batch.unsqueeze(0)
    fields: dict[str, Any] = {}
    for key, value in batch.items(include_nested=True, leaves_only=True):
        name = key if isinstance(key, str) else ".".join(key)
        array = value.detach().numpy()
        if name.rsplit(".", 1)[-1] in ("reward", "done", "terminated", "truncated"):
            array = array[..., 0]
        fields[name] = array.copy()
    return fields
