"""Nodes as processes of this machine, forked from the zygote."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Sequence

from gleanrl.engine.backends.process import zygote
from gleanrl.engine.backends.zygote import NODE
from gleanrl.rollout.handshake import Invitation
from gleanrl.rollout.node import Going
from gleanrl.rollout.serve import Surroundings

_FORK_TIMEOUT = 60.0


class LocalLauncher:
    """Starts nodes here. They reach the learner through the loopback interface."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._zygote = zygote()
        self._owner = os.getpid()
        self._pids: dict[int, int] = {}

    def address(self) -> str:
        """Return the loopback address."""
        return "127.0.0.1"

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Fork one process per invitation."""
        for invitation in invitations:
            going = pickle.dumps(Going(invitation, Surroundings.here()))
            # A pipe would hold no more than 64 KB before somebody reads it.
            with open(os.memfd_create("gleanrl"), "w+b") as told:
                told.write(going)
                told.seek(0)
                pid = self._zygote.fork([told.fileno()], _FORK_TIMEOUT, NODE)
            before = self._pids.get(invitation.node)
            if before is not None:  # it was given up, which it need not have noticed
                self._zygote.kill(before)
            self._pids[invitation.node] = pid

    def fate(self, node: int, timeout: float) -> str | None:
        """Return how the process of ``node`` ended."""
        pid = self._pids.get(node)
        status = None if pid is None else self._zygote.exit_status(pid, timeout)
        if status is None:
            return None
        if status < 0:
            return f"(process {pid}) was killed by signal {-status}"
        return f"(process {pid}) exited with code {status}"

    def stop(self, timeout: float) -> None:
        """Let those that were asked to end do so, kill the rest."""
        pids, self._pids = self._pids, {}
        deadline = time.monotonic() + timeout
        # In a forked child of the learner they are somebody else's nodes.
        for pid in pids.values() if self._owner == os.getpid() else ():
            left = max(0.0, deadline - time.monotonic())
            if self._zygote.exit_status(pid, left) is None:
                with contextlib.suppress(OSError):
                    self._zygote.kill(pid)
