"""Data of nodes by torch.distributed.rpc, in a world of which a process can be in one.

Rank 0 is the learner, ranks 1, 2, ... are nodes. They find each other through a `TCPStore` on the
learner's interface. Torch's agents and their store ask nobody who connects for a secret, and agents
unpickle what they are sent: they listen on that interface only, and the user is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import struct
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import autograd, rpc

from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError
from gleanrl.core.options import warn
from gleanrl.transport.data_plane import (
    Connect,
    Connection,
    DataPlane,
    NodesConnection,
    Pair,
    Transfer,
)
from gleanrl.transport.process_group import tcp_store

LEARNER = 0
_autograd: Any = autograd  # stubs leave out what we use of these
_rpc: Any = rpc
_QUIET = {"_transports": ["uv"]}
"""The other transport that torch would choose on one machine keeps a thread spinning in each
process, whether or not anything is on its way."""
_LONG = 3600.0
_listens: str | None = None
"""The interface that TensorPipe listens on in this process: it looks once."""
_warned = False
_SIOCGIFADDR = 0x8915
_INTERFACES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def _plain_name(rank: int) -> str:
    """Return what users call a member in device maps."""
    return "TRAINER_NODE" if rank == LEARNER else f"COLLECTOR_NODE_{rank}"


@dataclass(frozen=True, slots=True)
class World:
    """What every member has to know."""

    size: int
    """Members, the learner included."""
    host: str
    """Where the store listens."""
    port: int
    timeout_s: float
    """Seconds that every step of joining may take."""
    token: str
    """Told apart from other worlds by this: torch counts what members of the same names did."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `TensorPipeRpcBackendOptions`."""

    def name(self, rank: int) -> str:
        """Return the RPC name of a member."""
        return f"{_plain_name(rank)}:{self.token}"

    def timeout(self, rank: int) -> float:
        """Return the seconds that every single message of a member may take.

        Nodes wait for a learner that is busy or suspended: that it is gone, their connections tell.
        """
        default = self.timeout_s if rank == LEARNER else max(self.timeout_s, _LONG)
        return float(self.options.get("rpc_timeout", default))

    def enter(self, rank: int, store: Any, address: str) -> None:
        """Become member ``rank``; waits for all others, at most ``timeout_s`` seconds per step.

        Args:
            rank: Of this process.
            store: This process's end of the store.
            address: This process's address on the network between the members.

        Raises:
            RuntimeError: the others did not come, or went away.
        """
        options = rpc.TensorPipeRpcBackendOptions(**self._translated(rank))
        store.set_timeout(timedelta(seconds=self.timeout_s))
        with _listening_on(address), warnings.catch_warnings():
            # About how torch calls itself.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            # What init_rpc does, less its prefix for keys: a learner may be in its third world
            # when its nodes are in their first.
            torch_rpc: Any = rpc
            _autograd._init(rank)
            torch_rpc._init_rpc_backend(
                store=store,
                name=self.name(rank),
                rank=rank,
                world_size=self.size,
                rpc_backend_options=options,
            )

    def _translated(self, rank: int) -> dict[str, Any]:
        """Return the options of a member, with the names of this world."""
        options = {**_QUIET, **self.options, "rpc_timeout": self.timeout(rank)}
        names = {_plain_name(other): self.name(other) for other in range(self.size)}
        maps = self.options.get("device_maps") or {}
        if maps:
            mine = {names.get(name, name): devices for name, devices in maps.items()}
            options["device_maps"] = {n: d for n, d in mine.items() if n != self.name(rank)}
        return options


def inside() -> bool:
    """Whether this process is in a world already."""
    return bool(_rpc._is_current_rpc_agent_set())


def check_outside() -> None:
    """Check that this process can enter a world.

    Raises:
        ConfigError: it is in one already, or this PyTorch has no RPC.
    """
    if not rpc.is_available():
        raise ConfigError(
            "this PyTorch was built without torch.distributed.rpc; use DistributedCollector"
        )
    if inside():
        raise ConfigError(
            "torch.distributed.rpc is initialised in this process already, by another RPCCollector "
            "or by init_rpc, and a process can be in one RPC world only: shut that one down first, "
            "or use a DistributedCollector, of which there may be any number"
        )


def leave() -> None:
    """Leave the world, if there is one, whether or not the others do. Never raises.

    Torch's way of leaving together hangs in a process that was in another world before.
    """
    if inside():
        with without_farewells(), contextlib.suppress(Exception):
            rpc.shutdown(graceful=False)


@contextlib.contextmanager
def without_farewells() -> Iterator[None]:
    """Leave out what RPC agents say on stderr when connections end, which here they are meant to.

    Everything else that is said meanwhile comes afterwards.
    """
    try:
        kept = os.dup(2)
    except OSError:  # there is no stderr
        yield
        return
    with open(os.memfd_create("stderr"), "w+b") as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            others = b"".join(line for line in said if b"tensorpipe_agent.cpp" not in line)
            if others:
                os.write(2, others)


