"""Checks of every system's batches, field by field, before the timing.

In one process all systems get equally seeded environments, and torch has the same seed before each
first batch. Systems that draw equal numbers in equal order must deliver equal values. Random
actions come from a stream of each system's own, so with these only the first observations are
equal. Workers draw from streams of their own, so their batches are checked alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.harness import WRONG, Fields, System

_SEED = 7
_BAD = re.compile("DIFFERENT|INCONSISTENT|OTHER")


def first_batches(systems: Mapping[str, System], random: bool = False) -> list[str]:
    """Collect one batch of each system and compare all with the first that has fields.

    Args:
        systems: Systems by name.
        random: Whether actions are random.

    Returns:
        One line of text per system; lines that start with `WRONG` are disagreements.
    """
    reference: Fields = {}
    lines = []
    for name, system in systems.items():
        torch.manual_seed(_SEED)
        if not (fields := _batch(system)):
            continue
        line = f"{name}: {_consistent(fields)}"
        if reference:
            line += f"; {_shapes(reference, fields)}"
            line += "" if "DIFFERENT" in line else f", {_values(reference, fields, random)}"
        else:
            reference = fields
        lines.append(_marked(line))
    return lines


def worker_batches(systems: Mapping[str, System], net: nn.Module) -> list[str]:
    """Collect one batch of each system, whose log-probabilities must be those of ``net``.

    Returns:
        As `first_batches`.
    """
    lines = []
    for name, system in systems.items():
        with system.turn():
            fields = _batch(system)
        if fields:
            lines.append(_marked(f"{name}: {_consistent(fields)}, {_scores(fields, net)}"))
    return lines


def _batch(system: System) -> Fields:
    """Return a copy of a batch; systems fill the same memory again."""
    system.collect_batch()
    return {name: value.copy() for name, value in system.fields().items()}


def _marked(line: str) -> str:
    return f"{WRONG} {line}" if _BAD.search(line) else line


def _scores(fields: Fields, net: nn.Module) -> str:
    with torch.no_grad():
        logits = net(torch.from_numpy(fields["observation"]).float())
    action = torch.from_numpy(fields["action"]).long()
    expected = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))[..., 0].numpy()
    # Rows that only reset also have an action: it is ignored, and scored like any other.
    close = np.allclose(expected, fields["action_log_prob"], rtol=1e-4, atol=1e-5)
    return f"log-probabilities of {'the' if close else 'OTHER'} network"


def _values(ours: Fields, theirs: Fields, random: bool) -> str:
    """Compare the values of all fields that both have, of random actions first observations."""
    if random:
        first, other = (fields["observation"][:, 0] for fields in (ours, theirs))
        return f"{'equal' if np.allclose(first, other) else 'DIFFERENT'} first observations"
    mine, other = _rows(ours, theirs)
    shared = sorted(set(ours) & set(theirs))
    different = [name for name in shared if not _equal(name, ours[name][mine], theirs[name][other])]
    return f"DIFFERENT VALUES in {', '.join(different)}" if different else "equal values"


def _shapes(ours: Fields, theirs: Fields) -> str:
    """Compare the shapes of the fields that both have."""
    shared = sorted(set(ours) & set(theirs))
    shapes = [
        f"{name} {ours[name].shape} / {theirs[name].shape}"
        for name in shared
        if ours[name].shape != theirs[name].shape
    ]
    if shapes:
        return f"DIFFERENT SHAPES {', '.join(shapes)}"
    missing = sorted(set(ours) - set(theirs))
    without = f", without {', '.join(missing)}" if missing else ""
    return f"{len(shared)} fields of equal shape{without}"


def _rows(ours: Fields, theirs: Fields) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return which rows to compare, ``[P, T]`` each: all, or only real ones if one has others.

    Where an environment has ``k`` real rows in one batch, they are its first ``k`` in the other.
    """
    shape = ours["next.reward"].shape
    masks = [fields.get("mask", np.ones(shape, bool)) for fields in (ours, theirs)]
    count = np.minimum(*(mask.sum(1, keepdims=True) for mask in masks))
    mine, other = (mask & (np.cumsum(mask, 1) <= count) for mask in masks)
    return mine, other


def _equal(name: str, one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Compare rows of all environments one after the other, ``[rows, ...]``."""
    if name.endswith("traj_ids"):
        # Ids of trajectories are free; their first and last rows are not.
        return bool(np.array_equal(np.diff(one) != 0, np.diff(other) != 0))
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, rtol=1e-4, atol=1e-5))
    return bool(np.array_equal(one, other))


def _consistent(fields: Fields) -> str:
    """Check the laws of any batch: successors follow, flags and ids agree."""
    if "next.observation" not in fields:
        return "no successors to check"
    done = fields["next.done"]
    real = fields.get("mask", np.ones_like(done))[:, :-1]
    after, root = fields["next.observation"][:, :-1], fields["observation"][:, 1:]
    follows = (after == root).reshape(*real.shape, -1).all(-1)
    ids = np.diff(fields["collector.traj_ids"], axis=1) != 0
    checks = {
        "done": np.array_equal(done, fields["next.terminated"] | fields["next.truncated"]),
        "next.observation": bool((follows | done[:, :-1] | ~real).all()),
        "traj_ids": np.array_equal(ids[real], done[:, :-1][real]),
    }
    wrong = [name for name, right in checks.items() if not right]
    return f"INCONSISTENT {', '.join(wrong)}" if wrong else f"consistent ({int(done.sum())} ends)"
