"""Nodes that are processes of this machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence

from gleanrl.core.deadline import Deadline
from gleanrl.transport.addresses import LOOPBACK
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.process import zygote
from gleanrl.transport.worker_loop import Surroundings
from gleanrl.transport.zygote import NODE, Zygote, exit_text


class LocalLauncher:
    """Starts nodes here. They reach the learner through the loopback interface."""

    def __init__(self) -> None:
        zygote()  # it imports meanwhile
        self._owner = os.getpid()
        self._processes: dict[int, tuple[Zygote, int]] = {}
        """Of each node: the zygote it was forked from, and its process id."""

    def address(self) -> str:
        return LOOPBACK

    def launch(self, invitations: Sequence[Invitation]) -> None:
        for invitation in invitations:
            going = pickle.dumps((invitation, Surroundings()))
            # A pipe holds no more than 64 KB without a reader.
            with open(os.memfd_create("gleanrl"), "w+b") as told:
                told.write(going)
                told.seek(0)
                source = zygote()
                pid = source.fork([told.fileno()], invitation.timeout_s, NODE)
            if invitation.node in self._processes:  # it was given up, and may not have noticed that
                before, replaced = self._processes[invitation.node]
                before.kill(replaced)
            self._processes[invitation.node] = source, pid

    def exit_reason(self, node: int, timeout: float) -> str | None:
        if node not in self._processes:
            return None
        source, pid = self._processes[node]
        status = source.exit_status(pid, timeout)
        return None if status is None else f"(process {pid}) {exit_text(status)}"

    def stop(self, timeout: float) -> None:
        processes, self._processes = self._processes.values(), {}
        # In a forked child of the learner the nodes belong to another process.
        if self._owner == os.getpid():
            deadline = Deadline(timeout)
            for source, pid in processes:
                source.end(pid, deadline.left)
