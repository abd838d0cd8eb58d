"""A sample of the standing hunt, and what its checks find."""

import inspect
import os
import time
import warnings

import pytest
import torch
from tests.covering import ALL
from tools import trials
from tools.hunt import run as hunting
from tools.hunt.cases import ALWAYS, EXCUSED, OPTIONS, Case, draw
from tools.hunt.checks import Checker, Wrong
from tools.hunt.run import Refused, iterate

import gleanrl

HERE = [number for number in range(600) if draw(number).backend == "here"][: 150 if ALL else 24]
WORKERS = [number for number in range(300) if draw(number).backend != "here"][: 8 if ALL else 3]
KINDS = (gleanrl.Collector, gleanrl.MultiSyncCollector, gleanrl.DistributedCollector)


@pytest.mark.parametrize("number", HERE + WORKERS)
def test_every_frame_of_a_random_collector_is_right(number):
    try:
        hunting.run(draw(number))
    except Refused as err:
        pytest.skip(str(err))


def test_every_argument_of_a_collector_is_drawn_or_excused():
    known = OPTIONS.keys() | ALWAYS | EXCUSED.keys()
    taken = {name for kind in KINDS for name in inspect.signature(kind).parameters}
    assert taken - known == set()
    assert known - taken == {"front_door"}


LAWS = {
    "warned through whole trajectories": Case(
        backend="sync", workers=2, options={"trajs_per_batch": 3}, events=("silent", *[""] * 8)
    ),
    "warned after a load": Case(
        backend="sync", workers=2, events=("silent", "", "", "reload", "", "")
    ),
    "warned in the background": Case(background=True, sink="buffer", events=("silent", *[""] * 3)),
    "rows of preempted rollouts": Case(
        backend="sync",
        workers=2,
        sink="buffer",
        background=True,
        options={"preemptive_threshold": 0.5},
        events=("",) * 3,
    ),
    "half batches of a pool": Case(env="NextStep", envs=3, steps=8, seed=66, events=("",) * 3),
}


@pytest.mark.parametrize("case", LAWS.values(), ids=LAWS)
def test_a_law_holds_in_a_case_that_asks_for_it(case):
    hunting.run(case)


def test_a_missing_warning_is_found(monkeypatch):
    monkeypatch.setattr(hunting._Run, "open", silenced(hunting._Run.open))
    with pytest.raises(Wrong, match="no warning"):
        hunting.run(LAWS["warned after a load"])


def silenced(build):
    """Return a way to open collectors that send no warning."""

    def quiet(run):
        collector = build(run)
        warnings.simplefilter("ignore")
        return collector

    return quiet


def stream():
    return [batch.clone() for batch in iterate(Case(envs=2, steps=6, events=("",) * 4))]


def shifted(batches):
    batches[1]["next", "observation"][0, 2] = batches[1]["next", "observation"][0, 3]


def wrong_version(batches):
    batches[2]["policy_version"][1, 3] += 1


def lost_frame(batches):
    batches[1] = batches[1][:, 1:]


def lost_batch(batches):
    del batches[2]


def repeated_batch(batches):
    batches.insert(2, batches[1].clone())


def swapped_environments(batches):
    batches[1]["collector", "traj_ids"] = batches[1]["collector", "traj_ids"].flip(0)


def wrong_end(batches):
    done = batches[1]["next", "done"]
    done[0, 0] = ~done[0, 0]


def wrong_reward(batches):
    batches[3]["next", "reward"][1, 1] += 1


def stale_action(batches):
    batches[1]["action"][0, 1:] = batches[1]["action"][0, :-1].clone()


def late_reset(batches):
    after, root = batches[1]["next", "observation"], batches[1]["observation"]
    ends = batches[1]["next", "done"][:, :-1, 0]
    env, step = (int(one[0]) for one in torch.nonzero(ends, as_tuple=True))
    root[env, step + 1] = after[env, step]


ERRORS = [shifted, wrong_version, lost_frame, lost_batch, repeated_batch, swapped_environments]
ERRORS += [wrong_end, wrong_reward, stale_action, late_reset]


def check(batches):
    checker = Checker()
    for batch in batches:
        checker.batch(batch)


@pytest.mark.parametrize("damage", ERRORS)
def test_a_planted_error_is_found(damage):
    batches = stream()
    check(batches)
    damage(batches)
    with pytest.raises(Wrong):
        check(batches)


def raising():
    raise ArithmeticError("on purpose")


def dying():
    os.write(2, b"last words")
    os._exit(3)


ENDS = {
    "right": (lambda: "right", "right"),
    "raising": (raising, "wrong ArithmeticError: on purpose"),
    "dying": (dying, "wrong ended with code 3: last words"),
    "hanging": (lambda: str(time.sleep(60)), "wrong hangs for 1 s"),
}


def test_a_trial_answers_raises_dies_or_hangs():
    calls = [(name, call) for name, (call, _) in ENDS.items()]
    found = dict(trials.answers(calls, limit_s=1.0, jobs=2))
    assert found.keys() == ENDS.keys()
    for name, said in found.items():
        assert said.startswith(ENDS[name][1])
