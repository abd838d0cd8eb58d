"""`Collector` as the one name for collectors in this process and over others."""

import functools
import inspect
import sys

import numpy as np
import pytest

import gleanrl
from gleanrl import ConfigError
from gleanrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector


def collect(create_env_fn="CartPole-v1", policy=None, **options):
    return Collector(create_env_fn, policy, frames_per_batch=16, total_frames=32, **options)


@pytest.mark.parametrize(
    ("options", "kind", "shape"),
    [
        ({"backend": "process"}, MultiAsyncCollector, (16,)),
        ({"backend": "multiprocessing", "num_collectors": 2}, MultiAsyncCollector, (16,)),
        ({"num_collectors": 1}, MultiAsyncCollector, (16,)),
        ({"num_collectors": 2, "sync": False}, MultiAsyncCollector, (16,)),
        ({"num_collectors": 2, "sync": True}, MultiSyncCollector, (2, 8)),
        ({"num_collectors": 2, "sync": True, "num_envs": 4}, MultiSyncCollector, (2, 4, 2)),
    ],
)
def test_selectors_choose_the_kind_over_processes(options, kind, shape):
    with collect(**options) as collector:
        assert type(collector) is kind
        assert not isinstance(collector, Collector)
        assert collector.num_workers == options.get("num_collectors", 1)
        assert [tuple(batch.shape) for batch in collector] == [shape] * 2


@pytest.mark.parametrize("options", [{}, {"backend": "inline"}, {"backend": "direct"}])
def test_without_selectors_and_inline_it_is_in_this_process(options):
    with collect(**options) as collector:
        assert type(collector) is Collector
    with collect(backend="inline", num_collectors=1) as collector:
        assert type(collector) is Collector


def test_a_list_has_one_environment_per_worker():
    with collect(["CartPole-v1"] * 2, sync=True, backend="process") as collector:
        assert collector.num_workers == 2
    with collect(["CartPole-v1"] * 2, num_collectors=2) as collector:
        assert collector.num_workers == 2


def test_everything_may_be_given_by_name():
    with Collector(
        create_env_fn="CartPole-v1", policy=None, frames_per_batch=16, num_collectors=2
    ) as collector:
        assert collector.num_workers == 2


def test_options_of_the_backend_reach_it_and_are_not_changed():
    options = {"cat_results": -1, "num_sub_threads": 1}
    with collect(num_collectors=2, sync=True, backend_options=options) as collector:
        assert tuple(collector.next().shape) == (16,)
    assert options == {"cat_results": -1, "num_sub_threads": 1}
    with pytest.raises(TypeError, match="tea"):
        collect(backend="process", backend_options={"tea": 1})


def test_defaults_of_collector_that_the_target_lacks_are_dropped_and_others_refused():
    defaults = {"return_same_td": np.False_, "trajs_per_write": None, "policy_factory": None}
    with collect(num_collectors=1, **defaults) as collector:
        assert collector.num_workers == 1
    with pytest.raises(TypeError, match="takes no return_same_td=: it is an argument of Collector"):
        collect(num_collectors=1, return_same_td=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_collectors": True}, TypeError, r"num_collectors \(True\) must be a whole"),
        ({"num_collectors": 2.0}, TypeError, r"num_collectors \(2.0\)"),
        ({"num_collectors": 0}, ConfigError, r"num_collectors \(0\) must be at least 1"),
        ({"backend": "process", "num_collectors": -1}, ConfigError, "at least 1"),
        ({"backend": "inline", "num_collectors": "2"}, TypeError, "whole number"),
        ({"backend": "inline", "sync": False}, ConfigError, "backend='process'"),
        ({"backend": "teleport", "num_collectors": 2}, ConfigError, "'teleport'"),
        ({"backend": "thread"}, NotImplementedError, "'thread'"),
        ({"backend": "process", "sync": 2}, TypeError, r"sync \(2\)"),
        ({"backend": "process", "backend_options": [1]}, TypeError, "must be a mapping"),
        (
            {"backend": "process", "backend_options": {"num_workers": 2}},
            ConfigError,
            r"reserved names \['num_workers'\]",
        ),
        (
            {"backend": "process", "backend_options": {"sync": True, "backend": "inline"}},
            ConfigError,
            r"reserved names \['backend', 'sync'\]",
        ),
        (
            {"backend": "process", "backend_options": {"frames_per_batch": 2, "policy": None}},
            ConfigError,
            r"duplicate names \['frames_per_batch', 'policy'\]",
        ),
    ],
)
def test_selectors_that_make_no_sense_are_named(options, error, message):
    with pytest.raises(error, match=message):
        collect(**options)


