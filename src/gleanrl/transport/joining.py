"""How nodes join: they connect to one port, authenticate, and are brought up."""

from __future__ import annotations

import contextlib
import errno
import math
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
from gleanrl.core.options import users_stacklevel
from gleanrl.transport.handshake import Guest, HandshakeError, Introduction, Invitation
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.remote_node import Node

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
                f"port {ports[0]} is taken; nodes connect to {port} instead",
                UserWarning,
                stacklevel=users_stacklevel(),
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

    def __init__(self, listener: socket.socket, secret: bytes, timeout_s: float) -> None:
        listener.setblocking(False)
        self._listener, self._secret, self._timeout_s = listener, secret, timeout_s
        self._strangers: dict[int, _Stranger] = {}
        """By descriptor, longest there first."""
        self._ringing = threading.Lock()
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
                introduction = Introduction(sock, self._secret, self._timeout_s)
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
        """Have `wait` return now, or the next one at once; safe in any thread."""
        with self._ringing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        for fd in list(self._strangers):
            self._drop(fd).close()
        self._listener.close()
        with self._ringing:
            bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)


@dataclass(eq=False, slots=True)
class _Wanted:
    """A node that has to join."""

    life: int
    deadline: float | None = None
    """Until then it has to have joined, or once it has, to be up; ``None`` before it is started."""
    node: Node | None = None
    """Its connection, once it was let in."""


class NodeAdmitter:
    """Lets nodes in: those that are there first, and later those that take the place of lost ones.

    At the start the learner itself calls `step`. Later a thread of its own launches nodes and lets
    them in. Each node that was let in is brought up by a thread of its own. The learner is told
    through `bell`, which is readable while `pop` has something for it.
    """

    def __init__(
        self,
        launcher: Launcher,
        admission: Admission,
        take: Callable[[Guest], Node],
        invitation: Callable[[int], Invitation],
        timeout_s: float,
    ) -> None:
        self._launcher, self._admission = launcher, admission
        self._take, self._invitation = take, invitation
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._wanted: dict[int, _Wanted] = {}
        self._threads: set[threading.Thread] = set()
        self._admitting = False
        """Whether a thread lets nodes in."""
        self._closing = False
        self._done: deque[Node | WorkerDied] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    # -- for the learner -------------------------------------------------------------------------

    def launch_first(self, count: int) -> None:
        """Have nodes 0 to ``count - 1`` started, all at once; raises what their launcher raises.

        They have no deadline of their own: whoever calls `step` has one.
        """
        self._wanted = {index: _Wanted(0, math.inf) for index in range(count)}
        self._launcher.launch([self._invitation(index) for index in range(count)])

    def want(self, index: int, life: int) -> None:
        """Have node ``index``, which was lost ``life`` times, started again."""
        with self._lock:
            self._wanted[index] = _Wanted(life)
            if not self._admitting:
                self._start(self._admit_loop)
        self._admission.interrupt()

    def pop(self) -> Node | WorkerDied | None:
        """Return a node that has joined, or why one has not; ``None`` if there is no news."""
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
        self._admission.interrupt()
        for node in nodes:
            if node is not None:
                node.hang_up()
        for result in self._done:
            if not isinstance(result, WorkerDied):
                result.close()
        self._done.clear()
        os.close(self.bell)  # nobody rings any more
        deadline = time.monotonic() + timeout
        for thread in threads:  # last: an interrupt meanwhile leaves nothing undone
            thread.join(max(0.0, deadline - time.monotonic()))

    # -- letting nodes in ------------------------------------------------------------------------

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
        while True:
            with self._lock:
                if self._closing or not self._wanted:
                    self._admitting = False
                    return
                wanted = list(self._wanted.items())
            try:
                self.step(LOOK)
            except BaseException as err:  # `SystemExit` of a launcher would end this thread only
                for index, each in wanted:
                    self._fail(index, each, f"could not be started ({err!r})")

    def step(self, timeout: float) -> None:
        """Start who is wanted, see what became of them and let them in; waits for ``timeout``."""
        with self._lock:
            wanted = list(self._wanted.items())
        for index, each in wanted:
            try:
                if each.deadline is None:
                    self._launch(index, each)
                else:
                    self._look_after(index, each, each.deadline)
            except Exception as err:  # whatever a scheduler says
                self._fail(index, each, f"could not be started ({err})")
        try:
            for guest in [] if self._closing else self._admission.wait(timeout):
                self._let_in(guest)
        except Exception as err:  # nobody can be let in any more: no thread, no descriptor
            for index, each in wanted:
                self._fail(index, each, f"could not be let in ({err})")

    def _launch(self, index: int, wanted: _Wanted) -> None:
        wanted.deadline = time.monotonic() + self._timeout_s
        try:
            self._launcher.launch([self._invitation(index)])
        finally:
            if self._closing:  # it may have been started after everybody else was ended
                self._launcher.stop(0.0)

    def _look_after(self, index: int, wanted: _Wanted, deadline: float) -> None:
        reason = self._launcher.exit_reason(index, 0.0) if wanted.node is None else None
        if reason is not None:
            self._fail(index, wanted, f"{reason} before it joined; what it printed last tells why")
        elif time.monotonic() > deadline:
            done = "joined" if wanted.node is None else "built its environments"
            self._fail(index, wanted, f"had not {done} within {self._timeout_s} s")

    def _let_in(self, guest: Guest) -> None:
        index = guest.node
        with self._lock:
            wanted = self._wanted.get(index)
            if wanted is None or wanted.node is not None or self._closing:
                guest.sock.close()
                return
            try:
                node = wanted.node = self._take(guest)
            except OSError as err:
                guest.sock.close()
                gone = None if wanted.life else str(err)  # of a replacement there may be another
            else:
                gone = None
                if wanted.life:
                    wanted.deadline = time.monotonic() + self._timeout_s
                self._start(self._bring_up, index, wanted, node)
        if gone is not None:
            self._fail(index, wanted, f"was gone as soon as it had joined ({gone})")

    # -- one thread per node that was let in -----------------------------------------------------

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
        self._admission.interrupt()  # the learner may be the one that waits for guests