def check_interface(address: str) -> None:
    """Check that this process can listen for RPCs on the interface of ``address``.

    Raises:
        ConfigError: it was in a world on another one.
    """
    interface = _interface_of(address)
    if None not in (_listens, interface) and interface != _listens:
        raise ConfigError(
            f"torch.distributed.rpc has listened on {_listens} in this process and cannot change "
            f"to {interface} ({address}): set TP_SOCKET_IFNAME before the first RPCCollector, or "
            "begin a new process"
        )


def warn_of_strangers(address: str) -> None:
    """Warn, once per process, that RPC takes pickles from whoever reaches ``address``."""
    global _warned
    if _warned or ipaddress.ip_address(address).is_loopback:
        return
    _warned = True
    interface = os.environ.get(_INTERFACES[0]) or _interface_of(address) or address
    warn(
        "RPCCollector: torch.distributed.rpc unpickles what anybody sends who reaches its ports on "
        f"{interface} ({address}), here and on all nodes, and asks for no secret: keep others off "
        "that network with a firewall, or use DistributedCollector, which authenticates first"
    )


@contextlib.contextmanager
def _listening_on(address: str) -> Iterator[None]:
    """Have TensorPipe and gloo listen on the interface of ``address`` unless the user has chosen.

    What TensorPipe is told first holds for the whole life of the process.
    """
    global _listens
    interface = _interface_of(address)
    if _INTERFACES[0] not in os.environ:
        _listens = _listens or interface
    names = [name for name in _INTERFACES if interface and name not in os.environ]
    os.environ.update(dict.fromkeys(names, interface or ""))
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def _interface_of(address: str) -> str | None:
    """Return the interface that has ``address``, ``None`` if that cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                asked = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, asked)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


_PIECE = 1 << 22
"""Largest tensor of a message, in bytes: what is larger gets fresh pages every time it arrives."""
_pairs: dict[int, RpcPair] = {}
"""This process's sides, by the rank of the other one."""


class RpcPair:
    """One side of what carries data between two members: tensors are pushed by RPC.

    Calls may arrive in another order than they were made in, so the two sides count.
    """

    def __init__(self, world: World, rank: int, peer: int, connection: Connection) -> None:
        """Be the end at which tensors from ``peer`` arrive, from now on.

        Args:
            world: Both are members of it.
            rank: Of this process.
            peer: Of the other one.
            connection: Between the two; told if the other side cannot be reached.
        """
        self._world, self._rank, self._peer = world, rank, peer
        self._connection = connection
        self._counted: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()
        self._early: dict[tuple[int, int], Sequence[torch.Tensor]] = {}
        self._due: dict[tuple[int, int], _Arriving] = {}
        self._over = False
        _pairs[peer] = self

    def _place(self, direction: str, tag: int) -> tuple[int, int]:
        """Return what both sides call the next transfer of that kind."""
        number = self._counted[direction, tag]
        self._counted[direction, tag] += 1
        return tag, number

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        # Each piece has a storage of its own: of a view, RPC would send a copy.
        pieces = [torch.from_numpy(piece.numpy()) for piece in torch.split(tensor, _PIECE)]
        future = rpc.rpc_async(
            self._world.name(self._peer),
            _deliver,
            args=(self._rank, self._place("sent", tag), pieces),
            timeout=self._world.timeout(self._rank),
        )
        future.add_done_callback(self._done)
        return _Leaving(future)

    def _done(self, future: Any) -> None:
        problem = _problem(future)
        if problem is not None and not self._over:
            self._connection.fail(f"cannot be reached by RPC ({problem})")

    def receive(self, tensor: torch.Tensor, tag: int, whole: bool = False) -> Transfer:
        arriving = _Arriving(tensor, self._world.timeout(self._rank))
        place = self._place("received", tag)
        with self._lock:
            pieces = self._early.pop(place, None)
            if pieces is None:
                self._due[place] = arriving
        if pieces is not None:
            arriving.fill(pieces)
        return arriving

    def take(self, place: tuple[int, int], pieces: Sequence[torch.Tensor]) -> None:
        """Take in what the other side has sent, in a thread of the RPC agent."""
        with self._lock:
            arriving = self._due.pop(place, None)
            if arriving is None:
                self._early[place] = pieces
        if arriving is not None:
            arriving.fill(pieces)

    def close(self) -> None:
        """Take no more tensors; that connections end is no problem from now on."""
        self._over = True
        _pairs.pop(self._peer, None)


def _deliver(sender: int, place: tuple[int, int], pieces: Sequence[torch.Tensor]) -> None:
    """Put a tensor down here; this is what an RPC runs."""
    pair = _pairs.get(sender)
    if pair is None:
        raise GleanError("nobody takes data here any more")
    pair.take(place, pieces)


