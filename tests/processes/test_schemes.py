"""Schemes without a collector: one process sends weights, others have them."""

import multiprocessing
import os
import signal

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gleanrl import ClosedError, Collector, ConfigError, WeightsError, WorkerDied, WorkerError
from gleanrl.weight_update import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

LIMIT = 30.0
SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
both = pytest.mark.parametrize("kind", SCHEMES)


class Net(nn.Module):
    """Parameters, a buffer and extra state; all have one number."""

    def __init__(self, number=0.0):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.extra = None
        self.fill(number)

    def fill(self, number):
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(number)
        self.extra = number

    def numbers(self):
        tensors = (*self.parameters(), *self.buffers())
        return {number for tensor in tensors for number in tensor.flatten().tolist()}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        if state == "bad":
            raise ArithmeticError("bad state")
        self.extra = state


def work(scheme, worker, pipe):
    """A receiver that does what it is asked to."""
    model = Net(-1.0)
    scheme.init_on_receiver(model_id="policy", worker_idx=worker, model=model)
    scheme.connect()
    pipe.send("connected")
    for ask, value in iter(pipe.recv, None):
        if ask == "model":
            with scheme.lock:
                pipe.send((scheme.version, model.numbers(), model.extra))
        elif ask == "receive":
            weights = scheme.receive(value)
            pipe.send(None if weights is None else weights["layer", "weight"].mean().item())
        elif ask == "shutdown":
            scheme.shutdown()
            pipe.send("down")


class Rig:
    """A sender here and its receivers."""

    def __init__(self, scheme, method="fork", workers=1, **given):
        self.scheme = scheme
        ctx = multiprocessing.get_context(method)
        counted = {} if "params_map" in given else {"num_workers": workers}
        scheme.init_on_sender(model_id="policy", ctx=ctx, **given, **counted)
        self.pipes, self.processes = [], []
        for worker in range(workers):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=work, args=(scheme, worker, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def connect(self):
        self.scheme.connect()
        for worker in range(len(self.pipes)):
            assert self.answer(worker) == "connected"

    def answer(self, worker):
        assert self.pipes[worker].poll(LIMIT), "no answer"
        return self.pipes[worker].recv()

    def ask(self, question, value=None, worker=0):
        self.pipes[worker].send((question, value))
        return self.answer(worker)

    def close(self):
        self.scheme.shutdown()
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(LIMIT)
            assert process.exitcode is not None


@pytest.fixture
def rig():
    made = []

    def make(*args, **kwargs):
        made.append(Rig(*args, **kwargs))
        made[-1].connect()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kind", "method"), [*((kind, "fork") for kind in SCHEMES), (SCHEMES[0], "spawn")]
)
def test_what_is_sent_is_in_the_other_processes_model(rig, kind, method):
    policy = Net(1.0)
    pair = rig(kind(), method, model=policy)
    assert pair.ask("model") == (0, {1.0}, 1.0)
    assert pair.ask("receive") is None  # the first weights came with connect
    for number in (2.0, 3.0):
        policy.fill(number)
        pair.scheme.send()
        assert pair.ask("model") == (number - 1, {number}, number)
    pair.scheme.send(Net(4.0))
    state = Net(5.0).state_dict()
    pair.scheme.send({**state, "mean": state["mean"].numpy()})
    assert pair.ask("model") == (4, {5.0}, 5.0)
    assert pair.ask("receive", LIMIT) == 5.0
    assert pair.ask("receive") is None


@both
def test_workers_may_be_updated_one_by_one(rig, kind):
    pair = rig(kind(), workers=2, params_map={0: Net(1.0), 1: Net(2.0)})
    assert [pair.ask("model", worker=w) for w in (0, 1)] == [(0, {1.0}, 1.0), (0, {2.0}, 2.0)]
    pair.scheme.send(Net(3.0), worker_ids=1)
    pair.scheme.send({0: Net(4.0)})
    assert [pair.ask("model", worker=w) for w in (0, 1)] == [(2, {4.0}, 4.0), (1, {3.0}, 3.0)]
    with pytest.raises(ConfigError, match=r"\[7\]"):
        pair.scheme.send(worker_ids=[7])


