"""How nodes join: they connect to one port, authenticate, and are brought up.

A node and a learner show each other that they know the same secret:

    learner -> node     magic, nonce
    node    -> learner  nonce, index, HMAC(secret, "node", both nonces, index)
    learner -> node     timeout_s, HMAC(secret, "learner", both nonces, index, timeout_s)

Sizes are fixed and nothing is unpickled: a stranger gets no further than this. Both sides derive
keys from the secret and all that was said, and every later frame is authenticated with these (see
`transport.wire`). Who passes this introduction on therefore knows no key, and can neither change
nor add anything. Addresses are no part of it, so that tunnels and address translators may be in
between. Frames are not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError, WorkerDied
from gleanrl.core.options import warn

if TYPE_CHECKING:
    from gleanrl.transport.launchers import Launcher
    from gleanrl.transport.network import Node


_NAME, _VERSION = b"gleanrl", b"2"
_MAGIC = _NAME + _VERSION
_NONCE = 32
_INDEX = struct.Struct("=i")
_SECONDS = struct.Struct("=d")
_DIGEST = hashlib.sha256().digest_size
SECRET = "GLEANRL_SECRET"
"""Environment variable that holds a secret of the user's own."""
_SHORTEST = 16


class HandshakeError(GleanError):
    """The other side of a connection is not who it should be."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What a node needs to find its learner and to be let in."""

    host: str
    port: int
    node: int
    """The node's index."""
    secret: bytes = field(repr=False)
    timeout_s: float = 60.0
    """Seconds to look for the learner."""


def new_secret() -> bytes:
    """Return a secret for one collector: the user's, if there is one, or a new one.

    Raises:
        ConfigError: that in the environment is too short.
    """
    given = os.environ.get(SECRET)
    return secrets.token_hex(32).encode() if given is None else secret_from(given)


def secret_from(text: str) -> bytes:
    """Return the secret that ``text``, the value of an environment variable, stands for.

    Raises:
        ConfigError: it is too short.
    """
    secret = text.strip().encode()
    if len(secret) < _SHORTEST:
        raise ConfigError(
            f"the secret in {SECRET} is {len(secret)} bytes long, and guessed too easily; make one "
            "with: openssl rand -hex 32"
        )
    return secret


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """What authenticates the frames of one connection."""

    node: bytes
    """Of those that the node sends."""
    learner: bytes

    @classmethod
    def of(cls, secret: bytes, *said: bytes) -> Keys:
        """Derive the keys of the connection on which ``said`` was said."""
        session = _sign(secret, b"session", *said)
        return cls(_sign(session, b"from the node"), _sign(session, b"from the learner"))


class Guest(NamedTuple):
    """A node that was let in."""

    node: int
    """Its index."""
    sock: socket.socket
    keys: Keys


def admit(sock: socket.socket, secret: bytes, timeout_s: float, deadline: Deadline) -> Guest:
    """Let a node in that has connected.

    Args:
        sock: The connection; it stays the caller's.
        secret: What the node has to know.
        timeout_s: Told to the node: seconds without a sign of life after which either side takes
            the other for gone.
        deadline: When the node has to have authenticated.

    Raises:
        HandshakeError: the other side does not know the secret, says nothing, or is gone.
    """
    mine = secrets.token_bytes(_NONCE)
    _send(sock, _MAGIC + mine, deadline)
    answer = _receive(sock, _NONCE + _INDEX.size + _DIGEST, deadline)
    theirs, index = answer[:_NONCE], answer[_NONCE : _NONCE + _INDEX.size]
    if not hmac.compare_digest(answer[-_DIGEST:], _sign(secret, b"node", mine, theirs, index)):
        raise HandshakeError("a connection was refused: it does not know this collector's secret")
    told = _SECONDS.pack(timeout_s)
    _send(sock, told + _sign(secret, b"learner", mine, theirs, index, told), deadline)
    return Guest(int(_INDEX.unpack(index)[0]), sock, Keys.of(secret, mine, theirs, index, told))


