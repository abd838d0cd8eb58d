"""Workers on nodes of a torch.distributed.rpc world, of which a process can be in one.

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
import select
import socket
import struct
import sys
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed import autograd, rpc

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError
from gleanrl.core.options import users_stacklevel
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.core.window import Window
from gleanrl.transport.frames import WEIGHTS, CommandReader, InOrder, frame_of, head_of, key_frame
from gleanrl.transport.handshake import Guest
from gleanrl.transport.landing import Landings, RolloutBlock
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.network import NodeBackend, RemoteNode
from gleanrl.transport.node import NodeConnection
from gleanrl.transport.weights import LatestWeights
from gleanrl.transport.worker import Boot, OpenWindow, WeightReceiver

LEARNER = 0
_autograd: Any = autograd  # stubs leave out what we use of these
_rpc: Any = rpc
_c10d: Any = distributed
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

    def connect(self) -> Any:
        """Return a node's end of the store."""
        timeout = timedelta(seconds=self.timeout_s)
        return _c10d.TCPStore(self.host, self.port, is_master=False, timeout=timeout)


def open_store(host: str, timeout_s: float) -> Any:
    """Return the learner's end of a store that listens on ``host``, at any port."""
    sock = socket.create_server((host, 0))
    port = sock.getsockname()[1]
    return _c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=sock.detach(),
    )


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
    warnings.warn(
        "RPCCollector: torch.distributed.rpc unpickles what anybody sends who reaches its ports on "
        f"{interface} ({address}), here and on all nodes, and asks for no secret: keep others off "
        "that network with a firewall, or use DistributedCollector, which authenticates first",
        UserWarning,
        stacklevel=users_stacklevel(),
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


_LARGE = 1 << 16
"""Bytes from which on a frame travels beside the pickle."""
_PIECE = 1 << 22
"""Largest tensor of a message, in bytes: what is larger gets fresh pages every time it arrives."""
Data = Sequence[torch.Tensor]
Sink = Callable[[int, bytes, Data], None]
Lost = Callable[[int, str], None]
_here: RpcMessenger | None = None


class RpcMessenger:
    """One member's end."""

    def __init__(self, world: World, rank: int, timeout: float, sink: Sink, lost: Lost) -> None:
        """Be the end at which messages to this process arrive, from now on.

        Args:
            world: Whose members exchange them.
            rank: Of this process.
            timeout: Seconds that one message may take.
            sink: Called, in the order of sending, with who sent it, a frame and tensors; in any
                thread, one at a time for each sender.
            lost: Called with a member and what went wrong when a message did not reach it.
        """
        global _here
        self._world, self._rank, self._timeout = world, rank, timeout
        self._sink, self._lost = sink, lost
        self._sending = threading.RLock()
        self._sent: dict[int, int] = defaultdict(int)
        self._arriving: dict[int, InOrder[tuple[bytes, Data]]] = {}
        self._taking = threading.RLock()
        self._under_way = 0
        self._settled = threading.Condition(self._sending)
        _here = self

    def send(
        self, peer: int, frame: bytes, data: Data = (), done: Callable[[], None] | None = None
    ) -> None:
        """Send a message; waits for nobody.

        Args:
            peer: Who gets it.
            frame: The message.
            data: CPU tensors that go with it (see `cut`); must not change before ``done``.
            done: Called once the message has arrived or was lost; in any thread.
        """
        with self._sending:
            number = self._sent[peer]
            self._sent[peer] += 1
            self._under_way += 1
        try:
            future = rpc.rpc_async(
                self._world.name(peer),
                _deliver,
                args=(self._rank, number, _packed(frame), list(data)),
                timeout=self._timeout,
            )
        except RuntimeError as err:  # the agent knows already that it cannot
            self._finished(peer, str(err), done)
            return
        future.add_done_callback(lambda ended: self._finished(peer, _problem(ended), done))

    def _finished(self, peer: int, problem: str | None, done: Callable[[], None] | None) -> None:
        with self._sending:
            self._under_way -= 1
            self._settled.notify_all()
        if done is not None:
            done()
        if problem is not None:
            self._lost(peer, problem)

    def settle(self, timeout: float) -> bool:
        """Wait until all messages have arrived; return whether they have."""
        with self._settled:
            return self._settled.wait_for(lambda: self._under_way == 0, timeout)

    def take(self, sender: int, number: int, frame: bytes, data: Data) -> None:
        """Take in a message; hand over those whose turn it is."""
        with self._taking:
            arriving = self._arriving.get(sender)
            if arriving is None:
                arriving = InOrder(lambda message: self._sink(sender, *message))
                self._arriving[sender] = arriving
            arriving.take(number, (frame, data))

    def close(self) -> None:
        """Take no more messages."""
        global _here
        if _here is self:
            _here = None


def _deliver(sender: int, number: int, frame: bytes | torch.Tensor, data: Data) -> None:
    """Put a message down here; this is what an RPC runs."""
    post = _here
    if post is None:
        raise GleanError("nobody takes messages here any more")
    post.take(sender, number, _unpacked(frame), data)


def cut(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the pieces in which ``flat`` (uint8) travels, over the same memory.

    Each has a storage of its own: of a view, RPC would send a copy.
    """
    return [torch.from_numpy(piece.numpy()) for piece in torch.split(flat, _PIECE)]


def paste(data: Data, targets: Sequence[torch.Tensor]) -> None:
    """Copy what was cut from tensors of the sizes of ``targets`` into these."""
    places = [place for target in targets for place in torch.split(target, _PIECE)]
    for place, piece in zip(places, data, strict=True):
        place.copy_(piece)


def _packed(frame: bytes) -> bytes | torch.Tensor:
    if len(frame) < _LARGE:
        return frame
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


def _unpacked(frame: bytes | torch.Tensor) -> bytes:
    return frame if isinstance(frame, bytes) else frame.numpy().tobytes()


def _problem(future: Any) -> str | None:
    try:
        future.value()
    except Exception as err:  # also what `_deliver` raised there
        return f"{type(err).__name__}: {err}"
    return None


LEFT_WORLD = "leave"
"""What the learner tells on the connection once it has left the world."""


class RpcEndpoint:
    """A `NodeEndpoint` whose commands, replies, rollouts and weights travel by RPC.

    The connection on which the node was let in shows signs of life and raises the stop byte.
    """

    def __init__(
        self, connection: NodeConnection, boot: Boot, address: str, *, world: World
    ) -> None:
        self._connection, self._world = connection, world
        self._inbox = connection.inbox  # where a signal has this node end, too
        self._reader = CommandReader(boot.worker)
        self._received = LatestWeights(_paste_one)
        self._blocks: dict[int, _Outgoing] = {}
        self._slot = 0
        self._over = False
        self._index = boot.worker
        self.stop: Stop = connection.stop
        self.weights: WeightReceiver | None = self._received
        rank = boot.worker + 1
        self._messenger = RpcMessenger(world, rank, world.timeout(rank), self._take, self._lost)
        world.enter(rank, world.connect(), address)

    def next(self) -> tuple[int, m.Command]:
        return self._inbox.next()

    def _take(self, sender: int, frame: bytes, data: Data) -> None:
        """Take in a message, in a thread of the RPC agent."""
        if frame == WEIGHTS:
            self._received.put(data)
            return
        ticket, command = self._reader.read(frame)
        if isinstance(command, m.Failed):
            self.answer(command)
            return
        self._over = self._over or isinstance(command, m.Close)
        self._inbox.put(ticket, command)

    def window(self, reference: m.WindowRef) -> Window:
        self._slot = reference.slot
        outgoing = self._blocks.get(reference.slot)
        if outgoing is None:
            outgoing = self._blocks[reference.slot] = _Outgoing(reference)
        outgoing.free.wait()  # as long as the RPC may take, whose end sets it
        return outgoing.block.window

    def answer(self, reply: m.Reply) -> None:
        outgoing = self._blocks.get(self._slot)
        frame, send = frame_of(reply), self._messenger.send
        if isinstance(reply, m.Rolled) and reply.report.payload is None and outgoing is not None:
            outgoing.free.clear()
            send(LEARNER, frame, outgoing.pieces, outgoing.free.set)
        else:
            send(LEARNER, frame)

    def finish(self) -> None:
        self._connection.finish()
        self._over = True
        with without_farewells(), contextlib.suppress(GleanError):
            self._messenger.settle(self._world.timeout_s)
            self._connection.key(LEFT_WORLD)
        leave()

    def _lost(self, peer: int, problem: str) -> None:
        if self._over:  # the learner has left, maybe before its acknowledgement
            return
        sys.stderr.write(f"node {self._index}: a message did not reach the learner ({problem})\n")
        sys.stderr.flush()
        # Whatever the environment is doing: what the learner waits for will never come.
        os._exit(1)


class _Outgoing:
    """The rollouts of one slot, as they travel."""

    def __init__(self, reference: m.WindowRef) -> None:
        self.block = RolloutBlock(reference)
        self.pieces = [piece for whole in self.block.pieces for piece in cut(whole)]
        self.free = threading.Event()
        self.free.set()


def _paste_one(data: Data, target: torch.Tensor) -> None:
    """Copy what was cut from a tensor of the size of ``target`` into it."""
    paste(data, [target])


_LOOK = 0.2
"""Seconds between two looks at whether all nodes have entered the world."""


class RpcNode(RemoteNode):
    """A node to which messages and data go by RPC."""

    def __init__(self, guest: Guest, backend: RPCBackend) -> None:
        super().__init__(guest, backend)
        self.messenger: RpcMessenger | None = None
        """Carries messages, once the world was entered."""
        self._landings = Landings(backend.open_window)
        self._windows: dict[int, m.WindowRef] = {}
        """By ticket, where rollouts that are due belong."""

    def post(self, ticket: int, command: m.Command) -> None:
        assert self.messenger is not None
        if isinstance(command, m.Collect):
            self._windows[ticket] = command.window
        self.messenger.send(self.index + 1, self.writer.write(ticket, command))

    def copy_in(self, ticket: int, data: Data) -> None:
        """Copy the rollout that answers ``ticket`` into its window."""
        reference = self._windows.get(ticket)
        if data and reference is not None:
            landing = self._landings.of(reference)
            paste(data, landing.pieces)
            landing.settle()
        self._windows.pop(ticket, None)  # last: an interrupt meanwhile must not lose it


class RPCBackend(NodeBackend[RpcNode]):
    """Nodes whose commands, replies, rollouts and weights travel by RPC.

    Nodes are let in on connections of their own, which tell who is gone; they and the learner then
    enter an RPC world. Every RPC puts one message down and returns, however many are under way.
    """

    def __init__(
        self,
        open_window: OpenWindow,
        launcher: Launcher,
        *,
        rpc_options: Mapping[str, Any] | None = None,
        devices: Sequence[Sequence[Any] | None] | None = None,
        host: str | None = None,
        **options: Any,
    ) -> None:
        """Listen for nodes.

        Args:
            open_window: Maps windows of the learner's arenas.
            launcher: Starts the nodes.
            rpc_options: For `TensorPipeRpcBackendOptions`, in every process.
            devices: Per node, the CUDA devices whose tensors its RPCs may carry.
            host: Address to listen on, and that nodes are told; the launcher's choice by default.
            **options: See `NodeBackend`; ``timeout_s`` also bounds every RPC.

        Raises:
            ConfigError: RPC is initialised in this process already, or the port is taken.
        """
        check_outside()
        address = socket.gethostbyname(host or launcher.address())
        check_interface(address)
        warn_of_strangers(address)
        super().__init__(open_window, launcher, host=host, **options)
        self._rpc_options = dict(rpc_options or {})
        self._devices = devices
        self._store: Any = None
        self._entering: threading.Thread | None = None
        self._messenger: RpcMessenger | None = None
        self._coming: deque[tuple[RpcNode, bytes, Data]] = deque()
        """Replies that threads of the RPC agent have taken in."""
        self._lost: list[tuple[RpcNode, str]] = []
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._event, select.EPOLLIN)

    def _node(self, guest: Guest) -> RpcNode:
        return RpcNode(guest, self)

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        self._store = open_store(self._host, self.timeout_s)
        self._world = World(
            size=len(factories) + 1,
            host=self._host,
            port=self._store.port,
            timeout_s=self.timeout_s,
            token=secrets.token_hex(8),
            options=self._rpc_options,
        )
        super().start(factories)
        timeout = self._world.timeout(LEARNER)
        self._messenger = RpcMessenger(self._world, LEARNER, timeout, self._take, self._note_lost)
        for node in self._peers:
            node.messenger = self._messenger
        self._enter()

    def boot(self, index: int, life: int) -> Boot:
        world = self._world
        if self._devices is not None:
            own = {**self._rpc_options, "devices": list(self._devices[index] or [])}
            world = replace(world, options=own)
        connect = partial(RpcEndpoint, world=world)
        return Boot(index, self._factories[index], self._threads, life, connect)

    def _enter(self) -> None:
        """Enter the world in another thread, and look after the nodes meanwhile."""
        address, timeout = socket.gethostbyname(self._host), self.timeout_s
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                self._world.enter(LEARNER, self._store, address)
                outcome.append(None)
            except BaseException as err:
                outcome.append(err)

        thread = threading.Thread(target=run, name="gleanrl rpc", daemon=True)
        self._entering = thread
        thread.start()
        deadline = time.monotonic() + timeout
        while thread.is_alive():
            thread.join(_LOOK)
            for fd, events in self._poller.poll(0):
                self._turn_to(fd, events)
            if time.monotonic() > deadline:
                raise CollectorTimeout(f"the nodes did not enter an RPC world in {timeout} s")
        if outcome[0] is not None:
            raise outcome[0]

    # -- messages --------------------------------------------------------------------------------

    def _send_weights(self, peer: RpcNode, buffer: torch.Tensor, taken: Callable[[], None]) -> bool:
        assert self._messenger is not None
        self._messenger.send(peer.index + 1, WEIGHTS, cut(buffer), taken)
        return True

    def _take(self, sender: int, frame: bytes, data: Data) -> None:
        """Take in a reply, in a thread of the RPC agent."""
        self._coming.append((self._peers[sender - 1], frame, data))
        self._wake()

    def _note_lost(self, peer: int, problem: str) -> None:
        """Note that a message did not arrive, in a thread of the RPC agent."""
        self._lost.append((self._peers[peer - 1], problem))
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def _turn_to(self, fd: int, events: int) -> None:
        if fd == self._event:
            os.eventfd_read(fd)
        self._land()
        if self._arrived:  # what a node sent before it ended comes before its end
            if self._lost:
                self._wake()
            return
        if fd != self._event:
            super()._turn_to(fd, events)
        while self._lost:
            node, problem = self._lost.pop()
            if not node.gone:
                raise self._died(node, f"cannot be reached by RPC ({problem})")

    def _land(self) -> None:
        """Hand over the replies that have come, and put their rollouts where they belong."""
        while self._coming:
            node, frame, data = self._coming[0]
            node.copy_in(head_of(frame)[0], data)
            self._arrived.append(frame)
            self._coming.popleft()

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        if self._closed:
            return
        mine = self._owner == os.getpid()  # in a forked child it is somebody else's world
        if mine:
            leave()
            for node in {*self._peers, *self._by_fd.values()}:
                if not node.gone:
                    node.put(key_frame(LEFT_WORLD, b""))
        super().stop(timeout)
        if mine:
            if self._entering is not None:  # it fails now that the nodes are gone
                self._entering.join(_LOOK)
            leave()
            if self._messenger is not None:
                self._messenger.close()
            self._store = None  # a forked child has not the thread that this would wait for
        os.close(self._event)
