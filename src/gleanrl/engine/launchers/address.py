"""The address of this machine that nodes are told."""

from __future__ import annotations

import ipaddress
import socket

from gleanrl.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of no machine (RFC 5737): only the way there is looked up, nothing is sent."""


def outward(name: str | None = None) -> str:
    """Return an address of this machine that other machines reach it by.

    That of ``name`` (the host's own by default) if it is one; a host's name often stands for a
    loopback address on the host itself, and then it is that of the interface that the default
    route leads through.

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
    """Whether the address can be listened on: names may stand for one outside a translator."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True
