"""Checks of every system's batches, field by field, before the timing.

`first_batches`: in one process all systems get equally seeded environments, and torch has the same
seed before each first batch. Systems that draw equal numbers in equal order must deliver equal
values.

`random_batches`: random actions come from a stream of each system's own, so only the first
observations are equal. The actions must be equally frequent.

`RealBatches`: workers draw from streams of their own, so values cannot be compared between systems.
Each row must be a step of CartPole: CartPole computes the successor from observation and action,
and the network computes the log-probability.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.envs import cartpole_vector
from benchmarks.harness import OURS, WRONG, Fields, System

_SEED = 7
_BAD = re.compile("DIFFERENT|INCONSISTENT")


def first_batches(systems: Mapping[str, System]) -> list[str]:
    """Collect one batch of each system and compare all with the first that has fields.

    Returns:
        One line of text per system; lines that start with `WRONG` are disagreements.
    """
    return _compared(systems, _values)


def random_batches(systems: Mapping[str, System]) -> list[str]:
    """Collect one batch of each system with random actions, and compare what must agree.

    Returns:
        As `first_batches`.
    """
    return _compared(systems, _random_values)


def _compared(systems: Mapping[str, System], compare: Callable[[Fields, Fields], str]) -> list[str]:
    """Compare the first batch of each system with that of the first system that has fields."""
    reference: Fields = {}
    lines = []
    for name, system in systems.items():
        torch.manual_seed(_SEED)
        system.collect_batch()
        if not (fields := _copied(system)):
            continue
        line = f"{name}: {consistent(fields)}"
        if reference:
            line += f"; {_shapes(reference, fields)}"
            line += "" if "DIFFERENT" in line else f", {compare(reference, fields)}"
        else:
            reference = fields
        lines.append(f"{WRONG} {line}" if _BAD.search(line) else line)
    return lines


def _copied(system: System) -> Fields:
    """Return the last batch; systems fill the same memory again."""
    return {name: value.copy() for name, value in system.fields().items()}


def _values(ours: Fields, theirs: Fields) -> str:
    """Compare the values of all fields that both have."""
    mine, other = _rows(ours, theirs)
    shared = sorted(set(ours) & set(theirs))
    different = [name for name in shared if not _equal(name, ours[name][mine], theirs[name][other])]
    return f"DIFFERENT VALUES in {', '.join(different)}" if different else "equal values"


def _random_values(ours: Fields, theirs: Fields) -> str:
    """Compare first observations and how often each action was drawn."""
    if not np.allclose(ours["observation"][:, 0], theirs["observation"][:, 0]):
        return "DIFFERENT first observations"
    actions = 1 + max(int(fields["action"].max()) for fields in (ours, theirs))
    uneven = [_uneven(fields["action"], actions) for fields in (ours, theirs)]
    return "DIFFERENT frequencies of actions" if any(uneven) else "even actions"


def _uneven(action: np.ndarray[Any, Any], count: int) -> bool:
    """Say whether a frequency of an action lies five standard deviations from the even one."""
    share = np.bincount(action.reshape(-1), minlength=count) / action.size
    return bool((np.abs(share - 1 / count) > 5 * np.sqrt(1 / count / action.size)).any())


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
        # Ids of trajectories are free; their first and last rows are not.
        return bool(np.array_equal(np.diff(one) != 0, np.diff(other) != 0))
    if one.dtype.kind == "f":
        return bool(np.allclose(one, other, rtol=1e-4, atol=1e-5))
    return bool(np.array_equal(one, other))


def consistent(fields: Fields) -> str:
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


BATCHES = 8
"""Consecutive batches that are checked, so that streams can be followed through them."""


@dataclass(frozen=True)
class RealBatches:
    """Checks the systems of one case."""

    net: nn.Module
    rows: int
    """Environments of all workers."""
    steps: int
    """Steps of a rollout."""
    workers: int

    def __call__(self, systems: Mapping[str, System]) -> list[str]:
        lines = []
        for name, system in systems.items():
            remarks, wrong = self._check(name, system)
            line = f"{name}: {', '.join(remarks + wrong)}"
            lines.append(f"{WRONG} {line}" if wrong else line)
        return lines

    def _check(self, name: str, system: System) -> tuple[list[str], list[str]]:
        batches = []
        with system.turn():
            for _ in range(BATCHES):
                system.collect_batch()
                batches.append(_copied(system))
        if not batches[0]:
            return ["shows no fields"], []
        wrong = []
        rows, steps = batches[0]["next.reward"].shape
        if rows * steps not in (self.rows * self.steps, self.rows * self.steps / self.workers):
            wrong.append(f"SHAPE {rows} x {steps}")
        for fields in batches:
            wrong += [text for text in (consistent(fields),) if "INCONSISTENT" in text]
            wrong += _motion(fields) + self._scores(fields)
        streams = _streams(batches)
        if name == OURS and rows * len(streams) != self.rows:
            wrong.append(f"{len(streams)} STREAMS OF {rows} ENVIRONMENTS")
        remarks = [
            f"{BATCHES} batches of {rows} x {steps} are CartPole and the network's",
            f"{len(streams)} streams of {streams} batches",
        ]
        return ([] if wrong else remarks), sorted(set(wrong))

    def _scores(self, fields: Fields) -> list[str]:
        with torch.no_grad():
            logits = self.net(torch.from_numpy(fields["observation"]).float())
        action = torch.from_numpy(fields["action"]).long()
        expected = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))[..., 0].numpy()
        # Rows that only reset also have an action: it is ignored, and scored like any other.
        close = np.allclose(expected, fields["action_log_prob"], rtol=1e-4, atol=1e-5)
        return [] if close else ["LOG-PROBABILITIES OF ANOTHER NETWORK"]


def _motion(fields: Fields) -> list[str]:
    """Check CartPole's equations of motion; without successors, on consecutive rows."""
    seen = fields["observation"].astype(np.float64)
    if "next.observation" in fields:
        after, known = fields["next.observation"], True
    else:
        after, known = seen[:, 1:], False
    expected = _moved(seen[:, : after.shape[1]], fields["action"][:, : after.shape[1]])
    right = np.isclose(expected, after, rtol=1e-4, atol=1e-5).all(-1)
    if "mask" in fields:
        right |= ~fields["mask"][:, : after.shape[1]]
    # Without end flags, the few rows that end an episode cannot be told apart.
    good = right.all() if known else right.mean() > 0.9
    return [] if good else [f"NOT CARTPOLE: {1 - right.mean():.1%} of the rows"]


