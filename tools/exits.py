"""Count how interpreters end that never called `shutdown()`.

Each script starts a collector (or an evaluator) and ends while it works: at its last line, by
``sys.exit``, an exception, Ctrl-C (also while it starts), in a fork, or as the cell of a kernel.
Any exit code or line on stderr that such a script would not have without a collector is an event.
::

    python -m tools.exits [--cases 200] [--jobs 2] [--seed 0]

Interpreters are forked from one that has imported everything, and exit like any other.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from tools import trials

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/processes"))
import warm  # type: ignore[import-not-found]  # of the tests

SCRIPT = """
import os, signal, sys, threading, time, warnings
import gleanrl as g

warnings.simplefilter("ignore", DeprecationWarning)  # of forks of processes with threads

kind, ending, delay, switch = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])

CENTRAL = {
    "policy process": g.MultiSyncCollector,
    "policy process async": g.MultiAsyncCollector,
}
learn = lambda: time.sleep(0.001)

def lean(observation):
    return (observation[..., 2] > 0).long()

def begin():
    storage = g.LazyTensorStorage(10_000, ndim=2 if kind == "learner" else 1)
    rb = g.ReplayBuffer(storage=storage, batch_size=8, prefetch=2 if kind == "prefetch" else None)
    options = {"frames_per_batch": 64, "replay_buffer": rb}
    if kind == "evaluator":
        found = g.Evaluator("CartPole-v1", lean, num_trajectories=10_000)
        found.trigger_eval()
        return found
    if kind in CENTRAL:
        options |= {"inference": "central", "policy_process": True}
        found = CENTRAL[kind]("CartPole-v1", lean, num_workers=2, **options)
    elif kind in ("sync", "learner"):
        found = g.MultiSyncCollector("CartPole-v1", num_workers=2, **options)
    elif kind in ("async", "prefetch"):
        found = g.MultiAsyncCollector("CartPole-v1", num_workers=2, **options)
    else:
        found = g.Collector("CartPole-v1", **options)
    found.start()
    while rb.write_count < 200:
        time.sleep(0.001)
    if kind == "prefetch":
        rb.sample()
    def learn():
        rb.sample(8)
        found.increment_version()
        found.stats()
    globals()["learn"] = learn
    return found

def finish():
    if switch:
        sys.setswitchinterval(switch)
    time.sleep(delay)
    if ending == "exit":
        sys.exit(3)
    if ending == "fork" and (child := os.fork()):
        assert os.waitpid(child, 0)[1] == 0
    if ending == "raise":
        raise ArithmeticError("on purpose")
    if ending == "interrupt":
        signal.raise_signal(signal.SIGINT)
    while ending == "ctrl-c":
        learn()

if ending == "ctrl-c":  # at any moment
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 20 * delay + 0.01)
if ending == "forgotten":  # the last reference goes with the function, or later
    def main():
        started = begin()
        finish()
    main()
elif ending == "cycle":
    started = begin()
    started.myself = started
    del started
    finish()
elif ending == "thread":
    begun = threading.Event()
    def other():
        global started
        started = begin()
        begun.set()
        time.sleep(0.05)
    threading.Thread(target=other).start()
    begun.wait()
    finish()
elif ending == "kernel":
    cells = {}
    for cell in ("started = begin()", "finish()"):
        try:
            exec(cell, globals(), cells)
        except BaseException as err:
            print(repr(err))
else:
    started = begin()
    finish()
"""
LIMIT_S = 120.0
KINDS = (
    *("inline", "sync", "async", "learner", "prefetch", "evaluator"),
    *("policy process", "policy process async"),
)
EXPECTED = {
    "end": (0, ""),
    "exit": (3, ""),
    "raise": (1, "ArithmeticError: on purpose"),
    "interrupt": (-2, "KeyboardInterrupt"),
    "ctrl-c": (-2, "KeyboardInterrupt"),
    "fork": (0, ""),
    "forgotten": (0, ""),
    "cycle": (0, ""),
    "thread": (0, ""),
    "kernel": (0, ""),
}
"""Exit code and last line of stderr of each way to end."""
PAIRS = [(kind, ending) for kind in KINDS for ending in EXPECTED]


def one(kind: str, ending: str, delay: float, switch: float) -> str:
    """Run a script; tell what was not expected of it."""
    command = [str(warm.START), "-c", SCRIPT, kind, ending, str(delay), str(switch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    code, last = EXPECTED[ending]
    lines = done.stderr.strip().splitlines() or [""]
    wanted = done.returncode == code and lines[-1] == last
    if wanted and done.stderr.count("Traceback (") == bool(last):
        return "as expected"
    return f"{trials.WRONG}exit code {done.returncode}: {done.stderr[-2000:]}"


def draw(number: int) -> tuple[str, trials.Call]:
    """Return kind and call of the exit of a number."""
    chance = random.Random(number)
    kind, ending = PAIRS[number % len(PAIRS)]
    delay = chance.choice((0.0, chance.uniform(0, 0.05)))
    call = partial(one, kind, ending, delay, chance.choice((0, 1e-6)))
    return f"{kind} {ending}", call


def main() -> int:
    """Run scripts; return 1 if one ended otherwise than expected."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell's background job ignores Ctrl-C, and so would the scripts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warm.open_door()
    found = trials.main("exits", __doc__, draw, LIMIT_S, cases=200)
    return int(any(each.wrong for each in found))


if __name__ == "__main__":
    sys.exit(main())
