"""Frames over a socket, authenticated one by one where they leave this machine."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import weakref
from collections import deque
from hashlib import blake2b

_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<QI")
_TAG = 16
_RECORD = 1 << 20
"""Largest part of a frame in one record, in bytes."""
_MORE = 1 << 31
"""Added to the length of a record that does not end its frame."""
_CHUNK = 1 << 18
_open: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_all() -> None:
    for channel in list(_open):
        channel.close()


# A forked child must not keep the connections of its parent open beyond its parent's end.
os.register_at_fork(after_in_child=_close_all)


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


class Channel:
    """One end of a stream socket that carries frames. Owns the socket.

    A frame travels as records: length, tag, bytes. Records on this machine have no tag. The tags of
    a connection that leaves it authenticate every record and its place among all. When the other
    side is gone, sending raises `ConnectionError` and reading `EOFError`.
    """

    def __init__(self, sock: socket.socket, keys: tuple[bytes, bytes] | None = None) -> None:
        """Take over ``sock``; ``keys`` authenticate sent and received records."""
        sock.setblocking(False)
        self._socket = sock
        _open.add(self)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._parts: list[bytes] = []
        """Of a frame that has not come whole."""
        self._sends = _Seal(keys[0]) if keys else None
        self._receives = _Seal(keys[1]) if keys else None
        self._start = _LENGTH.size + (_TAG if keys else 0)
        """Bytes of a record before those of its frame."""
        self._forged = False

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether frames are waiting to be taken by the other side."""
        return bool(self._out)

    def post(self, frame: bytes) -> bool:
        """Send ``frame`` as far as the other side takes it; tell whether more is to be sent."""
        size = len(frame)
        if size <= _RECORD:
            self._out.append(memoryview(self._head(size, frame) + frame))
        else:
            whole = memoryview(frame)
            for start in range(0, size, _RECORD):
                part = whole[start : start + _RECORD]
                length = len(part) + (_MORE if start + _RECORD < size else 0)
                self._out += memoryview(self._head(length, part)), part
        self.flush()
        return bool(self._out)

    def _head(self, length: int, part: bytes | memoryview) -> bytes:
        """Return the header of a record."""
        tag = b"" if self._sends is None else self._sends.tag(length, part)
        return _LENGTH.pack(length) + tag

    def flush(self) -> None:
        """Send waiting bytes, as far as the other side takes them."""
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
        """Send ``frame``, waiting until the other side has taken it."""
        self.post(frame)
        while self._out:
            self._writable.poll()
            self.flush()

    def read(self) -> list[bytes]:
        """Return the whole frames that have come, without waiting."""
        frames: list[bytes] = []
        while not self._forged:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return frames
            except ConnectionError:
                chunk = b""
            if not chunk:
                break
            self._in += chunk
            frames += self._cut()
            if len(chunk) < _CHUNK and not self._forged:
                return frames
        if frames:
            return frames
        if self._forged:
            raise ForgedFrameError(
                "a message on the connection was not authentic: something between the two hosts "
                "changes, repeats or adds to what they send"
            )
        raise EOFError("the other side is gone")

    def _cut(self) -> list[bytes]:
        """Take the whole frames out of the received bytes."""
        frames: list[bytes] = []
        start = 0
        while len(self._in) - start >= self._start:
            (length,) = _LENGTH.unpack_from(self._in, start)
            size = length & ~_MORE
            end = start + self._start + size
            if size <= _RECORD and end > len(self._in):
                break
            part = bytes(self._in[start + self._start : end])
            if self._receives is not None and not self._authentic(start, length, part):
                self._forged = True
                self.hang_up()
                break
            start = end
            if length & _MORE:
                self._parts.append(part)
            elif self._parts:
                frames.append(b"".join((*self._parts, part)))
                self._parts.clear()
            else:
                frames.append(part)
        if start:
            del self._in[:start]
        return frames

    def _authentic(self, start: int, length: int, part: bytes) -> bool:
        """Tell whether the other end has sent the record at ``start``, as the next one."""
        assert self._receives is not None
        if length & ~_MORE > _RECORD:
            return False
        tag = bytes(self._in[start + _LENGTH.size : start + self._start])
        return hmac.compare_digest(tag, self._receives.tag(length, part))

    def wait(self) -> list[bytes]:
        """Wait for at least one whole frame; return all that have come."""
        while not (frames := self.read()):
            self._readable.poll()
        return frames

    def hang_up(self) -> None:
        """End the connection for both sides; the next to read is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def keep_alive(self, timeout_s: float) -> None:
        """Have the kernel end a connection over TCP when the other host is gone."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        every = int(min(max(1.0, timeout_s / 4), 32767))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.set_patience(timeout_s)

    def set_patience(self, timeout_s: float) -> None:
        """Set how long the other side may leave data on TCP unread; 0 means for ever."""
        longest = int(min(1000 * timeout_s, 2**31 - 1))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
