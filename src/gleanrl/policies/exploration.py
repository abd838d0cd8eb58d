"""How a policy chooses among the actions it thinks good.

The words are TensorDict's own, so that every module made with it listens to them: `ExplorationType`
is ``InteractionType``, `set_exploration_type` is ``set_interaction_type``.
"""

from __future__ import annotations

from typing import Any

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type

from gleanrl.core.errors import ConfigError
from gleanrl.policies.structure import modules_of, qualified

__all__ = [
    "ExplorationType",
    "complete_exploration",
    "exploration_type",
    "parse_exploration_mode",
    "set_exploration_type",
]

_MODES = {
    "random": ExplorationType.RANDOM,
    "mode": ExplorationType.MODE,
    "mean": ExplorationType.MEAN,
    "deterministic": ExplorationType.DETERMINISTIC,
}
_NOISE = "torchrl.modules.tensordict_module.exploration.AdditiveGaussianModule"


def complete_exploration(policy: Any, env: Any) -> None:
    """Give TorchRL's Gaussian noise modules that were made without spec that of ``env``.

    Environments other than TorchRL's have no specs that the modules could use: nothing happens, and
    the module says what it lacks when it is called.
    """
    spec = getattr(env, "action_spec_unbatched", None)
    for module in modules_of(policy) if spec is not None else ():
        noise: Any = module
        if any(qualified(kind) == _NOISE for kind in type(noise).__mro__) and noise.spec is None:
            noise.spec = spec


def exploration_type() -> ExplorationType | None:
    """Return the exploration type in force, ``None`` outside `set_exploration_type`."""
    found: ExplorationType | None = interaction_type()
    return found


def parse_exploration_mode(mode: str) -> ExplorationType:
    """Read the older spelling: ``"random"``, ``"mode"``, ``"mean"`` or ``"deterministic"``.

    >>> parse_exploration_mode("mean") is ExplorationType.MEAN
    True

    Raises:
        ConfigError: any other text.
    """
    found = _MODES.get(mode.lower()) if isinstance(mode, str) else None
    if found is None:
        raise ConfigError(
            f"exploration_mode ({mode!r}) must be one of {', '.join(map(repr, _MODES))}"
        )
    return found