@both
def test_a_send_that_does_not_wait_arrives(rig, kind):
    pair = rig(kind(sync=False), model=Net(1.0))
    for number in range(2, 12):
        pair.scheme.send(Net(float(number)))
    pair.scheme.shutdown()  # returns when all of it has arrived
    assert pair.ask("model") == (10, {11.0}, 11.0)


@both
def test_weights_may_be_a_tensordict_and_be_mapped(rig, kind):
    def shifted(worker, weights):
        return weights + worker

    weights = TensorDict.from_module(Net(1.0)).data
    pair = rig(kind(), workers=2, weights=weights, device_map_fn=shifted)
    assert [pair.ask("model", worker=w)[:2] for w in (0, 1)] == [(0, {1.0}), (0, {2.0})]
    pair.scheme.send(weights + 5)
    assert [pair.ask("model", worker=w)[:2] for w in (0, 1)] == [(1, {6.0}), (1, {7.0})]


@both
def test_weights_that_do_not_fit_are_not_sent(rig, kind):
    pair = rig(kind(), model=Net(1.0))
    with pytest.raises(WeightsError, match="layer"):
        pair.scheme.send(nn.Linear(2, 3))
    bad = Net(2.0)
    bad.extra = "bad"
    with pytest.raises(WorkerError, match="ArithmeticError: bad state"):
        pair.scheme.send(bad)
    pair.scheme.send(Net(3.0))
    assert pair.ask("model")[1:] == ({3.0}, 3.0)


@both
def test_a_worker_that_is_gone_is_named(rig, kind):
    pair = rig(kind(), workers=2, model=Net(1.0))
    assert pair.ask("shutdown", worker=0) == "down"
    with pytest.raises(ClosedError, match="worker 0 has called shutdown"):
        pair.scheme.send(worker_ids=0)
    os.kill(pair.processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="worker 1"):
        pair.scheme.send(worker_ids=1)


@both
def test_what_is_called_too_early_or_wrongly_says_so(kind):
    scheme = kind()
    for call in (scheme.connect, scheme.send, scheme.receive):
        with pytest.raises(RuntimeError, match="init_on_"):
            call()
    with pytest.raises(ConfigError, match="worker_idx"):
        scheme.init_on_receiver(model_id="policy", worker_idx=0)
    with pytest.raises(ConfigError, match="one of model"):
        scheme.init_on_sender(num_workers=1)
    with pytest.raises(ConfigError, match="num_workers"):
        scheme.init_on_sender(model=Net(), devices=["cpu"], num_workers=2)
    with pytest.raises(NotImplementedError, match="takes no context"):
        scheme.init_on_sender(model_id="policy", context=object())
    assert not scheme.initialized_on_sender
    assert not scheme.initialized_on_receiver
    scheme.init_on_sender(model=Net(2.0), devices=["cpu"])
    scheme.synchronize_weights()
    assert scheme.synchronized_on_sender
    with pytest.raises(ConfigError, match="fresh one"):
        Collector(lambda: None, frames_per_batch=1, weight_sync_schemes={"policy": scheme})
    assert (scheme.weights["layer", "bias"] == 2).all()
    with pytest.raises(RuntimeError, match="before"):
        scheme.connect()
    scheme.shutdown()
    scheme.shutdown()


def test_no_scheme_does_nothing():
    sender, receiver = NoWeightSyncScheme(), NoWeightSyncScheme()
    sender.init_on_sender(model_id="policy")
    receiver.init_on_receiver(model_id="policy", worker_idx=0)
    for scheme in (sender, receiver):
        scheme.connect()
    sender.send(Net())
    assert receiver.receive(timeout=1.0) is None
    sender.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        WeightSyncScheme,
        DistributedWeightSyncScheme,
        RPCWeightSyncScheme,
        RayWeightSyncScheme,
    ],
)
def test_other_schemes_say_what_to_use(kind):
    with pytest.raises(NotImplementedError, match=f"{kind.__name__}.*update_policy_weights_"):
        kind().init_on_sender(model=Net(), num_workers=1)
    with pytest.raises(NotImplementedError, match="SharedMemWeightSyncScheme"):
        kind().init_on_receiver(model_id="policy", worker_idx=0)
