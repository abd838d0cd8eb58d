"""Workers in processes of their own: forked from a zygote, talking over one socket each."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic

import torch

from gleanrl.core import messages as m
from gleanrl.core.affinity import Processors
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import WORKER_NAME, CollectorTimeout, WorkerDied
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.memory.shared import SharedMemory, check_memory
from gleanrl.transport.authenticated_channel import Channel
from gleanrl.transport.interrupts import interruptible
from gleanrl.transport.peer import ChannelBackend, ChannelPeer
from gleanrl.transport.pickling import pickled_each
from gleanrl.transport.worker_loop import Boot, Surroundings, refuse_at_import
from gleanrl.transport.zygote import Zygote, exit_text
from gleanrl.weights.published_buffers import SharedWeightPublisher

_WORKER_EXIT_S = 0.5
"""Seconds after which a worker that was told to end is killed."""
_KILLED_S = 2.0
"""Seconds to wait for the end of a worker that was killed."""
_LOOK_S = 0.1
"""Seconds until the next look, if it has not ended."""
_zygote: Zygote | None = None
_starting = threading.RLock()
"""Held while the zygote is started, because several threads may be the first to need it."""


def _forget() -> None:
    global _zygote, _starting
    if _zygote is not None:  # else this process would hide the end of its owner
        _zygote.close()
    _zygote, _starting = None, threading.RLock()


# Of the threads that may hold the lock, a forked child has none; nor is the zygote its own.
os.register_at_fork(after_in_child=_forget)


def zygote() -> Zygote:
    """Return this process's zygote, started on first use."""
    global _zygote
    refuse_at_import()
    with _starting:
        if _zygote is None or not _zygote.alive:
            if _zygote is not None:  # it was killed
                _zygote.close()
            _zygote = Zygote()
            # At the end of the interpreter finalizers run last made first: collectors, which were
            # made after their zygote, close before it does.
            weakref.finalize(Zygote, _zygote.close)
        return _zygote


