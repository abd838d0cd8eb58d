"""Readers of what is given on the command line."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Read a number of things: ``10000``, ``10_000``, ``10,000`` or ``1e4``.

    >>> count("10_000"), count("1e4")
    (10000, 10000)
    """
    value = _whole(text)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Read a list of numbers of things, each once.

    >>> counts("4,1,4")
    (1, 4)
    """
    return tuple(sorted({count(part.strip()) for part in text.split(",")}))


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def seed(text: str) -> int:
    """Read a seed: a whole number that every random generator takes."""
    value = _whole(text)
    if value is None or not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**32 - 1")
    return value


def index(text: str) -> int:
    """Read a number that counts from 0."""
    value = _whole(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return value


def address(text: str) -> tuple[str, int]:
    """Read a host and a port.

    >>> address("10.0.0.5:10003")
    ('10.0.0.5', 10003)
    """
    host, colon, port = text.rpartition(":")
    number = _whole(port)
    if not (colon and host and number is not None and 0 < number < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 10.0.0.5:10003")
    return host.strip("[]"), number


def _whole(text: str) -> int | None:
    digits = text.replace(",", "_")
    try:
        return int(digits)
    except ValueError:
        pass
    try:
        value = float(digits)
    except ValueError:
        return None
    return int(value) if value.is_integer() else None
