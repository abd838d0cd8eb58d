"""Entering and leaving the one world of torch.distributed.rpc that a process can be in.

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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
from torch import distributed
from torch.distributed import autograd, rpc

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError
from gleanrl.core.messages import BoardRef
from gleanrl.core.protocols import SourceFactory
from gleanrl.memory.arena import window_over
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.transport.frames import (
    WEIGHTS,
    CommandReader,
    frame_of,
    head_of,
    key_frame,
    read_weights,
    unreadable,
    weights_frame,
)
from gleanrl.transport.handshake import Guest
from gleanrl.transport.landing import Landing, pieces_of
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.network import NetworkBackend
from gleanrl.transport.node import NodeConnection
from gleanrl.transport.peer import RemoteNode
from gleanrl.transport.worker import OpenWindow, Worker, work
from gleanrl.weights.flat import FlatBuffer, check_fit, plan_flat

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
    patience: float
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
        default = self.patience if rank == LEARNER else max(self.patience, _LONG)
        return float(self.options.get("rpc_timeout", default))

    def enter(self, rank: int, store: Any, address: str) -> None:
        """Become member ``rank``; waits for all others, at most ``patience`` seconds per step.

        Args:
            rank: Of this process.
            store: This process's end of the store.
            address: This process's address on the network between the members.

        Raises:
            RuntimeError: the others did not come, or went away.
        """
        options = rpc.TensorPipeRpcBackendOptions(**self._translated(rank))
        store.set_timeout(timedelta(seconds=self.patience))
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
        timeout = timedelta(seconds=self.patience)
        return _c10d.TCPStore(self.host, self.port, is_master=False, timeout=timeout)


def open_store(host: str, patience: float) -> Any:
    """Return the learner's end of a store that listens on ``host``, at any port."""
    sock = socket.create_server((host, 0))
    port = sock.getsockname()[1]
    return _c10d.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=patience),
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
        stacklevel=2,
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
        self._arriving: dict[int, _InOrder] = defaultdict(_InOrder)
        self._under_way = 0
        self._settled = threading.Condition(self._sending)
        _here = self

    def send(
        self,
        peer: int,
        frame: bytes,
        data: Data = (),
        done: Callable[[], None] | None = None,
    ) -> None:
        """Send a message; waits for nobody.

        Args:
            peer: Who gets it.
            frame: The message.
            data: CPU tensors that go with it (see `cut`); must not change before ``done``.
            done: Called once the message has arrived or was lost; in any thread.
        """
        with self._sending:
            self._sent[peer] += 1
            self._under_way += 1
            number = self._sent[peer]
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
        with self._sending:
            arriving = self._arriving[sender]
        with arriving.lock:
            arriving.early[number] = frame, data
            while arriving.due in arriving.early:
                message = arriving.early.pop(arriving.due)
                arriving.due += 1
                self._sink(sender, *message)

    def close(self) -> None:
        """Take no more messages."""
        global _here
        if _here is self:
            _here = None


