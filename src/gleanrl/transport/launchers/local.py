"""Nodes that are processes of this machine; and the address of it that nodes are told."""

from __future__ import annotations

import ipaddress
import os
import pickle
import socket
from collections.abc import Sequence

from gleanrl.core.errors import ConfigError
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.process import zygote
from gleanrl.transport.worker_loop import Surroundings
from gleanrl.transport.zygote import NODE, exit_text

LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of no machine (RFC 5737), to look up the default route; nothing is sent there."""


def outward(name: str | None = None) -> str:
    """Return an address of this machine for other machines.

    The address of ``name`` (by default the host's name), unless it is a loopback address, as names
    often have on their own host; then the address of the interface of the default route.

    Raises:
        ConfigError: there is neither.
    """
    candidates = (_of_name(name or socket.gethostname()), _of_route())
    for candidate in candidates:
        if candidate is not None and not _is_loopback(candidate) and _is_here(candidate):
            return candidate
    raise ConfigError(
        f"no address of this machine ({socket.gethostname()}) was found that others reach it by: "
        "pass host= with the address of the interface that leads to the nodes"
    )


def _of_name(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _of_route() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_here(address: str) -> bool:
    """Whether the address can be listened on: it may be the one outside a translator."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


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
            going = pickle.dumps((invitation, Surroundings.current()))
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