def join(invitation: Invitation, timeout: float) -> tuple[socket.socket, Keys, float]:
    """Connect to the learner as one of its nodes.

    Returns:
        The connection, on which the node was let in; its keys; and the seconds without a sign of
        life after which either side takes the other for gone.

    Raises:
        HandshakeError: who answers is not the learner.
        CollectorTimeout: nobody answers.
    """
    deadline = Deadline(timeout)
    address = invitation.host, invitation.port
    try:
        sock = _connect(address, deadline)
    except OSError as err:
        raise CollectorTimeout(
            f"no learner answers at {address[0]}:{address[1]} within {timeout:g} s: {err}"
        ) from err
    try:
        return sock, *_introduce(sock, invitation, deadline)
    except BaseException:
        sock.close()
        raise


def _introduce(
    sock: socket.socket, invitation: Invitation, deadline: Deadline
) -> tuple[Keys, float]:
    where = f"{invitation.host}:{invitation.port}"
    hello = _receive(sock, len(_MAGIC) + _NONCE, deadline)
    if not hello.startswith(_MAGIC):
        if hello.startswith(_NAME):
            raise HandshakeError(
                f"the learner at {where} speaks another version of the nodes' protocol; install "
                "the same GleanRL on both"
            )
        raise HandshakeError(f"{where} is no GleanRL learner")
    theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
    index = _INDEX.pack(invitation.node)
    proof = _sign(invitation.secret, b"node", theirs, mine, index)
    _send(sock, mine + index + proof, deadline)
    try:
        answer = _receive(sock, _SECONDS.size + _DIGEST, deadline)
    except HandshakeError as err:
        raise HandshakeError(
            f"the learner at {where} did not let node {invitation.node} in: the secret is not that "
            f"of its collector, or that was just shut down ({err})"
        ) from err
    told = answer[: _SECONDS.size]
    expected = _sign(invitation.secret, b"learner", theirs, mine, index, told)
    if not hmac.compare_digest(answer[_SECONDS.size :], expected):
        raise HandshakeError(f"{where} does not know this collector's secret")
    keys = Keys.of(invitation.secret, theirs, mine, index, told)
    return keys, float(_SECONDS.unpack(told)[0])


def keep_alive(sock: socket.socket, timeout_s: float) -> None:
    """Have the kernel end the connection once the other host was silent for ``timeout_s`` s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        longest = int(min(1000 * timeout_s, 2**31 - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest)
        every = int(min(max(1.0, timeout_s / 4), 32767))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _connect(address: tuple[str, int], deadline: Deadline) -> socket.socket:
    """Connect, also to a learner that is not listening just yet."""
    while True:
        try:
            return socket.create_connection(address, max(0.1, deadline.left))
        except OSError:
            if deadline.expired:
                raise
            time.sleep(min(0.2, deadline.left))


def _sign(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(0.01, deadline.left))
    try:
        sock.sendall(data)
    except OSError as err:
        raise HandshakeError(f"a connection ended before it was let in ({err})") from err


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(max(0.01, deadline.left))
        try:
            part = sock.recv(count - len(data))
        except OSError as err:
            raise HandshakeError(f"a connection was not let in ({err})") from err
        if not part:
            raise HandshakeError("a connection ended before it was let in")
        data += part
    return bytes(data)


LOOK = 0.2
"""Seconds between two looks at what became of nodes that have not joined yet."""
_INTRODUCTION = 2.0
"""Seconds a stranger on the port may take to show that it is a node."""
_NAP = 0.05
"""Seconds in which others may give descriptors back."""
_MOST = 128
"""Strangers that are listened to at a time; others wait until one of them was let in or left."""


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of ``ports`` that is free; warn if that is not the first.

    Raises:
        ConfigError: none is.
    """
    for port in ports:
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except OSError as err:
            if err.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            where = f"{host}:{port}" if len(ports) == 1 else f"{host}:{ports[0]} to {port}"
            raise ConfigError(
                f"cannot listen for nodes on {where} ({err}); choose another tcp_port or "
                "interface, or leave them out"
            ) from err
        if port != ports[0]:
            warn(f"port {ports[0]} is taken; nodes connect to {port} instead")
        return listener
    raise ConfigError("no port to listen for nodes on was given")