class _InOrder:
    """What has come from one sender before its turn."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.due = 1
        self.early: dict[int, tuple[bytes, Data]] = {}


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


@dataclass(eq=False, slots=True)
class _RpcPublication:
    """Weights of one version, and how many messages still read from them."""

    buffer: FlatBuffer
    readers: int = 0


class RpcBoard:
    """The weights of one model, published to all nodes.

    While weights are on their way to a node it is sent no others; when they have arrived it gets
    those that are the newest by then. A command does not wait for that: before it, the newest are
    sent, so that it is carried out with what had been published when it was given.
    """

    def __init__(self, ref: BoardRef, post: RpcMessenger, nodes: Sequence[RemoteNode]) -> None:
        """Publish to ``nodes``.

        Args:
            ref: Where tensors lie; its offset is the board's number.
            post: Carries them.
            nodes: All of them.
        """
        self.ref = ref
        self._post, self._nodes = post, nodes
        self._lock = threading.RLock()  # messages may arrive while they are being sent
        self._free: list[FlatBuffer] = []
        self._newest: _RpcPublication | None = None
        self._moving: dict[int, int] = {node.index: 0 for node in nodes}
        """Per node, how many messages are on their way."""
        self._behind: set[int] = set()

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        with self._lock:
            buffer = self._free.pop() if self._free else FlatBuffer(self.ref)
        buffer.fill(tensors, version, serial)
        with self._lock:
            older, self._newest = self._newest, _RpcPublication(buffer)
            if older is not None:
                self._recycle(older)
            for node in self._nodes:
                if node.channel.fileno() < 0:
                    continue
                if self._moving[node.index]:
                    self._behind.add(node.index)
                else:
                    self._send(node.index)

    def catch_up(self, node: int) -> None:
        """Before ``node`` is given a command: send it the newest weights if it was not."""
        with self._lock:
            if node in self._behind:
                self._send(node)

    def _send(self, node: int) -> None:
        publication = self._newest
        assert publication is not None
        self._behind.discard(node)
        self._moving[node] += 1
        publication.readers += 1
        self._post.send(
            node + 1,
            weights_frame(self.ref.offset),
            cut(publication.buffer.bytes),
            lambda: self._arrived(node, publication),
        )

    def _arrived(self, node: int, publication: _RpcPublication) -> None:
        with self._lock:
            self._moving[node] -= 1
            publication.readers -= 1
            self._recycle(publication)
            if node in self._behind and not self._moving[node]:
                self._send(node)

    def _recycle(self, publication: _RpcPublication) -> None:
        if not publication.readers and publication is not self._newest:
            self._free.append(publication.buffer)


LEFT_WORLD = "leave"
"""What the learner tells on the connection once it has left the world."""


@dataclass(frozen=True, slots=True)
class RpcBoot:
    """What the learner tells a node that it has let in."""

    threads: int
    path: tuple[str, ...]
    """Where the learner imports from."""
    factory: bytes
    """A pickled `SourceFactory`."""
    world: World

    def serve(self, connection: NodeConnection, node: int, address: str) -> None:
        """Enter the world and serve the learner until it says `Close`."""
        member = _Member(connection, node, self)
        self.world.enter(node + 1, self.world.connect(), address)
        member.run()
        connection.finish()
        with without_farewells(), contextlib.suppress(GleanError):
            member.settle()
            connection.key(LEFT_WORLD)
        leave()


class _Member:
    """The worker of one node."""

    def __init__(self, connection: NodeConnection, index: int, boot: RpcBoot) -> None:
        self._link, self._index, self._boot = connection, index, boot
        self._inbox = connection.inbox  # where a signal has this node end, too
        self._reader = CommandReader()
        self._weights = RpcWeights()
        self._blocks: dict[int, _Block] = {}
        self._slot = 0
        self._over = False
        timeout = boot.world.timeout(index + 1)
        self._post = RpcMessenger(boot.world, index + 1, timeout, self._take, self._lost)

    def run(self) -> None:
        """Build the source and answer commands."""
        work(self._index, self._build, self._inbox.next, self._answer)

    def settle(self) -> None:
        """Wait until the learner has all answers, or has left."""
        self._over = True
        self._post.settle(self._boot.world.patience)

    def _build(self) -> Worker:
        factory = cloudpickle.loads(self._boot.factory)
        return Worker(self._index, factory, self._open, self._link.stop, self._weights)

    def _take(self, sender: int, frame: bytes, data: Data) -> None:
        if frame[:1] == WEIGHTS:
            self._weights.put(read_weights(frame), data)
            return
        try:
            command = self._reader.read(frame)
        except Exception as err:  # whatever the user's objects do when unpickled
            self._answer(m.Failed(self._index, head_of(frame)[0], unreadable(err)))
            return
        self._over = self._over or isinstance(command, m.Close)
        self._inbox.put(head_of(frame)[0], command)

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        """Return memory of this node's own for a rollout; what was in it has to be gone first."""
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        self._slot = reference.slot
        block = self._blocks.get(reference.slot)
        if block is None:
            block = self._blocks[reference.slot] = _Block(reference)
        block.free.wait()  # as long as the RPC may take, whose end sets it
        return block.window

    def _answer(self, reply: m.Reply) -> None:
        block = self._blocks.get(self._slot)
        if isinstance(reply, m.Rolled) and reply.report.payload is None and block is not None:
            block.free.clear()
            self._post.send(LEARNER, frame_of(reply), block.pieces, block.free.set)
        else:
            self._post.send(LEARNER, frame_of(reply))

    def _lost(self, peer: int, problem: str) -> None:
        if self._over:  # the learner has left, maybe before its acknowledgement
            return
        sys.stderr.write(f"node {self._index}: a message did not reach the learner ({problem})\n")
        sys.stderr.flush()
        # Whatever the environment is doing: what the learner waits for will never come.
        os._exit(1)


