"""Damages states of collectors, replay buffers, datasets and messages; watches how they are read.

``python -m tools.fuzz --cases 2000 --seed 0`` makes one of each kind, and damages a copy in one to
three ways for every case. A process of its own reads it. That process must end within the deadline
and must need little memory. It either reads data, or raises a named error of the library; then the
collector or buffer that it was to be loaded into is unchanged. The same number is the same damage:
``--only N`` repeats one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from tensordict import TensorDict

import gleanrl
from gleanrl.collectors import state_files
from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import GleanError
from gleanrl.data import TensorDictMaxValueWriter
from gleanrl.memory import tensor_files
from gleanrl.transport import handshake, wire
from gleanrl.transport.authenticated_channel import Channel, ForgedFrameError
from gleanrl.transport.handshake import HandshakeError
from tools import trials

DEADLINE_S = 120
"""A node has 60 seconds to answer a command."""
MOST_GROWTH_KB = 512 << 10
_ENVS, _STEPS = 2, 12
_SPARSE = 3 << 30
_SEALED = "sealed"
"""A file beside a state whose checksum fits nonsense, which environments then get."""


# -- what is read ----------------------------------------------------------------------------------


def _rows(first: int = 0) -> TensorDict:
    number = torch.arange(first, first + _ENVS * _STEPS).reshape(_ENVS, _STEPS)
    wide = number.unsqueeze(-1) * torch.ones(3, dtype=torch.float64)
    done = (number % 5 == 4).unsqueeze(-1)
    after = {"observation": wide + 1, "done": done, "reward": wide[..., :1]}
    ids = {"traj_ids": number // 5}
    return TensorDict({"observation": wide, "collector": ids, "next": after}, [_ENVS, _STEPS])


def _buffers() -> dict[str, Callable[[], gleanrl.ReplayBuffer]]:
    tensors, size = gleanrl.LazyTensorStorage, 40
    prioritized = gleanrl.PrioritizedSampler
    once, slices = gleanrl.SamplerWithoutReplacement, gleanrl.SliceSamplerWithoutReplacement

    def make(storage: Any, sampler: Any = None, **options: Any) -> Callable[[], Any]:
        return lambda: gleanrl.ReplayBuffer(
            storage=storage(), sampler=sampler, batch_size=4, **options
        )

    return {
        "rows": make(lambda: tensors(size), generator=torch.Generator()),
        "shared": make(lambda: tensors(size), shared=True),
        "env, time": make(lambda: tensors(size, ndim=2), lambda: once()),
        "compact": make(
            lambda: tensors(size, compact=["observation"]), lambda: prioritized(size, 0.7, 0.5)
        ),
        "memmap": make(lambda: gleanrl.LazyMemmapStorage(size), lambda: slices(slice_len=2)),
        "best": make(
            lambda: tensors(size), writer=lambda: TensorDictMaxValueWriter(("next", "reward"))
        ),
    }


def _fill(buffer: gleanrl.ReplayBuffer, first: int = 0) -> None:
    rows = _rows(first)
    buffer.extend(rows if buffer.storage.ndim == 2 else rows.reshape(-1))
    for _ in range(2):
        with contextlib.suppress(gleanrl.ReplayError):  # priorities that are all zero, say
            buffer.sample(4)


def _record(path: Path, format: str) -> None:
    recorder = gleanrl.Recorder(path, format, env="CartPole-v1", num_envs=2)
    collector = gleanrl.Collector(
        "CartPole-v1", num_envs=2, frames_per_batch=40, total_frames=80, replay_buffer=recorder
    )
    for _ in collector:
        pass
    recorder.close()


def make_all(folder: Path) -> None:
    """Save one of each kind below ``folder``."""
    for name, make in _buffers().items():
        buffer = make()
        _fill(buffer)
        buffer.dumps(folder / f"buffer {name}")
    (folder / "greeting").mkdir()
    (folder / "greeting" / "said").write_bytes(bytes(range(1, 69)))
    (folder / "messages").mkdir()
    (folder / "messages" / "said").write_bytes(_recorded(_FRAMES))
    for name in ("told", "saboteur"):  # nothing in them is read
        (folder / name).mkdir()
    with _collector(_buffers()["rows"]()) as collector:
        collector.next()
        (folder / "state").mkdir()
        collector.save(folder / "state" / "state", keep=2)
        collector.save(folder / "state both", replay_buffer=True)
    for format in ("tensordict", "parquet", "minari"):
        _record(folder / f"dataset-{format}-v0", format)
    recorder = gleanrl.Recorder(folder / "open")  # what a killed process leaves
    recorder.write(_rows().reshape(-1))
    shutil.copytree(folder / "open", folder / "dataset-killed-v0")
    recorder.close()
    shutil.rmtree(folder / "open")


def _greet(path: Path) -> str:
    """Say to a learner, as a node, what is at ``path``; it must be refused."""
    said = b""
    with contextlib.suppress(OSError):
        said = path.read_bytes() if path.is_file() and path.stat().st_size < _SPARSE else b""
    learner, stranger = socket.socketpair()
    with learner, stranger:
        stranger.sendall(said[:4096])
        stranger.shutdown(socket.SHUT_WR)
        try:
            handshake.admit(learner, b"x" * 32, 1.0, Deadline(5.0))
        except HandshakeError as err:
            return f"refused ({err})"
    raise AssertionError("a stranger was let in")


_KEY = b"k" * 32
_FRAMES = [bytes([number]) * (37 * number**2) for number in range(1, 9)]
_PICKLED = b"P" + struct.pack("=qi", 5, 0)


def _recorded(frames: list[bytes]) -> bytes:
    """Return what one side of an authenticated connection sends."""
    one, other = socket.socketpair()
    with other:
        channel = Channel(one, (_KEY, _KEY))
        for frame in frames:
            channel.send(frame)
        channel.close()
        return b"".join(iter(partial(other.recv, 1 << 16), b""))


def _records(path: Path, chance: random.Random) -> None:
    """Repeat, drop, exchange or cut whole records of a connection."""
    data, records = path.read_bytes(), []
    while data:
        size = 20 + int.from_bytes(data[:4], "little")
        records.append(data[:size])
        data = data[size:]
    place, other = chance.sample(range(len(records)), 2)
    what = chance.choice(["repeat", "drop", "exchange", "cut", "length"])
    if what == "repeat":
        records.insert(other, records[place])
    elif what == "exchange":
        records[place], records[other] = records[other], records[place]
    elif what == "cut":
        records[place] = records[place][: chance.randrange(len(records[place]))]
    elif what == "length":
        records[place] = chance.randbytes(4) + records[place][4:]
    else:
        del records[place]
    path.write_bytes(b"".join(records))


def _hear(path: Path, chance: random.Random) -> str:
    """Hear what is at ``path`` on an authenticated connection: a beginning of what was sent."""
    said = b""
    with contextlib.suppress(OSError):
        said = path.read_bytes() if path.is_file() and path.stat().st_size < _SPARSE else b""
    mine, stranger = socket.socketpair()
    with stranger:
        stranger.sendall(said[:60_000])
        stranger.shutdown(socket.SHUT_WR)
        channel, heard = Channel(mine, (_KEY, _KEY)), []
        try:
            while True:
                heard += channel.wait()
        except (EOFError, ForgedFrameError) as err:
            result = type(err).__name__
        channel.close()
    assert heard == _FRAMES[: len(heard)], "a message was taken that was not sent"
    for _ in range(100):
        _understand(_nonsense(chance))
    return f"heard, and then refused ({result})"


def _nonsense(chance: random.Random) -> bytes:
    """Return a message with the right authentication that nobody sends."""
    report = m.Report(4, 8, 1)
    replies: list[m.Reply] = [m.Rolled(0, 5, report), m.Done(0, 5, None), m.Begun(0, 5)]
    frame = bytearray(wire.frame_of(chance.choice(replies)))
    what = chance.choice(["noise", "cut", "odd", "kind"])
    if what == "noise":  # without what has pickle reserve memory
        noise = chance.randbytes(chance.randrange(200)).translate(None, b"pr")
        return chance.choice([b"", b"R", b"P", b"C", _PICKLED]) + noise
    if what == "odd":
        return _PICKLED + pickle.dumps(chance.choice([*_ODD, *replies]))
    if what == "kind":
        frame[0] = chance.randrange(256)
    return bytes(frame[: chance.randrange(len(frame) + 1)])


def _understand(frame: bytes) -> None:
    """Read a message as a learner and as a node do; it is named, or is a reply of worker 0."""
    with contextlib.suppress(ForgedFrameError):
        wire.check_reply(frame, 0)
        reply = wire.reply_in(frame)
        assert isinstance(reply, m.Reply)
        assert (reply.ticket, reply.worker) == wire.head_of(frame)
    with contextlib.suppress(struct.error):  # which ends the node, with this word
        _, command = wire.CommandReader(0).read(frame)
        assert isinstance(command, m.Command | m.Failed)


# -- nodes that know the key -----------------------------------------------------------------------


class Saboteur(gym.Wrapper[Any, Any, Any, Any]):
    """Has its node damage messages from its build or from one of its steps on."""

    def __init__(self, seed: int) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.chance = random.Random(seed)
        self.left = self.chance.randrange(40)
        self._maybe()

    def step(self, action: Any) -> Any:
        """Take a step."""
        self.left -= 1
        self._maybe()
        return self.env.step(action)

    def _maybe(self) -> None:
        if self.left == 0:
            sabotage("send", self.chance)


def sabotage(method: str, chance: random.Random) -> Callable[[], None]:
    """Damage what channels of this process send, before it is sealed; return what ends that."""
    send = getattr(Channel, method)

    def damaged(channel: Channel, frame: bytes) -> Any:
        said = [send(channel, one) for one in _damaged(frame, chance)]
        return said[-1] if said else False

    setattr(Channel, method, damaged)
    return partial(setattr, Channel, method, send)


def _damaged(frame: bytes, chance: random.Random) -> list[bytes]:
    """Return what is sent in place of ``frame``; no pickle that reserves memory."""
    noise = chance.randbytes(chance.randrange(60)).translate(None, b"pr")
    kind = chance.choice([wire.KEY, wire.STOP, wire.WEIGHTS, wire.LEAVE, wire.BEAT])
    head, ticket, place = bytearray(frame), chance.randint(-2, 9), chance.randint(-2, 3)
    head[1 : wire._HEAD.size] = struct.pack("=qi", ticket, place)
    cut, odd = frame[: chance.randrange(len(frame) + 1)], _nonsense(chance)
    choices = [[frame], [frame], [], [frame, frame], [odd], [odd, frame], [bytes(head)], [cut]]
    choices += [[kind], [kind + noise], [frame, kind + noise], [noise], [bytes(1 << 20)], [b""]]
    return chance.choice(choices)


def meet(told: bool, chance: random.Random) -> str:
    """Collect with a node that sends damaged messages or is ``told`` them.

    The learner collects whole batches, until an error of this library names the loss.
    """
    warnings.simplefilter("ignore")
    first: Any = "CartPole-v1" if told else partial(Saboteur, chance.randrange(1 << 30))
    options: dict[str, Any] = {
        "frames_per_batch": 16,
        "total_frames": -1,
        "launcher": "mp",
        "tcp_port": 0,
    }
    limits: dict[str, Any] = {"timeout": 3.0, "start_timeout": 20.0, "sync": chance.random() < 0.5}
    restore: Callable[[], Any] = bool
    try:
        with gleanrl.DistributedCollector([first, "CartPole-v1"], **options, **limits) as collector:
            restore = sabotage("post", chance) if told else bool
            for count, batch in enumerate(collector):
                assert bool((batch["next", "reward"] == 1).all())
                if count == 12:
                    break
                if count % 3 == 0:
                    collector.get_distant_attr("env.spec")
    except GleanError as err:
        kinds = (k.__name__ for k in type(err).__mro__ if k.__module__.startswith("gleanrl"))
        return f"lost ({next(kinds)})"
    finally:
        restore()
    return "collected"


def _collector(buffer: gleanrl.ReplayBuffer) -> gleanrl.Collector:
    return gleanrl.Collector("CartPole-v1", num_envs=2, frames_per_batch=8, replay_buffer=buffer)


def _read_state(path: Path, chance: random.Random) -> str:
    """Load a collector's state; it must be refused, and then change nothing, or be complete."""
    buffer = _buffers()["rows"]()
    warnings.simplefilter("ignore")
    with _collector(buffer) as collector:
        collector.set_seed(5)
        collector.next()
        before, rows = _plain(collector.state_dict()), _contents(buffer)
        try:
            collector.load(path, environments=chance.random() < 0.8)
        except (GleanError, OSError, KeyError) as err:
            assert _plain(collector.state_dict()) == before, "a load that failed changed something"
            assert _contents(buffer) == rows, "a load that failed changed the buffer"
            collector.next()
            return f"refused ({type(err).__name__})"
        with contextlib.suppress(Exception):  # it is complete; environments may get nonsense by it
            collector.next()
    return "read"


