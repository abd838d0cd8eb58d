"""Laws that the model of many nodes keeps."""

from dataclasses import replace

import pytest
from benchmarks.scaling import Cluster, bounds, simulate, straggler_factor
from hypothesis import given
from hypothesis import strategies as st
from tests.covering import examples

clusters = st.builds(
    Cluster,
    nodes=st.integers(1, 40),
    envs=st.integers(1, 64),
    step_s=st.sampled_from([1e-4, 1e-3, 1e-2]),
    steps=st.sampled_from([8, 64]),
    spread=st.sampled_from([0.0, 0.1, 0.5]),
    frame_bytes=st.sampled_from([0, 100, 1e4]),
    sync=st.booleans(),
    link_in=st.sampled_from([1e7, 1e9, float("inf")]),
    link_out=st.sampled_from([1e7, 1e9, float("inf")]),
    weight_bytes=st.sampled_from([0, 1e5, 1e7]),
    update_every=st.sampled_from([1, 4, 100]),
    one_object=st.booleans(),
    latency_s=st.sampled_from([0.0, 1e-4]),
    learn_frame_s=st.sampled_from([0.0, 1e-6, 1e-5]),
)
few = examples(60)


def rate(cluster, **changes):
    return simulate(replace(cluster, **changes)).frames_per_s


@pytest.mark.parametrize("sync", [True, False])
def test_one_node_without_costs_makes_its_environments_steps(sync):
    cluster = Cluster(envs=12, step_s=0.003, sync=sync)
    assert rate(cluster) == pytest.approx(12 / 0.003)
    assert rate(cluster, nodes=50) == pytest.approx(50 * 12 / 0.003)


@few
@given(clusters)
def test_no_run_exceeds_its_bounds(cluster):
    found = rate(cluster)
    # A run is finite: the rollouts counted last longer or shorter than the mean.
    slack = 1.001 if cluster.spread == 0 else 1.0 + cluster.spread
    limits = bounds(cluster)
    if cluster.spread:
        for noisy in ("straggler", "round"):
            limits.pop(noisy, None)
    for name, limit in limits.items():
        assert found <= limit * slack, name


def one_after_another(cluster):
    """Return the frames per second of synchronous rounds in which nothing overlaps."""
    rollout_s = cluster.rollout_s * straggler_factor(cluster.nodes, cluster.spread)
    sent_s = cluster.copies * cluster.sent_s / cluster.update_every
    moved_s = cluster.nodes * cluster.moved_s
    round_s = rollout_s + moved_s + sent_s + 2 * cluster.latency_s + cluster.learn_s
    return cluster.nodes * cluster.rollout_frames / round_s


@few
@given(clusters)
def test_rounds_are_no_slower_than_one_thing_after_another(cluster):
    cluster = replace(cluster, sync=True)
    slack = 0.99 if cluster.spread == 0 else 1 - cluster.spread / 2
    assert rate(cluster) >= one_after_another(cluster) * slack


@few
@given(clusters)
def test_waiting_for_nobody_is_no_slower_than_waiting_for_all(cluster):
    cluster = replace(cluster, sync=False)
    rounds = replace(cluster, sync=True, update_every=1)
    assert rate(cluster) >= rate(rounds) * 0.98


@few
@given(clusters, st.sampled_from(["link_in", "link_out"]))
def test_more_bandwidth_never_hurts(cluster, link):
    # In what order rollouts arrive changes what a finite run ends with.
    assert rate(cluster, **{link: 10 * getattr(cluster, link)}) >= rate(cluster) * 0.97


@few
@given(clusters)
def test_more_nodes_never_hurt_but_for_rounds_that_wait_for_more(cluster):
    cluster = replace(cluster, sync=False)
    assert rate(cluster, nodes=2 * cluster.nodes) >= rate(cluster) * 0.97


def test_each_bound_binds_where_nothing_else_does():
    node = Cluster(nodes=8, envs=10, step_s=0.01, steps=50)
    cases = {
        "node": node,
        "link in": replace(node, frame_bytes=1e4, link_in=2e7),
        "learner": replace(node, learn_frame_s=1e-3),
        "straggler": replace(node, sync=True, spread=0.5),
    }
    for name, cluster in cases.items():
        found = simulate(cluster, rollouts=400).frames_per_s
        assert found == pytest.approx(bounds(cluster)[name], rel=0.03), name
    # Many nodes, so that the round's other parts are small beside the weights.
    weights = replace(node, nodes=2000, sync=True, weight_bytes=1e6, link_out=1e7)
    assert rate(weights) == pytest.approx(bounds(weights)["weight out"], rel=0.06)


def test_the_slowest_of_many_takes_longer():
    factors = [straggler_factor(nodes, 0.3) for nodes in (1, 2, 10, 100, 1000)]
    assert factors[0] == 1
    assert factors == sorted(factors)
    # Two log-normal times: E max = 2 Phi(sigma / sqrt 2) of the mean.
    assert straggler_factor(2, 0.3) == pytest.approx(1.1644, rel=1e-3)


def test_weights_are_older_where_sending_them_takes_longer():
    cluster = Cluster(nodes=16, steps=64, step_s=1e-3, update_every=16, spread=0.1, link_out=1e9)
    lags = [simulate(replace(cluster, weight_bytes=size)).lag for size in (0, 1e6, 1e7, 1e8)]
    assert lags == sorted(lags)
    assert lags[-1] > 2 * lags[0]
    once = simulate(replace(cluster, weight_bytes=1e8, one_object=True)).lag
    assert once < lags[-1]
