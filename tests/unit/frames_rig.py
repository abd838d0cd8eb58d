"""Batches whose frames are numbered, and cut into trajectories at random."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict


def make_batch(ids, ended=None, start=1):
    """A batch over ``ids``; every frame is numbered, from ``start`` on."""
    ids = torch.as_tensor(ids)
    ended = torch.zeros_like(ids, dtype=torch.bool) if ended is None else torch.as_tensor(ended)
    number = torch.arange(start, start + ids.numel(), dtype=torch.float32).reshape(ids.shape)
    return TensorDict(
        {
            "observation": number.unsqueeze(-1).repeat_interleave(3, -1),
            "pixels": number.to(torch.uint8),
            "agents": TensorDict(
                {"action": number[..., None, None].expand(*ids.shape, 2, 4).clone()},
                batch_size=(*ids.shape, 2),
            ),
            "collector": {"traj_ids": ids},
            "next": {
                "reward": number.unsqueeze(-1),
                "done": ended.unsqueeze(-1),
                "terminated": ended.unsqueeze(-1).clone(),
            },
        },
        batch_size=ids.shape,
        names=[None] * (ids.ndim - 1) + ["time"],
    )


def assert_same(ours, theirs):
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert ours[key].dtype == theirs[key].dtype
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


@st.composite
def flags(draw, max_ndim=2):
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_ndim))
    shape[-1] = draw(st.integers(1, 12))
    bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return torch.tensor(bits).reshape(shape)


def ids_from(ended, first=0):
    """Trajectory ids that change after every end and with every row."""
    starts = torch.ones_like(ended)
    starts[..., 1:] = ended[..., :-1]
    return starts.reshape(-1).cumsum(0).reshape(ended.shape) - 1 + first