def test_lists_have_to_match_the_number_of_workers():
    with pytest.raises(ConfigError, match=r"num_collectors \(3\) does not match .* lists 2"):
        collect(["CartPole-v1"] * 2, num_collectors=3)
    with pytest.raises(ConfigError, match="is empty"):
        collect([], backend="process")


def test_only_two_arguments_go_by_position():
    for options in ({}, {"backend": "process"}):
        with pytest.raises(TypeError, match="positional"):
            Collector("CartPole-v1", None, 16, frames_per_batch=16, **options)


class Mine(Collector):
    """What users derive."""


def test_subclasses_stay_where_they_are_and_refuse_selectors():
    with Mine("CartPole-v1", frames_per_batch=16, backend="inline") as collector:
        assert type(collector) is Mine
    for options in ({"backend": "process"}, {"num_collectors": 1}, {"sync": True}):
        with pytest.raises(TypeError, match="collector_class="):
            Mine("CartPole-v1", frames_per_batch=16, **options)


def test_a_subclass_runs_inside_workers_all_the_same():
    with MultiSyncCollector(
        ["CartPole-v1"],
        frames_per_batch=16,
        backend="inline",
        collector_class=functools.partial(Mine),
    ) as collector:
        assert tuple(collector.next().shape) == (1, 16)


def test_the_signature_shows_the_selectors():
    shown = inspect.signature(gleanrl.Collector).parameters
    assert list(shown)[:2] == ["create_env_fn", "policy"]
    assert {"backend", "num_collectors", "sync", "backend_options"} <= set(shown)
    assert shown["frames_per_batch"].default is inspect.Parameter.empty


@pytest.mark.skipif(sys.version_info < (3, 11, 5), reason="inspect prefers __new__ before")
def test_a_subclass_shows_its_own_signature():
    class Other(Collector):
        def __init__(self, name):
            super().__init__(name, frames_per_batch=16)

    assert list(inspect.signature(Other).parameters) == ["name"]
    Other("CartPole-v1").shutdown()


def seeded():
    import torch

    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"update_at_each_batch": True}, (2, 8)),
        ({"preemptive_threshold": 1.0}, (2, 8)),
        ({"num_threads": 1, "num_sub_threads": 1}, (2, 8)),
        ({"cat_results": 0}, (16,)),
        ({"init_fn": seeded}, (2, 8)),
        ({"start_timeout": 90.0}, (2, 8)),
        ({"collector_class": Collector}, (2, 8)),
    ],
)
def test_arguments_that_only_collectors_with_workers_have_reach_them(options, shape):
    with collect(num_collectors=2, sync=True, **options) as collector:
        assert [tuple(batch.shape) for batch in collector] == [shape] * 2


def test_every_argument_of_the_kinds_over_processes_passes():
    own = inspect.signature(Collector).parameters
    for name, parameter in inspect.signature(MultiSyncCollector.__init__).parameters.items():
        if name in {"self", "create_env_fn", "policy", "num_workers", "sync", "backend", *own}:
            continue
        with collect(num_collectors=2, sync=True, **{name: parameter.default}) as collector:
            assert type(collector) is MultiSyncCollector


def test_arguments_that_a_class_passes_on_to_its_base_reach_it():
    with pytest.raises(ConfigError, match="cat_results"):
        collect(backend="rpc", sync=True, cat_results="sideways")
    with pytest.raises(TypeError, match="RPCCollector takes no nonsense="):
        collect(backend="rpc", sync=True, nonsense=1)


def test_the_number_of_workers_has_one_name():
    with pytest.raises(TypeError, match="num_collectors"):
        collect(num_collectors=2, num_workers=3)
