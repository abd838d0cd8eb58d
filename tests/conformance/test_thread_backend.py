"""Threads as a new kind of worker: the suite for backends passes unchanged."""

import queue
import threading

from test_backends import BackendConformance

from gleanrl.transport.peer import RemoteBackend
from gleanrl.transport.pickling import pickled
from gleanrl.transport.wire import frame_of
from gleanrl.transport.worker_loop import Boot, Inbox, serve


class ThreadEndpoint:
    """The worker's end: everything is in the same memory."""

    weights = None

    def __init__(self, backend):
        self.inbox, self.stop = Inbox(), backend.stop_byte
        self.next, self.window = self.inbox.next, backend.open_window
        self._replies = backend.replies

    def answer(self, reply):
        self._replies.put(frame_of(reply))


class Thread:
    """The learner's end."""

    def __init__(self, index, factory, backend):
        self.index = index
        self.endpoint = ThreadEndpoint(backend)
        boot, answer = Boot(index, factory, threads=1), self.endpoint.answer
        self.thread = threading.Thread(
            target=lambda: answer(serve(boot, self.endpoint)), daemon=True
        )
        self.thread.start()

    @property
    def gone(self):
        return not self.thread.is_alive()


class ThreadBackend(RemoteBackend):
    """One thread per worker."""

    def __init__(self, open_window):
        super().__init__()
        self.open_window = open_window
        self.stop_byte = bytearray(1)
        self.replies = queue.SimpleQueue()

    def weight_publisher(self, weights):
        return None

    def start(self, factories):
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        self._peers = {worker: Thread(worker, blob, self) for worker, blob in enumerate(blobs)}

    def _post(self, peer, ticket, command):
        peer.endpoint.inbox.put(ticket, command)

    def _poll(self, timeout):
        try:
            self._arrived.append(self.replies.get(timeout=0.1 if timeout is None else timeout))
        except queue.Empty:
            for peer in self._peers.values():
                if peer.gone and self.replies.empty():
                    raise self._died(peer, "ended") from None
        return 0.1

    def wait(self, timeout):
        pass

    def _exit_reason(self, peer, reason):
        return f"(a thread) {reason}"

    def _drop(self, peer):
        pass

    def stop(self, timeout):
        threads, self._peers = [peer.thread for peer in self._peers.values()], {}
        self._arrived.clear()
        for thread in threads:
            thread.join(timeout)


class TestThreads(BackendConformance):
    def backend(self, open_window):
        return ThreadBackend(open_window)
