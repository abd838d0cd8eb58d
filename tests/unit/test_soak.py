"""The checks of the soak, which have to find wrong frames and must not grow by themselves."""

import pickle

import pytest
import torch
from tensordict import TensorDict
from tools import soak


def batch(*trajectories, first=0):
    """Return a frame of environment 0 for each of ``trajectories``, which end with it."""
    steps = torch.arange(first, first + len(trajectories), dtype=torch.float64)
    observed = torch.stack([0 * steps, 7 + 0 * steps, steps], -1)[None]
    size = [1, len(trajectories)]
    after = {
        "observation": observed + torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
        "done": torch.ones(*size, 1, dtype=torch.bool),
        "reward": torch.zeros(*size, 1),
    }
    return TensorDict(
        {
            "observation": observed,
            "stamp": torch.zeros(*size, 2),
            "policy_version": torch.zeros(size),
            "collector": {
                "mask": torch.ones(size, dtype=torch.bool),
                "traj_ids": torch.tensor([trajectories]),
            },
            "next": after,
        },
        size,
    )


def test_the_ledger_keeps_no_more_of_many_trajectories_than_of_a_few():
    ledger, sizes = soak.Ledger(), []
    for first in range(1000, 4000, 1000):
        ledger.take(batch(*range(4 * first, 4 * (first + 1000), 4), first=first))
        sizes.append(len(pickle.dumps(ledger)))
    assert ledger.found["frames"] == 3000
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("again", [0, 4, 8])
def test_the_ledger_finds_a_number_that_comes_again(again):
    ledger = soak.Ledger()
    ledger.take(batch(0, 4, 8))
    with pytest.raises(AssertionError, match="came again"):
        ledger.take(batch(again, first=3))
