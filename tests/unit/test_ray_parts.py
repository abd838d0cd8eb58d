"""The parts of Ray collectors that need no Ray."""

import gc
import mmap
import sys
import tempfile
import types

import numpy as np
import pytest
import torch

from gleanrl import ConfigError, RayCollector, RayWeightSyncScheme, WeightSyncScheme
from gleanrl.core import messages as m
from gleanrl.core.layout import Field, Layout
from gleanrl.engine.batches import BatchOptions, SlabSlots
from gleanrl.memory.arena import Arena, Order, Slab
from gleanrl.transport.data_plane import RolloutBlock
from gleanrl.transport.peer import RemoteFlag
from gleanrl.transport.ray import (
    Session,
    StoreLender,
    check_options,
)

FIELDS = (
    Field(("observation",), (3,), torch.float32),
    Field(("done",), (1,), torch.bool),
    Field(("half",), (), torch.bfloat16),
    Field(("none",), (0,), torch.float64),
)
LAYOUT = Layout((2,), FIELDS)


LARGE = Layout((2,), (Field(("observation",), (1 << 16,), torch.uint8), *FIELDS[1:]))


def large(arena):
    """A rollout that came in memory of its own, which numpy calls read-only."""
    sent = RolloutBlock(arena.reference(0, 0))
    values = torch.arange(2 * 4 << 16).view(2, 4, -1) % 251
    sent.window.tensor(("observation",)).copy_(values)
    block = sent.bytes.numpy()
    block.flags.writeable = False
    return block


def test_a_large_rollout_is_handed_out_where_it_lies_until_a_part_of_the_store_is_lent():
    gc.collect()  # what other tests were lent counts, too
    arena = Arena(Slab([LARGE], [4], Order.TIME), 2)
    slots, lender = SlabSlots(arena, 2, BatchOptions()), StoreLender(lambda: 9 << 20)
    blocks = [large(arena) for _ in range(5)]
    lent = [lender.lend(block) for block in blocks]
    assert [block is not None for block in lent] == [True] * 4 + [False]
    batch = slots.hand_over(slots.acquire(), [m.Report(4, 8, 0, block=lent.pop(0))])
    assert batch["observation"].data_ptr() == blocks[0].ctypes.data
    assert batch["observation"][1, 0].eq(torch.arange(4 << 16, 5 << 16) % 251).all()
    batch["observation"][0] = 7  # batches are the user's
    assert blocks[0][0] == 7
    assert lender.lend(blocks[4]) is None
    part = batch["observation"][1]
    del batch
    assert lender.lend(blocks[4]) is None
    del part
    assert StoreLender(lambda: 9 << 20).lend(blocks[4]) is not None
    lent.append(lender.lend(blocks[4]))
    assert lent[-1] is not None
    assert StoreLender(lambda: 9 << 20).lend(blocks[4]) is None  # one store for all


def test_what_is_small_or_may_not_be_written_is_copied():
    block = large(Arena(Slab([LARGE], [4], Order.TIME), 1))
    assert StoreLender(lambda: 1 << 30).lend(block[: 1 << 17]) is None
    with tempfile.TemporaryFile() as file:
        file.write(bytes(block.nbytes))
        file.flush()
        mapped = mmap.mmap(file.fileno(), block.nbytes, prot=mmap.PROT_READ)
        assert StoreLender(lambda: 1 << 30).lend(np.frombuffer(mapped, np.uint8)) is None
    assert StoreLender(lambda: 1 << 30).lend(block) is not None


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
