"""Small disks that fill up, and children that are killed for writing there."""

import itertools
import os

import pytest
import torch
from tensordict import TensorDict

MB = 1 << 20


def rows(first, count, width=1000):
    number = torch.arange(first, first + count)
    return TensorDict({"number": number, "wide": number.unsqueeze(1).expand(-1, width)}, [count])


def survives(body):
    """Run ``body`` in a forked child, which a signal may end; return what it returned as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(body()).encode())
            os._exit(0)
        except BaseException as err:
            os.write(writing, repr(err).encode())
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as answer:
        said = answer.read().decode()
    status = os.waitpid(child, 0)[1]
    assert status == 0, (status, said)
    return said


def fill(disk):
    with (
        (disk / "other").open("wb", buffering=0) as other,
        pytest.raises(OSError, match="No space"),
    ):
        list(map(other.write, itertools.repeat(bytes(65536))))
