"""How a policy chooses among the actions it thinks good.

The words are TensorDict's own, so that every module made with it listens to them: `ExplorationType`
is ``InteractionType``, `set_exploration_type` is ``set_interaction_type``.
"""

from __future__ import annotations

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type

from gleanrl.core.errors import ConfigError

__all__ = [
    "ExplorationType",
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