def _moved(state: np.ndarray[Any, Any], action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    env: Any = cartpole_vector(action.size).unwrapped
    env.state = state.reshape(-1, 4).T.copy()
    after: np.ndarray[Any, Any] = env.step(action.reshape(-1).astype(np.int64))[0]
    return after.reshape(state.shape)


def _streams(batches: Sequence[Fields]) -> list[int]:
    """Return how many batches each stream has; a batch continues the one it begins after.

    It does if the first observations are the last successors, except where an episode ended.
    """
    tails: list[tuple[Any, Any]] = []
    lengths: list[int] = []
    for fields in batches:
        seen = fields["observation"]
        after = fields.get("next.observation", seen)[:, -1]
        ended = fields["next.done"][:, -1] if "next.observation" in fields else None
        for place, (tail, free) in enumerate(tails):
            if free is None or ((tail == seen[:, 0]).all(-1) | free).all():
                tails[place] = after, ended
                lengths[place] += 1
                break
        else:
            tails.append((after, ended))
            lengths.append(1)
    return lengths


def real_bytes(systems: Mapping[str, System]) -> list[str]:
    """Check every byte that `envs.Stamped` sent through ours: stamps count on, the rest is 1."""
    lines: list[str] = []
    if OURS not in systems:
        return lines
    system = systems[OURS]
    expected: dict[int, int] = {}
    with system.turn():
        for _ in range(BATCHES):
            system.collect_batch()
            fields = system.fields()
            for root, after in zip(fields["observation"], fields["next.observation"], strict=True):
                stamps, successors = (
                    np.ascontiguousarray(x[:, :16]).view(np.int64) for x in (root, after)
                )
                first, number = stamps[0]
                counted = np.arange(len(root)) + first
                right = (stamps[:, 0] == counted).all() and (successors[:, 0] == counted + 1).all()
                right = right and expected.get(number, first) == first
                right = right and (root[:, 16:] == 1).all() and (after[:, 16:] == 1).all()
                expected[int(number)] = int(successors[-1, 0])
                lines += [] if right else [f"{WRONG} {OURS}: other bytes than the environment's"]
    if len(expected) != 2:
        lines.append(f"{WRONG} {OURS}: {len(expected)} workers delivered")
    return sorted(set(lines)) or [f"{OURS}: all bytes of {BATCHES} batches are the environments'"]
