"""The Ray cluster that ``ray.init`` joins, and whether it answers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_CONNECT_S = 3.0
"""Seconds in which a cluster takes a connection."""
_FILE = "ray/ray_current_cluster"
"""Where Ray notes the address of the cluster that was started last, below its temporary folder."""


def known_cluster(given: str | None = None) -> tuple[str | None, str]:
    """Return the address of the cluster that ``ray.init(address=given)`` joins, and its source.

    The address is ``None`` if Ray starts a cluster here.
    """
    address, source = given, "ray_init_config['address']"
    if address in (None, "auto"):
        address, source = os.environ.get("RAY_ADDRESS") or None, "RAY_ADDRESS"
    if address in (None, "auto"):
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        file = Path(folder) / _FILE
        address, source = (file.read_text().strip() if file.exists() else None), str(file)
    return (None if address in ("", "local") else address), source


def connection_problem(address: str) -> str | None:
    """Return why no cluster answers at ``address``; ``None`` if one does, within seconds."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as err:
        return str(err)
    return None