class _Block:
    """Memory for the rollouts of one slot, as they travel."""

    def __init__(self, reference: m.WindowRef) -> None:
        plan, nbytes = packed(reference)
        block = torch.zeros(nbytes, dtype=torch.uint8)
        self.window = window_over(block, plan)
        self.pieces = [piece for a, b in pieces_of(reference) for piece in cut(block[a:b])]
        self.free = threading.Event()
        self.free.set()


class RpcWeights:
    """The newest weights that have arrived, of every board; a `Mailbox`."""

    def __init__(self) -> None:
        """Expect nothing yet."""
        self._boards: dict[int, tuple[str, FlatBuffer]] = {}
        self._new: dict[int, Data] = {}

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Expect weights of ``model_id`` from now on."""
        self._boards[board.offset] = model_id, FlatBuffer(board)

    def put(self, number: int, data: Data) -> None:
        """Take in weights of board ``number``; any thread may."""
        self._new[number] = data

    def newest(self) -> m.Snapshot | None:
        """Return what is new; its tensors are valid until the next call."""
        models, newest = {}, (0, 0)
        for number in list(self._new):
            model_id, buffer = self._boards[number]
            paste(self._new.pop(number), [buffer.bytes])
            version, serial = buffer.stamp
            models[model_id] = buffer.views
            newest = max(newest, (serial, version))
        return m.Snapshot(newest[1], models, newest[0]) if models else None


_LOOK = 0.2
"""Seconds between two looks at whether all nodes have entered the world."""


class RpcNode(RemoteNode):
    """One node, seen from the learner: messages go by RPC."""

    def __init__(self, guest: Guest, open_window: OpenWindow) -> None:
        """Take over the connection on which the node was let in."""
        super().__init__(guest, open_window)
        self.mail: RpcMessenger | None = None
        """Carries messages, once the world was entered."""
        self.arrived: dict[int, Data] = {}
        """Rollouts that have come, by ticket."""
        self._windows: dict[int, m.WindowRef] = {}
        """Where those that are due belong."""

    def connect(self, kind: str, patience: float) -> None:
        """Do nothing: all nodes enter the world at once."""

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command``."""
        assert self.mail is not None
        if isinstance(command, m.Collect):
            self._windows[ticket] = command.window
        self.mail.send(self.index + 1, self._writer.write(ticket, command))

    def is_here(self, ticket: int) -> bool:
        """Return True: rollouts travel with their reply."""
        return True

    def land(self, ticket: int) -> None:
        """If ``ticket`` is that of a rollout, copy it into its window."""
        data, reference = self.arrived.get(ticket), self._windows.get(ticket)
        if data is not None and reference is not None:
            landing = self._landings.get(reference.slot)
            if landing is None:
                landing = Landing(self._open_window(reference), reference)
                self._landings[reference.slot] = landing
            paste(data, landing.pieces)
            landing.settle()
        # Last: an interrupt meanwhile must not lose it.
        self.arrived.pop(ticket, None)
        self._windows.pop(ticket, None)


