"""Names of the entries of a batch.

A key is always a tuple of strings here; `tensordict` accepts both ``"a"`` and ``("a",)`` and the
rest of the library does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Key: TypeAlias = tuple[str, ...]
"""A nested key: ``("agents", "observation")``."""
NestedKey: TypeAlias = str | tuple[str, ...]
"""A key as users write it: a string or a tuple of strings."""

NEXT = "next"
OBSERVATION: Key = ("observation",)
ACTION: Key = ("action",)
REWARD: Key = ("reward",)
DONE: Key = ("done",)
TERMINATED: Key = ("terminated",)
TRUNCATED: Key = ("truncated",)
STEP_COUNT: Key = ("step_count",)
IS_INIT: Key = ("is_init",)
TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
POLICY_VERSION: Key = ("policy_version",)
END_FLAGS = frozenset({"done", "terminated", "truncated"})
"""Last parts of the keys of end-of-episode flags."""
TIME = "time"
"""Name of the last batch dimension of everything a collector delivers."""


def as_key(key: NestedKey | Sequence[str]) -> Key:
    """Return ``key`` as a tuple of strings.

    >>> as_key("action"), as_key(("agents", "action"))
    (('action',), ('agents', 'action'))
    """
    if isinstance(key, str):
        return (key,)
    return tuple(part for item in key for part in as_key(item))


def as_keys(keys: Iterable[NestedKey]) -> tuple[Key, ...]:
    """Return every key of ``keys`` as a tuple of strings."""
    return tuple(as_key(key) for key in keys)


def next_key(key: Key) -> Key:
    """Return the key of the same entry after the step.

    >>> next_key(("reward",))
    ('next', 'reward')
    """
    return (NEXT, *key)


def format_key(key: Key) -> str:
    """Return ``key`` as a user would write it in code.

    >>> format_key(("action",)), format_key(("next", "reward"))
    ("'action'", "('next', 'reward')")
    """
    return repr(key[0] if len(key) == 1 else key)


def outermost(keys: Iterable[Key]) -> tuple[Key, ...]:
    """Return the ``keys`` without another key at an outer level of their prefix.

    Of end flags these are the ones that end something: where the root has flags, those of nested
    groups (single agents, say) end nothing.

    >>> outermost([("done",), ("agents", "done"), ("truncated",)])
    (('done',), ('truncated',))
    """
    all_keys = tuple(keys)
    prefixes = {key[:-1] for key in all_keys}
    return tuple(
        key for key in all_keys if not any(key[:cut] in prefixes for cut in range(len(key) - 1))
    )


def is_private(key: Key) -> bool:
    """Tell whether any part of ``key`` starts with an underscore (never delivered)."""
    return any(part.startswith("_") for part in key)
