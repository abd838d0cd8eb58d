"""Where nodes knock: one port, and whoever shows that it knows the secret is let in."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gleanrl.core.errors import ConfigError, WorkerDied
from gleanrl.transport.handshake import Guest, HandshakeError, Introduction, Invitation
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.peer import RemoteNode

LOOK = 0.5
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
            warnings.warn(
                f"port {ports[0]} is taken; nodes connect to {port} instead", UserWarning, 3
            )
        return listener
    raise ConfigError("no port to listen for nodes on was given")


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection that has not shown yet who it is."""

    sock: socket.socket
    introduction: Introduction
    deadline: float


class Admission:
    """Lets nodes in, any number at a time: whoever says nothing delays nobody.

    For one thread; `interrupt` is for others.
    """

    def __init__(self, listener: socket.socket, secret: bytes, patience: float) -> None:
        """Take over ``listener``.

        Args:
            listener: Listens.
            secret: What nodes have to know.
            patience: Told to nodes; see `Introduction`.
        """
        listener.setblocking(False)
        self._listener, self._secret, self._patience = listener, secret, patience
        self._strangers: dict[int, _Stranger] = {}
        """By descriptor, longest there first."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        self._poller.register(listener, select.POLLIN)

    def wait(self, timeout: float) -> list[Guest]:
        """Return nodes that were let in; their connections become the caller's.

        Returns as soon as there is one, after ``timeout`` seconds or an `interrupt` with none.
        """
        let_in: list[Guest] = []
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            self._turn_away_late(now)
            first = next(iter(self._strangers.values()), None)
            until = deadline if first is None else min(deadline, first.deadline)
            events = dict(self._poller.poll(1000 * max(0.0, until - now)))
            if events.pop(self._bell, None):
                os.eventfd_read(self._bell)
                deadline = now
            if events.pop(self._listener.fileno(), None):
                self._take_in()
            for fd in events:
                let_in += self._hear(fd)
            if let_in or time.monotonic() >= deadline:
                return let_in

    def _take_in(self) -> None:
        """Accept who knocks, as many as there is room for."""
        while len(self._strangers) < _MOST:
            try:
                sock, _ = self._listener.accept()
            except OSError as err:  # nobody any more
                if err.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_NAP)  # they go on knocking until there is a descriptor for them
                break
            try:
                introduction = Introduction(sock, self._secret, self._patience)
            except HandshakeError:
                sock.close()
                continue
            deadline = time.monotonic() + _INTRODUCTION
            self._strangers[sock.fileno()] = _Stranger(sock, introduction, deadline)
            self._poller.register(sock, select.POLLIN)
        self._mind_the_door()

    def _mind_the_door(self) -> None:
        room = len(self._strangers) < _MOST
        self._poller.modify(self._listener, select.POLLIN if room else 0)

    def _hear(self, fd: int) -> list[Guest]:
        introduction = self._strangers[fd].introduction
        try:
            index = introduction.hear()
        except HandshakeError:
            self._drop(fd).close()
            return []
        if index is None or introduction.keys is None:
            return []
        return [Guest(index, self._drop(fd), introduction.keys)]

    def _drop(self, fd: int) -> socket.socket:
        self._poller.unregister(fd)
        sock = self._strangers.pop(fd).sock
        self._mind_the_door()
        return sock

    def _turn_away_late(self, now: float) -> None:
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._drop(fd).close()

    def interrupt(self) -> None:
        """Have `wait` return now, or the next one at once; safe in any thread until `close`."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        for fd in list(self._strangers):
            self._drop(fd).close()
        self._listener.close()
        if self._bell >= 0:
            os.close(self._bell)
        self._bell = -1


Greet = Callable[[RemoteNode, int], None]
"""Tells a node that was let in, of the given life, what to be; makes its process group."""


@dataclass(eq=False, slots=True)
class _Wanted:
    """A node that has to be replaced."""

    life: int
    deadline: float | None = None
    """Until then it has to have joined, or once it has, to be up; ``None`` before it is started."""
    node: RemoteNode | None = None
    """Its connection, once it was let in."""


