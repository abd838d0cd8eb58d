"""Checks every frame alone, and that each follows the one before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

import gleanrl
from tools.hunt.cases import GAMMA, N_STEPS, Case
from tools.hunt.policies import MODES
from tools.hunt.worlds import (
    AGENTS,
    ECHO,
    EPISODE,
    GROUP,
    NUMBER,
    STEP,
    TAG,
    label,
    length,
    reward,
    terminates,
)


class Wrong(AssertionError):
    """A frame is not what it has to be."""


def require(good: Any, message: str) -> None:
    """Raise `Wrong` with ``message`` unless ``good``."""
    if not good:
        raise Wrong(message)


EXTRAS = ("hidden", "carried", "mode", "scaled", "label", "steps_to_next_obs", "step_count")


@dataclass(frozen=True)
class Frame:
    """One frame of one environment or agent, as numbers; ``None`` for what is not delivered."""

    root: tuple[float, ...]
    after: tuple[float, ...] | None
    action: tuple[float, ...]
    reward: float
    terminated: bool
    truncated: bool
    done: bool
    version: int | None
    trajectory: int | None
    extras: dict[str, float]

    @property
    def place(self) -> tuple[int, int, int]:
        """Environment, episode and step."""
        return int(self.root[NUMBER]), int(self.root[EPISODE]), int(self.root[STEP])

    def __str__(self) -> str:
        return "environment {}, episode {}, step {}".format(*self.place)


def _of_agents(batch: TensorDictBase) -> TensorDictBase:
    """Return a flat batch with the names of one environment: all rows of one agent, then others."""

    def of(at: int) -> TensorDictBase:
        rows = TensorDict({}, batch.batch_size)
        for key, value in batch.items(True, True):
            path = (key,) if isinstance(key, str) else key
            names = tuple(name for name in path if name != GROUP)
            several = value.ndim > 1 and value.shape[1] == len(AGENTS)
            rows[names] = value[:, at] if several else value
        return rows

    # One agent after the other, so that each goes on in time.
    return torch.cat([of(at) for at in range(len(AGENTS))])


def frames_of(batch: TensorDictBase) -> Iterator[Frame]:
    """Yield the valid frames of a batch, row after row, each in the order of time."""
    if not batch.numel():
        return
    flat = batch.reshape(-1).cpu()
    if GROUP in flat.keys():
        flat = _of_agents(flat)
    mask = flat.get(("collector", "mask"), None)
    if mask is not None:
        flat = flat[mask.reshape(-1)]

    def rows(*key: str) -> list[Any]:
        value = flat.get(key, None)
        if value is None:
            return [None] * len(flat)
        return [tuple(row) for row in value.reshape(len(flat), -1).tolist()]

    def numbers(*key: str) -> list[Any]:
        return [row and row[0] for row in rows(*key)]

    extras = {name: numbers(name) for name in EXTRAS if name in flat.keys()}
    columns = [
        rows("observation"),
        rows("next", "observation"),
        rows("action"),
        numbers("next", "reward"),
        *(numbers("next", name) for name in ("terminated", "truncated", "done")),
        numbers("policy_version"),
        numbers("collector", "traj_ids"),
    ]
    for at, fields in enumerate(zip(*columns, strict=True)):
        known: list[Any] = [*fields, {name: values[at] for name, values in extras.items()}]
        yield Frame(*known)


@dataclass
class Checker:
    """What is known of all frames so far.

    Attributes:
        limit: ``max_frames_per_traj``.
        cuts: Whether environments may be truncated at any step.
        random: Frames at the beginning whose actions are random; ``None`` for all.
        labelled: Whether the version of a frame is the tag of the weights.
        bonus: What each reward has on top.
        mode: What a ``"typed"`` policy has to read.
        perturbed: Whether each episode has weights of its own.
        n_steps: Of `MultiStep`; zero without.
        gamma: Of `MultiStep`.
        agents: Agents of an environment.
        gaps: Whether frames may be missing between two of an environment.
        unique: Whether every trajectory has an id of its own.
        carries: Whether entries that the policy wrote are there at each next step.
    """

    limit: int | None = None
    cuts: bool = False
    random: int | None = 0
    labelled: bool = True
    bonus: float = 0.0
    mode: float | None = None
    perturbed: bool = False
    n_steps: int = 0
    gamma: float = 1.0
    agents: int = 1
    gaps: bool = False
    unique: bool = True
    carries: bool = True
    seen: int = 0
    newest: int = 0
    """The newest version that a learner has sent."""
    last: dict[int, Frame] = field(default_factory=dict)
    owners: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Per trajectory id, its environment and episode."""
    returns: list[float] = field(default_factory=list)
    """Of the episodes that ended, each the mean over its agents."""
    sums: dict[tuple[int, int], float] = field(default_factory=dict)
    loose: set[int] = field(default_factory=set)
    """Environments that may begin anew with their next frame."""
    tags: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Per place of a frame of the batch, the weights that acted there."""

    def begin_anew(self) -> None:
        """All environments may begin a new episode."""
        self.loose = set(self.last)

    def batch(self, batch: TensorDictBase, exactly: int | None = None) -> None:
        """Check a batch.

        Args:
            batch: Frames; those of one environment in the order of time.
            exactly: The version that all of it must have.
        """
        acts = self.acts
        frames = list(frames_of(batch))
        # Pools deliver first what was left over, so one batch may have frames of two versions.
        self.tags = {frame.place: frame.action[0] for frame in frames}
        for frame in frames:
            self._alone(frame, acts)
            self._follows(frame, acts)
            if exactly is not None and acts and frame.version is not None:
                made = frame.version
                require(made == exactly, f"{frame}: version {made}, not {exactly}")
        self.seen += len(frames) // self.agents

    def alone(self, batch: TensorDictBase) -> None:
        """Check each frame of some, in any order; actions may be random if some were."""
        for frame in frames_of(batch):
            self._alone(frame, acts=self.random == 0)

    @property
    def acts(self) -> bool:
        """Whether the policy made the actions of the next batch."""
        return self.random is not None and self.seen >= self.random

    def _alone(self, frame: Frame, acts: bool) -> None:
        number, episode, step = frame.place
        tag, made = frame.action[0], frame.version
        expected = (number, episode, step + 1, *frame.action)
        if frame.after is not None and not self.n_steps:
            same = frame.after[: ECHO + 1] == expected
            require(same, f"{frame}: next is {frame.after}, not {expected}")
        if acts:
            echo = float(number + 16 * step)
            require(frame.action[1] == echo, f"{frame}: the action is {frame.action}, not {echo}")
            if self.perturbed:
                require(tag == -1 - episode, f"{frame}: weights {tag}")
            else:
                require(tag in range(self.newest + 1), f"{frame}: weights {tag} were never sent")
            labelled = not self.labelled or made is None or tag == made
            require(labelled, f"{frame}: weights of version {tag}, labelled {made}")
        # Sums over random actions cannot be told from the first of them.
        if acts or not self.n_steps:
            self._paid(frame)
        self._entries(frame, acts)
        if not self.n_steps:
            self._ends(frame, number // self.agents, episode, step)

    def _paid(self, frame: Frame) -> None:
        number, episode, step = frame.place
        far, tags = 1, [frame.action[0]]
        if self.n_steps:
            far = int(frame.extras["steps_to_next_obs"])
            require(frame.after is not None, f"{frame}: no successor")
            landed = (number, episode, step + far)
            require((frame.after or ())[:3] == landed, f"{frame}: leads to {frame.after}")
            require(1 <= far <= self.n_steps, f"{frame}: {far} steps ahead")
            tags = [self.tags[number, episode, step + at] for at in range(far)]
        paid = sum(
            self.gamma**at * reward(number, step + at, tag, self.bonus)
            for at, tag in enumerate(tags)
        )
        require(
            np.float32(frame.reward) == np.float32(paid),
            f"{frame}: reward {frame.reward}, not {paid}",
        )

    def _entries(self, frame: Frame, acts: bool) -> None:
        number, episode, step = frame.place
        extras = frame.extras
        expected = {"label": label(number, episode, step), "step_count": step}
        expected["scaled"] = 2 * frame.reward
        if acts:
            # Random frames have zeros in place of what the policy would have written.
            expected |= {"mode": self.mode} if self.mode is not None else {}
        if self.random == 0:
            expected["hidden"] = step
        for name, value in expected.items():
            if name in extras:
                good = np.float32(extras[name]) == np.float32(value or 0.0)
                require(good, f"{frame}: {name} is {extras[name]}, not {value}")

    def _ends(self, frame: Frame, owner: int, episode: int, step: int) -> None:
        over = step + 1 >= length(owner, episode)
        dies = over and terminates(owner, episode)
        limited = self.limit is not None and step + 1 >= self.limit
        require(frame.terminated == dies, f"{frame}: terminated is {frame.terminated}")
        if limited or (over and not dies):
            require(frame.truncated or dies, f"{frame}: not truncated")
        elif not self.cuts:
            require(not frame.truncated, f"{frame}: truncated")
        either = frame.terminated or frame.truncated
        require(frame.done == either, f"{frame}: done is {frame.done}")

    def _follows(self, frame: Frame, acts: bool) -> None:
        number, episode, step = frame.place
        before = self.last.get(number)
        if step == 0:
            require(frame.root[TAG : ECHO + 1] == (0.0, 0.0), f"{frame}: shows an action before it")
        if before is not None:
            self._after(before, frame, acts)
        elif not self.gaps:
            require(step == 0, f"{frame}: the first of its environment")
        self._sum_up(frame)
        self.loose.discard(number)
        self.last[number] = frame
        if self.unique and frame.trajectory is not None:
            owner = number // self.agents, episode
            known = self.owners.setdefault(frame.trajectory, owner)
            require(known == owner, f"{frame}: trajectory {frame.trajectory} is that of {known}")

    def _sum_up(self, frame: Frame) -> None:
        number, episode, _ = frame.place
        owner, agent = divmod(number, self.agents)
        place = owner, episode
        self.sums[place] = self.sums.get(place, 0.0) + frame.reward / self.agents
        # Agents come one after the other, each with all its frames of a batch.
        if frame.done and agent == self.agents - 1:
            self.returns.append(self.sums.pop(place))

    def _after(self, before: Frame, frame: Frame, acts: bool) -> None:
        number, episode, step = frame.place
        apart = episode - before.root[EPISODE]
        over = before.done or (not self.n_steps and self.cuts and before.truncated)
        if number in self.loose and step == 0:
            require(apart > 0, f"{frame}: after {before}")
        elif self.n_steps or before.after is None:
            # Where the successor is left out, its number says whether it follows.
            joined = apart == 0 and step == before.root[STEP] + 1
            require(joined or (step == 0 and apart > 0), f"{frame}: after {before}")
        elif over:
            # A pool that is cut may have begun an episode that nobody saw.
            far = self.gaps or self.cuts
            follows = step == 0 and (apart == 1 or (far and apart > 1))
            marked = self.cuts and frame.root == before.after
            require(follows or marked, f"{frame}: after {before}")
        elif not (self.gaps and apart > 0 and step == 0):
            require(frame.root == before.after, f"{frame}: {frame.root} after {before.after}")
        if self.carries and "carried" in frame.extras and acts and number not in self.loose:
            counted = frame.extras["carried"], before.extras["carried"] + 1
            require(counted[0] == counted[1], f"{frame}: carries {counted[0]}, not {counted[1]}")


def check_slices(sample: TensorDictBase, steps: int) -> None:
    """Check that each slice of a sample is successive steps of one episode."""
    rows = sample.reshape(-1, steps)
    for row in rows:
        last: dict[int, Frame] = {}
        frames = list(frames_of(row))
        for frame in frames:
            number = frame.place[0]
            before = last.get(number)
            joined = before is None or frame.root == before.after
            require(joined, f"a slice joins {before} and {frame}")
            last[number] = frame
        require(len(frames) == steps * len(last), f"a slice joins environments {sorted(last)}")


def _mode(case: Case) -> float | None:
    """Return the mode that a ``"typed"`` policy has to read."""
    kind = getattr(gleanrl.ExplorationType, case.options.get("exploration_type", "RANDOM"))
    if "exploration_mode" in case.options:
        kind = gleanrl.ExplorationType.MODE
    return MODES[kind]


def checker_of(case: Case) -> Checker:
    """Return what checks the frames of a case."""
    options = case.options
    early = case.early
    random: int | None = options.get("init_random_frames", 0)
    if random:
        # Frames that laggards stepped ahead, and rollouts of slow workers, are delivered later.
        late = 1 if case.together or case.backend == "here" else 3 * case.workers
        random += late * case.frames * options.get("num_workers_per_collector", 1)
    several = options.get("postproc") == "multistep"
    own = {"update_at_each_batch", "update_after_each_batch", "max_weight_update_interval"}
    own |= {"update_interval", "weight_updater"}
    perturbed = case.policy == "perturbed"
    regroups = {"trajs_per_batch", "trajs_per_write"} & set(options)
    cuts = {"seed", "reset", "reload"} & set(case.events) or "reset_at_each_iter" in options
    lost = case.sink != "batches" and bool(cuts)
    return Checker(
        limit=options.get("max_frames_per_traj"),
        cuts=early or bool({"reset_at_each_iter", "set_truncated"} & set(options)),
        random=None if case.policy == "random" else random,
        labelled=not perturbed and not own & set(options),
        perturbed=perturbed,
        bonus=options.get("create_env_kwargs", {}).get("bonus", 0.0),
        mode=_mode(case),
        n_steps=N_STEPS if several else 0,
        gamma=GAMMA,
        agents=2 if case.env == "agents" else 1,
        gaps=bool(regroups) or lost or options.get("on_failure", "raise") != "raise",
        unique=case.writers == 1,
        # A vector environment that resets calls the policy for nothing.
        carries=not early and not lost and not regroups,
    )
