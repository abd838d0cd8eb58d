"""A TensorDict environment with the root TensorDict of its next step: what both loops stand on."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core.keys import NEXT
from gleanrl.envs.tensordict_layout import EndFlags


class TensorDictHandle:
    """Steps, cuts, resets, seeds, saves and closes one environment by its public methods."""

    def __init__(self, env: Any, first: TensorDictBase | None = None) -> None:
        """Take over ``env``.

        Args:
            env: Built. Reset here, once, unless ``first`` is given.
            first: What ``env.reset()`` returned, if it was called already. Taken over.
        """
        self.env = env
        self.root: TensorDictBase = env.reset() if first is None else first
        """The input of the next step; whoever steps sets the action in it."""
        self.ends = EndFlags(env.full_done_spec, tuple(env.batch_size))
        self.num_envs = math.prod(env.batch_size)
        self._unseen = True
        """Whether `root` is a full reset that was not asked for yet."""
        self._closed = False

    def step(self, cut: Sequence[int]) -> tuple[TensorDictBase, TensorDictBase, list[int] | None]:
        """Step; environments in ``cut`` are truncated if they do not end by themselves.

        Returns:
            The finished step, its ``"next"`` part, and which environments ended and were reset:
            ``None`` if no end flag is set anywhere, ``[]`` if one is that resets nothing.
        """
        finished, self.root = self.env.step_and_maybe_reset(self.root)
        self._unseen = False
        after = finished.get(NEXT)
        if not cut and not self.ends.any(after):
            return finished, after, None
        ended = self.ends.ended(after)
        late = [env for env in cut if env not in ended]
        if late:
            after = after.copy()
            self.ends.truncate(after, late)
            finished.set(NEXT, after)
            self.ends.truncate(self.root, late)
            self.root = self.env.maybe_reset(self.root)
        return finished, after, sorted(ended + late)

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset ``envs`` (all if ``None``); the reset made at construction counts as the first."""
        unseen, self._unseen = self._unseen, False
        if unseen and not options:
            return
        if envs is None:
            self.root = self.env.reset(**options)
        elif options:
            root = self.root.copy()
            for key, mask in self.ends.masks(envs).items():
                root.set(key, mask)
            self.root = self.env.reset(root, **options)
        else:
            # The environment's own way to reset ended elements: it hides from its reset what the
            # finished episode left behind.
            root = self.root.copy()
            self.ends.truncate(root, envs)
            self.root = self.env.maybe_reset(root)

    def seed(self, seed: int, static: bool = False) -> int:
        """Give ``seed`` to the environment, which derives its elements' from it.

        Returns:
            ``seed + P - 1``: a batch of ``P`` environments counts as ``P``; ``seed`` if static.
        """
        self.env.set_seed(seed, static_seed=static)
        self._unseen = False
        return seed if static else seed + self.num_envs - 1

    def state(self) -> dict[str, Any]:
        """Return a copy of the environment's ``state_dict``."""
        return copy.deepcopy(dict(self.env.state_dict()))

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state` returned; ``strict`` is passed on where the environment takes it."""
        load_env_state(self.env, state, strict)
        self._unseen = False

    def close(self) -> None:
        """Close the environment, unless that was done already."""
        # Closing twice is an error in TorchRL, whose environments tell by `is_closed`.
        if not self._closed and not getattr(self.env, "is_closed", False):
            self.env.close()
        self._closed = True


def load_env_state(env: Any, state: Mapping[str, Any], strict: bool) -> None:
    """Restore the state of one environment; ``strict`` is passed on where it takes that."""
    takes_strict = "strict" in inspect.signature(env.load_state_dict).parameters
    env.load_state_dict(dict(state), **({"strict": strict} if takes_strict else {}))
