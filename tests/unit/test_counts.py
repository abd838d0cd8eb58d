"""The cost of a step, in numbers that do not depend on the machine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import policies
from benchmarks.counts import (
    Still,
    calls_of_watching,
    calls_per_step,
    count_calls,
    count_traffic,
    still_frames,
)

FRAME = 4 * 84 * 84


def categorical():
    return policies.categorical_policy(policies.mlp(4, 2))


@pytest.mark.parametrize("make_policy", [lambda: None, categorical], ids=["random", "mlp"])
def test_a_step_of_all_environments_takes_few_calls(make_policy):
    step, batch = calls_per_step(envs=16, policy=make_policy(), steps=8)
    assert step.python <= 10
    assert step.c <= 8
    assert batch.python <= 900
    assert batch.c <= 600


def test_watching_takes_few_calls_of_a_batch(monkeypatch):
    monkeypatch.setenv("GLEANRL_TOP", "0")  # its file is written once a second
    calls = calls_of_watching()
    assert calls.python <= 12
    assert calls.c <= 30


def test_calls_per_step_do_not_grow_with_the_number_of_environments():
    few, _ = calls_per_step(envs=2, policy=categorical(), steps=8)
    many, _ = calls_per_step(envs=32, policy=categorical(), steps=8)
    assert few == many


@pytest.mark.parametrize(
    ("make_policy", "scratch"),
    [(lambda: None, 0), (categorical, 4 * 64 * 4 * 4 * 8 + 4096)],
    ids=["random", "mlp"],
)
def test_every_delivered_value_is_written_once(make_policy, scratch):
    # Four layers of 64 floats, 4 environments, 8 steps: activations lie elsewhere.
    traffic = count_traffic([Still] * 4, 8, make_policy())
    ids = traffic.written["collector.traj_ids"]
    others = {name: n for name, n in traffic.written.items() if name != "collector.traj_ids"}
    assert set(others.values()) == {1.0}
    assert ids <= 3.0
    assert traffic.unnamed <= scratch


def test_frames_are_not_copied_on_their_way_into_the_batch():
    traffic = count_traffic([still_frames] * 2, 8)
    assert traffic.written["observation"] == 1.0
    assert traffic.written["next.observation"] == 1.0
    assert traffic.transient < FRAME


def test_calls_are_counted_exactly():
    def run():
        abs(-1)
        max(1, 2)

    calls = count_calls(run)
    assert (calls.python, calls.c) == (1, 2)
