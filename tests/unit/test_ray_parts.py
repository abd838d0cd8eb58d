"""The parts of Ray collectors that need no Ray."""

import socket
import sys
import types
import weakref

import numpy as np
import pytest
import rig
import torch

from gleanrl import ConfigError, RayCollector, RayWeightSyncScheme, WeightSyncScheme
from gleanrl.transport.peer import RemoteFlag
from gleanrl.transport.ray_actor import ActorPair, RayNode
from gleanrl.transport.ray_nodes import (
    Session,
    check_options,
)


def test_a_byte_tells_only_changes():
    told = []
    byte = RemoteFlag(told.append)
    for value in (0, 1, 1, 0):
        byte[0] = value
        assert byte[0] == value
    assert told == [1, 0]


@pytest.mark.parametrize("name", ["max_restarts", "lifetime", "max_concurrency"])
def test_options_that_collection_depends_on_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        check_options({name: 1})


def test_options_get_one_cpu_unless_they_say_otherwise():
    assert check_options({"num_gpus": 1}) == {"num_cpus": 1, "num_gpus": 1}
    assert check_options({"num_cpus": 0})["num_cpus"] == 0
    with pytest.raises(ConfigError, match="mapping"):
        check_options(3)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'gleanrl\[ray\]'"):
        RayCollector(["CartPole-v1"], frames_per_batch=8)


def test_the_scheme_has_its_name():
    assert isinstance(WeightSyncScheme.from_backend("ray"), RayWeightSyncScheme)


class FakeRay(types.ModuleType):
    """Knows only whether it is on, and which of several it is."""

    def __init__(self):
        super().__init__("ray")
        self.started, self.on, self.given = 0, False, None

    def is_initialized(self):
        return self.on

    def init(self, **given):
        self.started, self.on, self.given = self.started + 1, True, given

    def shutdown(self):
        self.on = False

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: str(self.started))


@pytest.fixture
def fake(monkeypatch):
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


class Reference:
    """Stands for the weights ``array`` in Ray's store."""

    def __init__(self, array):
        self.array = array


def test_no_reference_to_weights_outlives_the_call_that_brings_them(fake):
    fake.get = lambda reference: reference.array
    reference, into = Reference(np.arange(3, dtype=np.uint8)), torch.zeros(3, dtype=torch.uint8)
    transfer, there = ActorPair(None).receive(into), weakref.ref(reference)
    RayNode.give(None, 0, [reference])
    del reference
    assert there() is None
    transfer.finish()
    assert into.tolist() == [0, 1, 2]


def test_the_last_collector_ends_the_ray_that_the_first_one_started(fake):
    session, one, two = Session(), object(), object()
    session.enter(one, {"num_cpus": 2})
    session.enter(two, None)
    assert fake.given == {"num_cpus": 2}
    assert fake.started == 1
    session.leave(one, True)
    session.leave(one, True)
    assert fake.on
    session.leave(two, True)
    assert not fake.on


def test_ray_that_is_the_users_stays(fake):
    session, one = Session(), object()
    fake.init()
    with pytest.warns(UserWarning, match="no effect"):
        session.enter(one, {"num_cpus": 2})
    session.leave(one, True)
    assert fake.on
    fake.shutdown()
    session.enter(one, None)  # started here, and then handed over
    session.leave(one, False)
    assert fake.on
    fake.shutdown()
    session.enter(one, None)
    fake.shutdown()
    fake.init()  # by somebody else, meanwhile
    session.leave(one, True)
    assert fake.on


@pytest.mark.parametrize("source", ["ray_init_config", "RAY_ADDRESS", "ray_current_cluster"])
def test_a_cluster_that_is_gone_is_named_at_once(fake, monkeypatch, tmp_path, source):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = None
    if source == "ray_init_config":
        config = {"address": address}
    elif source == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:  # what Ray leaves behind when its processes are killed
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    with rig.in_time(), pytest.raises(ConfigError, match=f"at {address}, which .*{source}"):
        RayCollector(["CartPole-v1"], frames_per_batch=8, ray_init_config=config)
    assert not fake.started
