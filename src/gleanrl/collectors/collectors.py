"""A path under which TorchRL has its collectors. Re-exports only."""

from tensordict.nn import InteractionType

from gleanrl.collectors import *  # noqa: F403

DEFAULT_EXPLORATION_TYPE = InteractionType.RANDOM
