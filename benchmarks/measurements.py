"""Numbers that are no rate against a rate: times, counts, shares, each with its limit."""

from __future__ import annotations

import gc
import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks import envs, policies
from benchmarks.harness import OURS, WRONG, Build, Case, Figure, Reference, Tick, run_case
from benchmarks.processes import (
    Group,
    descriptors,
    grouped,
    in_fresh_process,
    page_faults,
    private_mib,
    run_fresh,
    turn,
    wait_until_asleep,
    workers,
)
from benchmarks.systems import bare, ours

ONE_FRAME_US = 150.0
FAULTS = 1.0
"""Page faults per batch that count as none; fresh memory would cost hundreds to thousands."""
STRAGGLERS = 4
LOST = 5.0
"""Percent."""
BATCHES, FLAT_WARM_UP = 10_000, 1_000
WARM_UP = 100
"""Batches before the first reading: allocators and caches fill up in them."""
ALLOWED_MIB = 2.0
"""Growth that counts as flat: about a tenth of a percent of a torch process."""


# -- how long a batch of one frame takes, beside a bare message and its answer ---------------------


def one_frame(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Measure ours with one and with two workers, and a pipe there and back."""

    def single(count: int) -> Build:
        return grouped(lambda: ours.over("process", "async", envs.still(count, 16), None, 1))

    case = Case(
        "one-frame",
        "",
        single(2),
        [
            Reference("one worker", single(1)),
            Reference("pipe", grouped(bare.ping_pong)),
        ],
        turn=turn,
    )
    rates = run_case(case, rounds, seconds, tick).rates
    names = {
        OURS: ("batch of one frame, 2 workers", ONE_FRAME_US),
        "one worker": ("batch of one frame, 1 worker", ONE_FRAME_US),
        "pipe": ("bare pipe, message and answer", None),
    }
    return [
        Figure(text, "us", [1e6 / rate for rate in rates[name]], limit)
        for name, (text, limit) in names.items()
        if name in rates
    ]


# -- large observations: is memory used again, or does every batch cost new pages and copies? ------


def faults(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Count page faults of learner and workers, and batches that had to be copied."""
    from benchmarks.cases import multi as cases

    figures = []
    for kind in ("async", "sync"):
        for name, size in cases.SIZES.items():
            group = Group(lambda kind=kind, size=size: cases.still_collector(kind, size))  # type: ignore[misc]
            group.wake()
            try:
                values, copied = _count_faults(group, rounds, min(seconds, 0.5))
            finally:
                group.close()
            tick(f"faults {name} {kind}")
            figures += [
                Figure(f"{name} {kind}: page faults per batch", "", values, FAULTS),
                Figure(f"{name} {kind}: batches copied", "", [copied], 0.0),
            ]
    return figures


def _count_faults(group: Group, rounds: int, seconds: float) -> tuple[list[float], float]:
    pids = [os.getpid(), *group.pids]
    for _ in range(12):
        group.collect_batch()
    values = []
    for _ in range(rounds):
        before, batches = page_faults(pids), 0
        end = time.perf_counter() + seconds
        while batches < 10 or time.perf_counter() < end:
            group.collect_batch()
            batches += 1
        values.append((page_faults(pids) - before) / batches)
    system: Any = group.system
    return values, float(system.batches.collector.stats()["batches_copied"])


# -- workers whose steps take very different times -------------------------------------------------


def stragglers(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Measure the share of wall time that environments were not stepping, in percent.

    The environments sleep, so that four of them do not compete for two cores; their time is what
    passes in `step`. All of a worker's time between its first and its last observation counts.
    """
    systems = {
        kind: ours.over(
            "process",
            kind,
            envs.timed(STRAGGLERS, 0.002, True),
            None,
            16 * (STRAGGLERS if kind == "sync" else 1),
        )
        for kind in ("async", "sync")
    }
    shares: dict[str, list[float]] = {kind: [] for kind in systems}
    try:
        for _ in range(rounds):
            for kind, system in systems.items():
                shares[kind].append(100 * _lost(system, max(2.0, seconds)))
                tick(f"stragglers {kind}")
    finally:
        for system in systems.values():
            system.close()
    limits = {"async": LOST, "sync": None}
    return [
        Figure(f"busy time lost, {STRAGGLERS} workers, {kind}", "%", values, limits[kind])
        for kind, values in shares.items()
    ]


def _lost(system: ours.Batches, seconds: float) -> float:
    """Return the lost share of one window."""
    for _ in range(4 * STRAGGLERS):  # what was made while others were measured
        system.collect_batch()
    first: dict[int, Any] = {}
    last: dict[int, Any] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        system.collect_batch()
        fields = system.fields()
        rows = fields["observation"], fields["next.observation"]
        for roots, successors in zip(*rows, strict=True):
            first.setdefault(int(successors[0, 2]), roots[0].copy())
            last[int(successors[0, 2])] = successors[-1].copy()
    if len(first) != STRAGGLERS:
        raise RuntimeError(f"WRONG only workers {sorted(first)} delivered")
    spans = [last[number] - first[number] for number in first]
    return float(1 - sum(span[1] for span in spans) / sum(span[0] for span in spans))


# -- how long until the first batch, in a fresh process each time ----------------------------------


def start(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Compare it with importing torch, in turns; at most five rounds, for they are slow."""
    found: dict[str, list[dict[str, float]]] = {"torch": [], "sync": [], "async": []}
    for number in range(min(rounds, 5)):
        for what in found if number % 2 == 0 else reversed(found):
            found[what].append(
                run_fresh("-c", _IMPORT)
                if what == "torch"
                else in_fresh_process(__name__, "start_once", what)
            )
            tick(f"start {what}")
    imports = [item["first"] for item in found["torch"]]
    figures = [Figure("importing torch", "s", imports)]
    for kind in ("async", "sync"):
        firsts = [item["first"] for item in found[kind]]
        shares = [first / torch for first, torch in zip(firsts, imports, strict=True)]
        figures += [
            Figure(f"{kind}: start to first batch", "s", firsts),
            Figure(f"{kind}: the same / importing torch", "x", shares, 1.5),
        ]
        for which in ("second beside the first", "third after both were closed"):
            values = [item[which] for item in found[kind]]
            figures.append(Figure(f"{kind}: {which}", "s", values, 0.5))
    return figures


_IMPORT = """
import json, time
start = time.perf_counter()
import torch
print(json.dumps({"first": time.perf_counter() - start}))
"""


def start_once(what: str) -> dict[str, float]:
    """Time three collectors, from the call to the first batch."""
    from benchmarks.cases import cartpole as cases

    torch.set_num_threads(1)
    policy = policies.categorical_policy(policies.mlp(4, 2))

    def first_batch() -> tuple[float, ours.Batches]:
        start = time.perf_counter()
        system = ours.over(
            "process", what, cases.seeds(), policy, cases.frames(what), num_envs=cases.ENVS
        )
        system.collect_batch()
        return time.perf_counter() - start, system

    first, one = first_batch()
    second, two = first_batch()
    one.close()
    two.close()
    third, three = first_batch()
    three.close()
    return {
        "first": first,
        "second beside the first": second,
        "third after both were closed": third,
    }


# -- does anything grow? ---------------------------------------------------------------------------


def flat(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Run `measure` of both kinds in fresh interpreters; rounds and seconds do not matter."""
    figures = []
    for kind in ("async", "sync"):
        found = in_fresh_process(__name__, "flat_once", kind, BATCHES)
        tick(f"flat {kind}")
        figures += [
            Figure(f"{kind}: {name}", unit, [found[name]], limit)
            for name, unit, limit in (
                ("learner grew", "MiB", ALLOWED_MIB),
                ("workers grew", "MiB", ALLOWED_MIB),
                ("descriptors more", "", 0.0),
                ("/dev/shm entries more", "", 0.0),
                ("page faults per batch", "", 0.1),
                ("batches copied", "", 0.0),
                ("left after shutdown: descriptors", "", 0.0),
                ("left after shutdown: processes", "", None),
                ("left after shutdown: /dev/shm entries", "", 0.0),
            )
        ]
    return figures


def flat_once(kind: str, batches: int) -> dict[str, Any]:
    """Collect ``batches`` batches, publishing weights before every tenth."""
    torch.set_num_threads(1)

    def build() -> ours.Batches:
        return ours.over("process", kind, envs.still(2, 1024), ballast_policy(17 * 2**10), 64)

    # One collector before: what is started once per process is no leak of a collector.
    before = Group(build)
    before.wake()
    before.collect_batch()
    before.close()
    del before
    gc.collect()
    at_first = _counts(set())
    group = Group(build)
    group.wake()
    system: Any = group.system
    readings = []
    for number in range(FLAT_WARM_UP + batches + 1):
        if number >= FLAT_WARM_UP and (number - FLAT_WARM_UP) % 1000 == 0:
            readings.append(_counts(group.pids))
        if number % 10 == 0:
            system.collector.update_policy_weights_()
        group.collect_batch()
    copied = system.collector.stats().get("batches_copied", 0)
    group.close()
    del group, system
    gc.collect()
    at_last = _counts(set())
    start, end = readings[0], readings[-1]
    return {
        "learner grew": end["learner"] - start["learner"],
        "workers grew": end["workers"] - start["workers"],
        "descriptors more": end["descriptors"] - start["descriptors"],
        "/dev/shm entries more": end["shm"] - start["shm"],
        "page faults per batch": (end["faults"] - start["faults"]) / batches,
        "batches copied": copied,
        "left after shutdown: descriptors": at_last["descriptors"] - at_first["descriptors"],
        "left after shutdown: processes": len(workers()),
        "left after shutdown: /dev/shm entries": at_last["shm"] - at_first["shm"],
        "readings": readings,
    }


def _counts(pids: set[int]) -> dict[str, float]:
    gc.collect()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "learner": private_mib([os.getpid()]),
        "workers": private_mib(pids),
        "descriptors": descriptors([os.getpid(), *pids]),
        "shm": len(list(Path("/dev/shm").iterdir())),
        "faults": usage.ru_minflt + usage.ru_majflt + page_faults(pids),
    }


def memory(batches: int) -> dict[str, Any]:
    """Collect ``batches`` batches of CartPole x16 with an MLP and read the resident size."""
    torch.set_num_threads(1)
    policy = policies.categorical_policy(policies.mlp(4, 2))
    system = ours.inline(envs.seeded(envs.cartpole, 16), policy, 1024)
    for _ in range(WARM_UP):
        system.collect_batch()
    readings = [_resident_mib()]
    every = max(batches // 20, 1)
    for number in range(1, batches + 1):
        system.collect_batch()
        if number % every == 0:
            readings.append(_resident_mib())
    system.close()
    growth = readings[-1] - readings[0]
    return {
        "batches": batches,
        "rss_mib": readings,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "growth_mib": growth,
        "met": growth <= ALLOWED_MIB,
    }


def _resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


# -- publishing weights: what the learner pays for it, and when workers act on them ----------------

WEIGHTS = {"17KB": 17 * 2**10, "4MB": 4 * 2**20, "100MB": 100 * 2**20}
TENSORS = 8
"""Parameters that the bytes are spread over, as those of a network are."""


class Ballast(nn.Module):
    """Has as many bytes of weights as wanted; acts by the parity of the last one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        shape = size // (4 * TENSORS)
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(TENSORS))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        parity = self.parts[-1][-1].remainder(2).long()
        return parity.expand(observation.shape[:-1])

    def train_step(self) -> None:
        """Change every weight, as an optimizer does."""
        with torch.no_grad():
            for part in self.parts:
                part.add_(1)


def ballast_policy(size: int) -> TensorDictModule:
    """Return a policy with ``size`` bytes of weights."""
    return TensorDictModule(Ballast(size), in_keys=["observation"], out_keys=["action"])


def weights(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Time ``update_policy_weights_`` of two async workers and a copy of as many bytes."""
    figures: list[Figure] = []
    for name, size in WEIGHTS.items():
        figures += _publishing(name, size, rounds, seconds)
        tick(f"weights {name}")
    return figures


def _publishing(name: str, size: int, rounds: int, seconds: float) -> list[Figure]:
    policy = ballast_policy(size)
    group = Group(lambda: ours.over("process", "async", envs.still(2, 16), policy, 32))
    group.wake()
    try:
        measure = _Publishing(group, policy.module, size)
        measure.check()
        figures = []
        for state in ("at work", "at rest"):
            pairs = [measure.round(state == "at rest", seconds) for _ in range(rounds)]
            updates, copies = zip(*pairs, strict=True)
            over = [update - 1.5 * copy for update, copy in pairs]
            figures += [
                Figure(f"{name}, workers {state}: update", "us", list(updates)),
                Figure(f"{name}, workers {state}: memcpy", "us", list(copies)),
                Figure(f"{name}, workers {state}: update - 1.5 memcpy", "us", over, 50.0),
            ]
        return figures
    finally:
        group.close()


class _Publishing:
    """Takes turns between publishing and copying, under the same conditions."""

    def __init__(self, group: Group, module: Ballast, size: int) -> None:
        self._group, self._module = group, module
        system: Any = group.system
        self._update = system.collector.update_policy_weights_
        self._source, self._target = (np.ones(size, np.uint8) for _ in range(2))

    def round(self, at_rest: bool, seconds: float) -> tuple[float, float]:
        """Return the medians of both in microseconds, over ``seconds`` or five of each."""
        updates: list[float] = []
        copies: list[float] = []
        end = time.perf_counter() + seconds
        while len(updates) < 5 or time.perf_counter() < end:
            order = (self._time_update, updates), (self._time_copy, copies)
            for measure, times in order if len(updates) % 2 else order[::-1]:
                for _ in range(6):
                    self._group.collect_batch()
                if at_rest:
                    wait_until_asleep(self._group.pids)
                times.append(1e6 * measure())
        return statistics.median(updates), statistics.median(copies)

    def _time_update(self) -> float:
        self._module.train_step()
        start = time.perf_counter()
        self._update()
        return time.perf_counter() - start

    def _time_copy(self) -> float:
        np.add(self._source, 1, out=self._source)
        start = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - start

    def check(self) -> None:
        """See to it that published weights are acted on.

        Raises:
            RuntimeError: they are not.
        """
        for _ in range(4):
            self._module.train_step()
            self._update()
            wanted = int(self._module.parts[-1][-1].item()) % 2
            for _ in range(20):
                self._group.collect_batch()
            system: Any = self._group.system
            if not bool((system.batch["action"] == wanted).all()):
                raise RuntimeError(f"{WRONG} workers do not act by the published weights")


def freshness(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Follow versions of the policy through the frames of two async workers.

    A rollout that begins after a publication must have its version; of those under way only one
    per worker may be without it.
    """
    policy = TensorDictModule(OneWeight(), in_keys=["observation"], out_keys=["action"])
    system = ours.over(
        "process", "async", envs.timed(2, 0.001, False), policy, 16, track_policy_version=True
    )
    try:
        log = _log(system, rounds, seconds, tick)
    finally:
        system.close()
    return list(_freshness(*log))


class OneWeight(nn.Module):
    """A policy with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight[0].long().expand(observation.shape[:-1])


_Rollout = tuple[int, float, float, float, int]
"""Worker, end of the rollout before, end of the first step, end of the last step, version."""


def _log(
    system: ours.Batches, rounds: int, seconds: float, tick: Tick
) -> tuple[list[_Rollout], list[float]]:
    seen: list[_Rollout] = []
    published: list[float] = []

    def collect(count: int) -> None:
        for _ in range(count):
            system.collect_batch()
            batch = system.batch
            versions = batch["policy_version"]
            if int(versions.min()) != int(versions.max()):
                raise RuntimeError(f"{WRONG} a rollout has two versions: {versions.unique()}")
            after = batch["next", "observation"]
            stamps = (float(x) for x in (batch["observation"][0, 0], after[0, 0], after[-1, 0]))
            seen.append((int(after[0, 2]), *stamps, int(versions.min())))  # type: ignore[arg-type]

    collect(10)
    for _ in range(max(10, round(rounds * seconds * 5))):
        published.append(time.perf_counter())
        system.collector.update_policy_weights_()
        collect(10)
        tick("versions")
    collect(10)
    return seen, published


def _freshness(seen: list[_Rollout], published: list[float]) -> Iterator[Figure]:
    base = min(version for *_, version in seen)
    late, old, delays = [], [], []
    for number, when in enumerate(published, 1):
        for worker in (0, 1):
            rollouts = [item for item in seen if item[0] == worker]
            stale = [item for item in rollouts if item[3] > when and item[4] < base + number]
            late.append(float(sum(item[1] > when for item in stale)))
            old.append(float(len(stale)))
            first = next(item for item in rollouts if item[4] >= base + number)
            delays.append(1e3 * (first[2] - when))
    yield Figure("rollouts begun after publishing without it (worst)", "", [max(late)], 0.0)
    yield Figure("rollouts finished after publishing without it (worst)", "", [max(old)], 1.0)
    yield Figure("publishing to the first frame made with it (rollout: 17 ms)", "ms", delays)
