"""Small Gymnasium environments, each odd in one way."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
MOVES = spaces.Box(-1, 1, (2,), np.float32)


class Small(gym.Env):
    """A point of three coordinates that the action pushes; episodes last two to six steps."""

    def __init__(self, action: gym.Space | None = None, space: gym.Space = BOX):
        self.observation_space = space
        self.action_space = action if action is not None else spaces.Discrete(3)
        self.x, self.count, self.length = np.zeros(3), 0, 2

    def show(self) -> Any:
        """Return the observation."""
        return self.x.astype(np.float32)

    def pay(self, push: float) -> Any:
        """Return the reward."""
        return float(self.x.sum() + push)

    def push(self, action: Any) -> float:
        """Return a number that depends on the action."""
        flat = spaces.flatten(self.action_space, action).astype(np.float64)
        return float(flat @ np.linspace(-1, 1, flat.size))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=3)
        self.count, self.length = 0, int(self.np_random.integers(2, 7))
        return self.show(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        push = self.push(action)
        self.x = np.tanh(0.9 * np.roll(self.x, 1) + 0.3 * push + 0.05)
        self.count += 1
        over = self.count >= self.length
        late = over and self.length % 2 == 0
        return self.show(), self.pay(push), over and not late, late, {}


class ReusedReward(Small):
    """Pays with one zero-dimensional array, overwritten at every step."""

    paid = None

    def pay(self, push: float) -> Any:
        self.paid = np.zeros((), np.float64) if self.paid is None else self.paid
        self.paid[...] = super().pay(push)
        return self.paid


class ReusedObservation(Small):
    """Shows one array, overwritten at every step and reset."""

    seen = None

    def show(self) -> Any:
        self.seen = np.zeros(3, np.float32) if self.seen is None else self.seen
        self.seen[:] = self.x
        return self.seen


class SharedObservation(ReusedObservation):
    """Shows one array that all environments of the class overwrite."""

    seen = np.zeros(3, np.float32)


class Draws(Small):
    """Adds noise from the global streams of torch and NumPy, and of Python's ``random``."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        noise = torch.randn(3).numpy() + np.random.randn(3) + random.random()
        self.x = self.x + 0.1 * noise
        return super().step(action)


class PaysWith(Small):
    """Pays whole numbers, flags or numpy scalars."""

    def __init__(self, kind: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.kind = kind

    def pay(self, push: float) -> Any:
        return self.kind(super().pay(push) * 3)


class EndsWithNumpy(Small):
    """Tells its ends with numpy's booleans."""

    def step(self, action: Any) -> Any:
        seen, paid, terminated, truncated, info = super().step(action)
        return seen, paid, np.bool_(terminated), np.bool_(truncated), info


class Lives(Small):
    """Tells how many lives are left, as Atari environments do."""

    @property
    def ale(self) -> Lives:
        """Return what has the method."""
        return self

    def lives(self) -> int:
        """Return how many lives are left."""
        return (self.length - self.count) // 2


class Masked(Small):
    """Shows which of three actions are allowed."""

    def __init__(self, action: gym.Space | None = None):
        allowed = spaces.Dict(observation=BOX, action_mask=spaces.MultiBinary(3))
        super().__init__(action, allowed)

    def show(self) -> Any:
        seen = self.x.astype(np.float32)
        mask = np.array([1, seen[0] > 0, seen[1] > 0], np.int8)
        return {"observation": seen, "action_mask": mask}


class Doubles(Small):
    """Shows float64 numbers."""

    def __init__(self, action: gym.Space | None = None):
        super().__init__(action, spaces.Box(-np.inf, np.inf, (3,), np.float64))

    def show(self) -> Any:
        return self.x.copy()


class Pictures(Small):
    """Shows a picture."""

    def __init__(self, action: gym.Space | None = None):
        super().__init__(action, spaces.Box(0, 255, (3, 8, 8), np.uint8))

    def show(self) -> Any:
        values = (127 + 120 * np.tanh(self.x)).astype(np.uint8)
        return np.broadcast_to(values[:, None, None], (3, 8, 8))


class Mapped(Small):
    """Shows a dictionary with whole numbers, flags, and a dictionary and a tuple in it."""

    def __init__(self, action: gym.Space | None = None):
        inner = spaces.Dict(speed=spaces.Box(-9, 9, (2,), np.float32), side=spaces.Discrete(2))
        pair = spaces.Tuple([spaces.MultiBinary(3), spaces.Box(-9, 9, (), np.float64)])
        entries = {"observation": BOX, "count": spaces.Discrete(9), "inner": inner, "pair": pair}
        super().__init__(action, spaces.Dict(entries))

    def show(self) -> Any:
        inner = {"speed": self.x[:2].astype(np.float32), "side": int(self.x[0] > 0)}
        pair = ((self.x > 0).astype(np.int8), np.float64(self.x[2]))
        seen = self.x.astype(np.float32)
        return {"observation": seen, "count": self.count, "inner": inner, "pair": pair}


class Paired(Small):
    """Shows a tuple."""

    def __init__(self, action: gym.Space | None = None):
        super().__init__(action, spaces.Tuple([BOX, spaces.Discrete(9)]))

    def show(self) -> Any:
        return self.x.astype(np.float32), self.count


class Quits(Small):
    """Raises at its ninth step."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 9:
            raise ArithmeticError("the ninth step")
        return super().step(action)


class Meddles(Small):
    """Changes the action it is given."""

    def step(self, action: Any) -> Any:
        action *= 0.5
        return super().step(action)


def patched(env: gym.Env) -> gym.Env:
    """Patch ``step`` of this one instance."""
    step = env.step

    def louder(action: Any) -> Any:
        seen, paid, *rest = step(action)
        return (seen, paid * 5, *rest)

    env.step = louder
    return env


class Louder(gym.Wrapper):
    """Multiplies rewards: what a subclass of an environment class elsewhere does."""

    def step(self, action: Any) -> Any:
        seen, paid, *rest = self.env.step(action)
        return (seen, paid * 8, *rest)
