"""Notice that an environment has another user besides its collector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LAST_USER: dict[int, object] = {}
"""By the id of each environment that a collector was given; ``None``: called directly."""


class GivenEnvs:
    """Environments that a collector was given, not made, so that other code may have them."""

    def __init__(self, envs: Iterable[Any]) -> None:
        """Be the last user of ``envs``, which the caller keeps alive."""
        self._ids = [id(env) for env in envs]
        self.note_use()

    def note_use(self) -> None:
        """Be the last user again."""
        for each in self._ids:
            _LAST_USER[each] = self

    @property
    def used_elsewhere(self) -> bool:
        """Whether another collector used one, or a call reset one, since the last `note_use`."""
        return any(_LAST_USER.get(each) is not self for each in self._ids)

    def end(self) -> None:
        """Forget the environments that no other collector has taken meanwhile."""
        for each in self._ids:
            if _LAST_USER.get(each) is self:
                del _LAST_USER[each]


def note_reset(env: Any) -> None:
    """Note that ``env`` was reset by a call of its own method."""
    if id(env) in _LAST_USER:
        _LAST_USER[id(env)] = None