@dataclass(eq=False, slots=True)
class _Wanted:
    """A node that has to join."""

    life: int
    deadline: Deadline | None = None
    """Until then it has to have joined, or once it has, to be up; ``None`` before it is started."""
    node: Node | None = None
    """Its connection, once it was let in."""


class NodeAdmitter:
    """Lets nodes in: those that are there first, and later those that take the place of lost ones.

    A thread launches nodes and accepts connections as long as nodes are wanted. Each connection
    has a thread of its own, in which it authenticates and is brought up: a stranger who says
    nothing delays nobody. The learner is told through `bell`, which is readable while `pop` has
    something for it.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        launcher: Launcher,
        take: Callable[[Guest], Node],
        *,
        heartbeat: float,
        timeout_s: float,
    ) -> None:
        """Let nobody in yet.

        Args:
            listener: Where nodes connect; it stays the caller's.
            secret: What they have to know.
            launcher: Starts them.
            take: Makes a node of one that was let in.
            heartbeat: Told to nodes: seconds without a sign of life after which they are lost.
            timeout_s: Seconds that a node may take to join, and then to be up.
        """
        self._listener, self._secret, self._launcher = listener, secret, launcher
        self._take, self._heartbeat, self._timeout_s = take, heartbeat, timeout_s
        self._lock = threading.Lock()
        self._wanted: dict[int, _Wanted] = {}
        self._threads: set[threading.Thread] = set()
        self._strangers: set[socket.socket] = set()
        """Connections that have not authenticated yet."""
        self._admitting = False
        """Whether a thread lets nodes in."""
        self._closing = False
        self._next_look = 0.0
        self._done: deque[Node | WorkerDied] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    # -- for the learner -------------------------------------------------------------------------

    def launch_first(self, count: int) -> None:
        """Have nodes 0 to ``count - 1`` started, all at once; raises what their launcher raises.

        They have no deadline of their own: the learner has one.
        """
        self._wanted = {index: _Wanted(0, Deadline(None)) for index in range(count)}
        self._launcher.launch([self._invitation(index) for index in range(count)])
        self._start(self._admit_loop)

    def want(self, index: int, life: int) -> None:
        """Have node ``index``, which was lost ``life`` times, started again."""
        with self._lock:
            self._wanted[index] = _Wanted(life)
            if not self._admitting:
                self._start(self._admit_loop)

    def pop(self, timeout: float = 0.0) -> Node | WorkerDied | None:
        """Return a node that has joined, or why one has not; ``None`` if there is no news in time.

        Args:
            timeout: Seconds to wait for some.
        """
        if timeout:
            select.select([self.bell], [], [], timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
            return self._done.popleft()
        return None

    def stop(self, timeout: float) -> None:
        """Let nobody in any more and hang up on who is joining. Idempotent.

        Threads that are not through by then end by themselves.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            nodes = [wanted.node for wanted in self._wanted.values()]
            threads = list(self._threads)
        for sock in (self._listener, *self._strangers):  # which wakes who waits for them
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for node in nodes:
            if node is not None:
                node.hang_up()
        for result in self._done:
            if not isinstance(result, WorkerDied):
                result.close()
        self._done.clear()
        bell, self.bell = self.bell, -1
        os.close(bell)  # nobody rings any more
        deadline = Deadline(timeout)
        for thread in threads:  # last: an interrupt meanwhile leaves nothing undone
            thread.join(deadline.left)

    # -- the thread that lets nodes in -----------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="gleanrl joining", daemon=True)
        self._threads = {each for each in self._threads if each.is_alive() or not each.ident}
        self._threads.add(thread)
        thread.start()

    def _admit_loop(self) -> None:
        """Start nodes that are wanted and let them in, until none is wanted any more."""
        with self._lock:
            if self._admitting:  # whoever started that thread was interrupted
                return
            self._admitting = True
        knocks = select.poll()
        knocks.register(self._listener, select.POLLIN)
        while True:
            with self._lock:
                if self._closing or not self._wanted:
                    self._admitting = False
                    return
                wanted = list(self._wanted.items())
            for index, each in wanted:
                if each.deadline is None:
                    self._launch(index, each)
            if time.monotonic() >= self._next_look:
                for index, each in wanted:
                    self._look_after(index, each)
                self._next_look = time.monotonic() + LOOK
            try:
                self._accept(knocks)
            except Exception as err:  # nobody can be let in any more: no thread, no descriptor
                for index, each in wanted:
                    self._fail(index, each, f"could not be let in ({err})")

    def _invitation(self, node: int) -> Invitation:
        host, port = self._listener.getsockname()[:2]
        return Invitation(str(host), int(port), node, self._secret, self._timeout_s)

    def _launch(self, index: int, wanted: _Wanted) -> None:
        wanted.deadline = Deadline(self._timeout_s)
        try:
            self._launcher.launch([self._invitation(index)])
        except BaseException as err:  # `SystemExit` of a launcher would end this thread only
            self._fail(index, wanted, f"could not be started ({type(err).__name__}: {err})")
        finally:
            if self._closing:  # it may have been started after everybody else was ended
                self._launcher.stop(0.0)

    def _look_after(self, index: int, wanted: _Wanted) -> None:
        try:
            reason = self._launcher.exit_reason(index, 0.0) if wanted.node is None else None
        except Exception as err:  # whatever a scheduler says
            reason = f"is not known to run ({err})"
        if reason is not None:
            self._fail(index, wanted, f"{reason} before it joined; what it printed last tells why")
        elif wanted.deadline is not None and wanted.deadline.expired:
            done = "joined" if wanted.node is None else "built its environments"
            self._fail(index, wanted, f"had not {done} within {self._timeout_s} s")

    def _accept(self, knocks: select.poll) -> None:
        """Accept a connection, if one comes soon and there is room for it."""
        if len(self._strangers) >= _MOST:
            time.sleep(_NAP)
            return
        if not knocks.poll(1000 * LOOK) or self._closing:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError as err:
            if err.errno in (errno.EMFILE, errno.ENFILE):  # others may give descriptors back
                time.sleep(_NAP)
            return
        self._strangers.add(sock)
        try:
            self._start(self._hear, sock)
        except BaseException:
            self._strangers.discard(sock)
            sock.close()
            raise

    # -- one thread per connection ---------------------------------------------------------------

    def _hear(self, sock: socket.socket) -> None:
        try:
            guest = admit(sock, self._secret, self._heartbeat, Deadline(_INTRODUCTION))
        except HandshakeError:
            sock.close()
            return
        finally:
            self._strangers.discard(sock)
        self._let_in(guest)

    def _let_in(self, guest: Guest) -> None:
        index = guest.node
        with self._lock:
            wanted = self._wanted.get(index)
            if wanted is None or wanted.node is not None or self._closing:
                guest.sock.close()
                return
            try:
                node = wanted.node = self._take(guest)
            except OSError as err:  # of a replacement there may be another
                guest.sock.close()
                gone = "" if wanted.life else f"was gone as soon as it had joined ({err})"
                node = None
            if wanted.life and node is not None:
                wanted.deadline = Deadline(self._timeout_s)
        if node is not None:
            self._bring_up(index, wanted, node)
        elif gone:
            self._fail(index, wanted, gone)

    def _bring_up(self, index: int, wanted: _Wanted, node: Node) -> None:
        try:
            node.greet(wanted.life)
            if wanted.life:  # the learner goes on with the others meanwhile
                node.await_start()
        except BaseException as err:  # whatever it is, the learner is told
            if not self._closing:  # else nobody asks why
                node.listen()
                reason = node.exit_reason(f"was lost while it joined ({err})")
                self._fail(index, wanted, f"on node {node.address} {reason}")
            node.close()
            return
        with self._lock:
            if self._wanted.get(index) is wanted and not self._closing:
                del self._wanted[index]
                self._tell(node)
                return
        node.close()

    def _fail(self, index: int, wanted: _Wanted, reason: str) -> None:
        with self._lock:
            if self._wanted.get(index) is not wanted or self._closing:
                return
            del self._wanted[index]
            if wanted.node is not None:
                wanted.node.hang_up()
            what = "the replacement of worker" if wanted.life else "worker"
            error = WorkerDied(f"{what} {index} {reason}")
            error.worker = index
            self._tell(error)

    def _tell(self, result: Node | WorkerDied) -> None:
        self._done.append(result)
        os.eventfd_write(self.bell, 1)
