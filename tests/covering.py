"""Which part of a large family of cases a test run takes; ``GLEANRL_TESTS=all`` runs all of it.

A test that is marked ``covering`` has several ``parametrize`` marks whose combinations prove little
more than their values do. It runs for as few combinations as hold each value of each mark, and for
all of them with ``GLEANRL_TESTS=all`` in the environment.
"""

import itertools
import os
from collections import Counter, defaultdict

from hypothesis import settings

ALL = os.environ.get("GLEANRL_TESTS") == "all"


def pytest_collection_modifyitems(config, items):
    """Leave out the combinations that repeat values."""
    families = defaultdict(list)
    for item in items:
        if not ALL and item.get_closest_marker("covering"):
            families[item.parent, item.originalname].append(item)
    left_out = [item for family in families.values() for item in _repeated(family)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        known = {*map(id, left_out)}
        items[:] = [item for item in items if id(item) not in known]


def _repeated(family):
    """Return those combinations of a test that it need not run for."""
    places = [_place(item) for item in family]
    chosen = covering(places)
    return [item for item, place in zip(family, places, strict=True) if place not in chosen]


def _place(item):
    """Return the values of a combination; those of one mark are one."""
    axes, values = [], {name: id(value) for name, value in item.callspec.params.items()}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        axes.append(tuple(values.pop(name.strip()) for name in names))
    return tuple(enumerate([*axes, *values.values()]))


def covering(places):
    """Return some of ``places``, tuples of values, in which each value occurs.

    Each adds as many values as possible, and repeats values and pairs of them as little.
    """
    parts = {p: [*p, *itertools.combinations(p, 2)] for p in places}
    missing, uses, chosen = set(itertools.chain(*places)), Counter(), []
    while missing:
        added = {place: len(missing.intersection(place)) for place in places}
        most = max(added.values())
        best = [place for place in places if added[place] == most]
        chosen.append(min(best, key=lambda place: sum(uses[part] for part in parts[place])))
        missing.difference_update(chosen[-1])
        uses.update(parts[chosen[-1]])
    return chosen


def examples(count):
    """Return settings of Hypothesis: ``count`` examples, or a quarter of them."""
    return settings(max_examples=count if ALL else -(-count // 4), deadline=None)
