"""What a case is, and how one is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KINDS = ("fresh", "reused", "shared", "dict")
POLICIES = ("linear", "module", "opaque", "recurrent", "drawing")
BACKENDS = ("here", "sync", "async", "background", "pool")
POOLS = ("NextStep", "SameStep", "Disabled")
EVENTS = ("update", "some", "each", "seed", "reset", "reload", "state", "hold")


@dataclass(frozen=True)
class Case:
    """One collector and what happens to it; written as JSON to be repeated."""

    backend: str = "here"
    env: str = "fresh"
    """A kind of environment, or how a pool resets."""
    policy: str = "linear"
    envs: int = 1
    """Of each worker."""
    workers: int = 1
    steps: int = 4
    """Of each environment per batch."""
    draws: bool = False
    fast: bool = True
    seed: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the collector."""
    events: tuple[str, ...] = ()
    """What happens after each batch; empty for nothing."""

    @property
    def frames(self) -> int:
        """Frames of a batch."""
        several = self.workers if self.backend in ("sync", "background") else 1
        return self.steps * self.envs * several

    @property
    def deterministic(self) -> bool:
        """Whether the same case gives the same bits again."""
        return self.backend in ("here", "sync", "pool") and self.seed is not None

    def json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def _options(chance: random.Random, case: Case) -> dict[str, Any]:
    """Draw arguments of the collector."""
    drawn: dict[str, Any] = {}

    def maybe(share: float, name: str, value: Callable[[], Any]) -> None:
        if chance.random() < share:
            drawn[name] = value()

    maybe(0.2, "max_frames_per_traj", lambda: chance.randint(1, 6))
    maybe(0.2, "init_random_frames", lambda: case.frames * chance.randint(1, 2))
    maybe(0.1, "reset_at_each_iter", lambda: True)
    maybe(0.2, "storing_device", lambda: "cpu")
    if case.backend == "here":
        maybe(0.1, "return_same_td", lambda: True)
    if case.backend == "sync":
        maybe(0.5, "cat_results", lambda: chance.choice(["stack", 0, -1]))
        maybe(0.1, "preemptive_threshold", lambda: 0.5)
    return drawn


def draw(number: int) -> Case:
    """Draw the case of a number."""
    chance = random.Random(number)
    backend = chance.choices(BACKENDS, (5, 3, 2, 2, 3))[0]
    case = Case(
        backend=backend,
        env=chance.choice(POOLS if backend == "pool" else KINDS),
        policy=chance.choice(POLICIES),
        envs=chance.randint(2, 4) if backend == "pool" else chance.randint(1, 4),
        workers=1 if backend in ("here", "pool") else chance.randint(1, 3),
        steps=chance.choice([1, 2, 3, 5, 8, 20]),
        draws=chance.random() < 0.4,
        fast=chance.random() < 0.8,
        seed=chance.choice([None, chance.randint(0, 99)]),
    )
    batches = chance.randint(2, 8)
    events = tuple(chance.choice(EVENTS) if chance.random() < 0.5 else "" for _ in range(batches))
    return replace(case, options=_options(chance, case), events=events)


def simpler(case: Case) -> Iterator[Case]:
    """Yield cases that are a little simpler than ``case``."""
    for name in case.options:
        yield replace(case, options={k: v for k, v in case.options.items() if k != name})
    for at in range(len(case.events)):
        yield replace(case, events=case.events[:at] + case.events[at + 1 :])
        if case.events[at]:
            yield replace(case, events=(*case.events[:at], "", *case.events[at + 1 :]))
    plain = Case()
    for name in ("env", "policy", "draws", "fast", "seed"):
        if getattr(case, name) != getattr(plain, name) and case.backend != "pool":
            yield replace(case, **{name: getattr(plain, name)})
    for name in ("envs", "workers", "steps"):
        if (value := getattr(case, name)) > 1:
            yield replace(case, **{name: value - 1})
