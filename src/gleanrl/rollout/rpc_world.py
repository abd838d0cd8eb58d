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
import socket
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed import autograd, rpc

from gleanrl.core.errors import ConfigError

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