def _plain(value: Any) -> Any:
    """Return all of a state as text, to be compared."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


def _contents(buffer: gleanrl.ReplayBuffer) -> list[Any]:
    """Return all of a buffer's state, to be compared."""
    state = copy.deepcopy(buffer.state_dict())
    flat: list[Any] = []
    while state:
        key, value = state.popitem()
        if isinstance(value, dict):
            state |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            items = value if isinstance(value, list) else [value]
            flat += [(key, x.tolist() if isinstance(x, torch.Tensor) else x) for x in items]
    return sorted(flat, key=repr)


def _read_dataset(path: Path, chance: random.Random) -> str:
    """Load a dataset, and write it in another format."""
    try:
        data = gleanrl.load_dataset(path)
    except GleanError as err:
        return f"refused ({type(err).__name__})"
    assert all(len(value) == len(data) for value in data.values())
    data.clone()
    try:
        format = chance.choice(["tensordict", "parquet", "minari"])
        with gleanrl.Recorder(path.with_name("converted-v0"), format) as recorder:
            recorder.write(data)
    except GleanError as err:
        return f"read, not converted ({type(err).__name__})"
    return "read, converted"


def read(path: Path, chance: random.Random) -> str:
    """Read what is at ``path``; return what became of it.

    Args:
        path: Something that `make_all` saved, and its name.
        chance: Chooses what else is tried with it.

    Raises:
        AssertionError: a buffer was changed though it could not be loaded.
        Exception: anything that is no error of this library.
    """
    if path.name.startswith("dataset"):
        return _read_dataset(path, chance)
    if path.name == "greeting":
        return _greet(path / "said")
    if path.name in ("told", "saboteur"):
        return meet(path.name == "told", chance)
    if path.name == "messages":
        return _hear(path / "said", chance)
    if path.name.startswith("state"):
        try:
            return _read_state(path / "state" if path.name == "state" else path, chance)
        except AssertionError:
            raise
        except Exception as err:
            if not (path / _SEALED).exists():
                raise
            return f"read, and an environment raised ({type(err).__name__})"
    make = _buffers()[path.name.removeprefix("buffer ")]
    result, other = _load(make(), path), make()
    _fill(other)
    try:
        other.dumps(path)
    except (GleanError, OSError) as err:
        result += f", not replaced ({type(err).__name__})"
    return result