class NodeAdmitter:
    """Has nodes started again, lets them in and waits until they are up, in threads of its own.

    The learner is told through `bell`, which is readable while `pop` has something for it.
    """

    def __init__(
        self,
        launcher: Launcher,
        admission: Admission,
        take: Callable[[Guest], RemoteNode],
        greet: Greet,
        invitation: Callable[[int], Invitation],
        timeout: float,
    ) -> None:
        """Start nothing yet.

        Args:
            launcher: Starts nodes.
            admission: Lets them in; used by nobody else from now on.
            take: Makes a node of a connection.
            greet: See `Greet`.
            invitation: Invites a node.
            timeout: Seconds a node may take to join, and again until it is up.
        """
        self._launcher, self._admission = launcher, admission
        self._take, self._greet, self._invitation = take, greet, invitation
        self._timeout = timeout
        self._lock = threading.Lock()
        self._wanted: dict[int, _Wanted] = {}
        self._threads: set[threading.Thread] = set()
        self._minded = False
        """Whether a thread lets nodes in."""
        self._closing = False
        self._done: deque[RemoteNode | WorkerDied] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    # -- for the learner -------------------------------------------------------------------------

    def want(self, index: int, life: int) -> None:
        """Have node ``index`` started again."""
        with self._lock:
            self._wanted[index] = _Wanted(life)
            if not self._minded:
                self._start(self._mind)
        self._admission.interrupt()

    def pop(self) -> RemoteNode | WorkerDied | None:
        """Return a node that is up, or why one is not; ``None`` if there is no news."""
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
            wanted = list(self._wanted.values())
            threads = list(self._threads)
        self._admission.interrupt()
        for each in wanted:
            if each.node is not None:
                each.node.channel.hang_up()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for result in self._done:
            if isinstance(result, RemoteNode):
                result.close()
        self._done.clear()
        os.close(self.bell)  # nobody rings any more

    # -- the porter ------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="gleanrl joining", daemon=True)
        self._threads = {each for each in self._threads if each.is_alive() or not each.ident}
        self._threads.add(thread)
        thread.start()
        return thread

    def _mind(self) -> None:
        """Start who is wanted and let them in, until nobody is wanted any more."""
        with self._lock:
            if self._minded:  # whoever started that thread was interrupted
                return
            self._minded = True
        while True:
            with self._lock:
                if self._closing or not self._wanted:
                    self._minded = False
                    return
                wanted = list(self._wanted.items())
            for index, each in wanted:
                try:
                    if each.deadline is None:
                        self._launch(index, each)
                    else:
                        self._look_after(index, each)
                except Exception as err:  # whatever a scheduler says
                    self._fail(index, each, f"could not be started ({err})")
            try:
                for guest in [] if self._closing else self._admission.wait(LOOK):
                    self._let_in(guest)
            except Exception as err:  # nobody can be let in any more: no thread, no descriptor
                for index, each in wanted:
                    self._fail(index, each, f"could not be let in ({err})")

    def _launch(self, index: int, wanted: _Wanted) -> None:
        wanted.deadline = time.monotonic() + self._timeout
        try:
            self._launcher.launch([self._invitation(index)])
        finally:
            if self._closing:  # it may have been started after everybody else was ended
                self._launcher.stop(0.0)

    def _look_after(self, index: int, wanted: _Wanted) -> None:
        assert wanted.deadline is not None
        fate = self._launcher.fate(index, 0.0) if wanted.node is None else None
        if fate is not None:
            self._fail(index, wanted, f"{fate} before it joined; what it printed last tells why")
        elif time.monotonic() > wanted.deadline:
            done = "joined" if wanted.node is None else "built its environments"
            self._fail(index, wanted, f"had not {done} within {self._timeout} s")

    def _let_in(self, guest: Guest) -> None:
        index = guest.node
        with self._lock:
            wanted = self._wanted.get(index)
            if wanted is None or wanted.node is not None or self._closing:
                guest.sock.close()
                return
            try:
                node = wanted.node = self._take(guest)
            except WorkerDied:  # gone already; there may be another
                return
            wanted.deadline = time.monotonic() + self._timeout
            self._start(self._bring_up, index, wanted, node)

    # -- one thread per node that was let in -----------------------------------------------------

    def _bring_up(self, index: int, wanted: _Wanted, node: RemoteNode) -> None:
        try:
            self._greet(node, wanted.life)
            node.await_start()
        except Exception as err:
            how = f"was lost while it joined ({err})"
            self._fail(index, wanted, node.fate(self._launcher, how))
            node.close()
            return
        with self._lock:
            if self._wanted.get(index) is wanted and not self._closing:
                del self._wanted[index]
                self._tell(node)
                return
        node.close()

    def _fail(self, index: int, wanted: _Wanted, how: str) -> None:
        with self._lock:
            if self._wanted.get(index) is not wanted or self._closing:
                return
            del self._wanted[index]
            if wanted.node is not None:
                wanted.node.channel.hang_up()
            error = WorkerDied(f"the replacement of worker {index} {how}")
            error.worker = index
            self._tell(error)

    def _tell(self, result: RemoteNode | WorkerDied) -> None:
        self._done.append(result)
        os.eventfd_write(self.bell, 1)
