"""The address and the ports of this machine that nodes are told."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence

from gleanrl.core.errors import ConfigError

TCP_PORT = "10003"
"""The port nodes connect to unless ``TCP_PORT`` in the environment names another."""
_PORTS = 1 << 16
_MOST_PORTS = 100
LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of no machine (RFC 5737), to look up the default route; nothing is sent there."""


def outward(name: str | None = None) -> str:
    """Return an address of this machine for other machines.

    The address of ``name`` (by default the host's name), unless it is a loopback address, as names
    often have on their own host; then the address of the interface of the default route.
    """
    for candidate in _candidates(name or socket.gethostname()):
        if not ipaddress.ip_address(candidate).is_loopback:
            with contextlib.suppress(OSError):  # it may be the one outside a translator
                socket.create_server((candidate, 0)).close()
                return candidate
    raise ConfigError(
        f"no address of this machine ({socket.gethostname()}) was found that others reach it by: "
        "pass host= with the address of the interface that leads to the nodes"
    )


def _candidates(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield socket.gethostbyname(name)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        yield str(probe.getsockname()[0])


def ports_to_try(wanted: int | str | None) -> Sequence[int]:
    """Return the requested port; else the port in the environment, and those after it."""
    given = os.environ.get("TCP_PORT", TCP_PORT) if wanted is None else wanted
    try:
        port = int(given)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port < _PORTS:
        raise ConfigError(f"tcp_port ({given!r}) must be a port number")
    if wanted is not None or port == 0:
        return (port,)
    return range(port, min(port + _MOST_PORTS, _PORTS))