def _load(buffer: gleanrl.ReplayBuffer, path: Path) -> str:
    _fill(buffer, 1000)
    before, number = _contents(buffer), buffer.write_count
    try:
        buffer.loads(path)
    except GleanError as err:
        assert _contents(buffer) == before, "a load that failed changed the buffer"
        assert buffer.write_count == number
        result = f"refused ({type(err).__name__})"
    else:
        result = "read"
    if len(buffer):
        buffer[:]
    _fill(buffer, 2000)
    return result


# -- damage ----------------------------------------------------------------------------------------

_ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**64, -(2**70), 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", ".", "../../etc/passwd", "/dev/zero", "\0", "float99"),
    *("float32", "bool", "int64", "complex64", "x" * 5000, [], {}, [[]], [0], [-1], [2**40] * 3),
    *([1, 2, 3], ["next"], {"file": "0.bin"}, {"": None}, "[" * 5000, "0.bin", "data-" + "0" * 32),
]


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"file": value, "key": 1}
    return value


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container and key of a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _json(path: Path, chance: random.Random) -> None:
    """Change an entry of a description, or the description as a text."""
    tree = json.loads(path.read_text())
    places = [*_places(tree)]
    holder, key = chance.choice(places)
    what = chance.choice(["odd", "odd", "odd", "nested", "number", "delete", "twice", "swap"])
    if what == "odd":
        holder[key] = chance.choice(_ODD)
    elif what == "nested":
        holder[key] = _nested(chance.choice([70, 400, 700]))
    elif what == "number" and isinstance(holder[key], int):
        holder[key] = holder[key] + chance.choice([-1, 1, 64, -holder[key] - 1])
    elif what == "delete":
        del holder[key]
    elif what == "swap":
        other, name = chance.choice(places)
        holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
    text = json.dumps(tree)
    if what == "twice":
        text = text[:-1] + f", {json.dumps(str(key))}: {json.dumps(chance.choice(_ODD))}}}"
    path.write_text(text)


