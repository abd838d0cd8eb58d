"""Counting policy versions."""

from __future__ import annotations

import uuid
from typing import Literal

from gleanrl.core.errors import ConfigError


class PolicyVersion:
    """An integer that only grows; with ``version_type="uuid"`` it shows as a label of its own.

    >>> version = PolicyVersion()
    >>> version.increment_version()
    >>> version.version
    1
    """

    def __init__(self, version_type: Literal["int", "uuid"] = "int") -> None:
        """Start at version 0."""
        if version_type not in ("int", "uuid"):
            raise ConfigError(f"version_type ({version_type!r}) must be 'int' or 'uuid'")
        self.version_type = version_type
        self._number = 0
        self._label = str(uuid.uuid4()) if version_type == "uuid" else ""

    @property
    def number(self) -> int:
        """How many updates there were: what batches carry."""
        return self._number

    @property
    def version(self) -> int | str:
        """The version as it is shown: the number, or the label of a uuid version."""
        return self._label if self.version_type == "uuid" else self._number

    def increment_version(self) -> None:
        """Move to the next version."""
        self.set_number(self._number + 1)

    def set_number(self, number: int) -> None:
        """Continue from ``number`` (a restored checkpoint)."""
        self._number = number
        if self.version_type == "uuid":
            self._label = str(uuid.uuid4())