class _Leaving:
    """A `Transfer` to the other side."""

    def __init__(self, future: Any) -> None:
        self._future = future

    @property
    def over(self) -> bool:
        return bool(self._future.done())

    def finish(self) -> None:
        problem = _problem(self._future)
        if problem is not None:
            raise RuntimeError(problem)


class _Arriving:
    """A `Transfer` from the other side."""

    def __init__(self, target: torch.Tensor, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self._whole = threading.Event()

    def fill(self, pieces: Sequence[torch.Tensor]) -> None:
        for place, piece in zip(torch.split(self._target, _PIECE), pieces, strict=True):
            place.copy_(piece)
        self._whole.set()

    @property
    def over(self) -> bool:
        return self._whole.is_set()

    def finish(self) -> None:
        if not self._whole.wait(self._timeout):
            raise RuntimeError(f"nothing came by RPC for {self._timeout:.0f} s")


def _problem(future: Any) -> str | None:
    """Wait for the end of an RPC; return what went wrong."""
    try:
        future.wait()
    except Exception as err:  # also what `_deliver` raised there
        return f"{type(err).__name__}: {err}"
    return None


_LOOK = 0.2
"""Seconds between two looks at whether all nodes have entered the world."""


class RpcPlane(DataPlane):
    """Every RPC puts one tensor down and returns, however many are under way."""

    def __init__(
        self,
        host: str,
        options: Mapping[str, Any] | None = None,
        devices: Sequence[Sequence[Any] | None] | None = None,
    ) -> None:
        """Check that this process can enter a world.

        Args:
            host: Address that nodes are told.
            options: For `TensorPipeRpcBackendOptions`, in every process.
            devices: Per node, the CUDA devices whose tensors its RPCs may carry.

        Raises:
            ConfigError: RPC is initialised in this process already, or on another interface.
        """
        check_outside()
        self._address = socket.gethostbyname(host)
        check_interface(self._address)
        warn_of_strangers(self._address)
        self._options, self._devices = dict(options or {}), devices
        self._store: Any = None
        self._entering: threading.Thread | None = None

    def begin(self, host: str, nodes: int, timeout_s: float) -> None:
        listener = socket.create_server((host, 0))
        self._store = tcp_store(host, listener.getsockname()[1], timeout_s, listener)
        self._world = World(
            size=nodes + 1,
            host=host,
            port=self._store.port,
            timeout_s=timeout_s,
            token=secrets.token_hex(8),
            options=self._options,
        )

    def connect(self, node: int) -> Connect:
        world = self._world
        if self._devices is not None:
            own = {**self._options, "devices": list(self._devices[node] or [])}
            world = replace(world, options=own)
        return partial(_NodesPair, world=world)

    def pair(self, connection: Connection) -> Pair:
        return RpcPair(self._world, LEARNER, connection.index + 1, connection)

    def enter(self, look: Callable[[], None]) -> None:
        """Enter the world in another thread, and look after the nodes meanwhile.

        Raises:
            CollectorTimeout: not all nodes did in time.
            RuntimeError: they went away.
        """
        entered: Future[None] = Future()

        def run() -> None:
            try:
                self._world.enter(LEARNER, self._store, self._address)
                entered.set_result(None)
            except BaseException as err:
                entered.set_exception(err)

        self._entering = threading.Thread(target=run, name="gleanrl rpc", daemon=True)
        self._entering.start()
        timeout = self._world.timeout_s
        deadline = time.monotonic() + timeout
        while not entered.done():
            self._entering.join(_LOOK)
            look()
            if time.monotonic() > deadline:
                raise CollectorTimeout(f"the nodes did not enter an RPC world in {timeout} s")
        entered.result()

    def leave(self) -> None:
        """Leave the world before the nodes do."""
        for pair in list(_pairs.values()):
            pair.close()
        leave()

    def close(self) -> None:
        if self._entering is not None:  # it fails now that the nodes are gone
            self._entering.join(_LOOK)
        leave()
        self._store = None  # a forked child has not the thread that this would wait for


class _NodesPair(RpcPair):
    """A node's side; it leaves the world last."""

    def __init__(self, connection: NodesConnection, world: World) -> None:
        """Enter the world; returns once all others have."""
        rank = connection.index + 1
        super().__init__(world, rank, LEARNER, connection)
        self._nodes = connection
        store = tcp_store(world.host, world.port, world.timeout_s)
        world.enter(rank, store, connection.here)

    @contextlib.contextmanager
    def parting(self) -> Iterator[None]:
        # From before the learner may leave: it and other nodes end their connections at any moment.
        with without_farewells():
            self.close()
            yield
            self._nodes.await_end()  # the learner hangs up once it has left
            leave()
