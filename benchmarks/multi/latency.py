"""How long a batch of one frame takes, beside a bare message and its answer."""

from __future__ import annotations

from benchmarks.harness import OURS, Case, Reference, run_case
from benchmarks.multi import collectors, memcpy
from benchmarks.multi.envs import still
from benchmarks.multi.figures import Figure, Tick
from benchmarks.multi.processes import grouped, turn

LIMIT = 150.0


def one_frame(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Measure ours with one and with two workers, and a pipe there and back."""
    case = Case(
        "one-frame",
        "",
        grouped(lambda: _ours(2)),
        [
            Reference("one worker", grouped(lambda: _ours(1))),
            Reference("pipe", grouped(memcpy.PingPong)),
        ],
        turn=turn,
    )
    rates = run_case(case, rounds, seconds, tick).rates
    names = {
        OURS: ("batch of one frame, 2 workers", LIMIT),
        "one worker": ("batch of one frame, 1 worker", LIMIT),
        "pipe": ("bare pipe, message and answer", None),
    }
    return [
        Figure(text, "us", [1e6 / rate for rate in rates[name]], limit)
        for name, (text, limit) in names.items()
        if name in rates
    ]


def _ours(workers: int) -> collectors.Batches:
    return collectors.ours("async", still(workers, 16), None, 1, num_threads=1)
