"""Acting at random."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ArgumentTypeError, PolicyError
from gleanrl.core.keys import Key, NestedKey
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import JointAct, Policy, Spec
from gleanrl.core.streams import Streams
from gleanrl.core.window import Window


class RandomPolicy:
    """Draws actions from a spec, or from the environment's own if it has none.

    Given to a collector it needs no spec. With one it can also be called on a TensorDict.
    """

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        """Draw from ``action_spec``.

        Args:
            action_spec: A spec of one action, of a whole batch of them, or a composite of specs by
                action key; anything with ``shape`` and ``rand(shape)``. A shape that begins with
                the batch dimensions of the TensorDict is that of a whole batch.
            action_key: Entry of the action; a composite has keys of its own.

        Raises:
            ConfigError: ``action_spec`` has no ``rand``, as a space of Gymnasium's.
        """
        if action_spec is not None and not callable(getattr(action_spec, "rand", None)):
            raise ArgumentTypeError(
                f"action_spec ({action_spec!r:.100}) has no rand(shape): give the action_spec of a "
                "GymEnv, or none, and a collector draws from the environment's own space"
            )
        self.action_spec = action_spec
        self.action_key = action_key

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write random actions into ``tensordict`` and return it.

        Raises:
            PolicyError: there is no spec to draw from.
        """
        spec = self.action_spec
        if spec is None:
            raise PolicyError(
                "RandomPolicy() has no action_spec to draw from; pass one to call it, or give it "
                "to a collector as it is"
            )
        drawn = spec.rand(missing_batch(spec, tuple(tensordict.batch_size)))
        if isinstance(drawn, TensorDictBase):
            return tensordict.update(drawn)
        return tensordict.set(self.action_key, drawn)

    def __repr__(self) -> str:
        return f"RandomPolicy({self.action_spec!r}, action_key={self.action_key!r})"


def missing_batch(spec: Any, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``batch``, or ``()`` if ``spec`` is that of a whole batch."""
    return () if tuple(spec.shape[: len(batch)]) == batch else batch


class RandomActions:
    """A `Policy` that draws actions from specs and leaves all else zero."""

    provided: Collection[Key] = ()
    inner: Any = None
    requested: JointAct | None = None
    memory: Any = None

    def __init__(
        self, specs: Mapping[Key, Spec], env: EnvLayout, like: Policy | None = None
    ) -> None:
        """Draw actions for ``env``; ``specs`` are those of one environment, by action key.

        ``like``: The policy it stands in for: the other outputs of that one are zeros.
        """
        self.outputs: tuple[Field, ...] = env.actions if like is None else like.outputs
        self.states: tuple[Key, ...] = () if like is None else like.states
        self._zeros = [f.key for f in self.outputs if f.key not in specs]
        self._specs, self._envs = specs, env.num_envs
        self._stepwise = [spec.stepwise for spec in specs.values()] == [True]
        self.streams = Streams()
        """Those of the source that this acts for: actions have a stream there."""
        self.ahead: int | None = None
        """Rows to draw at once; ``None`` for all of a window."""
        self._drawn = 0
        """The row behind the newest rows that were drawn at once."""
        self._rewind: tuple[int, torch.Tensor | None] = 0, None
        """The first of these rows, and the stream before they were drawn."""
        self._window: Window

    def begin(self, window: Window, next_root: Window) -> None:
        """Zero everything but the actions: a policy's extras and its state."""
        for key in (*self._zeros, *self.states):
            window.tensor(key).zero_()
        for key in self.states:
            next_root.tensor(key).zero_()
        self._window, self._drawn = window, 0

    def act(self, t: int) -> None:
        if t == self._drawn:
            self._draw(t)

    def _draw(self, t: int) -> None:
        """Draw row ``t``, and the rows behind it where one call draws the same numbers for them."""
        streams, envs = self.streams, self._envs
        with streams.acting():
            if not self._stepwise:
                for key, spec in self._specs.items():
                    self._window.tensor_rows(key)[t].copy_(spec.rand((envs,)))
                self._drawn = t + 1
                return
            self._rewind = t, torch.get_rng_state()
            ((key, spec),) = self._specs.items()
            rows = self._window.tensor(key)[:, t : t + (self.ahead or self._window.steps)]
            rows.copy_(spec.rand((rows.shape[1], envs)).transpose(0, 1))
            self._drawn = t + rows.shape[1]

    def finish(self, steps: int) -> None:
        """Put the stream behind the last of ``steps`` rows."""
        if self._drawn > steps:
            first, self.streams.actions = self._rewind
            (spec,) = self._specs.values()
            with self.streams.acting():
                spec.rand((steps - first, self._envs))

    def forget(self) -> None:
        """Do nothing: nothing is remembered."""

    def explain(self) -> list[str]:
        return ["random actions, drawn from a spec"]
