"""Times systems against each other: alternating windows, one rate per system and round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Fields = Mapping[str, np.ndarray[Any, Any]]
"""A batch for comparison: dotted names to ``[P, T, ...]`` arrays."""


class System:
    """Something that fills batches, built once per case and driven by `measure`."""

    def collect_batch(self) -> int:
        """Collect one batch and return how many agent steps (or whatever counts) it holds."""
        raise NotImplementedError

    def fields(self) -> Fields:
        """Return the last batch for comparison, if there is anything to compare. Not timed."""
        return {}

    def close(self) -> None:
        """Release environments and processes."""


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


def summary(values: list[float]) -> dict[str, Any]:
    """Return median, quartiles and extremes of what the rounds gave."""
    low, middle, high = values * 3 if len(values) < 2 else _quartiles(values)
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


Tick = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One number that is no rate against a rate, measured several times."""

    name: str
    unit: str
    values: list[float]
    limit: float | None = None
    """Greatest acceptable median; ``None`` only informs."""

    def summary(self) -> dict[str, Any]:
        found = summary(self.values)
        met = None if self.limit is None else found["median"] <= self.limit
        head = {"unit": self.unit, "limit": self.limit}
        return {**head, **found, "met": met, "rounds": self.values}


@dataclass(frozen=True)
class Measurement:
    """Something that gives `Figure` objects."""

    name: str
    title: str
    run: Callable[[int, float, Tick], Iterable[Figure]]
    """Called with rounds, seconds per round and the tick of a progress display."""


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

    def ratios(self, cpu: bool = False) -> dict[str, Any]:
        """Return ours against every reference that ran, round by round, and summed up."""
        rates = self.cpu_rates if cpu else self.rates
        ours = rates.get(OURS)
        found = {}
        for name, theirs in rates.items() if ours else ():
            if name == OURS:
                continue
            rounds, target = [a / b for a, b in zip(ours, theirs, strict=True)], self.targets[name]
            values = summary(rounds)
            met = None if target is None else values["median"] >= target
            found[name] = {"target": target, **values, "met": met, "rounds": rounds}
        return found


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


def tensordict_fields(batch: Any) -> Fields:
    """Return the leaves of a batch as ``[P, T, ...]``; flags and rewards lose their last 1."""
    batch = batch.unsqueeze(0) if batch.ndim == 1 else batch.flatten(0, -2)
    fields: dict[str, Any] = {}
    for key, value in batch.items(include_nested=True, leaves_only=True):
        name = key if isinstance(key, str) else ".".join(key)
        array = value.detach().numpy()
        if name.rsplit(".", 1)[-1] in ("reward", "done", "terminated", "truncated"):
            array = array[..., 0]
        fields[name] = array.copy()
    return fields
