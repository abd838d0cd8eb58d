"""What a writer holds while it writes."""

from __future__ import annotations

from typing import NamedTuple


class Reservation(NamedTuple):
    """Rows that one writer may write; travels between processes."""

    entry: int
    owner: int
    first: int
    """Position of the first row; its place is ``first % slots``."""
    rows: int
