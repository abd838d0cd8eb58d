"""Weights in shared memory: what is read is what was published, in whatever kind of tensor."""

import os
import threading

import numpy as np
import pytest
import rig
import torch
from tests.covering import ALL
from torch import nn

from gleanrl import MultiAsyncCollector
from gleanrl.memory.shared import SharedMemory
from gleanrl.weights.module_weights import TrackedModule
from gleanrl.weights.published_buffers import SharedWeightPublisher, SharedWeightReceiver

WEIGHTS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 3),
    "half": torch.arange(5).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "counts": torch.arange(4),
}


class Both:
    """A board and somebody who reads it."""

    def __init__(self) -> None:
        memory = SharedMemory()
        self.board = SharedWeightPublisher(memory, WEIGHTS)
        self.boards = SharedWeightReceiver(memory)
        self.boards.bind("policy", self.board.ref)
        self.version = 0

    def through(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Publish; return what is read."""
        self.version += 1
        self.board.publish(tensors, self.version, self.version)
        snapshot = self.boards.newest()
        assert snapshot is not None
        assert snapshot.version == self.version
        return dict(snapshot.models["policy"])


def replaced(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    return list({**WEIGHTS, name: tensor}.values())


def test_values_of_a_list_that_is_given_again_are_read_anew() -> None:
    both = Both()
    tensors = [tensor.clone() for tensor in WEIGHTS.values()]
    for _ in range(4):  # more often than there are buffers
        tensors[0].add_(1)
        tensors[4].logical_not_()
        read = both.through(tensors)
        assert all(map(torch.equal, read.values(), tensors))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("matrix", torch.arange(12.0).view(4, 3).T),
        ("matrix", torch.arange(12.0).view(3, 4).double()),
        ("matrix", nn.Parameter(torch.arange(12.0).view(3, 4))),
        ("matrix", torch.ones(3, 1).expand(3, 4)),
        ("complex", torch.tensor([1 + 2j, 3 - 4j]).conj()),
    ],
    ids=["transposed", "of another dtype", "with gradient", "expanded", "conjugated"],
)
def test_tensors_that_are_not_plain_memory_arrive_as_their_values(
    name: str, tensor: torch.Tensor
) -> None:
    both = Both()
    both.through(list(WEIGHTS.values()))
    read = both.through(replaced(name, tensor))
    assert torch.equal(read[name], tensor.detach().to(read[name].dtype).resolve_conj())
    assert not read[name].requires_grad


def test_weights_beyond_the_small_arrive_too() -> None:
    memory = SharedMemory()
    weights = {"large": torch.arange(400_000.0), "little": torch.ones(3)}
    board = SharedWeightPublisher(memory, weights)
    boards = SharedWeightReceiver(memory)
    boards.bind("policy", board.ref)
    board.publish(list(weights.values()), 1, 1)
    snapshot = boards.newest()
    assert snapshot is not None
    read = snapshot.models["policy"]
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def retrained(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


def moved(module: nn.Module) -> None:
    module[0].weight.data = torch.full((2, 3), 7.0)  # type: ignore[index]


def exchanged(module: nn.Module) -> None:
    module[0] = nn.Linear(3, 2)  # type: ignore[operator]


def renamed(module: nn.Module) -> None:
    module[1].later = module[1].known  # type: ignore[index]
    del module[1].known  # type: ignore[index]


def grown(module: nn.Module) -> None:
    module[1].register_buffer("more", torch.zeros(2))  # type: ignore[operator]


def wider(module: nn.Module) -> None:
    module.double()


@pytest.mark.parametrize("change", [retrained, moved, exchanged, renamed, grown, wider])
def test_a_module_is_seen_as_it_is_now(change) -> None:  # type: ignore[no-untyped-def]
    module = nn.Sequential(nn.Linear(3, 2), nn.Identity())
    module[1].register_buffer("known", torch.ones(2))
    tracked = TrackedModule(module)
    before = tracked.tensors()
    change(module)
    now = tracked.tensors()
    assert (now is before) == (change is retrained)
    wanted = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert tracked.names == list(wanted)
    assert all(map(torch.equal, now, wanted.values()))


def test_marks_stand_on_the_right_side_of_what_they_announce(monkeypatch) -> None:
    """Where stores and loads may change places, fences keep these apart."""
    memory = SharedMemory()
    weights = {"w": torch.zeros(4)}
    board, boards = SharedWeightPublisher(memory, weights), SharedWeightReceiver(memory)
    boards.bind("policy", board.ref)
    count = np.frombuffer(memory.map(), np.int64, 1, board.ref.offset)
    buffer = board.ref.offset + 64 + board.ref.nbytes
    mark = np.frombuffer(memory.map(), np.int64, 1, buffer + 16)
    first = np.frombuffer(memory.map(), np.float32, 4, buffer + 64)
    seen: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(
        "gleanrl.weights.published_buffers.fence",
        lambda: seen.append((int(count[0]), int(mark[0]), bool(first.any()))),
    )
    board.publish([torch.ones(4)], 1, 1)
    assert seen == [(0, 1, False), (0, 1, True), (0, 2, True)]
    assert boards.newest() is not None
    assert len(seen) == 6  # after the number, after the mark, before the mark is looked at again


READS = 600 if ALL else 300


class Stress(rig.Count):
    """Reads a board that another process publishes on."""

    def read(self, path, ref, times):
        with open(path, "r+b", buffering=0) as file:
            boards = SharedWeightReceiver(SharedMemory(os.dup(file.fileno())))
            boards.bind("policy", ref)
            reads, last = 0, 0
            while reads < times:
                snapshot = boards.newest()
                if snapshot is None:
                    continue
                reads += 1
                for tensor in snapshot.models["policy"].values():
                    low, high = tensor.min(), tensor.max()
                    if not low == high == snapshot.version == snapshot.serial:
                        return f"torn: {low} to {high} in version {snapshot.version}"
                if snapshot.version <= last:
                    return f"version {snapshot.version} after {last}"
                last = snapshot.version
        return reads


@pytest.mark.parametrize("sizes", [(100, 7), (40_000, 3)])
def test_no_torn_read_under_a_tight_publisher(sizes):
    memory, done = SharedMemory(), threading.Event()
    weights = {str(size): torch.zeros(size, dtype=torch.int64) for size in sizes}
    board = SharedWeightPublisher(memory, weights)

    def publish():
        version = 0
        while not done.is_set():
            version += 1
            for tensor in weights.values():
                tensor.fill_(version)
            board.publish(list(weights.values()), version, version)

    thread = threading.Thread(target=publish)
    with MultiAsyncCollector([Stress, Stress], frames_per_batch=8) as collector:
        path = f"/proc/{os.getpid()}/fd/{memory.fd}"
        thread.start()
        try:
            found = collector.map_fn("env.read", [(path, board.ref, READS)] * 2)
        finally:
            done.set()
            thread.join()
    memory.close()
    assert found == [READS, READS]
