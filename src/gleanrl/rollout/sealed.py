"""Frames that only the other end of one connection can have sent, each once and in its order.

A frame travels in records of at most `_RECORD` bytes:

    length (and whether more of the frame follows), tag, part of the frame

The tag is a keyed BLAKE2b over the record's number, its length and its part, so that a record which
was changed, repeated, left out or made up is refused, and with it the connection. A length is
checked before anything is read for it, and only records that are authentic are kept.
"""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import NoReturn

from gleanrl.rollout.channel import Channel

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
        """Take over ``sock``.

        Args:
            sock: The connection.
            sends: The key of what this end sends.
            receives: The key of what the other end sends.
        """
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
