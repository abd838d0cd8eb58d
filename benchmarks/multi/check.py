"""Are the batches of every system real? Checked before the timing, field by field, row by row.

Workers draw from streams of their own, so that values cannot be compared between systems. What can
be checked is that each row is a step of CartPole: the successor follows from observation and action
by the equations of motion, the log-probability from observation and action by the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.agreement import consistent
from benchmarks.harness import OURS, WRONG, Clock, Fields, System
from benchmarks.multi.processes import turn

BATCHES = 8
"""Batches looked at; consecutive ones, so that streams can be followed from one to the next."""


class RealBatches:
    """Checks the systems of one case."""

    def __init__(
        self,
        net: nn.Module,
        rows: int,
        steps: int,
        workers: int,
        turn: Callable[[System], AbstractContextManager[Clock]] = turn,
    ) -> None:
        """Remember what is expected.

        Args:
            net: The network everybody runs.
            rows: Environments of all workers.
            steps: Steps per environment and rollout.
            workers: How many there are.
            turn: Surrounds what a system does.
        """
        self._turn = turn
        self._net, self._rows, self._steps, self._workers = net, rows, steps, workers

    def __call__(self, systems: Mapping[str, System]) -> list[str]:
        lines = []
        for name, system in systems.items():
            remarks, wrong = self._check(name, system)
            line = f"{name}: {', '.join(remarks + wrong)}"
            lines.append(f"{WRONG} {line}" if wrong else line)
        return lines

    def _check(self, name: str, system: System) -> tuple[list[str], list[str]]:
        batches = []
        with self._turn(system):
            for _ in range(BATCHES):
                system.collect_batch()
                batches.append(system.fields())
        if not batches[0]:
            return ["shows no fields"], []
        wrong = []
        rows, steps = batches[0]["next.reward"].shape
        if rows * steps not in (self._rows * self._steps, self._rows * self._steps / self._workers):
            wrong.append(f"SHAPE {rows} x {steps}")
        for fields in batches:
            wrong += [text for text in (consistent(fields),) if "INCONSISTENT" in text]
            wrong += _motion(fields) + self._scores(fields)
        streams = _streams(batches)
        if name == OURS and rows * len(streams) != self._rows:
            wrong.append(f"{len(streams)} STREAMS OF {rows} ENVIRONMENTS")
        remarks = [
            f"{BATCHES} batches of {rows} x {steps} are CartPole and the network's",
            f"{len(streams)} streams of {streams} batches",
        ]
        return ([] if wrong else remarks), sorted(set(wrong))

    def _scores(self, fields: Fields) -> list[str]:
        with torch.no_grad():
            logits = self._net(torch.from_numpy(fields["observation"]).float())
        action = torch.from_numpy(fields["action"]).long()
        expected = logits.log_softmax(-1).gather(-1, action.unsqueeze(-1))[..., 0].numpy()
        # Rows that only reset have an action, too: it is ignored, and scored like any other.
        close = np.allclose(expected, fields["action_log_prob"], rtol=1e-4, atol=1e-5)
        return [] if close else ["LOG-PROBABILITIES OF ANOTHER NETWORK"]


def _motion(fields: Fields) -> list[str]:
    """Check the equations of motion; without successors, on the rows that follow each other."""
    seen = fields["observation"].astype(np.float64)
    if "next.observation" in fields:
        after, known = fields["next.observation"], True
    else:
        after, known = seen[:, 1:], False
    expected = _moved(seen[:, : after.shape[1]], fields["action"][:, : after.shape[1]])
    right = np.isclose(expected, after, rtol=1e-4, atol=1e-5).all(-1)
    if "mask" in fields:
        right |= ~fields["mask"][:, : after.shape[1]]
    # Where it is not told which rows end an episode, those few cannot obey.
    good = right.all() if known else right.mean() > 0.9
    return [] if good else [f"NOT CARTPOLE: {1 - right.mean():.1%} of the rows"]


def _moved(state: np.ndarray[Any, Any], action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x, speed, angle, turning = np.moveaxis(state, -1, 0)
    force = np.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * turning**2 * np.sin(angle)) / 1.1
    twist = 9.8 * np.sin(angle) - np.cos(angle) * push
    twist /= 0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
    pull = push - 0.05 * twist * np.cos(angle) / 1.1
    moved = (x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turning, turning + 0.02 * twist)
    return np.stack(moved, -1)


def _streams(batches: Sequence[Fields]) -> list[int]:
    """Return how many batches each stream has; a batch continues the one it begins after.

    It does if the first observations are the last successors, except where an episode ended.
    """
    tails: list[tuple[Any, Any]] = []
    lengths: list[int] = []
    for fields in batches:
        seen = fields["observation"]
        after = fields.get("next.observation", seen)[:, -1]
        ended = fields["next.done"][:, -1] if "next.done" in fields else None
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
    """Check every byte that `envs.Still` has sent through ours: stamps count on, the rest is 1."""
    lines: list[str] = []
    if OURS not in systems:
        return lines
    system = systems[OURS]
    expected: dict[int, int] = {}
    with turn(system):
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
