"""The parts of Ray collectors that need no Ray."""

import asyncio
import gc
import sys
import types

import cloudpickle
import pytest
import torch

from gleanrl import ConfigError, RayCollector, RayWeightSyncScheme, WeightSyncScheme
from gleanrl.core import messages as m
from gleanrl.core.errors import WeightsError
from gleanrl.core.layout import Field, Layout
from gleanrl.engine.backends.ray_data import Landing, RayBoard, ToldByte
from gleanrl.engine.backends.ray_session import Session, check_options
from gleanrl.memory.arena import Arena
from gleanrl.memory.slab import Order, Slab
from gleanrl.rollout.actor import ActorBoot, Blocks, RayWorker, Turns
from gleanrl.rollout.wire import CommandWriter, read_reply
from gleanrl.testing import StampedSource
from gleanrl.weights.flat import plan_flat

FIELDS = (
    Field(("observation",), (3,), torch.float32),
    Field(("done",), (1,), torch.bool),
    Field(("half",), (), torch.bfloat16),
    Field(("none",), (0,), torch.float64),
)
LAYOUT = Layout((2,), FIELDS)


class Quits(StampedSource):
    def get(self, path):
        raise SystemExit(4)


class Raises(StampedSource):
    def __init__(self, worker):
        raise LookupError("no such thing")


def test_what_comes_out_of_order_is_done_in_order():
    turns, done = Turns(), []
    for turn in (2, 0, 3, 1, 4):
        turns.take(turn, lambda turn=turn: done.append(turn))
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("order", [Order.STACKED, Order.ENVS, Order.TIME, Order.APART])
def test_a_block_lands_where_its_window_is(order):
    layouts = [LAYOUT for _ in range(3)]
    arena = Arena(Slab(layouts, [4] * 3, order), 1)
    blocks = Blocks()
    for worker in range(3):
        reference = arena.reference(0, worker)
        sent, block = blocks.take(reference)
        torch.manual_seed(worker)
        for key in sent.keys():
            tensor = sent.tensor(key)
            tensor.copy_((torch.rand(tensor.shape) * 100).to(tensor.dtype))
        Landing(arena.window(reference), reference).fill(block)
        for key in sent.keys():
            assert torch.equal(arena.window(reference).tensor(key), sent.tensor(key))
    for worker in range(3):  # nobody wrote into another's part
        torch.manual_seed(worker)
        seen = arena.window(arena.reference(0, worker)).tensor(("observation",))
        assert torch.equal(seen, torch.rand(seen.shape) * 100)


def test_a_block_is_used_again_only_when_what_was_sent_is_gone():
    arena = Arena(Slab([LAYOUT], [4], Order.TIME), 1)
    blocks, reference = Blocks(), arena.reference(0, 0)
    _, first = blocks.take(reference)
    _, second = blocks.take(reference)
    assert blocks.made == 2
    address = first.ctypes.data
    assert address != second.ctypes.data
    del first
    gc.collect()
    _, third = blocks.take(reference)
    assert third.ctypes.data == address
    assert blocks.made == 2


def test_a_byte_tells_only_changes():
    told = []
    byte = ToldByte(told.append)
    for value in (0, 1, 1, 0):
        byte[0] = value
        assert byte[0] == value
    assert told == [1, 0]


def test_a_publication_is_one_object():
    stored, told = [], []
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.int64)}
    board = RayBoard(
        plan_flat(7, weights),
        lambda array: stored.append(array.copy()) or len(stored),
        lambda number, reference: told.append((number, reference)),
    )
    board.publish(list(weights.values()), 5, 6)
    assert told == [(7, 1)]
    assert len(stored) == 1
    assert stored[0][:16].view("int64").tolist() == [5, 6]
    with pytest.raises(WeightsError, match="'a' has shape"):
        board.publish([torch.ones(4), weights["b"]], 6, 7)
    assert len(stored) == 1


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


def test_a_worker_whose_code_ends_the_process_says_so_and_exceptions_travel(capsys):
    async def serve(factory, *commands):
        boot = ActorBoot(1, torch.get_num_threads(), (), cloudpickle.dumps(factory))
        actor, writer = RayWorker(boot), CommandWriter()
        answers = [await actor.serve()]
        calls = [
            asyncio.ensure_future(actor.do(turn, writer.write(turn + 1, command)))
            for turn, command in enumerate(commands)
        ]
        ended = asyncio.ensure_future(actor.ended())
        done, _ = await asyncio.wait(
            [*calls, ended], timeout=5 * bool(calls), return_when="FIRST_COMPLETED"
        )
        answers += [task.result() for task in calls if task in done]
        return answers, ended.result() if ended in done else None

    answers, why = asyncio.run(serve(Quits, m.Get("number")))
    assert read_reply(answers[0][1]).layout is not None
    assert why == "its code ended it with SystemExit(4)"
    assert "SystemExit" in capsys.readouterr().err
    answers, why = asyncio.run(serve(Raises))
    failed = read_reply(answers[0][1])
    assert (failed.worker, failed.ticket, failed.error.kind) == (1, 0, "LookupError")


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