class RPCBackend(NetworkBackend):
    """A `NetworkBackend` whose commands, replies, rollouts and weights travel by RPC.

    Nodes are let in on connections of their own, which tell who is gone; they and the learner then
    enter an RPC world. Every RPC puts one message down and returns, however many are under way.
    """

    _node_class = RpcNode

    def __init__(
        self,
        open_window: OpenWindow,
        launcher: Launcher,
        *,
        options: Mapping[str, Any] | None = None,
        devices: Sequence[Sequence[Any] | None] | None = None,
        host: str | None = None,
        ports: Sequence[int] = (0,),
        threads: int = 1,
        patience: float = 60.0,
        start_timeout: float = 120.0,
    ) -> None:
        """Listen for nodes.

        Args:
            open_window: Maps windows of the learner's arenas.
            launcher: Starts the nodes.
            options: For `TensorPipeRpcBackendOptions`, in every process.
            devices: Per node, the CUDA devices whose tensors its RPCs may carry.
            host: Address to listen on, and that nodes are told; the launcher's choice by default.
            ports: To listen on the first of these that is free; any by default.
            threads: torch threads of each node.
            patience: Seconds without a sign of life after which a node counts as dead, and that
                any RPC may take.
            start_timeout: Seconds all nodes together may take to join.

        Raises:
            ConfigError: RPC is initialised in this process already, or the port is taken.
        """
        check_outside()
        address = socket.gethostbyname(host or launcher.address())
        check_interface(address)
        warn_of_strangers(address)
        super().__init__(
            open_window,
            launcher,
            host=host,
            ports=ports,
            threads=threads,
            patience=patience,
            start_timeout=start_timeout,
        )
        self._options = dict(options or {})
        self._devices = devices
        self._published: list[RpcBoard] = []
        self._lost: list[tuple[RemoteNode, str]] = []
        self._store: Any = None
        self._entering: threading.Thread | None = None
        self._post: RpcMessenger | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._event, select.EPOLLIN)

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Have one node started per factory, let them in and enter an RPC world with them.

        Raises:
            ConfigError: something that cannot be sent to another process.
            WorkerDied: a node ended before it joined.
            CollectorTimeout: not all had joined in time.
        """
        self._store = open_store(self._host, self._patience)
        self._world = World(
            size=len(factories) + 1,
            host=self._host,
            port=self._store.port,
            patience=self._patience,
            token=secrets.token_hex(8),
            options=self._options,
        )
        super().start(factories)

    def _boot(self, index: int, factory: bytes, life: int) -> RpcBoot:
        world = self._world
        if self._devices is not None:
            own = {**self._options, "devices": list(self._devices[index] or [])}
            world = replace(world, options=own)
        return RpcBoot(self._threads, tuple(sys.path), factory, world)

    def _all_in(self, factories: Sequence[bytes]) -> None:
        """Enter the world; a node that goes away meanwhile is noticed."""
        super()._all_in(factories)
        timeout = self._world.timeout(LEARNER)
        post = RpcMessenger(self._world, LEARNER, timeout, self._take, self._note_lost)
        self._post = post
        for node in self._nodes:
            assert isinstance(node, RpcNode)
            node.mail = post
        self._enter()

    def _enter(self) -> None:
        """Enter in another thread, and look after the nodes meanwhile."""
        address, timeout = socket.gethostbyname(self._host), self._patience
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

    def board(self, weights: Mapping[str, torch.Tensor]) -> RpcBoard:  # type: ignore[override]
        """Prepare to send weights like these to all nodes."""
        assert self._post is not None
        board = RpcBoard(plan_flat(len(self._published), weights), self._post, self._nodes)
        self._published.append(board)
        return board

    # -- messages --------------------------------------------------------------------------------

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """RpcMessenger ``command``; if the node is gone, `receive` says so.

        Raises:
            ClosedError: after `stop`.
            WorkerDied: `receive` has said already that the node is gone.
        """
        if not isinstance(command, m.Load | m.Bind | m.Close):
            for board in self._published:
                board.catch_up(worker)
        super().send(worker, ticket, command)

    def _take(self, sender: int, frame: bytes, data: Data) -> None:
        """Take in a reply, in a thread of the RPC agent."""
        node = self._nodes[sender - 1]
        ticket, _ = head_of(frame)
        if data:
            assert isinstance(node, RpcNode)
            node.arrived[ticket] = data
        self._frames.append((node, frame))
        self._wake()

    def _note_lost(self, peer: int, problem: str) -> None:
        """Note that a message did not arrive, in a thread of the RPC agent."""
        self._lost.append((self._nodes[peer - 1], problem))
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def _turn_to(self, fd: int, events: int) -> None:
        if self._frames:  # what a node sent before it ended comes before its end
            return
        if fd != self._event:
            super()._turn_to(fd, events)
            return
        os.eventfd_read(fd)
        while self._lost and not self._frames:
            node, problem = self._lost.pop()
            if node.channel.fileno() >= 0:
                raise self._died(node, f"cannot be reached by RPC ({problem})")

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """End all nodes: let those that were asked go, kill the rest. Idempotent."""
        if self._closed:
            return
        mine = self._owner == os.getpid()  # in a forked child it is somebody else's world
        if mine:
            leave()
            for node in {*self._nodes, *self._by_fd.values()}:
                if node.channel.fileno() >= 0:
                    node.put(key_frame(LEFT_WORLD, b""))
        super().stop(timeout)
        if mine:
            if self._entering is not None:  # it fails now that the nodes are gone
                self._entering.join(_LOOK)
            leave()
            if self._post is not None:
                self._post.close()
            self._store = None  # a forked child has not the thread that this would wait for
        os.close(self._event)
