"""Nodes that are processes of this machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence

from gleanrl.transport.addresses import LOOPBACK
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.process import zygote
from gleanrl.transport.worker_loop import Surroundings
from gleanrl.transport.zygote import NODE, exit_text


class LocalLauncher:
    """Starts nodes here. They reach the learner through the loopback interface."""

    def __init__(self) -> None:
        self._zygote = zygote()
        self._owner = os.getpid()
        self._pids: dict[int, int] = {}

    def address(self) -> str:
        return LOOPBACK

    def launch(self, invitations: Sequence[Invitation]) -> None:
        for invitation in invitations:
            going = pickle.dumps((invitation, Surroundings()))
            # A pipe holds no more than 64 KB without a reader.
            with open(os.memfd_create("gleanrl"), "w+b") as told:
                told.write(going)
                told.seek(0)
                pid = self._zygote.fork([told.fileno()], invitation.timeout_s, NODE)
            before = self._pids.get(invitation.node)
            if before is not None:  # it was given up, and may not have noticed that
                self._zygote.kill(before)
            self._pids[invitation.node] = pid

    def exit_reason(self, node: int, timeout: float) -> str | None:
        pid = self._pids.get(node)
        status = None if pid is None else self._zygote.exit_status(pid, timeout)
        return None if status is None else f"(process {pid}) {exit_text(status)}"

    def stop(self, timeout: float) -> None:
        pids, self._pids = self._pids, {}
        # In a forked child of the learner the nodes belong to another process.
        if self._owner == os.getpid():
            self._zygote.end(list(pids.values()), timeout)
