"""TorchRL's environments as rows, stepped by their parts or by their own methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gleanrl.core.keys import Key
from gleanrl.core.layout import DoneGroup, Field
from gleanrl.core.protocols import Spec
from gleanrl.core.streams import preserved
from gleanrl.core.window import Window
from gleanrl.envs.recorded_or_called_transforms import Unproven, unproven_on_error
from gleanrl.envs.recorded_step import RecordedStep
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.envs.tensordict_rows import ForeignSpec, TensorDictRows
from gleanrl.envs.torchrl_parts import Parts, parts_of

_DRAWS = 5
"""Draws that are compared."""


class TransformedRows(TensorDictRows):
    """A TorchRL environment that consists of `Parts`.

    Its parts are stepped without TensorDicts. Resets of all members, seeds and saved states are the
    environment's own, and so are its steps once it was changed in a way that is not proven.
    """

    def __init__(
        self, handle: TensorDictHandle, parts: Parts, prove: Callable[[TransformedRows], None]
    ) -> None:
        """Record the transforms of ``handle``, the user's environment, which was reset once.

        ``prove`` is called after transforms were recorded; it raises `Unproven`.
        """
        super().__init__(handle)
        self._prove = prove
        self.drops_root = not (parts.members or parts.wholes)
        """Whether the environment, a bare ``ParallelEnv``, keeps only actions of the policy's."""
        # It also shows workers other entries if episodes are cut while others end.
        self.can_cut = not self.drops_root
        if list(self.layout.dones) != [DoneGroup(())] or self.layout.groups:
            raise Unproven("it has other end flags than done, terminated and truncated")
        if len(self.layout.actions) != 1:
            raise Unproven("it has several actions")
        self.on_partial_reset: Callable[[Sequence[int]], None] = lambda envs: None
        """Called with members that are reset while others continue."""
        self.why = ""
        """Why the environment is stepped by its own methods, if it is."""
        self._record(parts)
        masks = any(type(part).__name__ == "ActionMask" for part in parts.transforms)
        (action,) = self.layout.actions
        own = None if masks else self._recorded.members.action_specs.get(action.key)
        self._drawn = _Drawn(self, action, own)
        self.action_specs = {action.key: self._drawn}

    def proven_specs(self) -> dict[Key, Spec] | None:
        """Return own specs with the draws of the environment; ``None`` without proof."""
        own = self._drawn.own
        return None if own is None else {key: ForeignSpec(own, True) for key in self.action_specs}

    @property
    def parts(self) -> Parts:
        """What the environment consists of."""
        return self._recorded.parts

    def explain(self) -> str:
        if self.why:
            return f"{self.handle.kind}, called as it is by its TensorDict methods ({self.why})"
        return self._recorded.explain()

    def _record(self, parts: Parts) -> None:
        self._recorded = RecordedStep(self.layout, parts, self.passed)
        self._prove(self)

    def pass_on(self, keys: Collection[Key]) -> None:
        """Have transforms pass on ``("next", *key)`` of the policy's, or raise `Unproven`."""
        if keys:
            self.passed = keys
            with unproven_on_error():
                self._record(self.parts)

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; look whether the environment was changed."""
        try:
            with unproven_on_error():
                self._look(window)
        except Unproven as err:
            self.why = str(err)
        if not self.why:
            self._recorded.begin(window, carry, self.on_partial_reset)
            return
        super().begin(window, carry)
        root = self.handle.root.copy()  # recorded steps leave it behind
        for key in self._seen:
            root.set(key, self._rows[key][0].clone())
        self.handle.root = root

    def read_present(self) -> None:
        """Take the present from the first root row of the window, as in `begin`."""
        self._recorded.read_present()

    def _look(self, window: Window) -> None:
        """Record changed transforms again; `Unproven` if parts can no longer be stepped."""
        if self.why:
            return
        for field in self.layout.actions:
            given = window.tensor(field.key)
            if given.dtype is not field.dtype or tuple(given.shape[2:]) != field.shape:
                raise Unproven(f"the policy writes other actions than {field}")
        if not self.parts.intact():
            raise Unproven("its parts or their methods were replaced after construction")
        if self._recorded.changed():
            self._record(parts_of(self.handle.env))

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        if not self.why:
            return self._recorded.step(t, cut, resets)
        ended = super().step(t, cut, resets)
        self._tell(ended)
        return ended

    def finish(self, steps: int) -> None:
        super().finish(steps)
        self.reset_s += self._recorded.reset_s
        self._recorded.reset_s = 0.0

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        super().reset(carry, envs, **options)
        self._tell(envs or ())

    def _tell(self, ended: Sequence[int]) -> None:
        if 0 < len(ended) < self.layout.num_envs:
            self.on_partial_reset(ended)


class _Drawn:
    """The spec of an action, drawn as the environment draws it.

    A spec of our own takes its place where it is proven to draw the same numbers.
    """

    def __init__(self, rows: TransformedRows, field: Field, own: Spec | None) -> None:
        """Draw actions of ``field``; ``own`` is what the Gymnasium environments' space declares."""
        self._rows, self._key, self._envs = rows, field.key, rows.layout.num_envs
        self.shape, self.dtype = torch.Size(field.shape), field.dtype
        self.own: Spec | None = None
        self.own = own if own is not None and self._draws_alike(own) else None

    @property
    def stepwise(self) -> bool:
        return self.own is not None

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Draw actions of all members, ``shape`` is ``(P,)`` or ``(T, P)``."""
        if self.own is not None and not self._rows.why:
            return self.own.rand(shape)
        draws = range(math.prod(shape) // self._envs)
        drawn = [self._rows.handle.env.rand_action().get(self._key) for _ in draws]
        return torch.stack(drawn).reshape(*shape, *self.shape)

    def _draws_alike(self, own: Spec) -> bool:
        """Tell whether ``own`` makes the environment's draws, and leaves the stream alike."""
        shape = (_DRAWS, self._envs)
        if not own.stepwise or own.shape != self.shape or own.dtype != self.dtype:
            return False
        found = []
        with preserved():
            for rand in (own.rand, self.rand):
                torch.default_generator.manual_seed(_DRAWS)
                found.append((rand(shape), torch.get_rng_state()))
        (mine, after), (theirs, after_theirs) = found
        return torch.equal(mine, theirs) and torch.equal(after, after_theirs)
