"""Order of loads and stores, for memory that is read while another thread or process writes it.

What Python can promise: aligned 64-bit words that numpy reads and writes in one element are read
and written whole, by one instruction. Their order is the processor's.

* x86-64 keeps loads in order and stores in order, and copies that bypass the caches end in a fence
  of their own. Nothing is needed.
* Elsewhere (ARM) any two may change places. Taking a lock keeps what comes later from coming
  earlier, releasing it keeps what came earlier from coming later, and a lock cannot be taken
  before it was released: two turns of one lock order everything around them. It need not be a
  lock that anybody else knows, since what orders is the processor's instruction. Each call has a
  lock of its own, so that no forked child inherits one that is held.
"""

from __future__ import annotations

import platform
import threading


def two_turns() -> None:
    """Keep all loads and stores before from passing those behind, on any processor."""
    turn = threading.Lock()
    for _ in range(2):
        turn.acquire()
        turn.release()


def nothing() -> None:
    """Do what x86-64 needs."""


fence = nothing if platform.machine() in {"x86_64", "AMD64"} else two_turns
"""Keeps loads before from passing loads behind, and stores before from passing stores behind."""
