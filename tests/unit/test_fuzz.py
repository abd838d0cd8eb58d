"""Damaged files: a sample of what `python -m tools.fuzz` tries, and damages that it has found."""

import json
import os
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tools import fuzz, trials

from gleanrl import ConfigError, LazyTensorStorage, ReplayBuffer, load_dataset
from gleanrl.memory.tensor_files import TensorFileError


@pytest.mark.slow
def test_damaged_files_are_read_or_refused_and_change_nothing():
    with fuzz.drawing() as draw:

        def five(first):
            return "\n".join(draw(number)[1]() for number in range(first, first + 5))

        calls = [(first, partial(five, first)) for first in range(0, 40, 5)]  # forks are slow here
        # Those with nodes mostly wait for deadlines.
        found = [said for _, said in trials.answers(calls, 5 * fuzz.DEADLINE_S, jobs=4)]
    assert [said for said in found if trials.WRONG in said] == []
    assert sum(len(said.splitlines()) for said in found) == 40
    assert len(set("\n".join(found).splitlines())) > 4


def fifo(path):
    os.mkfifo(path)


def circle(path):
    path.symlink_to(path)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(3 << 30)


def nested(path):
    path.write_text('{"a":' * 700 + "1" + "}" * 700)


def nested_state(path):
    tree = 1
    for _ in range(700):
        tree = {"a": tree}
    parts = {"folder": "data-" + "0" * 32, "storage": tree, "sampler": {}}
    path.write_text(json.dumps({"format": "gleanrl replay buffer", "version": 3, **parts}))


DAMAGES = [fifo, circle, device, sparse, nested, nested_state]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_description_that_is_none_is_refused_at_once(damage, tmp_path):
    damage(tmp_path / "meta.json")
    damage(tmp_path / "card.json")
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    with pytest.raises(ConfigError):
        rb.loads(tmp_path)
    with pytest.raises(TensorFileError):
        load_dataset(tmp_path)
    assert rb[:]["a"].tolist() == [0, 1]
    if damage is not circle:  # which leads to no file, so there is none to lose
        with pytest.raises(ConfigError, match="choose another directory"):
            rb.dumps(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_data_that_are_no_file_are_refused_at_once(damage, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(4))
    rb.extend(TensorDict({"a": torch.arange(2)}, [2]))
    rb.dumps(tmp_path)
    file = next(tmp_path.rglob("0.bin"))
    file.unlink()
    damage(file)
    with pytest.raises(ConfigError):
        rb.loads(tmp_path)
    assert rb[:]["a"].tolist() == [0, 1]
    rb.dumps(tmp_path)  # replaces it
    rb.loads(tmp_path)
