"""Nodes that are lost: what goes on without them, and with those that take their place."""

import os
import signal

import pytest
import rig
import torch
from tensordict.nn import TensorDictModule

from gleanrl import DistributedCollector
from gleanrl.engine.backends.process import zygote


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Have the zygote and all that torch opens once per process up."""
    zygote()
    nodes(rig.counting()).shutdown()


@pytest.fixture(autouse=True)
def _tidy(_warm):
    with rig.nothing_left_behind():
        yield


def nodes(*envs, policy=None, per_node=8, **options):
    options = {"tcp_port": 0, "launcher": "mp", **options}
    return DistributedCollector(list(envs), policy, frames_per_batch=per_node, **options)


def encoded(width=10):
    return TensorDictModule(
        rig.Encoded(width), in_keys=["observation"], out_keys=["action", "seen"]
    )


def number_in(batch):
    return int(batch["next", "observation"][0, 0])


def ids_in(batch):
    return set(batch["collector", "traj_ids"].flatten().tolist())


def kill(collector, worker):
    """Kill a node and wait until it has ended."""
    pid = collector.map_fn("env.pid")[worker]
    os.kill(pid, signal.SIGKILL)
    rig.await_end([pid])


# -- without them ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:collection goes on without it")
def test_everything_can_be_asked_of_the_nodes_that_are_left():
    policy = encoded()
    with nodes(rig.counting(0), rig.counting(1), policy=policy, on_failure="continue") as collector:
        collector.next()
        policy.module.set(1.0)
        collector.update_policy_weights_()
        kill(collector, 0)
        assert collector.getattr_env("number") == 1
        assert collector.get_distant_attr("env.number") == [None, 1]
        assert collector.map_fn("env.get_wrapper_attr", [("number",)] * 2) == [None, 1]
        assert collector.set_seed(5) == 6
        assert collector.set_seed(5, static_seed=True) == 5
        collector.reset()
        collector.update_policy_weights_(worker_ids=[0, 1])
        assert collector.stats("per_worker")["worker_0/alive"] is False
        state = collector.state_dict()
        collector.load_state_dict(state)
        seen = {number_in(collector.next()) for _ in range(6)}
        assert seen == {1}


def random_steps(batch):
    return batch["action"].flatten().tolist()


@pytest.mark.filterwarnings("ignore:collection goes on without it")
def test_a_state_after_a_loss_loads_into_whole_collectors():
    def make():
        torch.manual_seed(0)
        return nodes(rig.counting(0), rig.counting(1), per_node=40, on_failure="continue")

    used, drawn = set(), []
    with make() as collector:
        for _ in range(8):
            batch = collector.next()
            used |= ids_in(batch)
            if number_in(batch) == 1:
                drawn.append(random_steps(batch))
        kill(collector, 1)
        for _ in range(4):
            used |= ids_in(collector.next())
        state = collector.state_dict()
    assert state["worker1"]["lost"] is True
    again = []
    for _ in range(2):
        with make() as collector:
            collector.load_state_dict(state)
            assert collector.stats()["frames"] == state["frames"]
            begun = [batch for batch in (collector.next() for _ in range(10))]
            first = next(batch for batch in begun if number_in(batch) == 1)
            assert not used & set().union(*map(ids_in, begun))
            again.append(random_steps(first))
    assert again[0] == again[1]
    assert again[0] not in drawn
