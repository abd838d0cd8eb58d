"""The joining of nodes, which connect to one port, authenticate, and are brought up."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ConfigError, WorkerDied
from gleanrl.core.options import warn
from gleanrl.transport.handshake import Guest, HandshakeError, Invitation, admit, new_secret
from gleanrl.transport.launchers import Launcher

_LOOK_S = 0.2
"""Seconds between two looks at nodes that have not joined yet."""
_INTRODUCTION_S = 2.0
"""Seconds a stranger on the port may take to show that it is a node."""
_NAP_S = 0.05
"""Seconds in which others may give descriptors back."""
_MOST = 128
"""Strangers that are listened to at a time; others wait until one of them was let in or left."""


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of ``ports`` that is free; warn if that is not the first."""
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
    """A node that is expected to join."""

    life: int
    deadline: Deadline | None = None
    """The time until which it has to join, then to be up; ``None`` before it is started."""
    node: Any = None
    """Its `Node`, once it was let in."""
    delay: Deadline = field(default_factory=partial(Deadline, 0.0))
    """The time before which it is not started."""


class NodeAdmitter:
    """Lets nodes in: those that are there first, and later those that take the place of lost ones.

    A thread launches nodes and accepts connections as long as nodes are wanted. Each connection
    authenticates and is brought up in a thread of its own, so that a silent stranger delays no
    node. `bell` is readable while `pop` has news for the learner.
    """

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        launcher: Launcher,
        take: Callable[[Guest], Any],
        *,
        heartbeat: float,
        timeout_s: float,
    ) -> None:
        """Listen; no node is let in yet. ``take`` makes a `Node` of one that was let in.

        ``heartbeat`` is told to nodes (see `NetworkBackend`); a node may take ``timeout_s`` seconds
        to join, and then to be up.
        """
        self._secret = new_secret()
        self.listener = _listen(host, ports)
        self._launcher, self._take = launcher, take
        self._heartbeat, self._timeout_s = heartbeat, timeout_s
        self._lock = threading.RLock()
        self._wanted: dict[int, _Wanted] = {}
        self._threads: set[threading.Thread] = set()
        self._strangers: set[socket.socket] = set()
        """Connections that have not authenticated yet."""
        self._admitting = False
        """Whether a thread lets nodes in."""
        self._closing = False
        self._next_look = Deadline(0.0)
        self._done: deque[Any] = deque()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    # -- for the learner -------------------------------------------------------------------------

    def launch_first(self, count: int) -> None:
        """Have nodes 0 to ``count - 1`` started, all at once; raises the launcher's errors.

        They have no deadline of their own: the learner has one.
        """
        self._wanted = {index: _Wanted(0, Deadline(None)) for index in range(count)}
        self._launcher.launch([self.invitation(index) for index in range(count)])
        self._start(self._admit_loop)

    def invitation(self, node: int) -> Invitation:
        """Return the address, the secret and the number with which ``node`` can join."""
        host, port = self.listener.getsockname()[:2]
        return Invitation(host, port, node, self._secret, self._timeout_s)

    def want(self, index: int, life: int, delay: float = 0.0) -> None:
        """Have node ``index``, lost ``life`` times, started again after ``delay`` seconds."""
        with self._lock:
            self._wanted[index] = _Wanted(life, delay=Deadline(delay))
            if not self._admitting:
                self._start(self._admit_loop)

    def pop(self) -> Any:
        """Return a `Node` that joined, or the error of one that did not; ``None`` for no news."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
            return self._done.popleft()
        return None

    def stop(self, timeout: float) -> None:
        """Let no node in any more and hang up on those that are joining. Idempotent.

        Threads that run longer than ``timeout`` seconds end by themselves.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            nodes = [wanted.node for wanted in self._wanted.values()]
            threads = list(self._threads)
        for sock in (self.listener, *self._strangers):  # which wakes the threads that wait
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
        os.close(bell)  # no thread rings it any more
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
            if self._admitting:  # two calls of `want` may both have started a thread
                return
            self._admitting = True
        knocks = select.poll()
        knocks.register(self.listener, select.POLLIN)
        while True:
            with self._lock:
                if self._closing or not self._wanted:
                    self._admitting = False
                    return
                wanted = list(self._wanted.items())
            for index, each in wanted:
                if each.deadline is None and each.delay.expired:
                    self._launch(index, each)
            if self._next_look.expired:
                for index, each in wanted:
                    self._look_after(index, each)
                self._next_look = Deadline(_LOOK_S)
            try:
                self._accept(knocks)
            except Exception as err:  # no thread or no descriptor for the connection
                for index, each in wanted:
                    self._fail(index, each, f"could not be let in ({err})")

    def _launch(self, index: int, wanted: _Wanted) -> None:
        wanted.deadline = Deadline(self._timeout_s)
        try:
            self._launcher.launch([self.invitation(index)])
        except BaseException as err:  # `SystemExit` of a launcher would end this thread only
            self._fail(index, wanted, f"could not be started ({type(err).__name__}: {err})")
        finally:
            if self._closing:  # it may have been started after everybody else was ended
                self._launcher.stop(0.0)

    def _look_after(self, index: int, wanted: _Wanted) -> None:
        if wanted.deadline is None:  # it was not started: its launcher knows the one before it
            return
        try:
            reason = self._launcher.exit_reason(index, 0.0) if wanted.node is None else None
        except Exception as err:  # of a scheduler
            reason = f"is not known to run ({err})"
        if reason is not None:
            self._fail(index, wanted, f"{reason} before it joined; what it printed last tells why")
        elif wanted.deadline.expired:
            done = "joined" if wanted.node is None else "built its environments"
            self._fail(index, wanted, f"had not {done} within {self._timeout_s} s")

    def _accept(self, knocks: select.poll) -> None:
        """Accept a connection, if one comes soon and there is room for it."""
        if len(self._strangers) >= _MOST:
            time.sleep(_NAP_S)
            return
        if not knocks.poll(1000 * _LOOK_S) or self._closing:
            return
        try:
            sock, _ = self.listener.accept()
        except OSError as err:
            if err.errno in (errno.EMFILE, errno.ENFILE):  # others may give descriptors back
                time.sleep(_NAP_S)
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
            guest = admit(sock, self._secret, self._heartbeat, Deadline(_INTRODUCTION_S))
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
            except OSError as err:
                guest.sock.close()
                if not wanted.life:  # else the replacement may come again
                    self._fail(index, wanted, f"was gone as soon as it had joined ({err})")
                return
            if wanted.life:
                wanted.deadline = Deadline(self._timeout_s)
        self._bring_up(index, wanted, node)

    def _bring_up(self, index: int, wanted: _Wanted, node: Any) -> None:
        try:
            node.bring_up(wanted.life)
        except BaseException as err:  # the learner is told of any
            if not self._closing:  # else the reason is of no interest
                self._fail(index, wanted, node.exit_reason(f"was lost while it joined ({err})"))
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
            self._tell(WorkerDied(f"{what} {index} {reason}", worker=index))

    def _tell(self, result: Any) -> None:
        self._done.append(result)
        os.eventfd_write(self.bell, 1)
