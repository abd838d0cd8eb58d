"""The sum tree against a plain list of priorities."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.covering import examples

from gleanrl.memory.replay.samplers import SumTree


@examples(60)
@given(data=st.data(), size=st.sampled_from([1, 5, 31, 32, 33, 2048, 2049, 70_000]))
def test_a_sum_tree_holds_what_was_set(data, size):
    tree = SumTree(size)
    model = torch.zeros(size, dtype=torch.float64)
    for _ in range(3):
        places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8, unique=True))
        values = data.draw(st.lists(st.floats(0, 1e6), min_size=len(places), max_size=len(places)))
        given = torch.tensor(values, dtype=torch.float64)
        tree.set(torch.tensor(places), given)
        model[places] = torch.where(given > 1e-300, given, 0.0)
        assert (tree.leaves == model).all()
        positive = model[model > 0]
        assert tree.smallest() == (float(positive.min()) if len(positive) else torch.inf)
        drawn = tree.draw(64)
        if not len(positive):
            assert drawn is None
        else:
            assert (model[drawn] > 0).all()


def test_a_sum_tree_draws_in_proportion():
    size = 100_000
    tree = SumTree(size)
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(size, dtype=torch.float64, generator=generator)
    values[: size // 2] *= 3
    tree.set(torch.arange(size), values)
    drawn = tree.draw(200_000, generator)
    share = (drawn < size // 2).double().mean()
    assert abs(share - values[: size // 2].sum() / values.sum()) < 0.005
    counts = torch.bincount(drawn // 10_000, minlength=10) / len(drawn)
    expected = values.view(10, -1).sum(1) / values.sum()
    assert (counts - expected).abs().max() < 0.005
