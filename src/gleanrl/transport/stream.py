"""Frames over a socket: writing never waits unless asked to, reading takes what has come."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NoReturn

_HEADER = struct.Struct("=Q")
_CHUNK = 1 << 18
_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_all() -> None:
    for channel in list(_open):
        channel.close()


# A forked child must not keep the connections of its parent open beyond its parent's end.
os.register_at_fork(after_in_child=_close_all)


class Channel:
    """One end of a stream socket that carries length-prefixed frames. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        _open.add(self)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether frames are waiting to be taken by the other side."""
        return bool(self._out)

    def post(self, frame: bytes) -> None:
        """Send ``frame`` as far as the other side takes it; `flush` sends the rest.

        Raises:
            ConnectionError: the other side is gone.
        """
        self._out.extend(self._packed(frame))
        self.flush()

    def _packed(self, frame: bytes) -> Iterable[memoryview]:
        """Return ``frame`` as it travels."""
        return (memoryview(_HEADER.pack(len(frame)) + frame),)

    def flush(self) -> None:
        """Send what waits, as far as it is taken.

        Raises:
            ConnectionError: the other side is gone.
        """
        while self._out:
            try:
                sent = self._socket.send(self._out[0])
            except BlockingIOError:
                return
            left = self._out[0][sent:]
            if left:
                self._out[0] = left
            else:
                self._out.popleft()

    def send(self, frame: bytes) -> None:
        """Send ``frame``, waiting until the other side has taken it.

        Raises:
            ConnectionError: the other side is gone.
        """
        self.post(frame)
        while self._out:
            self._writable.poll()
            self.flush()

    def read(self) -> list[bytes]:
        """Return the whole frames that have come, without waiting.

        Raises:
            EOFError: the other side is gone and every frame it sent was returned.
        """
        ended = False
        frames: list[bytes] = []
        while True:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
            if not chunk:
                ended = True
                break
            self._in += chunk
            frames += self._cut()
            if len(chunk) < _CHUNK:
                break
        if ended and not frames:
            raise EOFError("the other side is gone")
        return frames

    def _cut(self) -> list[bytes]:
        """Take the whole frames out of what has come."""
        frames, start, size = [], 0, _HEADER.size
        while len(self._in) - start >= size:
            (length,) = _HEADER.unpack_from(self._in, start)
            if len(self._in) - start - size < length:
                break
            frames.append(bytes(self._in[start + size : start + size + length]))
            start += size + length
        if start:
            del self._in[:start]
        return frames

    def wait(self) -> list[bytes]:
        """Wait for at least one whole frame and return what has come.

        Raises:
            EOFError: the other side is gone.
        """
        while not (frames := self.read()):
            self._readable.poll()
        return frames

    def hang_up(self) -> None:
        """End the connection for both sides; the next to read is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait_for_ever(self) -> None:
        """Let the other side take its time: on TCP only its host has to show signs of life."""
        if sys.platform == "linux" and self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<QI")
_TAG = 16
_START = _LENGTH.size + _TAG
_RECORD = 1 << 20
"""Largest part of a frame in one record, in bytes."""
_MORE = 1 << 31
"""Added to the length of a record that does not end its frame."""


class ForgedFrameError(ConnectionError):
    """Something came on a connection that its other end has not sent, or not at this place."""


class _Seal:
    """Makes the tags of one direction."""

    def __init__(self, key: bytes) -> None:
        self._keyed = blake2b(key=key, digest_size=_TAG)
        self._number = 0

    def tag(self, length: int, part: bytes | memoryview) -> bytes:
        """Return the tag of the next record."""
        digest = self._keyed.copy()
        digest.update(_NUMBERED.pack(self._number, length))
        digest.update(part)
        self._number += 1
        return digest.digest()


class SealedChannel(Channel):
    """A `Channel` whose frames are authenticated, for connections that leave this machine."""

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes) -> None:
        super().__init__(sock)
        self._sends, self._receives = _Seal(sends), _Seal(receives)
        self._parts: list[bytes] = []
        """Of a frame that has not come whole."""
        self._forged = False

    def _packed(self, frame: bytes) -> Iterator[memoryview]:
        if len(frame) <= _RECORD:
            length = len(frame)
            yield memoryview(_LENGTH.pack(length) + self._sends.tag(length, frame) + frame)
            return
        whole = memoryview(frame)
        for start in range(0, len(frame), _RECORD):
            part = whole[start : start + _RECORD]
            length = len(part) + (_MORE if start + _RECORD < len(frame) else 0)
            yield memoryview(_LENGTH.pack(length) + self._sends.tag(length, part))
            yield part

    def read(self) -> list[bytes]:
        """Return the whole frames that have come, without waiting.

        Raises:
            EOFError: the other side is gone and every frame it sent was returned.
            ForgedFrameError: the next thing that came is not from the other side.
        """
        if self._forged:
            self._refuse()
        frames = super().read()
        if self._forged and not frames:
            self._refuse()
        return frames

    def _refuse(self) -> NoReturn:
        raise ForgedFrameError(
            "a message on the connection was not authentic: something between the two hosts "
            "changes, repeats or adds to what they send"
        )

    def _cut(self) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._in) - start >= _START:
            (length,) = _LENGTH.unpack_from(self._in, start)
            size = length & ~_MORE
            end = start + _START + size
            if size <= _RECORD and end > len(self._in):
                break
            tag = bytes(self._in[start + _LENGTH.size : start + _START])
            part = bytes(self._in[start + _START : end])
            if size > _RECORD or not hmac.compare_digest(tag, self._receives.tag(length, part)):
                self._forged = True
                self._in.clear()
                self.hang_up()
                return frames
            start = end
            self._parts.append(part)
            if length < _MORE:
                frames.append(part if len(self._parts) == 1 else b"".join(self._parts))
                self._parts.clear()
        if start:
            del self._in[:start]
        return frames
