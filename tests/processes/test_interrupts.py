"""Ctrl-C at the lines of the engine: nothing hangs, and delivered batches stay whole."""

import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import rig
from tests.covering import ALL

import gleanrl
from gleanrl import ClosedError, MultiAsyncCollector, MultiSyncCollector, ParallelEnv, SerialEnv

RINGS = "engine", "rollout", "memory", "parallel"
PARTS = tuple(str(Path(gleanrl.__file__).parent / ring) for ring in RINGS)
TURNS = "turns.py"
"""Python handles signals neither before a ``with`` leaves an interpreter's lock nor right after it
was entered; a trace function is called there, too."""
FRAMES = 8


class Interrupts:
    """Sends SIGINT when the engine is at its ``at``-th line from now on."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        file = frame.f_code.co_filename
        if not file.startswith(PARTS) or file.endswith(TURNS):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.fixture(autouse=True)
def ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def central(envs, **options):
    """Make a collector with central inference over two groups of environments."""
    return MultiSyncCollector(envs, num_envs=2, inference="central", env_groups=2, **options)


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector, central])
def test_an_interrupt_inside_closes_the_collector_and_leaves_batches_whole(kind):
    """At every 29th line or less often; each collector ends, and nothing of it stays."""
    envs = [rig.counting(0), rig.counting(1)]
    frames = FRAMES * (1 if kind is MultiAsyncCollector else 2)
    every = 137 if kind is central else 11 if ALL else 29  # a worker more to start, and busy waits
    line, interrupted, closed, at = 1, 0, 0, None
    while at is None or at.left <= 0:
        collector = kind(envs, frames_per_batch=frames, total_frames=-1)
        kept = collector.rollout()
        copy = kept.clone()
        with rig.in_time(), Interrupts(line) as at, suppress(KeyboardInterrupt):
            collector.rollout()
        closed += collector.closed
        interrupted += at.left <= 0
        with pytest.raises(ClosedError) if collector.closed else nullcontext():
            collector.rollout()  # an interrupt before anything began changes nothing
        collector.shutdown()
        assert (kept == copy).all()
        line += every
    assert interrupted > 10
    assert closed > interrupted / 2


def test_interrupts_at_any_line_of_a_step_leave_environments_that_can_be_seeded_and_reset():
    interrupted, line = 0, 0
    with ParallelEnv(2, "CartPole-v1") as env, SerialEnv(2, "CartPole-v1") as serial:
        serial.set_seed(3)
        first, second = (serial.reset()["observation"] for _ in range(2))
        while True:
            line += 1
            root = env.rand_action(env.reset())
            with rig.in_time(), Interrupts(line) as at:
                try:
                    env.step(root)
                except KeyboardInterrupt:
                    interrupted += 1
            env.set_seed(3)
            assert env.reset()["observation"].equal(first)
            assert env.reset()["observation"].equal(second)
            if at.left > 0:
                break
    assert interrupted > 50
