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
from gleanrl.policies.random import RandomPolicy
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
_RANDOM = "torchrl.modules.tensordict_module.exploration.RandomPolicy"
_ENV = "torchrl.envs.common.EnvBase"
_NOISE = "torchrl.modules.tensordict_module.exploration.AdditiveGaussianModule"


def complete_exploration(policy: Any, env: Any) -> Any:
    """Give what ``policy`` lacks from the specs of ``env``, as TorchRL's collectors do.

    Its Gaussian noise modules that were made without spec get the action's, its ``RandomPolicy``
    the specs of all actions. Environments other than TorchRL's have no specs that these could use:
    a noise module says what it lacks when it is called, random actions are drawn by ``env``.

    Returns:
        The policy to act with.
    """
    if any(qualified(kind) == _RANDOM for kind in type(policy).__mro__):
        own = any(qualified(kind) == _ENV for kind in type(env).__mro__)
        if own and policy.action_spec is None:
            policy.set_action_spec_from_env(env)
        return RandomPolicy() if policy.action_spec is None else policy
    spec = getattr(env, "action_spec_unbatched", None)
    for module in modules_of(policy) if spec is not None else ():
        noise: Any = module
        if any(qualified(kind) == _NOISE for kind in type(noise).__mro__) and noise.spec is None:
            noise.spec = spec
    return policy


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
