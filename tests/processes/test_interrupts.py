"""Ctrl-C at every line of the engine: nothing hangs, nothing is torn, nothing comes twice."""

import signal
import sys
from pathlib import Path

import pytest
import rig

import gleanrl
from gleanrl import MultiAsyncCollector, MultiSyncCollector, ParallelEnv, SerialEnv

PARTS = tuple(str(Path(gleanrl.__file__).parent / part) for part in ("engine", "rollout", "memory"))
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


def rollouts_in(batch):
    """Return per rollout the number of its environment and its steps."""
    seen = batch["next", "observation"].reshape(-1, FRAMES, 2)
    return [(int(rows[0, 0]), rows[:, 1].int().tolist()) for rows in seen]


@pytest.mark.parametrize("kind", [MultiAsyncCollector, MultiSyncCollector])
def test_interrupts_at_any_line_lose_at_most_the_batch_that_was_about_to_be_returned(kind):
    envs = [rig.counting(0), rig.counting(1)]
    frames = FRAMES * (2 if kind is MultiSyncCollector else 1)
    lost, interrupted, line = 0, 0, 0
    with kind(envs, frames_per_batch=frames, total_frames=-1) as collector:
        collector.rollout()
        done = {0: FRAMES, 1: FRAMES if kind is MultiSyncCollector else 0}
        while True:
            line += 1
            with rig.in_time(), Interrupts(line) as at:
                try:
                    batch = collector.rollout()
                except KeyboardInterrupt:
                    interrupted += 1
                    continue
            for number, seen in rollouts_in(batch):
                assert seen == list(range(seen[0], seen[0] + FRAMES))
                lost += (seen[0] - 1 - done[number]) // FRAMES
                assert seen[0] > done[number]
                done[number] = seen[-1]
            if at.left > 0:
                break
        assert interrupted > 100
        assert lost <= interrupted * len(rollouts_in(batch))
        for _ in range(10):
            collector.rollout()
        assert collector.stats()["frames_discarded"] == 0


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
