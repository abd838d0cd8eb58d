"""Exploration types and groups of agents. Re-exports only."""

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from gleanrl.envs.libs.pettingzoo import MarlGroupMapType

__all__ = ["ExplorationType", "MarlGroupMapType", "exploration_type", "set_exploration_type"]
