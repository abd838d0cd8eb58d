"""Acting at random."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import Key, NestedKey, as_key, format_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.protocols import Policy
from gleanrl.core.window import Window


class RandomPolicy:
    """Draws actions from a spec, or from the environment's own if it has none.

    Given to a collector it needs no spec. With one it can also be called on a TensorDict.
    """

    def __init__(self, action_spec: Any = None, action_key: NestedKey = "action") -> None:
        """Draw from ``action_spec``.

        Args:
            action_spec: A spec of one action, of a whole batch of them, or a composite of specs by
                action key; anything with ``shape`` and ``rand(shape)``.
            action_key: Where the action is written; a composite brings its own keys.
        """
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
        batch = tuple(tensordict.batch_size)
        has_batch = tuple(spec.shape[: len(batch)]) == batch
        drawn = spec.rand() if has_batch else spec.rand(batch)
        if isinstance(drawn, TensorDictBase):
            return tensordict.update(drawn)
        return tensordict.set(self.action_key, drawn)

    def __repr__(self) -> str:
        return f"RandomPolicy({self.action_spec!r}, action_key={self.action_key!r})"


class RandomActions:
    """A `Policy` that lets somebody else write the actions and leaves all else zero."""

    provided: Collection[Key] = ()
    inner: Any = None

    def __init__(
        self,
        draw: Callable[[int], None],
        actions: Sequence[Field],
        like: Policy | None = None,
    ) -> None:
        """Act through ``draw``.

        Args:
            draw: Writes random actions into a row; an environment's ``random``.
            actions: What it writes.
            like: The policy it stands in for: the other outputs of that one are zeros.
        """
        self.outputs: tuple[Field, ...] = tuple(actions) if like is None else like.outputs
        self.states: tuple[Key, ...] = () if like is None else like.states
        self._zeros = [f.key for f in self.outputs if f.key not in {a.key for a in actions}]
        self._draw = draw

    def begin(self, window: Window, next_root: Window) -> None:
        """Zero everything but the actions: a policy's extras and its state."""
        for key in (*self._zeros, *self.states):
            window.tensor(key).zero_()
        for key in self.states:
            next_root.tensor(key).zero_()

    def act(self, t: int) -> None:
        """Write random actions into row ``t``."""
        self._draw(t)

    def reset(self, t: int, ended: Sequence[int]) -> None:
        """Do nothing: there is no state."""

    def finish(self, steps: int) -> Mapping[int, tuple[Key, TensorDictBase]]:
        """Return that everything was written."""
        return {}

    def forget(self) -> None:
        """Do nothing: nothing is remembered."""

    def explain(self) -> list[str]:
        """Say who acts."""
        return ["random actions, drawn by the environment or from a spec"]


class SpecActions(RandomActions):
    """A `Policy` that draws from specs of the user's."""

    def __init__(self, policy: RandomPolicy, env: EnvLayout) -> None:
        """Draw actions for ``env`` as calling ``policy`` does.

        Raises:
            PolicyError: its spec does not fit the environment's actions.
        """
        super().__init__(self._copy, env.actions)
        self.inner = policy
        self._envs = env.num_envs
        self._sources = [(field, _source(policy, field, env.batch_shape)) for field in env.actions]
        self._rows: list[tuple[Callable[[], torch.Tensor], tuple[int, ...], Any]] = []

    def begin(self, window: Window, next_root: Window) -> None:
        """Bind to the rows of ``window``."""
        self._rows = [
            (draw, (self._envs, *field.shape), window.tensor_rows(field.key))
            for field, draw in self._sources
        ]

    def _copy(self, t: int) -> None:
        for draw, shape, rows in self._rows:
            rows[t].copy_(draw().view(shape))


def _source(
    policy: RandomPolicy, field: Field, batch: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    spec = _spec_of(policy, field.key)
    shape = tuple(spec.shape)
    wanted = (*batch, *field.shape)
    lead = () if shape == wanted else batch
    if (*lead, *shape) != wanted or spec.dtype != field.dtype:
        raise PolicyError(
            f"RandomPolicy draws {format_key(field.key)} as {spec.dtype} of shape {shape}; the "
            f"environment wants {field.dtype} of shape {tuple(field.shape)}, or {wanted} for all "
            "environments"
        )
    return partial(spec.rand, lead)


def _spec_of(policy: RandomPolicy, key: Key) -> Any:
    spec: Any = policy.action_spec
    if isinstance(spec, Mapping) or callable(getattr(spec, "keys", None)):
        try:
            return spec[key if len(key) > 1 else key[0]]
        except KeyError:
            raise PolicyError(
                f"RandomPolicy's spec has no {format_key(key)}; it has "
                f"{sorted(map(str, spec.keys()))}"
            ) from None
    if as_key(policy.action_key) != key:
        raise PolicyError(
            f"RandomPolicy writes {format_key(as_key(policy.action_key))}; the environment reads "
            f"{format_key(key)}: pass action_key={format_key(key)}"
        )
    return spec
