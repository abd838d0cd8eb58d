"""Times systems against each other: alternating windows, one rate per system and round."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from benchmarks.processes import cpu_seconds, workers

Fields = Mapping[str, np.ndarray[Any, Any]]
"""A batch for comparison: dotted names to ``[P, T, ...]`` arrays."""
Clock = Callable[[], float]
OURS = "gleanrl"
WRONG = "WRONG"
SETTLE = 0.3
"""Seconds of batches before a window is timed, which use up the batches that were ready."""


class System:
    """A loop that fills batches, built once per case and driven by `run_case`."""

    def __init__(
        self,
        collect: Callable[[], int],
        fields: Callable[[], Fields] = dict,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """Put it together from functions.

        Args:
            collect: Collects one batch and returns its size: agent steps, bytes or calls.
            fields: Returns the last batch for comparison, or nothing.
            end: Releases environments and processes.
        """
        self.collect_batch, self.fields, self._end = collect, fields, end
        self._pids: set[int] | None = None

    def then(self, do: Callable[[int], int]) -> Self:
        """Have ``do(size)`` follow each batch and return the size that counts."""
        collect = self.collect_batch
        self.collect_batch = lambda: do(collect())
        return self

    def sleep(self, pids: set[int]) -> None:
        """Stop the processes that building it started while other systems have their turn.

        Some peers work or spin between requests.
        """
        self._pids = pids
        self._signal(signal.SIGSTOP)

    @contextmanager
    def turn(self) -> Iterator[Clock]:
        """Surround a window of batches; gives the clock of the CPU time that they take.

        Processes that sleep are woken, and settle first.
        """
        if (pids := self._pids) is None:
            yield time.process_time
            return
        self._signal(signal.SIGCONT)
        try:
            end = time.perf_counter() + SETTLE
            while time.perf_counter() < end:
                self.collect_batch()
            yield lambda: time.process_time() + cpu_seconds(pids)
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids or ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """Release environments and processes."""
        self._signal(signal.SIGCONT)
        self._end()


class Skip(Exception):
    """Raised by a builder whose requirements are not installed."""


Build = Callable[[], System]
"""Builds a system; its requirements are imported inside."""


@dataclass(frozen=True)
class Reference:
    """A system to compare GleanRL with, and the target of the comparison."""

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
    """Compares first batches; lines that start with `WRONG` are errors."""
    stopped: bool = False
    """Whether processes of systems that do not have their turn are stopped."""


def run_case(
    case: Case, rounds: int, seconds: float, tick: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Build the systems of ``case``, compare their batches, time them, close them.

    Args:
        case: What to run.
        rounds: Windows per system.
        seconds: Least length of one window.
        tick: Called with a short text after every window.

    Returns:
        The results, ready for JSON: rates per second of wall time and of CPU time, one per round;
        their medians and quartiles; ours over each reference.
    """
    load = list(os.getloadavg())  # before anything of the case runs
    systems, skipped = _build(case)
    try:
        agreement = case.check(systems) if case.check is not None and systems else []
        rates, cpu_rates = _measure(systems, rounds, seconds, tick)
    finally:
        for system in systems.values():
            system.close()
    found = {name: summary(values) for name, values in rates.items()}
    return {
        "title": case.title,
        "frames_per_second": {name: round(rate["median"]) for name, rate in found.items()},
        "quartiles": {name: [round(r["q1"]), round(r["q3"])] for name, r in found.items()},
        "rates": rates,
        "cpu_rates": cpu_rates,
        "ratios": _ratios(case, rates),
        "cpu_ratios": _ratios(case, cpu_rates),
        "agreement": agreement,
        "skipped": skipped,
        "load_average": load,
    }


def _build(case: Case) -> tuple[dict[str, System], dict[str, str]]:
    builders = {OURS: case.ours, **{item.name: item.build for item in case.references}}
    systems: dict[str, System] = {}
    skipped: dict[str, str] = {}
    for name, build in builders.items():
        try:
            before = workers() if case.stopped else set()
            systems[name] = build()
            if case.stopped:
                systems[name].sleep(workers() - before)
        except (Skip, ImportError) as err:
            skipped[name] = str(err) or type(err).__name__
        except Exception as err:
            skipped[name] = f"{WRONG} {type(err).__name__}: {err}"
    return systems, skipped


def _measure(
    systems: Mapping[str, System], rounds: int, seconds: float, tick: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    for system in systems.values():
        _window(system, min(seconds, 0.2))
    rates: dict[str, list[float]] = {name: [] for name in systems}
    cpu_rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds):
        # Every other round runs backwards, so a drift of the machine favours no system.
        for name in systems if number % 2 == 0 else reversed(list(systems)):
            rate, cpu_rate = _window(systems[name], seconds)
            rates[name].append(rate)
            cpu_rates[name].append(cpu_rate)
            tick(f"{name}: {rate:,.0f}/s")
    return rates, cpu_rates


def _window(system: System, seconds: float) -> tuple[float, float]:
    gc.collect()
    collect, clock = system.collect_batch, time.perf_counter
    frames = 0
    with system.turn() as cpu:
        cpu_start, start = cpu(), clock()
        end = start
        while end - start < seconds:
            frames += collect()
            end = clock()
        spent = cpu() - cpu_start
    return frames / (end - start), frames / max(spent, 1e-9)


def _ratios(case: Case, rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return ours against every reference that ran."""
    return {
        item.name: compared(
            item.target, [a / b for a, b in zip(rates[OURS], rates[item.name], strict=True)]
        )
        for item in case.references
        if OURS in rates and item.name in rates
    }


def compared(target: float | None, rounds: list[float]) -> dict[str, Any]:
    """Return ratios round by round, summed up, and whether their median reaches the target."""
    values = summary(rounds)
    met = None if target is None else values["median"] >= target
    return {"target": target, **values, "met": met, "rounds": rounds}


def summary(values: list[float]) -> dict[str, Any]:
    """Return median, quartiles and extremes of the rounds."""
    rounds = values if len(values) > 1 else values * 2
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values)}
