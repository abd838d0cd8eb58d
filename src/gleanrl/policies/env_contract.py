"""The entries that an environment shows a policy, and the actions that it takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tensordict import TensorDictBase

from gleanrl.core.keys import Key
from gleanrl.core.layout import EnvLayout
from gleanrl.core.window import Window
from gleanrl.memory.batch_arena import batch_rows
from gleanrl.memory.tensordicts import env_root


@dataclass(frozen=True, slots=True)
class EnvContract:
    """The environment's side of a step, as a policy meets it; keys are root keys."""

    root: TensorDictBase
    """The results of the first reset, on which a policy is called first. Not changed."""
    observed: Sequence[Key]
    acted: Sequence[Key]
    rewarded: Sequence[Key]
    layout: EnvLayout | None
    """The environment's fields; ``None`` if these are not fixed."""
    one_hot: Collection[Key] = ()
    """Actions that it wants as one-hot vectors, and would not take as indices."""
    env_checks_actions: bool = True
    """Whether the environment takes actions as they are written."""
    infos: Collection[Key] = ()
    """Those of ``observed`` that are requested info entries."""

    @classmethod
    def of_rows(
        cls,
        layout: EnvLayout,
        first: Window,
        one_hot: Collection[Key],
        env_checks_actions: bool = False,
    ) -> EnvContract:
        """Describe an environment whose data lie in rows, and whose reset showed ``first``."""
        batch, observed = layout.batch_shape, [field.key for field in layout.observations]
        return cls(
            env_root(
                layout,
                {key: batch_rows(first, key, batch)[0].clone() for key in observed},
                layout.device,
            ),
            observed=observed,
            acted=[field.key for field in layout.actions],
            rewarded=[field.key for field in layout.rewards],
            layout=layout,
            one_hot=() if env_checks_actions else one_hot,
            env_checks_actions=env_checks_actions,
            infos=layout.infos,
        )
