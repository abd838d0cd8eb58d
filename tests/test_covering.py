"""Tests of many combinations run for those in which each value of each parameter occurs."""

import itertools
from types import SimpleNamespace

import pytest
from tests import covering


@pytest.mark.parametrize("lengths", [(3, 3), (5, 2), (2, 2, 3), (7, 1, 4), (1, 1)])
def test_each_value_occurs_in_as_few_combinations_as_can_be(lengths):
    places = [tuple(enumerate(place)) for place in itertools.product(*map(range, lengths))]
    chosen = covering.covering(places)
    assert set(itertools.chain(*chosen)) == set(itertools.chain(*places))
    assert len(chosen) == max(lengths)
    pairs = [pair for place in chosen for pair in itertools.combinations(place, 2)]
    assert lengths != (2, 2, 3) or len(pairs) == len(set(pairs))


def test_arguments_of_one_mark_go_together(monkeypatch):
    marks = [pytest.mark.parametrize("letter", "abc"), pytest.mark.parametrize(("n", "half"), [])]
    product = itertools.product("abc", [(1, 0.5), (2, 1.0)], [True, False])
    items = [
        SimpleNamespace(
            parent=None,
            originalname="test",
            callspec=SimpleNamespace(params=dict(letter=a, n=n, half=half, fixture=other)),
            iter_markers=lambda name: [mark.mark for mark in marks],
            get_closest_marker=lambda name: name == "covering",
        )
        for a, (n, half), other in product
    ]
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    every = len(items)
    monkeypatch.setattr(covering, "ALL", True)
    covering.pytest_collection_modifyitems(config, items)
    assert len(items) == every
    monkeypatch.setattr(covering, "ALL", False)
    covering.pytest_collection_modifyitems(config, items)
    found = [tuple(item.callspec.params.values()) for item in items]
    assert found == [("a", 1, 0.5, True), ("b", 2, 1.0, False), ("c", 1, 0.5, False)]