class ProcessBackend(ChannelBackend[ChannelPeer]):
    """One process per worker. Rollouts lie in memory both sides map; only messages travel."""

    def __init__(
        self,
        threads: int = 1,
        start_timeout: float = 120.0,
        *,
        replaces: bool = False,
        affinity: Sequence[Processors] | None = None,
        worker_name: str = WORKER_NAME,
    ) -> None:
        """Start nothing yet.

        Args:
            threads: torch threads of each worker.
            start_timeout: Seconds in which a process must start, and in which a replacement must
                build its environments.
            replaces: Whether `replace` will be called. The factories of workers are then kept.
            affinity: The processors that each worker may use; all by default.
            worker_name: See `Backend`.
        """
        super().__init__()
        self.worker_name = worker_name
        self._threads, self._start_timeout = threads, start_timeout
        self._replaces, self._affinity = replaces, affinity
        self._factories: list[bytes] = []
        """What workers start from, if lost ones are replaced."""
        self._due: dict[int, tuple[float, int]] = {}
        """When (on the monotonic clock) a replacement is started, and its life, by worker."""
        self._building: dict[int, Deadline] = {}
        """The time that replacements have to build their environments, by worker."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._poller.close)
            zygote()  # it imports meanwhile
            self._zygotes: dict[int, Zygote] = {}
            """The zygote of each worker; one that was killed has taken its workers along."""
            self.memory = SharedMemory()
            """The arena's memory."""
            undo.callback(self.memory.close)
            self._control = SharedMemory()  # the stop byte, and weights after it
            undo.callback(self._control.close)
            self._control.reserve(1)
            self._stop_byte: Stop = memoryview(self._control.map())
            self._ends = select.poll()  # of connections; replies do not show in it
            self.pids: list[int] = []
            """Process ids in worker order, including workers that are gone."""
            undo.pop_all()

    @property
    def stop_byte(self) -> Stop:
        """The byte that running rollouts look at; a forked child of the learner gets another."""
        return self._stop_byte if self._owner == os.getpid() else bytearray(1)

    def weight_publisher(self, weights: Mapping[str, torch.Tensor]) -> SharedWeightPublisher:
        nbytes = 3 * sum(tensor.nbytes for tensor in weights.values())
        check_memory(nbytes, "three copies of a model's weights", "use a smaller model")
        return SharedWeightPublisher(self._control, weights)

    def start(self, factories: Sequence[SourceFactory]) -> None:
        waiting = deque(pickled_each(factories, self.worker_name))
        self._factories = list(waiting) if self._replaces else []
        self.pids = [0] * len(waiting)
        for worker in range(len(waiting)):
            # No more than one copy of each, however large the policy is.
            self._fork(worker, waiting.popleft(), 0)

    def replace(self, worker: int, life: int, delay: float) -> None:
        """Have another process started in place of ``worker``, without waiting.

        It is started once that of ``worker`` has certainly ended, because both write the same
        memory. Once it has built its environments, `receive` returns its `Ready`; else `receive`
        raises `WorkerDied`. Arguments as in `NetworkBackend.replace`.
        """
        self._due[worker] = monotonic() + delay, life

    def _look_after(self) -> float | None:
        """Start replacements that are due, and end late ones; return the seconds until the next."""
        now = monotonic()
        for worker in [worker for worker, (due, _) in self._due.items() if due <= now]:
            _, life = self._due.pop(worker)
            before = self._zygotes[worker]
            if before.alive and before.exit_status(self.pids[worker], 0.0) is None:
                self._due[worker] = now + _LOOK_S, life
                continue
            try:
                self._fork(worker, self._factories[worker], life)
            except (WorkerDied, CollectorTimeout, OSError) as err:
                text = f"{self.worker_name.format(worker)} was not replaced: {err}"
                raise WorkerDied(text, worker=worker) from err
            self._building[worker] = Deadline(self._start_timeout)
        for worker, deadline in self._building.items():
            if deadline.expired:
                raise WorkerDied(
                    f"the replacement of {self.worker_name.format(worker)} did not build its "
                    f"environments within {self._start_timeout} s",
                    worker=worker,
                )
        waits = [due - now for due, _ in self._due.values()]
        return min([*waits, *(one.left for one in self._building.values())], default=None)

    def _fork(self, worker: int, factory: bytes, life: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                fds = [theirs.fileno(), self.memory.fd, self._control.fd]
                source = zygote()
                pid = source.fork(fds, self._start_timeout)
        except BaseException:
            ours.close()
            raise
        self._zygotes[worker] = source
        process = ChannelPeer(worker, Channel(ours))
        self._peers[worker] = process
        self.pids[worker] = pid
        self._ends.register(process.channel.fileno(), 0)
        boot = Boot(
            worker,
            factory,
            self._threads,
            life,
            surroundings=Surroundings(),
            processors=None if self._affinity is None else self._affinity[worker],
        )
        with contextlib.suppress(ConnectionError):
            process.channel.post(pickle.dumps(boot))
        self._watch(process)

    def _post(self, peer: ChannelPeer, ticket: int, command: m.Command) -> None:
        if peer.gone:
            raise self._died(peer, "is gone")
        frame = peer.writer.write(ticket, command)
        with contextlib.suppress(ConnectionError):
            if peer.channel.post(frame):
                self._watch(peer)

    def _poll(self, timeout: float | None) -> float | None:
        soon = self._look_after() if self._due or self._building else None
        if soon is not None:
            timeout = soon if timeout is None else min(timeout, soon)
        for fd, events in interruptible(self._poller.poll, timeout):
            peer = self._by_fd[fd]
            # Read first: messages that a worker sent before its end are whole, as is their data.
            if events & ~select.EPOLLOUT:
                try:
                    self._arrived.extend(peer.channel.read())
                    self._building.pop(peer.index, None)  # what comes first is about its start
                except EOFError:
                    raise self._died(peer, "closed its connection") from None
            if events & select.EPOLLOUT:
                peer.flush()
                self._watch(peer)
        return soon

    def no_end_noticed(self) -> bool:
        return not self._ends.poll(0)

    def _exit_reason(self, peer: ChannelPeer, reason: str) -> str:
        pid = self.pids[peer.index]
        status = interruptible(self._zygotes[peer.index].exit_status, pid, 2.0)
        reason = reason if status is None else exit_text(status)
        return f"(process {pid}) {reason}; its output, if there was any, is above"

    def end(self, worker: int) -> bool:
        """Kill the process of ``worker`` unless it has ended, and wait for its end."""
        self._due.pop(worker, None)
        self._building.pop(worker, None)
        if worker in self._peers:
            self._drop(self._peers[worker])
        pid, source = self.pids[worker], self._zygotes[worker]
        with contextlib.suppress(OSError):
            source.end(pid, 0.0)
        return interruptible(source.exit_status, pid, _KILLED_S) is not None

    def _drop(self, peer: ChannelPeer) -> None:
        if not peer.gone:
            self._ends.unregister(peer.channel.fileno())
        super()._drop(peer)

    def stop(self, timeout: float) -> None:
        processes, self._peers = self._peers.values(), {}
        self._arrived.clear()
        for process in processes:
            process.channel.close()
        # In a forked child of the learner the workers belong to another process.
        if self._owner == os.getpid():
            deadline = Deadline(min(timeout, _WORKER_EXIT_S))
            for process in processes:
                self._zygotes[process.index].end(self.pids[process.index], deadline.left)
        self._poller.close()
        self.memory.close()
        self._control.close()
