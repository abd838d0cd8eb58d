"""The parts of Ray collectors that need no Ray."""

import gc
import mmap
import sys
import tempfile
import types

import cloudpickle
import numpy as np
import pytest
import torch
from backend_rig import StampedSource

from gleanrl import ConfigError, RayCollector, RayWeightSyncScheme, WeightsError, WeightSyncScheme
from gleanrl.core import messages as m
from gleanrl.core.layout import Field, Layout
from gleanrl.engine.batches import BatchOptions, SlabSlots
from gleanrl.memory.arena import Arena
from gleanrl.memory.slab import Order, Slab
from gleanrl.transport.frames import CommandWriter, read_reply
from gleanrl.transport.peer import RemoteFlag
from gleanrl.transport.ray import (
    RayLanding,
    RayWeightPublisher,
    Session,
    ZeroCopyPolicy,
    check_options,
)
from gleanrl.transport.ray_actor import COLLECTED, Arrivals, Blocks, RayWorker
from gleanrl.transport.weights import plan_flat
from gleanrl.transport.worker import Boot

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
    arrivals, done = Arrivals(), []
    for turn in (2, 0, 3, 1, 4):
        arrivals.take(turn, lambda turn=turn: done.append(turn))
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
        RayLanding(arena.window(reference), reference).fill(block)
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


LARGE = Layout((2,), (Field(("observation",), (1 << 16,), torch.uint8), *FIELDS[1:]))


def large(arena):
    """A rollout that came in memory of its own, which numpy calls read-only."""
    sent, block = Blocks().take(arena.reference(0, 0))
    sent.tensor(("observation",)).copy_(torch.arange(2 * 4 << 16).view(2, 4, -1) % 251)
    block.flags.writeable = False
    return block


def test_a_large_rollout_is_handed_out_where_it_lies_until_a_part_of_the_store_is_lent():
    arena = Arena(Slab([LARGE], [4], Order.TIME), 2)
    slots, lender = SlabSlots(arena, 2, BatchOptions()), ZeroCopyPolicy(lambda: 9 << 20)
    blocks = [large(arena) for _ in range(5)]
    windows = [slots.windows(0)[0]] * 5
    lent = [lender.lend(window, block) for window, block in zip(windows, blocks, strict=True)]
    assert [block is not None for block in lent] == [True] * 4 + [False]
    batch = slots.hand_over(slots.acquire(), [m.Report(4, 8, 0, block=lent.pop(0))])
    assert batch["observation"].data_ptr() == blocks[0].ctypes.data
    assert batch["observation"][1, 0].eq(torch.arange(4 << 16, 5 << 16) % 251).all()
    batch["observation"][0] = 7  # batches are the user's
    assert blocks[0][0] == 7
    assert lender.lend(windows[4], blocks[4]) is None
    part = batch["observation"][1]
    del batch
    assert lender.lend(windows[4], blocks[4]) is None
    del part
    assert ZeroCopyPolicy(lambda: 9 << 20).lend(windows[4], blocks[4]) is not None
    lent.append(lender.lend(windows[4], blocks[4]))
    assert lent[-1] is not None
    assert ZeroCopyPolicy(lambda: 9 << 20).lend(windows[4], blocks[4]) is None  # one store for all


def test_what_is_small_or_a_part_of_a_batch_or_may_not_be_written_is_copied():
    block = large(Arena(Slab([LARGE], [4], Order.TIME), 1))
    for slab in (Slab([LARGE] * 2, [4] * 2), Slab([LAYOUT], [4], Order.TIME)):
        arena = Arena(slab, 1)
        own = block if slab.layouts[0] is LARGE else Blocks().take(arena.reference(0, 0))[1]
        assert ZeroCopyPolicy(lambda: 1 << 30).lend(arena.reference(0, 0), own) is None
    with tempfile.TemporaryFile() as file:
        file.write(bytes(block.nbytes))
        file.flush()
        mapped = mmap.mmap(file.fileno(), block.nbytes, prot=mmap.PROT_READ)
        reference = Arena(Slab([LARGE], [4], Order.TIME), 1).reference(0, 0)
        assert (
            ZeroCopyPolicy(lambda: 1 << 30).lend(reference, np.frombuffer(mapped, np.uint8)) is None
        )
    assert ZeroCopyPolicy(lambda: 1 << 30).lend(reference, block) is not None


