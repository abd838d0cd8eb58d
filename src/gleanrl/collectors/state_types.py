"""The types of all entries of a collector's state, checked before use; errors of other states."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from gleanrl.core.errors import ConfigError

Kind: TypeAlias = Any
"""A class; ``None``; a list with the kind of all items; a dict with the kinds of entries, of which
``...`` is that of all others; or a tuple of alternatives."""

NO_STATE = (
    "this is no state of such a collector, or another version of GleanRL saved it and can load it"
)
_BATCH = list
"""The result of `save_state`, whose contents `load_state` checks."""
_WORKER: Kind = {
    "policy_version": int,
    "tracker": {...: torch.Tensor},
    "streams": {
        "actions": (torch.Tensor, None),
        "torch": torch.Tensor,
        "numpy": list,
        "python": tuple,
        "devices": list,
    },
    "episodes": {
        "envs": list,
        "fresh": bool,
        "root": {...: torch.Tensor},
        "why": str,
        "pickle": bool,
    },
}
_TRAJECTORIES: Kind = {
    "parts": [_BATCH],
    "whole": (
        {"frames": [_BATCH], "running": list, "latest": list, "ready": list},
        None,
    ),
}
_ENTRY: Kind = {
    "policy_state_dict": dict,
    "env_state_dict": dict,
    "policy_version": int,
    "worker": _WORKER,
    "life": int,
    "lost": bool,
}
OF_ALL: Mapping[str, Kind] = {
    "frames": int,
    "iter": int,
    "whole_frames": int,
    "envs": int,
    "statistics": [tuple],
    "schedule": ({"waiting": {...: int}, "due": [int]}, None),
    "trajectories": _TRAJECTORIES,
    "undelivered": [
        {
            "worker": int,
            "steps": int,
            "frames": int,
            "version": int,
            "ended": torch.Tensor,
            "batch": _BATCH,
        }
    ],
    "ready": [(_BATCH, None)],
    "ledger": {"discards": {...: int}, "dropped": int, "unfinished": int},
}
"""Entries that are not those of one worker."""


def check_types(state: Any) -> None:
    """Raise `ConfigError`, which names the entry, if one has another type than in saved states."""
    names = state if isinstance(state, Mapping) else ()
    workers = {name: _ENTRY for name in names if re.fullmatch(r"worker\d+", str(name))}
    if at := _misfit(state, {**OF_ALL, **_ENTRY, **workers}, "state"):
        raise ConfigError(f"{NO_STATE} ({at} has another type)")


@contextlib.contextmanager
def explained(what: str, passed: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn what a state, which may come from anyone, can cause into a `ConfigError` of ``what``."""
    try:
        yield
    except Exception as err:
        if isinstance(err, (ConfigError, *passed)):
            raise
        why = f"{type(err).__name__}: {err}"
        raise ConfigError(f"{what} ({why:.200})") from err


def _misfit(value: Any, kind: Kind, at: str) -> str | None:
    """Return the place of the first part that is not of its kind."""
    if isinstance(kind, tuple):
        found = [_misfit(value, one, at) for one in kind]
        return None if None in found else found[0]
    if not isinstance(kind, list | dict):
        number = type(value) is int  # a bool is none
        fits = value is None if kind is None else number if kind is int else isinstance(value, kind)
        return None if fits else at
    if not isinstance(value, list if isinstance(kind, list) else Mapping):
        return at
    parts = enumerate(value) if isinstance(value, list) else value.items()
    kinds = {...: kind[0]} if isinstance(kind, list) else kind
    rest = kinds.get(..., object)
    places = (_misfit(part, kinds.get(name, rest), f"{at}[{name!r}]") for name, part in parts)
    return next((place for place in places if place), None)
