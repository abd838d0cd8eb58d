"""RPCCollector: a DistributedCollector under TorchRL's name, with TorchRL's arguments."""

import pytest
import rig
import torch
from node_rig import kill, until_back

from gleanrl import DistributedCollector, RPCCollector, RPCDataCollector
from gleanrl.collectors.distributed.default_configs import DEFAULT_TENSORPIPE_OPTIONS
from gleanrl.weight_update import RPCWeightSyncScheme, WeightSyncScheme

pytestmark = pytest.mark.usefixtures("tidy_nodes")


def collect(kind=RPCCollector, envs=None, **options):
    options = {"launcher": "mp", "tcp_port": 0, "frames_per_batch": 16, "sync": True, **options}
    return kind(envs or [rig.counting(0), rig.counting(1)], **options)


def test_two_at_once_deliver_the_data_of_a_distributed_collector():
    options = {"envs": ["Pendulum-v1"] * 2, "total_frames": 64, "num_envs": 2}
    with (
        collect(**options) as one,
        collect(**options) as two,
        collect(DistributedCollector, **options) as other,
    ):
        assert one.set_seed(5) == two.set_seed(5) == other.set_seed(5)
        count = 0
        for batches in zip(one, two, other, strict=True):
            assert all(bool((batch == batches[-1]).all()) for batch in batches)
            count += 1
        assert count == 4
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"tensorpipe_options": DEFAULT_TENSORPIPE_OPTIONS}, "heartbeat="),
        ({"visible_devices": ["cuda:0", "cuda:1"]}, "policy_device="),
    ],
)
def test_arguments_of_torchs_agents_change_nothing(options, instead):
    (name,) = options
    with pytest.warns(DeprecationWarning, match=f"^{name}= is retired; use {instead}") as said:
        collector = collect(**options)
    assert len(said) == 1
    with collector:
        assert collector.next().numel() == 16


@pytest.mark.filterwarnings("ignore:collection continues", "ignore:worker 1 was replaced")
def test_a_lost_node_is_replaced():
    with collect(sync=False, frames_per_batch=8, on_failure="relaunch") as collector:
        collector.next()
        kill(collector, 1)
        assert until_back(collector, 1).numel() == 8


def test_its_names():
    assert RPCDataCollector is RPCCollector
    assert isinstance(WeightSyncScheme.from_backend("rpc"), RPCWeightSyncScheme)
