"""Checks every frame alone, and that each follows the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from tools.hunt.worlds import ECHO, EPISODE, NUMBER, STEP, TAG, length, reward, terminates


class Wrong(AssertionError):
    """A frame is not what it has to be."""


def require(good: Any, message: str) -> None:
    """Raise `Wrong` with ``message`` unless ``good``."""
    if not good:
        raise Wrong(message)


@dataclass(frozen=True)
class Frame:
    """One frame, as numbers."""

    root: tuple[float, ...]
    after: tuple[float, ...]
    action: tuple[float, ...]
    reward: float
    terminated: bool
    truncated: bool
    done: bool
    version: int
    trajectory: int
    hidden: float | None

    def __str__(self) -> str:
        number, episode, step = (int(self.root[at]) for at in (NUMBER, EPISODE, STEP))
        return f"environment {number}, episode {episode}, step {step}"


def frames_of(batch: TensorDictBase) -> Iterator[Frame]:
    """Yield the valid frames of a batch, row after row, each in the order of time."""
    flat = batch.reshape(-1).cpu()
    mask = flat.get(("collector", "mask"), None)
    if mask is not None:
        flat = flat[mask.reshape(-1)]
    hidden = flat.get("hidden", None)
    columns: list[Any] = [
        flat["observation"].tolist(),
        flat["next", "observation"].tolist(),
        flat["action"].tolist(),
        flat["next", "reward"].reshape(-1).tolist(),
        *(flat["next", name].reshape(-1).tolist() for name in ("terminated", "truncated", "done")),
        flat["policy_version"].reshape(-1).tolist(),
        flat["collector", "traj_ids"].reshape(-1).tolist(),
        [None] * len(flat) if hidden is None else hidden.reshape(-1).tolist(),
    ]
    for root, after, action, *others in zip(*columns, strict=True):
        yield Frame(tuple(root), tuple(after), tuple(action), *others)


@dataclass
class Checker:
    """What is known of all frames so far.

    Attributes:
        limit: ``max_frames_per_traj``.
        cuts: Whether environments may be truncated at any step.
        random: Frames at the beginning whose actions are random.
    """

    limit: int | None = None
    cuts: bool = False
    random: int = 0
    seen: int = 0
    ended: int = 0
    newest: int = 0
    """The newest version that a learner has sent."""
    last: dict[int, Frame] = field(default_factory=dict)
    owners: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Per trajectory id, its environment, episode and life."""
    loose: set[int] = field(default_factory=set)
    """Environments that may begin anew with their next frame."""
    life: int = 0

    def begin_anew(self, restarted: bool = False) -> None:
        """All environments may begin a new episode; as new objects if they were ``restarted``."""
        self.loose = set(self.last)
        if restarted:
            self.last, self.loose = {}, set()
            self.life += 1

    def batch(self, batch: TensorDictBase, exactly: int | None = None) -> None:
        """Check a batch; ``exactly``: the version that all of it must have."""
        require(batch.names[-1] == "time", f"the last dimension is called {batch.names[-1]!r}")
        begun = self.seen
        for frame in frames_of(batch):
            acts = begun >= self.random
            self._alone(frame, acts)
            self._follows(frame)
            if exactly is not None and acts:
                made = frame.version
                require(made == exactly, f"{frame}: version {made}, not {exactly}")
            self.seen += 1
            self.ended += frame.done

    def _alone(self, frame: Frame, acts: bool) -> None:
        root, after = frame.root, frame.after
        number, episode, step = (int(root[at]) for at in (NUMBER, EPISODE, STEP))
        tag, made = frame.action[0], frame.version
        expected = (number, episode, step + 1, *frame.action)
        require(after[: ECHO + 1] == expected, f"{frame}: next is {after}, not {expected}")
        if acts:
            echo = float(number + 16 * step)
            require(frame.action[1] == echo, f"{frame}: the action is {frame.action}, not {echo}")
            require(tag == made, f"{frame}: weights of version {tag}, labelled {made}")
            require(made <= self.newest, f"{frame}: version {made} was never sent")
        paid = np.float32(reward(number, step, tag))
        require(np.float32(frame.reward) == paid, f"{frame}: reward {frame.reward}, not {paid}")
        self._ends(frame, number, episode, step)
        if frame.hidden is not None and not self.random:
            require(frame.hidden == step, f"{frame}: hidden is {frame.hidden}")

    def _ends(self, frame: Frame, number: int, episode: int, step: int) -> None:
        over = step + 1 >= length(number, episode)
        dies = over and terminates(number, episode)
        cut = self.cuts or (self.limit is not None and step + 1 >= self.limit)
        require(frame.terminated == dies, f"{frame}: terminated is {frame.terminated}")
        late = frame.truncated == (over and not dies) or (cut and not dies)
        require(late, f"{frame}: truncated is {frame.truncated}")
        either = frame.terminated or frame.truncated
        require(frame.done == either, f"{frame}: done is {frame.done}")

    def _follows(self, frame: Frame) -> None:
        number, episode, step = (int(frame.root[at]) for at in (NUMBER, EPISODE, STEP))
        before = self.last.get(number)
        if step == 0:
            require(frame.root[TAG : ECHO + 1] == (0.0, 0.0), f"{frame}: shows an action before it")
        if before is not None and number in self.loose and step == 0:
            require(episode > before.root[EPISODE], f"{frame}: after {before}")
        elif before is not None and before.done:
            apart = episode - before.root[EPISODE]
            # A pool that is cut may have begun an episode that nobody saw.
            follows = step == 0 and (apart == 1 or (self.cuts and apart > 1))
            require(follows, f"{frame}: after {before}")
        elif before is not None:
            require(frame.root == before.after, f"{frame}: {frame.root} after {before.after}")
        self.loose.discard(number)
        self.last[number] = frame
        owner = number, episode, self.life
        known = self.owners.setdefault(frame.trajectory, owner)
        require(known == owner, f"{frame}: trajectory {frame.trajectory} is that of {known}")