def _bytes(path: Path, chance: random.Random) -> None:
    """Change the bytes of a file."""
    data = bytearray(path.read_bytes())
    what = chance.choice(["flip", "flip", "cut", "more", "noise", "empty", "nested", "zeros"])
    if what == "flip" and data:
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif what == "cut":
        data = data[: chance.randrange(len(data) + 1)]
    elif what == "more":
        data += chance.randbytes(chance.randint(1, 100))
    elif what == "noise":
        data = bytearray(chance.randbytes(len(data)))
    elif what == "nested":
        data = bytearray(b'{"a":' * chance.choice([700, 3000, 10**6]))
    elif what == "zeros":
        data = bytearray(len(data))
    else:
        data = bytearray()
    path.write_bytes(data)


def _seal(path: Path, chance: random.Random) -> None:
    """Change the description of a collector's state, and have its checksum fit."""
    data = path.read_bytes()
    start = len(state_files._MAGIC) + state_files._HEAD.size
    *_, length = state_files._HEAD.unpack(data[len(state_files._MAGIC) : start])
    draft = path.with_name("description.json")
    draft.write_bytes(data[start : start + length])
    for _ in range(chance.choice([1, 1, 2, 5])):
        _json(draft, chance)
    text = draft.read_bytes()
    draft.unlink()
    body = text + b" " * (-(start + len(text)) % 64) + data[start + length :]
    length += len(body) - (len(data) - start)
    head = state_files._HEAD.pack(len(body), zlib.crc32(body), length)
    path.write_bytes(state_files._MAGIC + head + body)
    path.with_name(_SEALED).touch()


