"""Do the systems deliver the same batches? Checked once, on their first batch, outside the timing.

All systems get environments whose random numbers start alike, and torch is seeded alike before each
first batch; whoever draws the same numbers in the same order has to deliver the same values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch

from benchmarks.harness import WRONG, Fields, System

_SEED = 7
_BAD = re.compile("DIFFERENT|INCONSISTENT")


def first_batches(systems: Mapping[str, System]) -> list[str]:
    """Collect one batch of each and compare all with the first that shows its fields.

    Returns:
        One line of text per system; lines that start with `WRONG` are disagreements.
    """
    reference: Fields = {}
    lines = []
    for name, system in systems.items():
        fields = _first(system)
        if not fields:
            continue
        line = f"{name}: {consistent(fields)}"
        if reference:
            line += f"; {_compare(reference, fields)}"
        else:
            reference = fields
        lines.append(f"{WRONG} {line}" if _BAD.search(line) else line)
    return lines


def _first(system: System) -> Fields:
    torch.manual_seed(_SEED)
    system.collect_batch()
    return system.fields()


def _compare(ours: Fields, theirs: Fields) -> str:
    shared = sorted(set(ours) & set(theirs))
    missing = sorted(set(ours) - set(theirs))
    shapes = [name for name in shared if ours[name].shape != theirs[name].shape]
    if shapes:
        return "DIFFERENT SHAPES " + ", ".join(
            f"{name} {ours[name].shape} / {theirs[name].shape}" for name in shapes
        )
    mine, other = _rows(ours, theirs)
    different = [name for name in shared if not _equal(name, ours[name][mine], theirs[name][other])]
    text = f"{len(shared)} fields of equal shape"
    text += f", DIFFERENT VALUES in {', '.join(different)}" if different else ", equal values"
    return text + (f", without {', '.join(missing)}" if missing else "")


def _rows(ours: Fields, theirs: Fields) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows to compare, ``[P, T]`` each: all, or only real ones if one has others.

    Where an environment has ``k`` real rows in one batch, they are its first ``k`` in the other.
    """
    shape = ours["next.reward"].shape
    masks = [fields.get("mask", np.ones(shape, bool)) for fields in (ours, theirs)]
    count = np.minimum(*(mask.sum(1, keepdims=True) for mask in masks))
    mine, other = (mask & (np.cumsum(mask, 1) <= count) for mask in masks)
    return mine, other


def _equal(name: str, one: np.ndarray, other: np.ndarray) -> bool:
    """Compare rows of all environments one after the other, ``[rows, ...]``."""
    if name.endswith("traj_ids"):
        # Names of trajectories are free; where one ends and the next begins is not.
        return bool(np.array_equal(np.diff(one) != 0, np.diff(other) != 0))
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, rtol=1e-4, atol=1e-5))
    return bool(np.array_equal(one, other))


def consistent(fields: Fields) -> str:
    """Check what must hold within any batch: successors follow, flags and ids agree."""
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