def test_a_byte_tells_only_changes():
    told = []
    byte = RemoteFlag(told.append)
    for value in (0, 1, 1, 0):
        byte[0] = value
        assert byte[0] == value
    assert told == [1, 0]


def test_a_publication_is_one_object():
    stored, told = [], []
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.int64)}
    board = RayWeightPublisher(
        plan_flat(weights),
        lambda array: stored.append(array.copy()) or len(stored),
        told.append,
    )
    board.publish(list(weights.values()), 5, 6)
    assert told == [1]
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


def serving(factory, index=1):
    actor = RayWorker(Boot(index, cloudpickle.dumps(factory), torch.get_num_threads()))
    return actor, actor.serve()


def ask(writer, number, command=None):
    return writer.write(number, m.Get("num_envs") if command is None else command)


def test_a_step_does_what_is_next_whatever_it_came_with():
    actor, ready = serving(StampedSource)
    assert ready[0] == 0
    assert read_reply(ready[2]).layout is not None
    writer = CommandWriter()
    window = Arena(Slab([read_reply(ready[2]).layout], [4], Order.TIME), 1).reference(0, 0)
    collects = [writer.write(ticket, m.Collect(window)) for ticket in (1, 2)]
    actor.post(2, ask(writer, 3))  # overtakes rollouts, not what was sent before it
    assert actor.step(1, collects[1]) is None
    place, turns, frame, block = actor.step(0, collects[0])
    assert (place, turns, read_reply(frame).ticket, block) == (1, 3, 3, None)
    actor.begun(3)  # returns
    answers = [actor.step(0, None) for _ in range(2)]
    assert [place for place, _, _, _ in answers] == [2, 3]
    assert all(read_reply(frame).ticket == COLLECTED for _, _, frame, _ in answers)
    assert all(block is not None for _, _, _, block in answers)
    assert actor.step(0, None) is None


def test_a_rollout_like_the_one_before_is_asked_for_without_arguments():
    actor, ready = serving(StampedSource)
    writer = CommandWriter()
    window = Arena(Slab([read_reply(ready[2]).layout], [4], Order.TIME), 1).reference(0, 0)
    actor.step(0, writer.write(1, m.Collect(window)))
    actor.step(1, writer.write(2, m.Collect(window, random=True)))
    actor.post(2, ask(writer, 3))
    _, turns, frame, _ = actor.again()  # has it queued: questions overtake rollouts
    assert (turns, read_reply(frame).ticket) == (3, 3)
    place, _, frame, block = actor.step(0, None)
    assert (place, read_reply(frame).ticket) == (4, COLLECTED)
    assert read_reply(frame).report.steps == 4
    assert block is not None


def test_a_command_that_cannot_be_loaded_is_answered_and_the_next_is_carried_out():
    actor, _ = serving(StampedSource)
    writer = CommandWriter()
    actor.post(0, ask(writer, 1)[:-20])
    actor.post(1, ask(writer, 2))
    failed, done = (read_reply(actor.step(0, None)[2]) for _ in range(2))
    assert "cannot be loaded" in failed.error.message
    assert (done.ticket, done.value) == (2, 2)


def test_what_raises_in_the_worker_travels_and_what_ends_it_is_told(capsys):
    _, (_, _, frame, _) = serving(Raises)
    failed = read_reply(frame)
    assert (failed.worker, failed.ticket, failed.error.kind) == (1, 0, "LookupError")
    actor, _ = serving(Quits)
    actor.post(0, ask(CommandWriter(), 1))
    with pytest.raises(SystemExit):
        actor.step(0, None)
    assert actor.ended() == "its code ended it with SystemExit(4)"
    assert "SystemExit" in capsys.readouterr().err


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