def _kind(path: Path, chance: random.Random) -> None:
    """Put something else than a file in the place of one."""
    what = chance.choice(["fifo", "device", "circle", "outside", "folder", "sparse", "gone"])
    path.unlink()
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to(chance.choice(["/dev/zero", "/dev/random", "/dev/null"]))
    elif what == "circle":
        path.symlink_to(path)
    elif what == "outside":
        path.symlink_to("/proc/self/mem")
    elif what == "folder":
        path.mkdir()
    elif what == "sparse":
        with path.open("wb") as file:
            file.truncate(_SPARSE)


def _reseal(meta: Path) -> None:
    """Have the checksums of a saved buffer fit its files and its description."""
    tree = json.loads(meta.read_text())
    for holder, key in [*_places(tree)]:
        if key == "crc32":
            path = meta.parent / tree["folder"] / holder["file"]
            if path.is_file() and path.stat().st_size < _SPARSE:
                holder[key] = zlib.crc32(path.read_bytes())
    meta.write_bytes(tensor_files.sealed(json.dumps(tree).encode()))


def flip(folder: Path, chance: random.Random) -> None:
    """Flip one to three bits of one file, as a disk may."""
    path = chance.choice([p for p in sorted(folder.rglob("*")) if p.is_file()])
    data = bytearray(path.read_bytes())
    for place in chance.sample(range(len(data)), chance.randint(1, 3)):
        data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def damage(folder: Path, foreign: list[Path], chance: random.Random) -> None:
    """Damage one to three files of ``folder``, or put ``foreign`` ones in their place."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not p.is_symlink()]
        files = [p for p in files if p.name != "state.pt" and p.stat().st_size < _SPARSE]
        if not files:
            return
        texts = [p for p in files if p.suffix == ".json"]
        path = chance.choice(texts if texts and chance.random() < 0.5 else files)
        what = chance.choice(["json", "json", "bytes", "bytes", "kind", "swap", "foreign"])
        if what == "swap":
            other = chance.choice(files)
            one, two = path.read_bytes(), other.read_bytes()
            path.write_bytes(two)
            other.write_bytes(one)
        elif what == "foreign":
            shutil.copy(chance.choice(foreign), path)
        elif what == "kind":
            _kind(path, chance)
        else:
            try:
                if path.parent.name == "messages" and chance.random() < 0.6:
                    _records(path, chance)
                    continue
                if path.name == "state" and chance.random() < 0.7:
                    _seal(path, chance)
                    continue
                (_json if what == "json" and path.suffix == ".json" else _bytes)(path, chance)
            except (ValueError, LookupError, RecursionError, TypeError, struct.error):
                _bytes(path, chance)  # it was damaged before


# -- one file --------------------------------------------------------------------------------------


def attempt(number: int, whole: Path) -> str:
    """Damage a copy of something below ``whole`` and read it; return what became of it."""
    chance = random.Random(number)
    kinds = sorted(whole.iterdir())
    foreign = [path for path in sorted(whole.rglob("*")) if path.is_file()]
    kind = kinds[number % len(kinds)]
    with tempfile.TemporaryDirectory(dir=whole.parent) as place:
        folder = shutil.copytree(kind, Path(place, kind.name))
        flipped = kind.name.startswith(("buffer", "state")) and chance.random() < 0.25
        if flipped:
            flip(folder, chance)
        else:
            damage(folder, foreign, chance)
            metas = [p for p in folder.rglob("meta.json") if p.is_file() and not p.is_symlink()]
            metas = [p for p in metas if p.stat().st_size < _SPARSE]
            for meta in metas if chance.random() < 0.7 else ():
                with contextlib.suppress(Exception):  # it is no description any more
                    _reseal(meta)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = read(folder, chance)
        assert not flipped or said.startswith("refused"), f"a flipped bit was {said}"
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return said if growth <= MOST_GROWTH_KB else f"{trials.WRONG}takes {growth >> 10} MiB"


@contextlib.contextmanager
def drawing() -> Iterator[Callable[[int], tuple[str, trials.Call]]]:
    """Save one of each kind, and give what draws a damage of a copy."""
    with tempfile.TemporaryDirectory(prefix="gleanrl-fuzz-") as place:
        whole = Path(place, "whole")
        make_all(whole)
        yield lambda number: (f"damage {number}", partial(attempt, number, whole))


def main() -> int:
    """Damage files; return 1 if one was read wrongly."""
    os.environ["RL_WARNINGS"] = "0"
    with drawing() as draw:
        found = trials.main("fuzz", __doc__, draw, DEADLINE_S, cases=2000)
    return int(any(one.wrong for one in found))


if __name__ == "__main__":
    sys.exit(main())
