"""A TensorDict environment with the root TensorDict of its next step: what both loops stand on."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core.keys import NEXT
from gleanrl.envs.tensordict_layout import EndFlags

_BASES = ("torchrl.envs.common", "gleanrl.envs.base")
_STOCK = ("step_and_maybe_reset", "_step_and_maybe_reset", "step_mdp")
"""Methods by which an ``EnvBase`` steps and resets in one, or that make a difference to it."""
_EXTRAS = ("_torchrl_native_autoreset", "_compiled_step_and_maybe_reset")
"""Attributes by which TorchRL's ``EnvBase`` does more, if they are set."""
_AFTER_MDP = "_post_step_mdp_hooks"
"""What TorchRL's ``EnvBase`` calls between `step_mdp` and `maybe_reset`, if it is set."""


def steps_apart(env: Any) -> bool:
    """Tell whether ``env.step_and_maybe_reset`` is `step`, `step_mdp` and `maybe_reset`, in turn.

    That is so for environments that inherit it from an ``EnvBase`` and change nothing about it.
    """
    kind, state = type(env), getattr(env, "__dict__", {})
    for name in _STOCK:
        method = getattr(kind, name, None)
        if method is not None and getattr(method, "__module__", "") not in _BASES:
            return False
        if name in state:
            return False
    extras = any(state.get(name) or getattr(kind, name, None) for name in _EXTRAS)
    return kind.step_and_maybe_reset.__qualname__ == "EnvBase.step_and_maybe_reset" and not extras


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
        self.after: TensorDictBase | None = None
        """What the last step led to."""
        self._apart = False
        """Whether stepping and resetting can be taken apart."""
        self._after_mdp: Callable[..., tuple[TensorDictBase, TensorDictBase]] | None = None
        self._unseen = True
        """Whether `root` is a full reset that was not asked for yet."""
        self._closed = False

    def begin(self) -> None:
        """Look at the environment's methods as they are now; before a rollout."""
        self._apart = steps_apart(self.env)
        self._after_mdp = getattr(self.env, _AFTER_MDP, None)

    def step(
        self, cut: Sequence[int], record: Callable[[TensorDictBase], None]
    ) -> Sequence[int] | None:
        """Step; environments in ``cut`` are truncated if they do not end by themselves.

        Args:
            cut: Which to truncate.
            record: Called with the finished step before anything is reset, as far as the
                environment's way to step and reset can be taken apart: a reset may use the memory
                of the step again.

        Returns:
            Which environments ended and were reset: ``None`` if no end flag is set anywhere, an
            empty list if one is that resets nothing.
        """
        self._unseen = False
        if not self._apart:
            return self._step_whole(cut, record)
        env, root = self.env, self.root
        if root.device != env.device:
            root = root.to(env.device)
        finished = env.step(root)
        ended = self._cut(finished, cut)
        root = env.step_mdp(finished)
        if self._after_mdp is not None:
            finished, root = self._after_mdp(finished, root)
        record(finished)
        self.after = finished.get(NEXT)
        self.root = env.maybe_reset(root)
        return ended

    def _step_whole(
        self, cut: Sequence[int], record: Callable[[TensorDictBase], None]
    ) -> Sequence[int] | None:
        finished, self.root = self.env.step_and_maybe_reset(self.root)
        before = None if not cut else set(self.ends.ended(finished.get(NEXT)))
        ended = self._cut(finished, cut)
        record(finished)
        self.after = finished.get(NEXT)
        late = [env for env in cut if before is not None and env not in before]
        if late:
            self.ends.truncate(self.root, late)
            self.root = self.env.maybe_reset(self.root)
        return ended

    def _cut(self, finished: TensorDictBase, cut: Sequence[int]) -> Sequence[int] | None:
        """Truncate ``cut`` in the finished step; return who ended, ``None`` without any flag."""
        after = finished.get(NEXT)
        if not cut:
            return self.ends.ended(after) if self.ends.any(after) else None
        ended = self.ends.ended(after)
        late = [env for env in cut if env not in ended]
        if late:
            after = after.copy()
            self.ends.truncate(after, late)
            finished.set(NEXT, after)
        return sorted(ended + late)

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
