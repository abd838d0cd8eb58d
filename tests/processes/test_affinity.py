"""Workers that run on chosen processors."""

import functools
import os

import numpy as np
import pytest
import rig

from gleanrl import ConfigError, MultiAsyncCollector, MultiSyncCollector
from gleanrl.collectors import AsyncBatchedCollector
from gleanrl.core.affinity import cores, shares

ALLOWED = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.usefixtures("tidy_workers"),
    pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one processor"),
]
ONE, OTHER = ALLOWED[0], ALLOWED[-1]


class Pinned(rig.Count):
    """Observes its number, and the processors that it may use as the bits of a number."""

    def _observe(self, where):
        return np.array([self.number, bits(os.sched_getaffinity(0))], np.float64)


def bits(processors):
    return float(sum(1 << processor for processor in processors))


def pinned(number):
    return functools.partial(Pinned, number)


def seen(batch):
    """Return by environment the bits of its processors."""
    return dict(batch["observation"].reshape(-1, 2).tolist())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([[ONE], [OTHER]], {0: bits([ONE]), 1: bits([OTHER])}),
        (lambda worker: [ONE, OTHER][: worker + 1], {0: bits([ONE]), 1: bits([ONE, OTHER])}),
        ("auto", dict(enumerate(map(bits, shares(cores(ALLOWED), 2))))),
    ],
)
def test_workers_run_on_their_processors(given, found):
    with MultiSyncCollector(
        [pinned(0), pinned(1)],
        None,
        frames_per_batch=16,
        worker_affinity=given,
        on_failure="relaunch",
    ) as collector:
        batches = iter(collector)
        assert seen(next(batches)) == found
        assert "worker 1: processors [" in collector.explain()
        os.kill(collector.map_fn("env.pid", [()] * 2)[1], 9)
        with pytest.warns(UserWarning, match=r"replacement|replaced"):
            assert seen(next(batches)) == found
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize("given", [None, [[OTHER], [ONE, OTHER]]])
def test_central_inference_pins_the_policy_and_the_workers_apart(given):
    with MultiAsyncCollector(
        [pinned(0), pinned(1)],
        rig.encoded(4),
        frames_per_batch=16,
        inference="central",
        driver_affinity=[ONE],
        worker_affinity=given,
    ) as collector:
        found = {}
        while len(found) < 2:
            found |= seen(collector.next())
        assert found == dict(enumerate(map(bits, given or [ALLOWED] * 2)))
        pid = int(collector.stats("per_worker")["policy_process/pid"])
        assert os.sched_getaffinity(pid) == {ONE}


def test_torchrls_arguments_pin_workers():
    with AsyncBatchedCollector(
        [pinned(0), pinned(1)],
        policy=rig.encoded(4),
        frames_per_batch=16,
        transition_chunk_size=8,
        worker_affinity=lambda worker: [[ONE, OTHER][worker]],
    ) as collector:
        found = {}
        while len(found) < 2:
            found |= seen(next(iter(collector)))
        assert found == {0: bits([ONE]), 1: bits([OTHER])}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"worker_affinity": [[ONE]]}, "1 entries for 2 workers"),
        ({"worker_affinity": [[ONE], []]}, r"worker_affinity\[1\]"),
        ({"worker_affinity": [[ONE], [100_000]]}, "may use"),
        ({"worker_affinity": "numa"}, "'auto'"),
        ({"worker_affinity": [0, 1]}, r"worker_affinity\[0\] \(0\) must be a collection"),
        ({"worker_affinity": [[ONE], [ONE]], "backend": "inline"}, "processes"),
        ({"driver_affinity": [ONE]}, "needs inference="),
    ],
)
def test_what_cannot_be_pinned_is_refused_before_a_start(options, says):
    with pytest.raises(ConfigError, match=says):
        MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=8, **options)


def test_equal_shares_are_whole_cores_of_one_node(tmp_path):
    """Two nodes of two cores with two threads each, numbered as usual: 0 to 3, then their twins."""
    for processor in range(8):
        own = tmp_path / f"cpu{processor}"
        (own / f"node{processor % 4 // 2}").mkdir(parents=True)
        (own / "topology").mkdir()
        (own / "topology" / "physical_package_id").write_text(str(processor % 4 // 2))
        (own / "topology" / "core_id").write_text(str(processor % 2))
    found = cores(range(8), tmp_path)
    assert found == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert shares(found, 2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert shares(found, 8) == [{0, 4}, {0, 4}, {1, 5}, {1, 5}, {2, 6}, {2, 6}, {3, 7}, {3, 7}]
    assert shares(cores([0, 2, 6], tmp_path), 3) == [{0}, {0}, {2, 6}]
