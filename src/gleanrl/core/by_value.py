"""Objects that every kind of pickling takes by value."""

from __future__ import annotations

from typing import Any

import cloudpickle


class ByValue:
    """Has plain pickle take ``value`` as cloudpickle does: lambdas and functions of a script too.

    Picklers that do so by themselves pickle ``value`` as a part of the rest.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (cloudpickle.dumps(self.value),)


def _loaded(pickled: bytes) -> ByValue:
    return ByValue(cloudpickle.loads(pickled))
