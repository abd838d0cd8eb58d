"""The handshake by which a node and a learner authenticate.

A node and a learner show each other that they know the same secret:

    learner -> node     magic, nonce
    node    -> learner  nonce, index, HMAC(secret, "node", both nonces, index)
    learner -> node     timeout_s, HMAC(secret, "learner", both nonces, index, timeout_s)

Sizes are fixed and nothing is unpickled: a stranger gets no further than this. Both sides derive
keys from the secret and this exchange, and authenticate every later frame with them (see
`authenticated_channel`). A relay of the exchange therefore knows no key, and can neither change nor
add frames. Addresses are not signed, so that tunnels and address translators may be in between.
Frames are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, ConfigError, GleanError

_NAME, _VERSION = b"gleanrl", b"2"
_MAGIC = _NAME + _VERSION
_NONCE = 32
_INDEX = struct.Struct("=i")
_SECONDS = struct.Struct("=d")
_DIGEST = hashlib.sha256().digest_size
SECRET = "GLEANRL_SECRET"
"""Environment variable that holds a secret of the user's own."""
_SHORTEST = 16


class HandshakeError(GleanError):
    """The other side of a connection could not prove its identity."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address of a learner and the secret that lets a node in."""

    host: str
    port: int
    node: int
    """The node's index."""
    secret: bytes = field(repr=False)
    timeout_s: float = 60.0
    """Seconds to look for the learner."""


def new_secret() -> bytes:
    """Return a secret for one collector: the user's, if there is one, or a new one."""
    given = os.environ.get(SECRET)
    return secrets.token_hex(32).encode() if given is None else secret_from(given)


def secret_from(text: str) -> bytes:
    """Return the secret in ``text``, the value of an environment variable."""
    secret = text.strip().encode()
    if len(secret) < _SHORTEST:
        raise ConfigError(
            f"the secret in {SECRET} is {len(secret)} bytes long, and guessed too easily; make one "
            "with: openssl rand -hex 32"
        )
    return secret


Keys: TypeAlias = tuple[bytes, bytes]
"""Authenticate the frames that one side of a connection sends, and those that it receives."""


def _keys(secret: bytes, *said: bytes) -> Keys:
    """Derive the node's keys of the connection on which ``said`` was said."""
    session = _sign(secret, b"session", *said)
    return _sign(session, b"from the node"), _sign(session, b"from the learner")


class Guest(NamedTuple):
    """A node that was let in."""

    node: int
    """Its index."""
    sock: socket.socket
    keys: Keys
    """The learner's."""


def admit(sock: socket.socket, secret: bytes, timeout_s: float, deadline: Deadline) -> Guest:
    """Let a node in that has connected; ``sock`` stays the caller's.

    The node is told ``timeout_s``: the seconds without a sign of life after which either side takes
    the other for gone.
    """
    mine = secrets.token_bytes(_NONCE)
    _send(sock, _MAGIC + mine, deadline)
    answer = _receive(sock, _NONCE + _INDEX.size + _DIGEST, deadline)
    theirs, index = answer[:_NONCE], answer[_NONCE : _NONCE + _INDEX.size]
    if not hmac.compare_digest(answer[-_DIGEST:], _sign(secret, b"node", mine, theirs, index)):
        raise HandshakeError("a connection was refused: it does not know this collector's secret")
    told = _SECONDS.pack(timeout_s)
    _send(sock, told + _sign(secret, b"learner", mine, theirs, index, told), deadline)
    receives, sends = _keys(secret, mine, theirs, index, told)
    return Guest(int(_INDEX.unpack(index)[0]), sock, (sends, receives))


def join(invitation: Invitation, timeout: float) -> tuple[socket.socket, Keys, float]:
    """Connect to the learner as one of its nodes.

    Returns:
        The connection, on which the node was let in; its keys; and the seconds without a sign of
        life after which either side takes the other for gone.

    Raises:
        HandshakeError: the other side is not the learner.
    """
    deadline = Deadline(timeout)
    address = invitation.host, invitation.port
    try:
        sock = _connect(address, deadline)
    except OSError as err:
        raise CollectorTimeout(
            f"no learner answers at {address[0]}:{address[1]} within {timeout:g} s: {err}"
        ) from err
    try:
        return sock, *_introduce(sock, invitation, deadline)
    except BaseException:
        sock.close()
        raise


def _introduce(
    sock: socket.socket, invitation: Invitation, deadline: Deadline
) -> tuple[Keys, float]:
    where = f"{invitation.host}:{invitation.port}"
    hello = _receive(sock, len(_MAGIC) + _NONCE, deadline)
    if not hello.startswith(_MAGIC):
        if hello.startswith(_NAME):
            raise HandshakeError(
                f"the learner at {where} speaks another version of the nodes' protocol; install "
                "the same GleanRL on both"
            )
        raise HandshakeError(f"{where} is not a GleanRL learner")
    theirs, mine = hello[len(_MAGIC) :], secrets.token_bytes(_NONCE)
    index = _INDEX.pack(invitation.node)
    proof = _sign(invitation.secret, b"node", theirs, mine, index)
    _send(sock, mine + index + proof, deadline)
    try:
        answer = _receive(sock, _SECONDS.size + _DIGEST, deadline)
    except HandshakeError as err:
        raise HandshakeError(
            f"the learner at {where} did not let node {invitation.node} in: the secret is not that "
            f"of its collector, or that was just shut down ({err})"
        ) from err
    told = answer[: _SECONDS.size]
    expected = _sign(invitation.secret, b"learner", theirs, mine, index, told)
    if not hmac.compare_digest(answer[_SECONDS.size :], expected):
        raise HandshakeError(f"{where} does not know this collector's secret")
    keys = _keys(invitation.secret, theirs, mine, index, told)
    return keys, float(_SECONDS.unpack(told)[0])


def _connect(address: tuple[str, int], deadline: Deadline) -> socket.socket:
    """Connect, also to a learner that is not listening just yet."""
    while True:
        try:
            return socket.create_connection(address, max(0.1, deadline.left))
        except OSError:
            if deadline.expired:
                raise
            time.sleep(min(0.2, deadline.left))


def _sign(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(0.01, deadline.left))
    try:
        sock.sendall(data)
    except OSError as err:
        raise HandshakeError(f"a connection ended before it was let in ({err})") from err


def _receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < count:
        sock.settimeout(max(0.01, deadline.left))
        try:
            part = sock.recv(count - len(data))
        except OSError as err:
            raise HandshakeError(f"a connection was not let in ({err})") from err
        if not part:
            raise HandshakeError("a connection ended before it was let in")
        data += part
    return bytes(data)
