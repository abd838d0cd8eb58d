"""Environments that were made and are not wanted after all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def closed_on_error(made: Sequence[Any]) -> Iterator[None]:
    """Close every environment that ``made`` holds by then, each once, if the block raises."""
    try:
        yield
    except BaseException:
        for env in {id(env): env for env in made}.values():
            # What went wrong first is what the user has to know.
            with contextlib.suppress(Exception):
                env.close()
        raise
